//! The exact index beside Dynamo's, on the same streams in the same run. See README.md.

mod allocated;
mod cpu;
mod index;
mod stream;

use std::hint::black_box;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, PositionalIndexer, RadixTree};

use crate::index::{Index, Kvlane, Threaded};
use crate::stream::{BATCH, Stream};

#[global_allocator]
static ALLOCATOR: allocated::Counting = allocated::Counting;

/// What one index did on one stream.
#[derive(Clone, Default)]
struct Figures {
    name: &'static str,
    blocks_per_s: f64,
    lookup_p50: Duration,
    lookup_p99: Duration,
    /// All answers summed: equal for all who are right.
    found: u64,
}

fn time<I: Index>(stream: &Stream, with_lookups: bool) -> Figures {
    let mut index = I::new();
    let took = index.apply(stream);
    let mut figures = Figures { name: I::NAME, ..Figures::default() };
    figures.blocks_per_s = stream.blocks.len() as f64 / took.as_secs_f64();
    if with_lookups {
        let prompts: Vec<I::Prompt> = stream.prompts.iter().map(|prompt| I::prompt(prompt)).collect();
        let mut times = Vec::with_capacity(4 * prompts.len());
        for round in 0..4 {
            for prompt in &prompts {
                let start = Instant::now();
                let found = black_box(index.lookup(black_box(prompt)));
                times.push(start.elapsed());
                figures.found += if round == 0 { found } else { 0 };
            }
        }
        (figures.lookup_p50, figures.lookup_p99, _) = percentiles(&mut times);
    }
    figures
}

fn bytes<I: Index>(stream: &Stream) -> f64 {
    allocated::start();
    let before = allocated::bytes();
    let mut index = I::new();
    index.apply(stream);
    let bytes = allocated::bytes() - before;
    drop(index);
    allocated::stop();
    bytes as f64 / stream.held as f64
}

fn percentiles(times: &mut [Duration]) -> (Duration, Duration, Duration) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    (at(0.5), at(0.99), at(0.999))
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn race(what: &str, stream: &Stream, rounds: usize, full: bool) -> Result<()> {
    type Run = fn(&Stream, bool) -> Figures;
    type Bytes = fn(&Stream) -> f64;
    let all: [(Run, Bytes); 4] = [
        (time::<Kvlane>, bytes::<Kvlane>),
        (time::<RadixTree>, bytes::<RadixTree>),
        (time::<Threaded<ConcurrentRadixTreeCompressed>>, bytes::<Threaded<ConcurrentRadixTreeCompressed>>),
        (time::<Threaded<PositionalIndexer>>, bytes::<Threaded<PositionalIndexer>>),
    ];
    let mut runs: Vec<Vec<Figures>> = vec![Vec::new(); all.len()];
    for _ in 0..rounds {
        for ((run, _), runs) in all.iter().zip(&mut runs) {
            runs.push(run(stream, full));
        }
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{what}: {} events, {} blocks, {} held at the end", stream.changes.len(), stream.blocks.len(), stream.held)?;
    writeln!(out, "{:40} {:>12} {:>12} {:>12} {:>12}", "", "M blocks/s", "lookup p50", "p99", "B per block")?;
    for ((_, bytes), runs) in all.iter().zip(&runs) {
        ensure!(runs[0].found == runs[0].found, "no two find different prefixes");
        let of = |figure: fn(&Figures) -> f64| median(runs.iter().map(figure).collect());
        let rate = of(|run| run.blocks_per_s / 1e6);
        write!(out, "{:40} {rate:>12.1}", runs[0].name)?;
        if full {
            let p50 = of(|run| run.lookup_p50.as_secs_f64() * 1e6);
            let p99 = of(|run| run.lookup_p99.as_secs_f64() * 1e6);
            write!(out, " {p50:>9.2} us {p99:>9.2} us {:>12.1}", bytes(stream))?;
        }
        writeln!(out)?;
    }
    let found: Vec<u64> = runs.iter().map(|runs| runs[0].found).collect();
    if found.iter().any(|all| *all != found[0]) {
        writeln!(out, "not all found the same: {found:?}")?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rounds = arguments.first().map_or(Ok(5), |rounds| rounds.parse())?;
    if arguments.get(1).is_some_and(|only| only == "profile") {
        let stream = Stream::plain(arguments[2].parse()?, false);
        for _ in 0..rounds {
            writeln!(std::io::stdout(), "{:.1}", time::<Kvlane>(&stream, arguments.len() > 3).blocks_per_s / 1e6)?;
        }
        return Ok(());
    }
    let traces: Vec<PathBuf> = arguments.iter().skip(1).map(PathBuf::from).collect();
    race("256 prompts of 8,192 blocks on 2 of 256 endpoints, batches of 16", &Stream::plain(BATCH, false), rounds, true)?;
    race("the same, endpoints in turn", &Stream::plain(BATCH, true), rounds, false)?;
    race("the same, one by one", &Stream::plain(1, false), rounds, false)?;
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/kvlane/assets/mooncake-conversation.trace.jsonl.gz");
    for path in [own].iter().chain(&traces) {
        let stream = Stream::of_trace(path, 16, 4096, 2_000_000)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        race(&format!("{name} on 16 endpoints of 4,096 blocks, with evictions"), &stream, rounds, true)?;
    }
    Ok(())
}
