//! Very many streams, very slow clients and a burst, and the latency of other clients meanwhile: those of another
//! model behind the same gateway.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use http::Method;
use kvlane_mock::Fault;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::client::{self, Client, Ending, Order, Shape};
use super::fleet::{Fleet, FleetConfig, MODEL};
use super::traffic;

/// The model of the other clients.
const OTHER: &str = "other";
/// Requests per second of the other clients.
const OTHERS_PER_S: u32 = 20;
/// Streams of one HTTP/2 connection: slightly below the gateway's maximum.
const STREAMS_PER_CONNECTION: usize = 1000;
/// Factors on the duration of steps once streams may end, and while clients are slow; at the start an engine takes
/// seconds per step. Faster than slow clients read, but slow enough to leave CPU time for others.
const FULL_PACE: f64 = 0.005;
const SLOW_PACE: f64 = 0.2;
/// Longer than any valid duration here.
const PATIENCE: Duration = Duration::from_secs(300);
/// Requests per second before and during the burst.
const CALM_PER_S: u32 = 20;
const BURST_PER_S: u32 = 200;

/// Flags.
#[derive(Args, Clone, Debug)]
pub struct CrowdArgs {
    /// The program.
    #[arg(long, default_value = "target/release/kvlane")]
    pub kvlane: PathBuf,
    /// Directory of logs.
    #[arg(long, default_value = "target/crowd")]
    pub dir: PathBuf,
    /// Number of simultaneous streams.
    #[arg(long, default_value_t = 20_000)]
    pub streams: usize,
    /// Streams opened per second.
    #[arg(long, default_value_t = 500)]
    pub opened_per_s: usize,
    /// Maximum requests in flight in the gateway; further ones are queued. Each takes a descriptor.
    #[arg(long, default_value_t = 19_800)]
    pub in_flight: usize,
    /// Connections of slow clients: half read slowly, half write slowly.
    #[arg(long, default_value_t = 5_000)]
    pub slow: usize,
    /// Time for which streams and slow clients are kept open.
    #[arg(long, default_value_t = 30)]
    pub hold_s: u64,
}

/// Latencies of the other clients.
struct Waits {
    all: Vec<Duration>,
    failed: Vec<Ending>,
}

/// All three parts, in order; returns whether something failed.
pub(crate) async fn run(args: &CrowdArgs) -> Result<bool, Box<dyn Error>> {
    let flags = ["--speed", "0.05", "--max-num-seqs", "10000", "--max-num-batched-tokens", "65536"];
    let config = FleetConfig {
        kvlane: args.kvlane.clone(),
        engine: args.kvlane.clone(),
        dir: args.dir.clone(),
        engines: vec![MODEL, MODEL, MODEL, MODEL, OTHER],
        engine_flags: flags.map(String::from).into(),
        feeds: false,
        faults: true,
        log_level: "info".into(),
        gateway: json!({
            "server": {"relay_threads": 2, "request_timeout": "10m", "body_timeout": "20s", "stream_idle_timeout": "5m"},
            "metrics": {},
            "routing": {
                "max_concurrent_requests": args.in_flight, "queue_size": args.streams, "queue_timeout": "5m",
                "policy": "least_load",
            },
        }),
    };
    let mut fleet = Fleet::start(config).await?;
    client::send(fleet.engines[4].control, Method::POST, "/fault", r#"{"fault":"slow","factor":0.002}"#)
        .await?;
    let mut say = io::stdout();
    let mut broken = false;
    let idle = fleet.usage()?;
    writeln!(say, "idle: {} KiB, {} descriptors", idle.rss_kib, idle.fds)?;
    broken |= report(&mut say, "alone", others(fleet.address, sleep(Duration::from_secs(15))).await.1)?;

    let (open, waits) = others(fleet.address, streams(&fleet, args)).await;
    broken |= report(&mut say, "many streams", waits)?;
    broken |= told(&mut say, ended(&fleet, open?).await?)?;

    pace(&fleet, SLOW_PACE).await?;
    let (endings, waits) = others(fleet.address, slow(fleet.address, args)).await;
    broken |= report(&mut say, "slow clients", waits)?;
    told(&mut say, endings)?;

    let (endings, waits) = others(fleet.address, burst(fleet.address)).await;
    broken |= report(&mut say, "burst", waits)?;
    broken |= told(&mut say, endings)?;

    let until = Instant::now() + Duration::from_secs(30);
    while fleet.usage()?.fds > idle.fds + 32 && Instant::now() < until {
        sleep(Duration::from_millis(200)).await;
    }
    let end = fleet.usage()?;
    writeln!(say, "at the end: {} KiB, {} descriptors", end.rss_kib, end.fds)?;
    if end.fds > idle.fds + 32 {
        writeln!(say, "BROKEN: descriptors are left")?;
        broken = true;
    }
    if let Some(how) = fleet.died()? {
        writeln!(say, "BROKEN: the gateway ended: {how}")?;
        broken = true;
    }
    Ok(broken)
}

/// Sends requests to the other model, on time, as long as `meanwhile` runs.
async fn others<T>(gateway: SocketAddr, meanwhile: impl Future<Output = T>) -> (T, Waits) {
    let (stop, stopped) = watch::channel(false);
    let asking: JoinHandle<Waits> = tokio::spawn(async move {
        let client = Arc::new(Client::new(gateway, PATIENCE, None));
        let mut ticks = interval(Duration::from_secs(1) / OTHERS_PER_S);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut asked = JoinSet::new();
        while !*stopped.borrow() {
            // A late tick was due all the same.
            let due: Instant = ticks.tick().await.into();
            let client = Arc::clone(&client);
            asked.spawn(async move {
                let body = json!({"model": OTHER, "prompt": "how long does it take", "max_tokens": 4});
                let ending =
                    client.ask(&order(Shape::Completion, body.to_string().into(), 4, false)).await.ending;
                (due.elapsed(), ending)
            });
        }
        let mut waits = Waits { all: Vec::new(), failed: Vec::new() };
        while let Some(ended) = asked.join_next().await {
            match ended {
                Ok((wait, Ending::Complete(_))) => waits.all.push(wait),
                Ok((_, other)) => waits.failed.push(other),
                Err(error) => waits.failed.push(Ending::Lost(error.to_string())),
            }
        }
        waits.all.sort_unstable();
        waits
    });
    let result = meanwhile.await;
    // There is no receiver only after a failure, which is reported below.
    let _ = stop.send(true);
    let waits = asking
        .await
        .unwrap_or_else(|error| Waits { all: Vec::new(), failed: vec![Ending::Lost(error.to_string())] });
    (result, waits)
}

fn order(shape: Shape, body: Bytes, tokens: u32, stream: bool) -> Order {
    let path = if shape == Shape::Chat { "/v1/chat/completions" } else { "/v1/completions" };
    Order {
        method: Method::POST,
        path,
        body,
        shape,
        stream,
        tokens,
        h2: stream,
        leaves_after: None,
        reads_every: None,
    }
}

/// Opens very many streams and keeps them open.
async fn streams(fleet: &Fleet, args: &CrowdArgs) -> io::Result<JoinSet<Ending>> {
    let clients: Vec<Arc<Client>> = (0..args.streams.div_ceil(STREAMS_PER_CONNECTION))
        .map(|_| Arc::new(Client::new(fleet.address, PATIENCE, None)))
        .collect();
    let mut ticks = interval(Duration::from_secs(1) / args.opened_per_s as u32);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let begun = Instant::now();
    let mut open = JoinSet::new();
    for n in 0..args.streams {
        ticks.tick().await;
        let client = Arc::clone(&clients[n % clients.len()]);
        // All end after the last has begun.
        let tokens = 60;
        let order = order(Shape::Chat, traffic::body(Shape::Chat, n as u64, tokens, true), tokens, true);
        open.spawn(async move { client.ask(&order).await.ending });
    }
    sleep(Duration::from_secs(2)).await;
    let usage = fleet.usage()?;
    writeln!(
        io::stdout(),
        "{} streams open after {:.0} s: gateway {} MiB, {} descriptors, {:.1} s of CPU",
        open.len(),
        begun.elapsed().as_secs_f64(),
        usage.rss_kib / 1024,
        usage.fds,
        usage.cpu_ms as f64 / 1e3
    )?;
    sleep(Duration::from_secs(args.hold_s)).await;
    Ok(open)
}

/// Sets the speed of the streams' engines.
async fn pace(fleet: &Fleet, factor: f64) -> io::Result<()> {
    let fault = serde_json::to_string(&Fault::Slow { factor })?;
    for engine in &fleet.engines[..4] {
        client::send(engine.control, Method::POST, "/fault", &fault).await?;
    }
    Ok(())
}

/// Lets all streams end, as fast as possible.
async fn ended(fleet: &Fleet, mut open: JoinSet<Ending>) -> io::Result<Vec<Ending>> {
    let begun = Instant::now();
    pace(fleet, FULL_PACE).await?;
    let mut endings = Vec::new();
    while let Some(ending) = open.join_next().await {
        endings.push(ending.map_err(io::Error::other)?);
    }
    writeln!(io::stdout(), "all ended {:.0} s later", begun.elapsed().as_secs_f64())?;
    Ok(endings)
}

/// Clients that read, or write, a few bytes at a time. What is left at the end is aborted.
async fn slow(gateway: SocketAddr, args: &CrowdArgs) -> Vec<Ending> {
    let mut clients = JoinSet::new();
    let until = Instant::now() + Duration::from_secs(args.hold_s);
    let mut ticks = interval(Duration::from_millis(2));
    for n in 0..args.slow {
        ticks.tick().await;
        clients.spawn(async move {
            let at_work = async {
                match n % 2 {
                    0 => slow_reader(gateway, n, until).await,
                    _ => slow_writer(gateway, n, until).await,
                }
            };
            at_work.await.unwrap_or_else(|error| Ending::Cut(error.kind().to_string()))
        });
    }
    let mut endings = Vec::new();
    while let Some(ending) = clients.join_next().await {
        endings.push(ending.unwrap_or_else(|error| Ending::Lost(error.to_string())));
    }
    endings
}

fn head(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

/// Requests a long stream and reads 200 bytes of it each second, through a small window.
async fn slow_reader(gateway: SocketAddr, n: usize, until: Instant) -> io::Result<Ending> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4096)?;
    let mut stream = socket.connect(gateway).await?;
    let body = traffic::body(Shape::Chat, n as u64, 400, true);
    stream.write_all(head("/v1/chat/completions", body.len()).as_bytes()).await?;
    stream.write_all(&body).await?;
    let mut bytes = [0; 200];
    while Instant::now() < until {
        if stream.read(&mut bytes).await? == 0 {
            return Ok(Ending::Cut("closed".into()));
        }
        sleep(Duration::from_secs(1)).await;
    }
    Ok(Ending::Left)
}

/// Sends a head, and then a byte of the body each second, until stopped.
async fn slow_writer(gateway: SocketAddr, n: usize, until: Instant) -> io::Result<Ending> {
    let mut stream = tokio::net::TcpStream::connect(gateway).await?;
    let body = traffic::body(Shape::Chat, n as u64, 10, true);
    stream.write_all(head("/v1/chat/completions", body.len()).as_bytes()).await?;
    let mut answer = [0; 1024];
    for byte in body.iter().cycle() {
        stream.write_all(&[*byte]).await?;
        if let Ok(read) = timeout(Duration::from_secs(1), stream.read(&mut answer)).await {
            let read = read?;
            let text = String::from_utf8_lossy(&answer[..read]);
            let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
            let code = if text.contains("body_timeout") { "body_timeout" } else { "" };
            return Ok(match status {
                Some(status) => Ending::Refused { status, code: code.into() },
                None => Ending::Cut("closed".into()),
            });
        }
        if Instant::now() > until {
            break;
        }
    }
    Ok(Ending::Left)
}

/// A steady rate, ten times as much for five seconds, and steady again.
async fn burst(gateway: SocketAddr) -> Vec<Ending> {
    let client = Arc::new(Client::new(gateway, PATIENCE, None));
    let mut asked = JoinSet::new();
    for (per_s, seconds) in [(CALM_PER_S, 5), (BURST_PER_S, 5), (CALM_PER_S, 10)] {
        let mut ticks = interval(Duration::from_secs(1) / per_s);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        for n in 0..per_s * seconds {
            ticks.tick().await;
            let order = order(Shape::Chat, traffic::body(Shape::Chat, n.into(), 40, false), 40, false);
            let client = Arc::clone(&client);
            asked.spawn(async move { client.ask(&order).await.ending });
        }
    }
    let mut endings = Vec::new();
    while let Some(ending) = asked.join_next().await {
        endings.push(ending.unwrap_or_else(|error| Ending::Lost(error.to_string())));
    }
    endings
}

/// Prints the latencies of the other clients; returns whether one of their requests failed.
fn report(say: &mut impl io::Write, name: &str, waits: Waits) -> io::Result<bool> {
    let at = |share: f64| {
        let index = (waits.all.len().saturating_sub(1) as f64 * share) as usize;
        waits.all.get(index).map_or(f64::NAN, |wait| wait.as_secs_f64() * 1e3)
    };
    let [p50, p90, p99, most] = [0.5, 0.9, 0.99, 1.0].map(at);
    writeln!(
        say,
        "{name:<16} others: {:>6} requests, p50 {p50:.1} ms, p90 {p90:.1}, p99 {p99:.1}, max {most:.1}; {} failed",
        waits.all.len(),
        waits.failed.len()
    )?;
    if let Some(failed) = waits.failed.first() {
        writeln!(say, "BROKEN: of the others one ended with {failed:?}")?;
    }
    Ok(!waits.failed.is_empty())
}

/// Prints the outcomes; returns whether one is invalid.
fn told(say: &mut impl io::Write, endings: Vec<Ending>) -> io::Result<bool> {
    let (mut counts, mut broken) = (BTreeMap::<String, u64>::new(), false);
    for ending in endings {
        let name = match ending {
            Ending::Complete(_) => "complete".into(),
            Ending::Refused { status, code } => format!("{status} {code}"),
            other => {
                broken |= other != Ending::Left;
                format!("{other:?}").chars().take(100).collect()
            }
        };
        *counts.entry(name).or_default() += 1;
    }
    for (name, count) in counts {
        writeln!(say, "{count:>9}  {name}")?;
    }
    Ok(broken)
}
