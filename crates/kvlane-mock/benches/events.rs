//! How many server-sent events four mock engines put out, and what each costs.
//!
//! `cargo bench -p kvlane-mock` runs four engines with 64 streams each at rising speeds and prints, for each, events
//! per second over all engines and the CPU time of the engines' threads, clients excluded. Reading per-thread CPU
//! time needs Linux.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvlane_mock::{MockConfig, MockEngine};
use kvlane_wire::sse::SseScanner;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const ENGINES: usize = 4;
const STREAMS_PER_ENGINE: usize = 64;
const WARM_UP: Duration = Duration::from_millis(500);
const MEASURED: Duration = Duration::from_secs(3);
const SERVER_THREAD: &str = "mock-server";

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{:>6} {:>12} {:>12} {:>14} {:>18}",
        "speed", "events/s", "CPU cores", "us per event", "events/s per core"
    )?;
    for speed in [1.0, 2.0, 4.0, 8.0, 16.0, 64.0] {
        let (events_per_s, cores) = measure(speed)?;
        let us = cores / events_per_s * 1e6;
        writeln!(out, "{speed:>6} {events_per_s:>12.0} {cores:>12.2} {us:>14.1} {:>18.0}", 1e6 / us)?;
    }
    Ok(())
}

/// Events per second and CPU cores used by the engines at one speed.
fn measure(speed: f64) -> std::io::Result<(f64, f64)> {
    let server = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name(SERVER_THREAD)
        .enable_all()
        .build()?;
    let engines: Vec<MockEngine> = server.block_on(async {
        let mut engines = Vec::new();
        for _ in 0..ENGINES {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let config = MockConfig { speed, ..Default::default() };
            engines.push(MockEngine::start(config, listener).map_err(std::io::Error::other)?);
        }
        std::io::Result::Ok(engines)
    })?;
    let addrs: Vec<SocketAddr> = engines.iter().map(MockEngine::addr).collect();
    let events = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let clients = std::thread::spawn({
        let (events, stop) = (events.clone(), stop.clone());
        move || consume(&addrs, &events, &stop)
    });
    std::thread::sleep(WARM_UP);
    let (start, cpu, seen) = (Instant::now(), server_cpu()?, events.load(Ordering::Relaxed));
    std::thread::sleep(MEASURED);
    let (wall, cpu, seen) = (start.elapsed(), server_cpu()? - cpu, events.load(Ordering::Relaxed) - seen);
    stop.store(true, Ordering::Relaxed);
    drop(engines);
    clients.join().map_err(|_| std::io::Error::other("a client thread panicked"))??;
    Ok((seen as f64 / wall.as_secs_f64(), cpu.as_secs_f64() / wall.as_secs_f64()))
}

/// Keeps every stream of every engine busy until told to stop or cut off.
fn consume(addrs: &[SocketAddr], events: &Arc<AtomicU64>, stop: &Arc<AtomicBool>) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut streams = tokio::task::JoinSet::new();
        for stream in 0..ENGINES * STREAMS_PER_ENGINE {
            let addr = addrs[stream % ENGINES];
            let (events, stop) = (events.clone(), stop.clone());
            streams.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    // An engine that was dropped breaks its streams off: the measurement is over.
                    if read_stream(addr, stream, &events).await.is_err() {
                        break;
                    }
                }
            });
        }
        while streams.join_next().await.is_some() {}
    });
    Ok(())
}

async fn read_stream(addr: SocketAddr, stream: usize, events: &AtomicU64) -> std::io::Result<()> {
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"stream {stream}"}}],"max_tokens":8000,"stream":true}}"#
    );
    let mut socket = TcpStream::connect(addr).await?;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: mock\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await?;
    socket.write_all(body.as_bytes()).await?;
    let mut scanner = SseScanner::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match socket.read(&mut buffer).await? {
            0 => return Ok(()),
            n => events.fetch_add(u64::from(scanner.push(&buffer[..n])), Ordering::Relaxed),
        };
    }
}

/// CPU time of the engines' threads so far.
fn server_cpu() -> std::io::Result<Duration> {
    let mut nanos = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        if std::fs::read_to_string(path.join("comm"))?.trim() == SERVER_THREAD {
            let stat = std::fs::read_to_string(path.join("schedstat"))?;
            nanos += stat.split(' ').next().and_then(|on_cpu| on_cpu.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(Duration::from_nanos(nanos))
}
