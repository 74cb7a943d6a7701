//! A connection, plain or TLS. A plain one costs one comparison per call and is not boxed.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

/// A connection to a client or a worker.
pub enum Stream {
    /// Plain TCP.
    Plain(TcpStream),
    /// TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

/// Applies the same expression to either variant.
macro_rules! either {
    ($self:expr, $stream:ident => $do:expr) => {
        match $self.get_mut() {
            Stream::Plain($stream) => $do,
            Stream::Tls($stream) => $do,
        }
    };
}

// === impl Stream ===

impl Stream {
    /// The socket below.
    pub fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    /// As [`Stream::is_silent`], by the runtime's readiness, which is updated when the runtime polls for events.
    pub fn seems_silent(&self) -> bool {
        let Self::Plain(socket) = self else { return false };
        socket.poll_read_ready(&mut Context::from_waker(Waker::noop())).is_pending()
    }

    /// Whether there are no unread bytes: neither in the socket nor in the TLS buffers.
    pub fn is_silent(&mut self) -> bool {
        let socket = match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => {
                let (socket, session) = match &mut **stream {
                    TlsStream::Client(client) => {
                        let (socket, session) = client.get_mut();
                        (&*socket, session.process_new_packets())
                    }
                    TlsStream::Server(server) => {
                        let (socket, session) = server.get_mut();
                        (&*socket, session.process_new_packets())
                    }
                };
                if !session
                    .is_ok_and(|state| state.plaintext_bytes_to_read() == 0 && !state.peer_has_closed())
                {
                    return false;
                }
                socket
            }
        };
        // Asks the kernel: the runtime notices a close only when it polls for events.
        let peeked = SockRef::from(socket).peek(&mut [MaybeUninit::uninit()]);
        matches!(peeked, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl AsyncRead for Stream {
    #[inline]
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(cx, buffer))
    }
}

impl AsyncWrite for Stream {
    #[inline]
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            // The socket usually accepts it at once, and no wake-up is needed.
            Self::Plain(stream) => match stream.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    Pin::new(stream).poll_write(cx, bytes)
                }
                written => Poll::Ready(written),
            },
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    #[inline]
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(cx, slices))
    }

    #[inline]
    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    #[inline]
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}
