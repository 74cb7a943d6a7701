//! What it costs when many workers join and leave at once.
//!
//! `cargo bench -p kvlane-gateway --bench discovery` starts a gateway in this process, in front of engines that share
//! one port under many loopback addresses, and names them all as a source of discovery does. Each answers the probes
//! with a page of metrics as large as vLLM's. Linux only.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvlane_fleet::discovery::{KUBERNETES, Target, Targets};
use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::serve::Serving;

const WORKERS: [u32; 3] = [100, 500, 2000];
/// About what vLLM 0.11 returns.
const PAGE_BYTES: usize = 31_000;
const MODELS: &str =
    r#"{"object":"list","data":[{"id":"m","object":"model","root":"m","max_model_len":32768}]}"#;
/// Clock ticks of `/proc` in a second.
const TICKS: f64 = 100.0;

fn main() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::Builder::new().name("engines".into()).spawn(move || serve(&listener))?;
    for workers in WORKERS {
        measure(workers, port)?;
    }
    Ok(())
}

fn measure(workers: u32, port: u16) -> io::Result<()> {
    let mut config = Config::default();
    config.server.host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    (config.server.port, config.metrics.port, config.server.relay_threads) = (0, 0, 2);
    config.health.interval = Duration::from_secs(3600);
    let serving = Serving::start(config)?;
    let target = |n: u32| Target {
        key: n.to_string(),
        spec: WorkerSpec::new(format!("http://127.7.{}.{}:{port}", n / 250, n % 250 + 1)),
        terminating: false,
    };
    let pods = Targets { workers: (0..workers).map(target).collect(), problems: Vec::new() };
    let eligible = || -> usize {
        let pools = serving.fleet.pools();
        pools.iter().map(|pool| pool.router.read(|scheduler| scheduler.pool().eligible().count())).sum()
    };
    let (rss, cpu, start) = (resident_mib()?, cpu_s()?, Instant::now());
    let left_out = serving.controller.reconcile(KUBERNETES, &pods);
    assert!(left_out.is_empty(), "{left_out:?}");
    let named = start.elapsed();
    while eligible() < workers as usize {
        std::thread::sleep(Duration::from_millis(1));
    }
    let routable = start.elapsed();
    let (rss, cpu) = (resident_mib()? - rss, cpu_s()? - cpu);

    let start = Instant::now();
    // Another thread sees when the last one takes no more requests.
    let drained = std::thread::scope(|scope| {
        let drained = scope.spawn(|| {
            while eligible() > 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
            start.elapsed()
        });
        serving.controller.reconcile(KUBERNETES, &Targets::default());
        drained.join()
    });
    let drained = drained.map_err(|_| io::Error::other("a thread panicked"))?;
    let gone = start.elapsed();
    assert!(serving.controller.workers().is_empty());
    writeln!(
        io::stdout(),
        "{workers} workers: named in {named:?}, all routable after {routable:?}, {cpu:.2} s CPU of the gateway's threads \
         for probes, {rss:.1} MiB more (with the engines'); when all leave: no request after {drained:?}, removed after \
         {gone:?}"
    )
}

/// CPU seconds of the threads that change the fleet.
fn cpu_s() -> io::Result<f64> {
    let mut ticks = 0;
    for task in fs::read_dir("/proc/self/task")? {
        let stat = fs::read_to_string(task?.path().join("stat")).unwrap_or_default();
        let (Some(open), Some(close)) = (stat.find('('), stat.rfind(')')) else { continue };
        if ["control", "discovery", "ingest"].contains(&&stat[open + 1..close]) {
            let fields: Vec<&str> = stat[close + 1..].split_whitespace().collect();
            ticks += fields[11..13].iter().filter_map(|field| field.parse::<u64>().ok()).sum::<u64>();
        }
    }
    Ok(ticks as f64 / TICKS)
}

fn resident_mib() -> io::Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    let kib = line.split_whitespace().next().and_then(|kib| kib.parse::<f64>().ok());
    Ok(kib.unwrap_or(f64::NAN) / 1024.0)
}

/// Answers probes, one thread per connection.
fn serve(listener: &TcpListener) {
    let mut page =
        String::from("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\"} 0\n");
    while page.len() < PAGE_BYTES {
        let _ = writeln!(
            page,
            "vllm:e2e_request_latency_seconds_bucket{{engine=\"0\",le=\"{}\"}} 0.0",
            page.len()
        );
    }
    for stream in listener.incoming().flatten() {
        let page = page.clone();
        // A thread that cannot be started closes its connection: the worker is tried again.
        let _ = std::thread::Builder::new().stack_size(64 << 10).spawn(move || answer_all(stream, &page));
    }
}

fn answer_all(stream: TcpStream, page: &str) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let mut reader = BufReader::new(stream);
    loop {
        let (mut line, mut length) = (String::new(), 0);
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        loop {
            let mut field = String::new();
            reader.read_line(&mut field).ok()?;
            if field.trim().is_empty() {
                break;
            }
            if let Some(value) = field.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().ok()?;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let (status, body) = match line.split(' ').nth(1)? {
            "/health" => (200, ""),
            "/metrics" => (200, page),
            "/v1/models" => (200, MODELS),
            _ => (404, ""),
        };
        let head = format!("HTTP/1.1 {status} -\r\ncontent-length: {}\r\n\r\n", body.len());
        reader.get_mut().write_all([head.as_bytes(), body.as_bytes()].concat().as_slice()).ok()?;
    }
}
