//! Listening sockets: bound here, bound beside another process (`SO_REUSEPORT`), or passed by a service manager.
//!
//! The last two hand the port from one process to the next. The successor accepts from the moment it is ready, the
//! predecessor until it is told to stop, and a connection that one of them has been given is always served: on Linux,
//! closing a listening socket resets the connections that are established and not accepted yet.
//! - A socket that is passed has one queue for all processes. A process that stops leaves the queue to the others.
//! - Sockets of one port have a queue each. A process that stops accepts what is in its queue, and then closes it. A
//!   handshake that has begun would be reset, too: so it first drops the packets that begin another, which their clients
//!   send again a second later, to a socket of the successor. `net.ipv4.tcp_migrate_req` makes the kernel move such
//!   connections to the successor's queue, and the pause is left out.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener as Bound, ToSocketAddrs as _};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::inherited::Inherited;
use crate::mode::Mode;

/// Most connections that a socket keeps for its thread to accept. The kernel's limit may be lower.
const BACKLOG: i32 = 4096;
/// Time for handshakes that have begun, before a socket beside those of a successor closes: a round trip to a client.
/// It is less than the second after which a client sends a dropped first packet again.
const HANDSHAKES_WITHIN: Duration = Duration::from_millis(250);
/// Says `1` if the kernel moves the connections of a closed socket to another one of its port.
const MIGRATES: &str = "/proc/sys/net/ipv4/tcp_migrate_req";

/// The sockets of one address, one for each of its threads.
pub(crate) struct Listening {
    pub(crate) sockets: Vec<Bound>,
    pub(crate) origin: Origin,
}

/// Where a listening socket comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It is this process's alone.
    Bound,
    /// Other processes may have sockets on its port.
    Shared,
    /// A service manager passed it, and may have passed it to other processes, too.
    Inherited,
}

/// The listeners of a process.
pub(crate) struct Listeners {
    /// For clients, or for a data plane.
    pub(crate) clients: Listening,
    /// For health checks, of an endpoint picker.
    pub(crate) health: Option<Listening>,
    /// For operators.
    pub(crate) metrics: Listening,
}

/// Opens the clients' sockets once the gateway is ready, if they wait for that.
pub(crate) struct Opening {
    listening: Option<Listening>,
    open: CancellationToken,
}

// === impl Listeners ===

impl Listeners {
    /// The inherited sockets, and sockets on the configured addresses for listeners without one.
    ///
    /// # Errors
    /// An address that cannot be bound, or an inherited socket that is for no listener.
    pub(crate) fn open(
        mode: Mode,
        config: &Config,
        relay_threads: usize,
        inherited: Inherited,
    ) -> io::Result<Self> {
        let (server, epp) = (&config.server, &config.epp);
        let (clients, field) = match mode {
            Mode::Gateway => (SocketAddr::new(server.host, server.port), "server.port"),
            Mode::Picker => (SocketAddr::new(epp.host, epp.port), "epp.port"),
        };
        let names = mode.listeners();
        let mut inherited = inherited.named(names)?;
        let mut aside = |name: &str, address: SocketAddr, field: &str| match inherited.claim(name) {
            Some(socket) => Listening::inherit(socket, 1),
            None => Listening::bind(address, 1).map_err(|error| failed(address, field, error, "")),
        };
        let metrics = SocketAddr::new(config.metrics.host, config.metrics.port);
        let metrics = aside("metrics", metrics, "metrics.port");
        let health = match mode {
            Mode::Gateway => None,
            Mode::Picker => {
                Some(aside("health", SocketAddr::new(epp.host, epp.health_port), "epp.health_port")?)
            }
        };
        let clients = match inherited.claim(names[0]) {
            Some(socket) => Listening::inherit(socket, relay_threads)?,
            None if server.reuse_port => Listening::share(clients, relay_threads)
                .map_err(|error| failed(clients, field, error, FOREIGN))?,
            None => Listening::bind(clients, relay_threads)
                .map_err(|error| failed(clients, field, error, SUCCEED))?,
        };
        Ok(Self { clients, health, metrics: metrics? })
    }
}

/// What to do if the clients' port is taken.
const SUCCEED: &str = "; to succeed a kvlane that listens there: --reuse-port (server.reuse_port)";
/// Why it is taken although it may be shared.
const FOREIGN: &str =
    "; what listens there is no kvlane, or one of another user: --reuse-port cannot succeed it";

/// A socket that listens on an address, which the configuration names in `field`.
///
/// # Errors
/// The address cannot be bound.
fn bind_one(address: SocketAddr, field: &str) -> io::Result<Bound> {
    let mut listening = Listening::bind(address, 1).map_err(|error| failed(address, field, error, ""))?;
    Ok(listening.sockets.remove(0))
}

/// A socket at a host's first address. A name is resolved once, before anything is served.
pub(crate) fn bind_named((host, port): (&str, u16), field: &str) -> io::Result<Bound> {
    let unknown =
        |error: io::Error| io::Error::new(error.kind(), format!("cannot resolve {host} ({field}): {error}"));
    let address = match host {
        // As for the other listeners.
        "localhost" => Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        _ => (host, port).to_socket_addrs().map_err(unknown)?.next(),
    };
    let address = address.ok_or_else(|| unknown(io::ErrorKind::NotFound.into()))?;
    bind_one(address, field)
}

fn failed(address: SocketAddr, field: &str, error: io::Error, taken: &str) -> io::Error {
    let hint = if error.kind() == io::ErrorKind::AddrInUse { taken } else { "" };
    io::Error::new(error.kind(), format!("cannot listen on {address} ({field}): {error}{hint}"))
}

// === impl Opening ===

impl Opening {
    /// Opens them when `ready` says so, and has relay threads accept.
    pub(crate) async fn run(self, mut ready: watch::Receiver<bool>) {
        let Some(listening) = self.listening else { return };
        tracing::info!(sockets = ?listening.origin, "clients are accepted when this gateway is ready");
        if ready.wait_for(|ready| *ready).await.is_err() {
            return;
        }
        if let Err(error) = listening.open() {
            tracing::error!(%error, "cannot listen for clients; another process has taken the port");
            return;
        }
        self.open.cancel();
        tracing::info!("accepting clients");
    }
}

// === impl Listening ===

impl Listening {
    /// One socket for each of `threads` threads, all on one address. They listen.
    ///
    /// # Errors
    /// The address cannot be bound, or another process listens there.
    pub(crate) fn bind(address: SocketAddr, threads: usize) -> io::Result<Self> {
        if address.port() != 0 {
            // Sockets that share a port bind beside those of another process, too, and would share its clients.
            socket(address)?.bind(&address.into())?;
        }
        let bound = Self { sockets: sockets(address, threads)?, origin: Origin::Bound };
        bound.open()?;
        Ok(bound)
    }

    /// Like [`Listening::bind`], beside the sockets of other processes of this user. They do not listen yet.
    ///
    /// # Errors
    /// The address cannot be bound, or the sockets there do not share it.
    pub(crate) fn share(address: SocketAddr, threads: usize) -> io::Result<Self> {
        if !cfg!(target_os = "linux") {
            let why = "server.reuse_port needs Linux: elsewhere connections are not spread over processes";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        Ok(Self { sockets: sockets(address, threads)?, origin: Origin::Shared })
    }

    /// The socket that a service manager passed, for `threads` threads. It listens.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub(crate) fn inherit(socket: Bound, threads: usize) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let mut sockets = vec![socket];
        for _ in 1..threads {
            sockets.push(sockets[0].try_clone()?);
        }
        Ok(Self { sockets, origin: Origin::Inherited })
    }

    /// The address.
    ///
    /// # Errors
    /// The system does not say.
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.sockets[0].local_addr()
    }

    /// What opens them when the gateway is ready, and cancels `open`; they are open, and it is cancelled at once, if no
    /// other process accepts clients meanwhile.
    ///
    /// # Errors
    /// There are too many open files.
    pub(crate) fn when_ready(&self, open: CancellationToken) -> io::Result<Opening> {
        if self.origin == Origin::Bound {
            open.cancel();
            return Ok(Opening { listening: None, open });
        }
        let sockets = self.sockets.iter().map(Bound::try_clone).collect::<io::Result<_>>()?;
        Ok(Opening { listening: Some(Self { sockets, origin: self.origin }), open })
    }

    /// Lets connections come: all sockets listen.
    ///
    /// # Errors
    /// The port was taken meanwhile by sockets that do not share it.
    fn open(&self) -> io::Result<()> {
        if self.origin != Origin::Inherited {
            self.sockets.iter().try_for_each(|socket| SockRef::from(socket).listen(BACKLOG))?;
        }
        Ok(())
    }
}

// === impl Origin ===

impl Origin {
    /// Ends accepting on a socket, without the loss of a connection that is this process's to accept: such connections
    /// go to `spread`.
    pub(crate) async fn close(self, socket: TcpListener, mut spread: impl FnMut(TcpStream)) {
        if self == Self::Inherited {
            return;
        }
        if self == Self::Shared && !kernel_migrates() {
            match refuse_handshakes(&socket) {
                Ok(()) => {
                    let accepting = async {
                        while let Ok((stream, _)) = socket.accept().await {
                            spread(stream);
                        }
                    };
                    let _ = timeout(HANDSHAKES_WITHIN, accepting).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot hold back new connections before the port closes; some may be reset");
                }
            }
        }
        // Accepted until the system says that there is none: the runtime's readiness may be older.
        let Ok(socket) = socket.into_std() else { return };
        // With a limit, as new ones may arrive as fast as they are accepted.
        for _ in 0..BACKLOG {
            let Ok((stream, _)) = socket.accept() else { return };
            if let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
                spread(stream);
            }
        }
    }
}

fn socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    Ok(socket)
}

/// Sockets on one address that share its port.
fn sockets(address: SocketAddr, threads: usize) -> io::Result<Vec<Bound>> {
    let shared = |address: SocketAddr| {
        let socket = socket(address)?;
        #[cfg(target_os = "linux")]
        socket.set_reuse_port(true)?;
        socket.bind(&address.into())?;
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

/// Whether the kernel moves the connections of a closed socket to another one of its port.
fn kernel_migrates() -> bool {
    std::fs::read_to_string(MIGRATES).is_ok_and(|says| says.trim() == "1")
}

/// Has the kernel drop the packets that begin a handshake at this socket. Those of handshakes that have begun pass.
#[cfg(target_os = "linux")]
fn refuse_handshakes(socket: &TcpListener) -> io::Result<()> {
    use socket2::SockFilter;
    /// Instructions of a classic BPF program (`linux/bpf_common.h`), which gets the packet from its TCP header on.
    const LOAD_BYTE: u16 = 0x30;
    const JUMP_IF_SET: u16 = 0x45;
    const RETURN: u16 = 0x06;
    /// Where a TCP header has its flags, and the flag that all segments but the first have (RFC 9293, section 3.1).
    const FLAGS_AT: u32 = 13;
    const ACK: u32 = 0x10;
    SockRef::from(socket).attach_filter(&[
        SockFilter::new(LOAD_BYTE, 0, 0, FLAGS_AT),
        SockFilter::new(JUMP_IF_SET, 0, 1, ACK),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
        SockFilter::new(RETURN, 0, 0, 0),
    ])
}

#[cfg(not(target_os = "linux"))]
fn refuse_handshakes(_: &TcpListener) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How long a test waits before it fails.
    const PATIENCE: Duration = Duration::from_secs(30);
    const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

    #[test]
    fn every_thread_gets_a_socket_on_the_same_port() {
        let sockets = Listening::bind(ANY_PORT, 3).expect("sockets").sockets;
        let addresses: Vec<_> = sockets.iter().map(|socket| socket.local_addr().expect("bound")).collect();
        assert_eq!(addresses, [addresses[0]; 3]);
    }

    #[test]
    fn localhost_is_the_loopback_address_that_the_other_listeners_have() {
        let bound = bind_named(("localhost", 0), "replicas.listen").expect("bound");
        assert_eq!(bound.local_addr().expect("an address").ip(), Ipv4Addr::LOCALHOST);
        let other = bind_named(("127.0.0.2", 0), "replicas.listen").expect("bound");
        assert_eq!(other.local_addr().expect("an address").ip(), Ipv4Addr::new(127, 0, 0, 2));
    }

    #[test]
    fn a_port_in_use_is_refused() {
        let sockets = Listening::bind(ANY_PORT, 2).expect("sockets");
        let taken = sockets.address().expect("bound");
        let error = Listening::bind(taken, 2).err().expect("it is in use");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(sockets);
        Listening::bind(taken, 2).expect("free again");
    }

    /// Takes the sockets that are there out of one listener.
    fn only(listening: Listening) -> TcpListener {
        let [socket] = <[Bound; 1]>::try_from(listening.sockets).expect("one thread");
        TcpListener::from_std(socket).expect("on a runtime")
    }

    #[tokio::test]
    async fn connections_that_are_queued_are_accepted_before_the_port_closes() {
        let listening = Listening::bind(ANY_PORT, 1).expect("a socket");
        let address = listening.address().expect("bound");
        let socket = only(listening);
        let clients: Vec<_> =
            (0..8).map(|_| std::net::TcpStream::connect(address).expect("queued")).collect();
        let mut accepted = Vec::new();
        Origin::Bound.close(socket, |stream| accepted.push(stream)).await;
        assert_eq!(accepted.len(), clients.len());
        assert!(std::net::TcpStream::connect(address).is_err(), "it is closed");
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_socket_that_is_about_to_close_gets_no_handshakes_and_keeps_its_connections() {
        use std::io::{Read as _, Write as _};
        let listening = Listening::share(ANY_PORT, 1).expect("a socket");
        listening.open().expect("it listens");
        let address = listening.address().expect("bound");
        let mut client = std::net::TcpStream::connect(address).expect("queued");
        let socket = only(listening);
        refuse_handshakes(&socket).expect("a filter");
        let error = std::net::TcpStream::connect_timeout(&address, Duration::from_millis(50));
        assert_eq!(error.expect_err("no answer").kind(), io::ErrorKind::TimedOut);
        client.write_all(b"?").expect("sent");
        let (stream, _) = socket.accept().await.expect("the connection before");
        let mut stream = stream.into_std().expect("blocking");
        stream.set_nonblocking(false).expect("set");
        stream.read_exact(&mut [0]).expect("received");
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn no_connection_is_reset_while_a_successor_takes_over() {
        let old = Listening::share(ANY_PORT, 1).expect("a socket");
        let address = old.address().expect("bound");
        old.open().expect("it listens");
        let new = Listening::share(address, 1).expect("beside it");
        new.open().expect("it listens");
        let (old, new) = (only(old), only(new));
        let before: Vec<_> =
            (0..32).map(|_| std::net::TcpStream::connect(address).expect("queued")).collect();
        let accepted = std::cell::RefCell::new(Vec::new());
        let keep = |stream: TcpStream| accepted.borrow_mut().push(stream);
        let all = before.len() + 32;
        let successor = async {
            while accepted.borrow().len() < all {
                keep(new.accept().await.expect("a connection").0);
            }
        };
        // They begin while the old socket is being closed. Those that it drops come a second later.
        let during = async {
            let connecting: Vec<_> = (0..32).map(|_| tokio::spawn(TcpStream::connect(address))).collect();
            let mut clients = Vec::new();
            for client in connecting {
                clients.push(client.await.expect("no panic").expect("a connection"));
            }
            clients
        };
        let closing = async {
            Origin::Shared.close(old, keep).await;
        };
        let handover = async { tokio::join!(closing, during, successor) };
        let ((), during, ()) = timeout(PATIENCE, handover).await.expect("all are accepted");
        for client in before.iter().map(|client| client.try_clone().expect("a handle")) {
            client.set_nonblocking(true).expect("set");
            let peeked = client.peek(&mut [0]).expect_err("nothing was sent");
            assert_eq!(peeked.kind(), io::ErrorKind::WouldBlock, "not reset");
        }
        assert_eq!(before.len() + during.len(), all);
    }
}
