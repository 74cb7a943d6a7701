//! Eight threads race for one router; replaying its recording on one thread reproduces their decisions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};

use kvlane_core::block::{BlockHash, ChainSeed};
use kvlane_core::breaker;
use kvlane_core::decision::Placement;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::index::approx;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::recording::Recording;
use kvlane_core::request::{RequestId, SchedulingRequest};
use kvlane_core::rng::Rng;
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{self, Input, Output};
use kvlane_core::time::Nanos;

const THREADS: u64 = 8;
const REQUESTS_PER_THREAD: u64 = 400;

fn dispatches(outputs: impl IntoIterator<Item = Output>) -> impl Iterator<Item = (RequestId, Placement)> {
    outputs.into_iter().filter_map(|output| match output {
        Output::Dispatch { request, placement } => Some((request, placement)),
        _ => None,
    })
}

fn race(policy: &str) -> (BTreeMap<RequestId, Placement>, Recording) {
    let router = Router::recorded(router::Config {
        scheduler: scheduler::Config {
            max_concurrent_requests: 40,
            max_requests_per_endpoint: 10,
            queue_size: 16,
            queue_timeout: Nanos(300),
            breaker: breaker::Config {
                failure_threshold: 2,
                cooldown: Nanos(50),
                cooldown_max: Nanos(500),
                slow_start: Nanos(100),
            },
            receipts: 8,
            seed: 11,
            ..scheduler::Config::new(PolicyConfig::by_name(policy).expect("a policy"))
        },
        index: approx::Config { memory_bytes_max: 1 << 20, ttl: Nanos(5_000) },
        exact: None,
        block_tokens: 16,
    });
    for n in 0..5 {
        router.join(Nanos::ZERO, format!("e{n}").into(), true, false, &mut Vec::new()).expect("room");
    }
    let (clock, seen, start) =
        (AtomicU64::new(1), Mutex::new(BTreeMap::new()), Barrier::new(THREADS as usize));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (router, clock, seen, start) = (&router, &clock, &seen, &start);
            scope.spawn(move || {
                let mut rng = Rng::new(thread);
                let (mut out, mut scratch, mut mine) = (Vec::new(), Scratch::default(), Vec::new());
                start.wait();
                for n in 0..REQUESTS_PER_THREAD {
                    let now = Nanos(clock.fetch_add(1, Ordering::Relaxed));
                    let id = RequestId(thread * REQUESTS_PER_THREAD + n);
                    let mut chain: Vec<BlockHash> = Vec::new();
                    let prompt = vec![rng.below(6) as u8; 16 * (1 + rng.below(40))];
                    ChainSeed::new("m", None, None).chain(&prompt, 16, &mut chain);
                    let request = SchedulingRequest::new(id, prompt.len() as u32);
                    router.arrive(now, request, &chain, &mut scratch, &mut out);
                    mine.push(id);
                    router.progress(now, id, n % 2 == 0, 3, &mut out);
                    if n % 50 == 7 {
                        let endpoint = EndpointId::new(rng.below(5) as u16, 0);
                        let healthy = rng.below(2) == 0;
                        router.step(now, Input::Health { endpoint, healthy }, &mut out);
                        router.step(now, Input::Draining { endpoint, draining: rng.below(4) == 0 }, &mut out);
                    }
                    if n % 300 == 150 {
                        let max_concurrent_requests = 30 + rng.below(20) as u32;
                        let config = router.read(|scheduler| scheduler.config().clone());
                        let config = scheduler::Config { max_concurrent_requests, ..config };
                        router.step(now, Input::Configured { config: Box::new(config) }, &mut out);
                    }
                    if mine.len() > 4 {
                        let request = mine.swap_remove(rng.below(mine.len()));
                        let retry_after = Some(Nanos(rng.below(40) as u64));
                        let told = [
                            Input::Failed { request },
                            Input::Busy { request, retry_after },
                            Input::Succeeded { request },
                        ];
                        if let Some(told) = told.into_iter().nth(rng.below(24)) {
                            router.step(now, told, &mut out);
                        }
                        router.step(now, Input::Finished { request }, &mut out);
                    }
                }
                seen.lock().expect("no panic").extend(dispatches(out));
            });
        }
    });
    (seen.into_inner().expect("no panic"), router.recording())
}

/// Invariant: The same inputs in the same order give the same decisions, for every policy and any number of racing
/// threads.
#[test]
fn a_recording_of_eight_racing_threads_replays_to_identical_decisions() {
    let mut waited = 0;
    for &policy in PolicyConfig::NAMES {
        let (seen, recording) = race(policy);
        waited +=
            recording.inputs.iter().filter(|(_, input)| matches!(input, Input::Refreshed { .. })).count();
        assert!(seen.len() as u64 > REQUESTS_PER_THREAD / 4, "{policy}: {} were placed", seen.len());
        let written = serde_json::to_string(&recording).expect("recordings can be written");
        let read: Recording = serde_json::from_str(&written).expect("and read");
        let replayed: BTreeMap<_, _> = dispatches(read.replay().into_iter().flatten()).collect();
        assert_eq!(replayed, seen, "{policy}");
    }
    assert!(waited > 100, "{waited} were queued and looked up again");
}
