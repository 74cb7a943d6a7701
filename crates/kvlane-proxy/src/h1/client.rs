//! The connection of a client.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead as _, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::io::poll_read_buf;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::output::PendingOutput;
use crate::memory::Held;
use crate::service::Service;
use crate::socket::Socket;

/// Size of the read buffer: at first, and at most. Between them it is the size of the previous request, so that a
/// similar body is contiguous with its head and is not moved.
pub(super) const READ_BYTES_MIN: usize = 8 << 10;
pub(super) const READ_BYTES_MAX: usize = 1 << 20;
/// Bytes that a client may send ahead while its request is answered.
const AHEAD_BYTES_MAX: usize = 64 << 10;
/// How long after it was accepted, or after an answer that said that it stays, a connection is not closed for a shutdown:
/// a request that is on its way would be lost.
pub(crate) const NEXT_WITHIN: Duration = Duration::from_secs(1);

/// One client's connection.
pub(crate) struct Client {
    pub(super) service: Arc<Service>,
    pub(super) socket: Socket,
    /// Bytes received and not parsed yet.
    pub(super) buffer: BytesMut,
    /// The memory that the buffer takes, if it is large.
    pub(super) held: Held,
    /// Size of the buffer for the next request.
    pub(super) read_bytes: usize,
    pub(super) out: PendingOutput,
    /// Deadline for a request head.
    pub(super) alarm: Pin<Box<Sleep>>,
    /// Until then a next request is expected, even if the gateway stops.
    pub(super) next_until: Instant,
    /// The gateway stops: no further request is read.
    pub(super) stopped: Pin<Box<WaitForCancellationFutureOwned>>,
}

// === impl Client ===

impl Client {
    pub(crate) fn new(service: Arc<Service>, stop: CancellationToken, socket: Socket) -> Self {
        let (held, stopped) = (service.proxy.memory.share(), stop.cancelled_owned());
        Self {
            service,
            socket,
            buffer: BytesMut::new(),
            held,
            read_bytes: READ_BYTES_MIN,
            out: PendingOutput::default(),
            alarm: Box::pin(sleep_until(Instant::now())),
            next_until: Instant::now() + NEXT_WITHIN,
            stopped: Box::pin(stopped),
        }
    }

    /// Reads available bytes into the buffer.
    pub(super) fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.buffer.capacity() == 0 {
            // No buffer is allocated before bytes arrive.
            ready!(self.socket.poll_readable(cx))?;
        }
        if self.buffer.capacity() == self.buffer.len() {
            self.buffer.reserve(self.read_bytes);
        }
        poll_read_buf(Pin::new(&mut self.socket), cx, &mut self.buffer)
    }

    /// Watches the client while it is being answered: ready when it has disconnected.
    pub(super) fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.buffer.len() < AHEAD_BYTES_MAX {
            let mut room = [MaybeUninit::uninit(); 512];
            let mut read = ReadBuf::uninit(&mut room);
            match ready!(Pin::new(&mut self.socket).poll_read(cx, &mut read)) {
                Ok(()) if !read.filled().is_empty() => self.buffer.extend_from_slice(read.filled()),
                Ok(()) | Err(_) => return Poll::Ready(()),
            }
        }
        Poll::Pending
    }
}
