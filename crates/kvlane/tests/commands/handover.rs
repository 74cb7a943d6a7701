//! A process that takes over the port of another one: by a socket of a service manager, and by `--reuse-port`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::program::{Engine, FAILURE, PATIENCE, Running, document, fails, kvlane, succeeds, text};

/// A service manager: passes sockets and is told states.
struct Manager {
    directory: TempDir,
    socket: UnixDatagram,
}

// === impl Manager ===

impl Manager {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = UnixDatagram::bind(directory.path().join("notify")).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("set");
        Self { directory, socket }
    }

    /// Runs it with up to two sockets. A shell gives them their places, as it sees them as its input and output.
    fn command(&self, args: &[&str], sockets: Vec<OwnedFd>, names: &str) -> Command {
        let program = kvlane(args);
        let script = r#"LISTEN_PID=$$ exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null"#;
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(program.get_program()).args(args);
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("LISTEN_FDS", sockets.len().to_string()).env("LISTEN_FDNAMES", names);
        command.env("NOTIFY_SOCKET", self.directory.path().join("notify"));
        let mut sockets = sockets.into_iter();
        command.stdin(sockets.next().map_or(Stdio::null(), Stdio::from));
        command.stdout(sockets.next().map_or(Stdio::null(), Stdio::from));
        command
    }

    fn is_told(&self, state: &str) {
        let mut told = [0; 64];
        let length = self.socket.recv(&mut told).unwrap_or_else(|error| panic!("{state}: {error}"));
        assert_eq!(text(&told[..length]), state);
    }
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

fn again(listener: &TcpListener) -> OwnedFd {
    listener.try_clone().expect("another handle").into()
}

/// A client that has sent a request.
fn ask(address: SocketAddr, stream: bool, tokens: u32) -> TcpStream {
    let mut client = TcpStream::connect(address).expect("a connection");
    client.set_read_timeout(Some(PATIENCE)).expect("set");
    let body = format!(
        r#"{{"model":"m","stream":{stream},"max_tokens":{tokens},"ignore_eos":true,"messages":[{{"role":"user","content":"hi"}}]}}"#
    );
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\nconnection: close\r\n";
    let head = format!("{head}content-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    client.write_all((head + &body).as_bytes()).expect("sent");
    client
}

/// Waits for the whole answer, which must be one.
fn answer(mut client: TcpStream) -> String {
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap_or_else(|error| panic!("{error} after '{answer}'"));
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    answer
}

/// The address that a gateway has logged.
fn clients_of(line: &str) -> SocketAddr {
    let address = line.split("clients=").nth(1).and_then(|rest| rest.split_whitespace().next());
    address.expect("it says where").parse().expect("an address")
}

#[test]
fn the_queue_of_an_inherited_socket_outlives_each_process() {
    let engine = Engine::start(&["--model", "m"]);
    let (manager, (clients, address), (metrics, operators)) = (Manager::new(), listener(), listener());
    let args = ["serve", "--worker-urls", &engine.url, "--relay-threads", "2"];
    let start =
        || Running::of(manager.command(&args, vec![again(&clients), again(&metrics)], "clients:metrics"));
    // It is in the queue before there is a gateway.
    let early = ask(address, false, 4);
    let mut first = start();
    let line = first.logs(&[" serving "]);
    assert_eq!(clients_of(&line), address);
    assert!(line.contains(&format!("metrics={operators}")), "{line}");
    manager.is_told("READY=1");
    answer(early);
    first.signal(&["-HUP"]);
    manager.is_told("RELOADING=1");
    manager.is_told("READY=1");

    let mut long = ask(address, true, 300);
    let mut begun = [0; 16];
    long.read_exact(&mut begun).expect("it has begun");
    let second = start();
    manager.is_told("READY=1");
    first.signal(&["-TERM"]);
    manager.is_told("STOPPING=1");
    let during: Vec<_> = (0..16).map(|_| ask(address, false, 4)).collect();
    during.into_iter().for_each(|client| drop(answer(client)));
    let mut rest = String::new();
    long.read_to_string(&mut rest).expect("the rest");
    assert!(rest.contains("[DONE]"), "{rest}");
    first.ends();

    second.signal(&["-TERM"]);
    manager.is_told("STOPPING=1");
    second.ends();
    let between = ask(address, false, 4);
    let third = start();
    manager.is_told("READY=1");
    answer(between);
    third.signal(&["-TERM"]);
    third.ends();
}

#[test]
fn a_picker_inherits_its_sockets_by_name() {
    let (manager, (grpc, address), (health, checks)) = (Manager::new(), listener(), listener());
    let args = ["epp", "--prometheus-port", "0"];
    let mut picker = Running::of(manager.command(&args, vec![again(&health), again(&grpc)], "health:grpc"));
    let line = picker.logs(&["picking endpoints"]);
    assert!(
        line.contains(&format!("grpc={address}")) && line.contains(&format!("health={checks}")),
        "{line}"
    );
    picker.signal(&["-TERM"]);
    picker.ends();
}

#[test]
fn a_descriptor_that_is_no_listener_is_refused() {
    let manager = Manager::new();
    let refused = |socket: OwnedFd, names: &str, why: &str| {
        let mut command = manager.command(&["serve", "--prometheus-port", "0"], vec![socket], names);
        let output = command.output().expect("it starts");
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(FAILURE) && said.contains(why), "{why}: {said}");
    };
    let datagrams = UdpSocket::bind("127.0.0.1:0").expect("a port");
    refused(
        datagrams.into(),
        "clients",
        "socket 1 of LISTEN_FDS ('clients'): fd 3 is not a valid tcp socket",
    );
    let (listening, address) = listener();
    let connected = TcpStream::connect(address).expect("a connection");
    refused(connected.into(), "clients", "it does not listen");
    refused(tempfile::tempfile().expect("a file").into(), "", "is not a socket");
    refused(listening.into(), "web", "inherited socket 'web' is for no listener");
    refused(listener().0.into(), "clients:metrics", "LISTEN_FDS=1, but LISTEN_FDNAMES has 2 names");
}

#[test]
fn a_successor_on_the_same_port_loses_no_request() {
    let engine = Engine::start(&["--model", "m"]);
    let manager = Manager::new();
    let start = |port: &str| {
        let args = ["serve", "--worker-urls", &engine.url, "--relay-threads", "2", "--port", port];
        let args = [&args[..], &["--prometheus-port", "0", "--reuse-port"]].concat();
        let mut running = Running::of(manager.command(&args, vec![], ""));
        let line = running.logs(&[" serving "]);
        manager.is_told("READY=1");
        (running, clients_of(&line))
    };
    let (first, address) = start("0");
    let (mut long, mut begun) = (ask(address, true, 300), [0; 16]);
    long.read_exact(&mut begun).expect("it has begun");
    let (second, beside) = start(&address.port().to_string());
    assert_eq!(beside, address);
    // While it is stopped, the system goes on to queue connections at its sockets.
    first.signal(&["-STOP"]);
    let queued: Vec<_> = (0..64).map(|_| ask(address, false, 4)).collect();
    first.signal(&["-TERM", "-CONT"]);
    manager.is_told("STOPPING=1");
    let during: Vec<_> = (0..64).map(|_| ask(address, false, 4)).collect();
    queued.into_iter().chain(during).for_each(|client| drop(answer(client)));
    let mut rest = String::new();
    long.read_to_string(&mut rest).expect("the rest");
    assert!(rest.contains("[DONE]"), "{rest}");
    first.ends();
    answer(ask(address, false, 4));
    second.signal(&["-TERM"]);
    second.ends();
}

/// The value of a directive of a unit.
fn directive<'a>(unit: &'a str, name: &str) -> &'a str {
    let value = unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    value.unwrap_or_else(|| panic!("{name} is not set"))
}

#[test]
fn the_units_of_systemd_fit_the_program() {
    let unit = |name: &str| document(&format!("../deploy/systemd/{name}"));
    let (socket, service) = (unit("kvlane.socket"), unit("kvlane@.service"));
    assert_eq!(directive(&socket, "FileDescriptorName"), "clients");
    assert_eq!(directive(&service, "Type"), "notify");
    let stop: u64 = directive(&service, "TimeoutStopSec").parse().expect("seconds");
    let server = kvlane_gateway::config::Config::default().server;
    assert!(stop > (server.shutdown_delay + server.shutdown_grace).as_secs());

    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("kvlane.yaml");
    std::fs::write(&file, "workers: []\n").expect("written");
    let command = directive(&service, "ExecStart").replace("%i", "29000");
    let command = command.replace("/etc/kvlane/kvlane.yaml", file.to_str().expect("UTF-8"));
    let mut words = command.split_whitespace().skip(1);
    assert_eq!(words.next(), Some("serve"));
    succeeds(&[&["check"], &words.collect::<Vec<_>>()[..]].concat());

    // Where systemd is installed, it reads them.
    let service = service.replace("/usr/local/bin/kvlane", env!("CARGO_BIN_EXE_kvlane"));
    for (name, text) in [("kvlane.socket", &socket), ("kvlane@.service", &service)] {
        std::fs::write(directory.path().join(name), text).expect("written");
    }
    let units = ["kvlane.socket", "kvlane@29000.service"].map(|name| directory.path().join(name));
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).args(units).output();
    if let Ok(output) = verified {
        let said = text(&output.stderr);
        assert!(output.status.success() && !said.contains("kvlane"), "{said}");
    }
}

#[test]
fn without_reuse_port_the_flag_is_named_and_it_needs_a_port_that_is_shared() {
    let (taken, address) = listener();
    let port = address.port().to_string();
    let args = ["serve", "--prometheus-port", "0", "--port", &port];
    fails(&args, FAILURE, &["cannot listen on", &port, "to succeed a kvlane", "--reuse-port"]);
    fails(&[&args[..], &["--reuse-port"]].concat(), FAILURE, &["cannot listen on", &port, "is no kvlane"]);
    drop(taken);
}
