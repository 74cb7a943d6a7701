//! Resident memory of the gateway after 200,000 distinct prompts of 6 KB, against its index bound.
//!
//! `cargo bench -p kvlane --bench memory` starts the real binary in front of a fixed-cost upstream and reads
//! `/proc/PID/status` (Linux only).

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const PROMPTS: u64 = 200_000;
const PROMPT_BYTES: usize = 6 << 10;
const CLIENTS: usize = 8;
const INDEX_BOUNDS_MIB: [u64; 2] = [16, 256];
const ALLOWANCE_MIB: f64 = 64.0;
const ANSWER: &str = concat!(
    r#"{"id":"1","object":"chat.completion","choices":[],"#,
    r#""usage":{"prompt_tokens":1500,"completion_tokens":2,"total_tokens":1502}}"#
);
const MODELS: &str = r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#;

fn main() -> io::Result<()> {
    let upstream = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let url = format!("http://{}", upstream.local_addr()?);
    std::thread::spawn(move || {
        for stream in upstream.incoming().flatten() {
            std::thread::spawn(move || answer_all(stream));
        }
    });
    for bound_mib in INDEX_BOUNDS_MIB {
        let (mut gateway, address, metrics) = start(&url, bound_mib)?;
        let before = resident_mib(&gateway)?;
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| send_all(address, &next))).collect();
            clients.into_iter().try_for_each(|client| client.join().expect("a client does not panic"))
        })?;
        let after = resident_mib(&gateway)?;
        let index = gauge(metrics, "kvlane_index_bytes")? / (1 << 20) as f64;
        gateway.kill()?;
        gateway.wait()?;
        writeln!(
            io::stdout(),
            "index bound {bound_mib} MiB: resident {before:.1} MiB at start, {after:.1} MiB after {PROMPTS} prompts of \
             {PROMPT_BYTES} bytes (allowed {:.0}), index counts {index:.1} MiB",
            bound_mib as f64 + ALLOWANCE_MIB
        )?;
    }
    Ok(())
}

/// The gateway, its clients' address and its metrics' address, once the worker takes requests.
fn start(worker: &str, bound_mib: u64) -> io::Result<(Child, SocketAddr, SocketAddr)> {
    let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr();
    let (address, metrics) = (free()?, free()?);
    let gateway = Command::new(env!("CARGO_BIN_EXE_kvlane"))
        .args(["serve", "--log-level", "error", "--policy", "cache_aware", "--worker-urls", worker])
        .args(["--port", &address.port().to_string(), "--prometheus-port", &metrics.port().to_string()])
        .args(["--set", &format!("routing.index_memory={}", bound_mib << 20)])
        .stdout(Stdio::null())
        .spawn()?;
    for _ in 0..200 {
        std::thread::sleep(Duration::from_millis(50)); // because: waits for another process, in a bench
        let ready = get(metrics, "/readiness").is_ok_and(|(status, _)| status == 200);
        if ready {
            return Ok((gateway, address, metrics));
        }
    }
    Err(io::Error::other("the gateway was not ready within 10 s"))
}

fn send_all(address: SocketAddr, next: &AtomicU64) -> io::Result<()> {
    let mut stream = BufReader::new(TcpStream::connect(address)?);
    loop {
        let n = next.fetch_add(1, Ordering::Relaxed);
        if n >= PROMPTS {
            return Ok(());
        }
        let mut prompt = format!("{n} ");
        while prompt.len() < PROMPT_BYTES {
            prompt.push_str("all work and no play ");
        }
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{prompt}"}}]}}"#);
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.get_mut().write_all((head + &body).as_bytes())?;
        let (status, _) = read_answer(&mut stream)?;
        if status != 200 {
            return Err(io::Error::other(format!("answered {status}")));
        }
    }
}

fn answer_all(stream: TcpStream) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let (first, length) = read_head(&mut stream)?;
        io::copy(&mut stream.by_ref().take(length), &mut io::sink())?;
        let body = if first.contains("/v1/models") { MODELS } else { ANSWER };
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.get_mut().write_all(head.as_bytes())?;
    }
}

fn read_head(stream: &mut impl BufRead) -> io::Result<(String, u64)> {
    let (mut first, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if line.trim().is_empty() {
            return Ok((first, length));
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().map_err(io::Error::other)?;
        }
        if first.is_empty() {
            first = line;
        }
    }
}

fn read_answer(stream: &mut impl BufRead) -> io::Result<(u16, String)> {
    let (first, length) = read_head(stream)?;
    let mut body = String::new();
    stream.take(length).read_to_string(&mut body)?;
    let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.ok_or_else(|| io::Error::other("no status"))?, body))
}

fn get(address: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    let mut stream = BufReader::new(TcpStream::connect(address)?);
    write!(stream.get_mut(), "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
    read_answer(&mut stream)
}

fn gauge(metrics: SocketAddr, name: &str) -> io::Result<f64> {
    let (_, text) = get(metrics, "/metrics")?;
    let line = text.lines().find(|line| line.starts_with(name)).and_then(|line| line.rsplit(' ').next());
    line.and_then(|value| value.parse().ok()).ok_or_else(|| io::Error::other(format!("no {name}")))
}

fn resident_mib(process: &Child) -> io::Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.map(|kib| kib / 1024.0).ok_or_else(|| io::Error::other("no VmRSS"))
}
