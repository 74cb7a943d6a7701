//! The relay threads: each accepts clients' connections on a socket of its own and serves them with a runtime of its
//! own.
//!
//! The kernel spreads new connections over the sockets without regard to the work of their threads. So a thread that
//! accepts a connection passes it on if another thread has fewer.

use std::io;
use std::net::{SocketAddr, TcpListener as Bound};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvlane_fleet::metrics::Reached;
use kvlane_proxy::listener::Listener;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

/// Most connections passed to a relay thread and not yet taken by it.
const HANDOVER_MAX: usize = 1024;
/// Most connections that a socket keeps for its thread to accept. The kernel's limit may be lower.
const BACKLOG: i32 = 4096;

/// One relay thread, as the others see it.
struct Lane {
    handover: mpsc::Sender<std::net::TcpStream>,
    /// Its connections.
    open: AtomicUsize,
}

/// A relay thread before it starts.
pub(crate) struct Relay {
    lanes: Arc<[Lane]>,
    /// Its place among the lanes.
    own: usize,
    handed: mpsc::Receiver<std::net::TcpStream>,
    socket: Bound,
}

/// One socket for each of `threads` relay threads, all on one address.
///
/// # Errors
/// The address cannot be bound, or another process listens there.
pub(crate) fn bind(address: SocketAddr, threads: usize) -> io::Result<Vec<Bound>> {
    let socket = |address: SocketAddr| {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        #[cfg(unix)]
        socket.set_reuse_address(true)?;
        Ok::<_, io::Error>(socket)
    };
    if address.port() != 0 {
        // Sockets that share a port bind beside those of another process, too, and would share its clients.
        socket(address)?.bind(&address.into())?;
    }
    let shared = |address: SocketAddr| {
        let socket = socket(address)?;
        #[cfg(target_os = "linux")]
        socket.set_reuse_port(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok::<Bound, io::Error>(socket.into())
    };
    let first = shared(address)?;
    let address = first.local_addr()?;
    let mut sockets = vec![first];
    for _ in 1..threads {
        // Elsewhere, sockets with one port do not share its connections; the threads share one socket.
        sockets.push(if cfg!(target_os = "linux") { shared(address)? } else { sockets[0].try_clone()? });
    }
    Ok(sockets)
}

// === impl Relay ===

impl Relay {
    /// A relay thread for each of these sockets.
    pub(crate) fn all(sockets: Vec<Bound>) -> Vec<Self> {
        let (lanes, handed): (Vec<_>, Vec<_>) = sockets
            .iter()
            .map(|_| {
                let (handover, handed) = mpsc::channel(HANDOVER_MAX);
                (Lane { handover, open: AtomicUsize::new(0) }, handed)
            })
            .unzip();
        let lanes: Arc<[Lane]> = lanes.into();
        let relays = sockets.into_iter().zip(handed).enumerate();
        relays
            .map(|(own, (socket, handed))| Self { lanes: Arc::clone(&lanes), own, handed, socket })
            .collect()
    }

    /// Accepts connections until the listener stops, and serves them and those passed on by other threads.
    pub(crate) async fn run(self, listener: Arc<Listener>) {
        let Self { lanes, own, mut handed, socket } = self;
        let socket = match TcpListener::from_std(socket) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::error!(%error, "relay thread cannot use its socket; it accepts no connections");
                return;
            }
        };
        let runtime = Handle::current();
        let metrics = &listener.service.proxy.fleet.metrics;
        // The connection is counted already.
        let serve = |stream: TcpStream| {
            let (served, lanes) = (listener.spawn(stream), Arc::clone(&lanes));
            runtime.spawn(async move {
                let _ = served.await;
                lanes[own].open.fetch_sub(1, Ordering::Relaxed);
            });
        };
        let spread = |stream: TcpStream| {
            let open = |lane: usize| lanes[lane].open.load(Ordering::Relaxed);
            let fewest = (0..lanes.len()).min_by_key(|&lane| (open(lane), lane != own)).unwrap_or(own);
            let lane = &lanes[fewest];
            lane.open.fetch_add(1, Ordering::Relaxed);
            if fewest == own {
                return serve(stream);
            }
            let passed = stream.into_std().map(|stream| lane.handover.try_send(stream).is_ok());
            if !matches!(passed, Ok(true)) {
                lane.open.fetch_sub(1, Ordering::Relaxed);
                metrics.limits.reached(Reached::Handover);
                tracing::warn!("client connection dropped: its relay thread is overloaded");
            }
        };
        let taking = async {
            while let Some(stream) = handed.recv().await {
                match TcpStream::from_std(stream) {
                    Ok(stream) => serve(stream),
                    Err(error) => {
                        lanes[own].open.fetch_sub(1, Ordering::Relaxed);
                        tracing::warn!(%error, "relay thread cannot use a connection");
                    }
                }
            }
        };
        tokio::join!(Listener::accept(metrics, socket, listener.stop.clone(), spread), taking);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

    #[test]
    fn every_thread_gets_a_socket_on_the_same_port() {
        let sockets = bind(ANY_PORT, 3).expect("sockets");
        let addresses: Vec<_> = sockets.iter().map(|socket| socket.local_addr().expect("bound")).collect();
        assert_eq!(addresses, [addresses[0]; 3]);
    }

    #[test]
    fn a_port_in_use_is_refused() {
        let sockets = bind(ANY_PORT, 2).expect("sockets");
        let taken = sockets[0].local_addr().expect("bound");
        assert_eq!(bind(taken, 2).expect_err("it is in use").kind(), io::ErrorKind::AddrInUse);
        drop(sockets);
        bind(taken, 2).expect("free again");
    }
}
