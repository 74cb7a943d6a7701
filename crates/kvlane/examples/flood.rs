//! Effect of a flood of KV events on request latency: 64 engines that each store and remove 2,000 blocks a second,
//! alternating with the same engines without events.
//!
//! `cargo run --release -p kvlane --example flood -- target/release/kvlane [ROUNDS]` starts its own gateway. Requests
//! are sent on time regardless of requests in flight, and their latency counts from their due times.

use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvlane_gateway::testing::{FakeFeed, Told, batch};
use kvlane_mock::{MockConfig, MockEngine};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{MissedTickBehavior, interval, sleep_until};

const ENGINES: usize = 64;
const BLOCKS_PER_S: u64 = 2_000;
const BLOCK_TOKENS: u32 = 16;
/// Blocks of one message, as of a prefill step or of a batch that decodes.
const BLOCKS_PER_MESSAGE: u64 = 100;
/// Messages after which stored blocks are removed.
const MESSAGES_KEPT: u64 = 400;
const REQUESTS_PER_S: u32 = 150;
const ROUND: Duration = Duration::from_secs(15);
const ROUNDS: usize = 4;
const ANSWER_BYTES_MAX: usize = 1 << 20;

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let kvlane = arguments.next().unwrap_or_else(|| "target/release/kvlane".into());
    let rounds = arguments.next().and_then(|rounds| rounds.parse().ok()).unwrap_or(ROUNDS);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(Path::new(&kvlane), rounds))
}

async fn run(kvlane: &Path, rounds: usize) -> io::Result<()> {
    let (mut engines, mut feeds, mut workers) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ENGINES {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let config = MockConfig { model: "m".into(), speed: 1000.0, ..MockConfig::default() };
        let engine = MockEngine::start(config, listener).map_err(io::Error::other)?;
        let feed = FakeFeed::start().await;
        let spec = feed.spec();
        workers.push(json!({
            "url": format!("http://{}", engine.addr()),
            "kv_events": {"endpoint": spec.endpoint, "replay": spec.replay, "topic": ""},
        }));
        engines.push(engine);
        feeds.push(feed);
    }
    let gateway = Gateway::start(kvlane, &workers).await?;
    let mut floods: Vec<Flood> = (0..).zip(&feeds).map(|(engine, feed)| Flood::new(engine, feed)).collect();
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{:<8} {:>9} {:>9} {:>9} {:>9} {:>10}",
        "", "p50 ms", "p90 ms", "p99 ms", "max ms", "gateway CPU"
    )?;
    let (mut quiet, mut flooded) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for (name, loud) in [("quiet", false), ("flood", true)] {
            let cpu = gateway.cpu_s()?;
            let (latencies, ()) = tokio::join!(ask(gateway.address), publish(&mut floods, loud));
            let mut latencies = latencies?;
            latencies.sort_unstable();
            let at =
                |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
            let cores = (gateway.cpu_s()? - cpu) / ROUND.as_secs_f64();
            let [p50, p90, p99, most] = [0.5, 0.9, 0.99, 1.0].map(at);
            writeln!(out, "{name:<8} {p50:>9.2} {p90:>9.2} {p99:>9.2} {most:>9.2} {:>9.1}%", cores * 100.0)?;
            if loud { &mut flooded } else { &mut quiet }.push(p99);
        }
    }
    let published: u64 = floods.iter().map(|flood| flood.messages * BLOCKS_PER_MESSAGE).sum();
    let [quiet, flooded] = [quiet, flooded].map(median);
    writeln!(
        out,
        "{published} blocks stored; median p99 {quiet:.2} ms in silence, {flooded:.2} ms in the flood: {:+.1} %",
        (flooded / quiet - 1.0) * 100.0
    )?;
    writeln!(out, "{}", gateway.events().await?)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The events of one engine.
struct Flood<'a> {
    engine: u64,
    feed: &'a FakeFeed,
    messages: u64,
}

impl<'a> Flood<'a> {
    fn new(engine: u64, feed: &'a FakeFeed) -> Self {
        Self { engine, feed, messages: 0 }
    }

    /// Stores blocks of a new prompt, and removes those of an old one.
    fn publish(&mut self) {
        let names = |message: u64| -> Vec<u64> {
            let first = (self.engine << 40) | (message * BLOCKS_PER_MESSAGE);
            (first..first + BLOCKS_PER_MESSAGE).collect()
        };
        let stored = names(self.messages);
        let tokens: Vec<u32> = stored
            .iter()
            .flat_map(|&name| (0..BLOCK_TOKENS).map(move |token| (name as u32 ^ token << 8) & 0x1_FFFF))
            .collect();
        let dropped = self.messages.checked_sub(MESSAGES_KEPT).map(names).unwrap_or_default();
        let mut told = vec![Told::Stored(&stored, None, &tokens, BLOCK_TOKENS, None)];
        if !dropped.is_empty() {
            told.push(Told::Removed(&dropped));
        }
        self.feed.publish(batch(None, &told));
        self.messages += 1;
        if self.messages.is_multiple_of(1000) {
            self.feed.forget_all_but_the_last();
        }
    }
}

/// Publishes for one round, every engine at its rate; or waits for its end.
async fn publish(floods: &mut [Flood<'_>], loud: bool) {
    let until = tokio::time::Instant::now() + ROUND;
    if !loud {
        return sleep_until(until).await;
    }
    let pause =
        Duration::from_secs_f64(BLOCKS_PER_MESSAGE as f64 / BLOCKS_PER_S as f64 / floods.len() as f64);
    let mut ticks = interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for turn in 0.. {
        ticks.tick().await;
        if tokio::time::Instant::now() >= until {
            break;
        }
        let engine = turn % floods.len();
        floods[engine].publish();
    }
}

/// Sends requests on time for one round, each on an idle connection: their latencies.
async fn ask(gateway: SocketAddr) -> io::Result<Vec<Duration>> {
    let count = (ROUND.as_secs_f64() * f64::from(REQUESTS_PER_S)) as u32;
    let start = Instant::now();
    let (free, mut idle) = tokio::sync::mpsc::unbounded_channel::<TcpStream>();
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..count {
        let due = start + Duration::from_secs(1) * n / REQUESTS_PER_S;
        sleep_until(due.into()).await;
        let stream = idle.try_recv().ok();
        let free = free.clone();
        tasks.spawn(async move {
            let mut stream = match stream {
                Some(stream) => stream,
                None => TcpStream::connect(gateway).await?,
            };
            exchange(&mut stream, &request(n)).await?;
            let took = due.elapsed();
            // There is no receiver after the last request.
            let _ = free.send(stream);
            Ok::<_, io::Error>(took)
        });
    }
    let mut latencies = Vec::with_capacity(count as usize);
    while let Some(took) = tasks.join_next().await {
        latencies.push(took.map_err(io::Error::other)??);
    }
    Ok(latencies)
}

/// A conversation of 6 KB, of one in eight.
fn request(n: u32) -> String {
    let system = format!("Conversation {}. ", n % 8).repeat(250);
    let body = json!({
        "model": "m", "max_tokens": 1,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": format!("What of {n}? ").repeat(100)}],
    });
    post("/v1/chat/completions", &body)
}

fn post(path: &str, body: &Value) -> String {
    let body = body.to_string();
    format!(
        "POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// One request and its whole answer; an answer other than 200 is an error.
async fn exchange(stream: &mut TcpStream, request: &str) -> io::Result<String> {
    stream.set_nodelay(true)?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    loop {
        if stream.read_buf(&mut answer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let text = String::from_utf8_lossy(&answer);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let head = head.to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        if length.is_some_and(|length: usize| body.len() >= length) || answer.len() > ANSWER_BYTES_MAX {
            return match head.starts_with("http/1.1 200") {
                true => Ok(body.to_owned()),
                false => Err(io::Error::other(text.into_owned())),
            };
        }
    }
}

/// A gateway in a separate process. Ends with this one.
struct Gateway {
    process: Child,
    address: SocketAddr,
    admin: SocketAddr,
    /// Its configuration, which is deleted with it.
    _config: tempfile::NamedTempFile,
}

impl Gateway {
    /// Starts it and waits until all feeds are live.
    async fn start(kvlane: &Path, workers: &[Value]) -> io::Result<Self> {
        let free = || std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr();
        let (address, admin) = (free()?, free()?);
        let mut config = tempfile::Builder::new().suffix(".yaml").tempfile()?;
        // JSON is YAML.
        let settings = json!({
            "server": {"port": address.port()}, "metrics": {"port": admin.port()}, "workers": workers,
            "routing": {"policy": "cache_aware"},
        });
        write!(config, "{settings}")?;
        let process = Command::new(kvlane)
            .args(["serve", "--config"])
            .arg(config.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let gateway = Self { process, address, admin, _config: config };
        let until = Instant::now() + Duration::from_secs(60);
        while Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let Ok(ready) = gateway.get("/readiness").await else { continue };
            let ready: Value = serde_json::from_str(&ready).map_err(io::Error::other)?;
            if ready["pools"][0]["knowledge"]["exact"] == ENGINES {
                return Ok(gateway);
            }
        }
        Err(io::Error::other("the gateway does not come to know its engines exactly: see GET /readiness"))
    }

    async fn get(&self, path: &str) -> io::Result<String> {
        let mut stream = TcpStream::connect(self.admin).await?;
        exchange(&mut stream, &format!("GET {path} HTTP/1.1\r\nhost: gateway\r\n\r\n")).await
    }

    /// CPU seconds used (`/proc/PID/stat`, in hundredths).
    fn cpu_s(&self) -> io::Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id()))?;
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        Ok(fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0)
    }

    /// Its metrics on received events.
    async fn events(&self) -> io::Result<String> {
        let metrics = self.get("/metrics").await?;
        let mut sums = std::collections::BTreeMap::<&str, f64>::new();
        for line in metrics.lines().filter(|line| line.starts_with("kvlane_kv_") && !line.contains("_bucket"))
        {
            let name = line.split(['{', ' ']).next().unwrap_or_default();
            *sums.entry(name).or_default() +=
                line.rsplit(' ').next().and_then(|v| v.parse().ok()).unwrap_or(0.0);
        }
        Ok(sums.iter().map(|(name, sum)| format!("{name} {sum}")).collect::<Vec<_>>().join("\n"))
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        // It may have exited by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
