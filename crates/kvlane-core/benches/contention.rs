//! What a request costs the router when many threads use it: each thread lets requests arrive, reports their tokens,
//! their reuse and their end, without a pause. Once with predictions by dispatches, once by KV events that one more
//! thread applies meanwhile.
//!
//! `cargo bench -p kvlane-core --bench contention`, or for one row `… -- events 4`. `… -- events 1 20000` runs that many
//! requests per thread and no events, for callgrind.

use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvlane_core::block::{BlockHash, ChainSeed};
use kvlane_core::cache_accuracy::{Feed, ReportedReuse};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::{EngineHash, KvEvent, StoredBlock, Tier};
use kvlane_core::index::{approx, exact};
use kvlane_core::policy::PolicyConfig;
use kvlane_core::request::{RequestId, SchedulingRequest};
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{self, Input};
use kvlane_core::time::Nanos;

const ENDPOINTS: u64 = 32;
const PROMPTS: u64 = 2048;
/// Blocks of a prompt, and those that all prompts have in common.
const BLOCKS: u64 = 128;
const COMMON: u64 = 24;
const BLOCK_TOKENS: u32 = 64;
const PROMPT_TOKENS: u32 = BLOCKS as u32 * BLOCK_TOKENS;
/// Reports of output tokens in a request, of sixteen tokens each.
const REPORTS: u64 = 4;
const SPAN: Duration = Duration::from_secs(2);

struct World {
    router: Router,
    endpoints: Vec<EndpointId>,
    prompts: Vec<Vec<BlockHash>>,
}

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let number = |n: usize| words.get(n).and_then(|word| word.parse::<u64>().ok());
    let out = &mut io::stdout();
    writeln!(
        out,
        "{:<12} {:>7} {:>12} {:>14} {:>10}",
        "knowledge", "threads", "requests/s", "µs per request", "events/s"
    )?;
    for (name, feed) in [("dispatches", Feed::Absent), ("events", Feed::Live)] {
        if words.first().is_some_and(|word| word != name) {
            continue;
        }
        for threads in number(1).map_or(vec![1, 2, 4, 8, 16, 32], |threads| vec![threads]) {
            // With a count of requests, nothing but they: for counting instructions.
            let with_events = feed == Feed::Live && number(2).is_none();
            let (requests, events, took) = World::new(feed).run(threads, with_events, number(2));
            let second = took.as_secs_f64();
            let cost_us = second * 1e6 * (threads.min(cores())) as f64 / requests as f64;
            writeln!(
                out,
                "{name:<12} {threads:>7} {:>12.0} {cost_us:>14.2} {:>10.0}",
                requests as f64 / second,
                events as f64 / second
            )?;
        }
    }
    Ok(())
}

fn cores() -> u64 {
    thread::available_parallelism().map_or(1, |cores| cores.get() as u64)
}

/// A stored prompt, as an engine reports it: its names of blocks are our hashes.
fn stored(chain: &[BlockHash]) -> KvEvent {
    let blocks = chain.iter().map(|hash| StoredBlock { name: EngineHash(hash.0), hash: *hash });
    KvEvent::Stored { parent: None, blocks: blocks.collect(), tier: Tier::Gpu }
}

fn removed(chain: &[BlockHash]) -> KvEvent {
    let own = chain[COMMON as usize..].iter().map(|hash| EngineHash(hash.0));
    KvEvent::Removed { blocks: own.collect(), tier: Tier::Gpu }
}

// === impl World ===

impl World {
    /// Endpoints that hold the prompts in turn.
    fn new(feed: Feed) -> Self {
        let router = Router::new(router::Config {
            scheduler: scheduler::Config {
                seed: 1,
                ..scheduler::Config::new(PolicyConfig::by_name("fleet_cost").expect("a policy"))
            },
            index: approx::Config { memory_bytes_max: 1 << 30, ttl: Nanos::MAX },
            exact: (feed == Feed::Live).then_some(exact::Config { memory_bytes_max: 1 << 30 }),
            block_tokens: BLOCK_TOKENS,
        });
        let mut out = Vec::new();
        let endpoints: Vec<EndpointId> = (0..ENDPOINTS)
            .map(|n| {
                router.join(Nanos(1), format!("http://e{n}").into(), true, false, &mut out).expect("room")
            })
            .collect();
        let seed = ChainSeed::new("m", None, None);
        let prompts: Vec<Vec<BlockHash>> = (0..PROMPTS)
            .map(|n| {
                let block = |at: u64| if at < COMMON { at } else { (n << 16) + at };
                let text: Vec<u8> = (0..BLOCKS).flat_map(|at| block(at).to_le_bytes()).collect();
                let mut chain = Vec::new();
                seed.chain(&text, 8, &mut chain);
                chain
            })
            .collect();
        for (n, chain) in prompts.iter().enumerate() {
            let endpoint = endpoints[n % endpoints.len()];
            match feed {
                Feed::Live => _ = router.apply(endpoint, &stored(chain)),
                _ => router.learn(Nanos(2), RequestId(n as u64), chain, endpoint),
            }
        }
        endpoints.iter().for_each(|&endpoint| router.set_feed(Nanos(3), endpoint, feed, &mut out));
        Self { router, endpoints, prompts }
    }

    /// Requests and events in a span, or in the time of `count` requests per thread.
    #[expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
    fn run(&self, threads: u64, with_events: bool, count: Option<u64>) -> (u64, u64, Duration) {
        let (stop, requests, events) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        let begun = Instant::now();
        let took = thread::scope(|scope| {
            let clients: Vec<_> = (0..threads)
                .map(|n| {
                    let (stop, requests) = (&stop, &requests);
                    scope.spawn(move || {
                        let mut served = 0;
                        while count.map_or_else(|| !stop.load(Ordering::Relaxed), |count| served < count) {
                            self.request((n << 40) + served);
                            served += 1;
                        }
                        requests.fetch_add(served, Ordering::Relaxed);
                    })
                })
                .collect();
            if with_events {
                scope.spawn(|| events.store(self.events(&stop), Ordering::Relaxed));
            }
            if count.is_none() {
                thread::sleep(SPAN);
                stop.store(true, Ordering::Relaxed);
            }
            clients.into_iter().for_each(|client| client.join().expect("it does not panic"));
            let took = begun.elapsed();
            stop.store(true, Ordering::Relaxed);
            took
        });
        (requests.into_inner(), events.into_inner(), took)
    }

    /// A request, from its arrival to its end.
    fn request(&self, n: u64) {
        thread_local! {
            static SCRATCH: std::cell::RefCell<(Scratch, Vec<scheduler::Output>)> = std::cell::RefCell::default();
        }
        SCRATCH.with_borrow_mut(|(scratch, out)| {
            out.clear();
            let (router, request) = (&self.router, RequestId(n));
            let now = |step: u64| Nanos::from_micros(10 * n % (1 << 40) + step);
            let chain = &self.prompts[(n % PROMPTS) as usize];
            router.arrive(now(0), SchedulingRequest::new(request, PROMPT_TOKENS), chain, scratch, out);
            assert!(matches!(out[..], [scheduler::Output::Dispatch { .. }]), "it is placed");
            router.progress(now(1), request, true, 0, out);
            (0..REPORTS).for_each(|at| router.progress(now(2 + at), request, false, 16, out));
            let cached_tokens = PROMPT_TOKENS - BLOCK_TOKENS;
            let reported = ReportedReuse { prompt_tokens: PROMPT_TOKENS, cached_tokens };
            let whole = [
                Input::Wrote { request, output_tokens: 1 + 16 * REPORTS as u32 },
                Input::Answered { request, reported },
                Input::Succeeded { request },
                Input::Finished { request },
            ];
            router.step_all(now(7), whole, out);
        });
    }

    /// Lets engines drop and store prompts, in turn, until `stop`.
    fn events(&self, stop: &AtomicBool) -> u64 {
        let mut applied = 0;
        for n in (0..self.prompts.len()).cycle() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let (chain, endpoint) = (&self.prompts[n], self.endpoints[n % self.endpoints.len()]);
            self.router.apply(endpoint, &removed(chain));
            self.router.apply(endpoint, &stored(chain));
            applied += 2;
        }
        applied
    }
}
