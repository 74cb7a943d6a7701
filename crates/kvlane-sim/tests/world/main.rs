//! The world as a whole: no request is lost, results depend only on inputs and seed, faults are handled.

mod cells;
mod faults;
mod gateways;
mod ramp;
mod split;
mod turns;

use kvlane_core::index::{approx, exact};
use kvlane_core::load::InFlight;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;
use kvlane_core::{router, scheduler};
use kvlane_sim::fault::{EventFeed, Fault};
use kvlane_sim::{
    Batching, Connector, CpuTier, Drive, EngineConfig, Eviction, Failure, GatewaysConfig, Hints, Outcome,
    Plan, ReportFeed, Run, Send, TransferConfig, World, WorldConfig,
};
use kvlane_trace::trace::{Builder, Trace, TraceRequest};
use proptest::prelude::*;

const BLOCK_TOKENS: u32 = 16;

const EVICTIONS: [Eviction; 4] = [Eviction::Lru, Eviction::Lfu, Eviction::SessionLru, Eviction::Infinite];

fn config(policy: &str, engines: usize, seed: u64) -> WorldConfig {
    let timing = TimingModel::preset("qwen2.5-7b@a100").expect("in the tables");
    let engine =
        EngineConfig { blocks: 400, max_num_seqs: 16, ..EngineConfig::vllm(timing, BLOCK_TOKENS, 0.9) };
    WorldConfig {
        engines: vec![engine; engines],
        router: router::Config {
            scheduler: scheduler::Config {
                seed,
                ..scheduler::Config::new(PolicyConfig::by_name(policy).expect("a policy"))
            },
            index: approx::Config { memory_bytes_max: 1 << 24, ttl: Nanos::MAX },
            exact: None,
            block_tokens: BLOCK_TOKENS,
        },
        parts: Vec::new(),
        gateways: GatewaysConfig::default(),
        fetch_tokens_min: None,
        link: TransferConfig::default(),
        routing_delay: Nanos::from_millis(1),
        reports: Some(ReportFeed { interval: Nanos::from_millis(100), age: Nanos::from_millis(20) }),
        events: EventFeed::default(),
        faults: Vec::new(),
        health_delay: Nanos::from_millis(5),
        attempts_max: 3,
        rules: None,
        reloaded: None,
        hints: Hints::default(),
        client_timeout: None,
        seed,
        stopwatch: None,
    }
}

/// A router that takes events.
const EVENTS: Option<exact::Config> = Some(exact::Config { memory_bytes_max: 1 << 28 });

/// `sessions` conversations of up to four turns; each turn begins with the one before, its answer included.
fn conversations(sessions: u32, seed: u64) -> Trace {
    let mut rng = Rng::new(seed);
    let mut builder = Builder::new(BLOCK_TOKENS);
    let mut arrival_s = 0.0;
    for session in 0..sessions {
        arrival_s += rng.unit() * 0.4;
        let mut before = None;
        for turn in 0..1 + rng.below(4) {
            turns::add(&mut builder, &mut rng, arrival_s + turn as f64, session, &mut before);
        }
    }
    builder.finish()
}

fn play(config: WorldConfig, trace: &Trace, drive: Drive) -> (Run, World) {
    let plan = Plan::new(trace);
    let mut world = World::new(config);
    let requests = 0..trace.requests.len() as u32;
    let run = world.run(&Send { trace, plan: &plan, requests, origin_s: 0.0, drive }, |_| {});
    (run, world)
}

const OPEN: Drive = Drive::Open { load: 1.0 };

/// Invariants of every run, with any faults.
fn check(trace: &Trace, run: &Run, world: &World) {
    assert_eq!(run.outcomes.len(), trace.requests.len());
    for (request, outcome) in trace.requests.iter().zip(&run.outcomes) {
        let Outcome { due, end, first_token, output_tokens, .. } = *outcome;
        assert!(run.start <= due && due <= end && end <= run.end);
        assert!(first_token.is_none_or(|first| due <= first && first <= end));
        match outcome.failure {
            None => assert_eq!(output_tokens, request.output_tokens),
            Some(_) => assert!(output_tokens <= request.output_tokens),
        }
        if let Some(after) = request.after {
            let before = run.outcomes[after as usize].end;
            assert!(due >= before + Nanos::from_secs_f64(f64::from(request.think_s.unwrap_or(0.0))));
        }
    }
    for stats in world.engine_stats() {
        assert_eq!((stats.running, stats.waiting, stats.kv_blocks_used), (0, 0, 0));
        assert!(stats.prefix_hit_tokens + stats.cpu_hit_tokens <= stats.prefix_queried_tokens);
    }
    for router in world.routers() {
        assert_eq!(router.read(|scheduler| (scheduler.in_flight(), scheduler.queued())), (0, 0));
        router.read(|scheduler| {
            let transfers = scheduler.transfers();
            for endpoint in scheduler.pool().endpoints() {
                assert_eq!(endpoint.load.in_flight, InFlight::default());
                assert_eq!(transfers.in_flight(endpoint.id), 0);
            }
            assert!(transfers.links(world.now()).all(|link| link.in_flight == 0));
        });
    }
}

/// Invariant: The same seed gives the same simulation.
#[test]
fn the_same_seed_gives_the_same_run_and_another_one_another() {
    let trace = conversations(60, 1);
    let run = |seed| play(config("power_of_two", 3, seed), &trace, OPEN).0.outcomes;
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

/// Invariant: Placements that are given again, without a router, have the outcomes that they had.
#[test]
fn placements_that_are_given_have_the_outcomes_that_a_router_had_with_them() {
    let trace = conversations(80, 5);
    let plan = Plan::new(&trace);
    for policy in ["fleet_cost", "round_robin"] {
        for exact in [None, EVENTS] {
            let mut given = config(policy, 3, 1);
            given.router.exact = exact;
            let (run, _) = play(given, &trace, OPEN);
            let engines: Vec<u16> =
                run.outcomes.iter().map(|outcome| outcome.endpoint.expect("it was placed")).collect();
            let mut world = World::new(config("random", 3, 2));
            let requests = 0..trace.requests.len() as u32;
            let send = Send { trace: &trace, plan: &plan, requests, origin_s: 0.0, drive: OPEN };
            let again = world.run_placed(&send, &engines);
            check(&trace, &again, &world);
            assert_eq!(again.outcomes, run.outcomes, "{policy}");
            assert_eq!(world.decisions().count, 0);
        }
    }
}

#[test]
fn hits_never_exceed_what_a_cache_that_never_forgets_would_have() {
    let trace = conversations(80, 3);
    for policy in PolicyConfig::NAMES {
        let (run, world) = play(config(policy, 3, 1), &trace, OPEN);
        check(&trace, &run, &world);
        let excess = run.outcomes.iter().find(|outcome| outcome.cached_tokens > outcome.reusable_tokens);
        assert_eq!(excess, None, "{policy}");
    }
}

#[test]
fn one_engine_finds_the_turn_before_with_its_answer() {
    let trace = conversations(1, 9);
    let mut config = config("round_robin", 1, 1);
    config.engines[0].blocks = 10_000;
    let (run, _) = play(config, &trace, OPEN);
    assert!(trace.requests.len() > 1);
    for outcome in &run.outcomes[1..] {
        // The last token of an answer has no keys and values.
        let last = run.outcomes[outcome.request as usize - 1];
        let held = (last.prompt_tokens + last.output_tokens - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
        assert_eq!(outcome.cached_tokens, held.min(outcome.reusable_tokens));
    }
}

#[test]
fn exact_knowledge_without_delay_is_what_the_engines_have() {
    let trace = conversations(60, 4);
    let mut exact = config("prefix_aware", 3, 1);
    exact.router.exact = EVENTS;
    let (run, world) = play(exact, &trace, OPEN);
    check(&trace, &run, &world);
    let (approximate, _) = play(config("prefix_aware", 3, 1), &trace, OPEN);
    let cached = |run: &Run| run.outcomes.iter().map(|o| u64::from(o.cached_tokens)).sum::<u64>();
    assert!(cached(&run) > 0 && cached(&approximate) > 0);
}

#[test]
fn a_closed_loop_keeps_its_clients_busy_and_no_more() {
    let trace = conversations(40, 5);
    let (run, world) = play(config("least_load", 2, 1), &trace, Drive::Closed { clients: 4 });
    check(&trace, &run, &world);
    // A conversation lasts from its first request to its last end: at any start no more than four are going on.
    let plan = Plan::new(&trace);
    let mut spans: std::collections::BTreeMap<u32, (Nanos, Nanos)> = Default::default();
    for outcome in &run.outcomes {
        let span = spans.entry(plan.root[outcome.request as usize]).or_insert((outcome.due, outcome.end));
        *span = (span.0.min(outcome.due), span.1.max(outcome.end));
    }
    let at = |time: Nanos| spans.values().filter(|(start, end)| *start <= time && time < *end).count();
    let most = spans.values().map(|(start, _)| at(*start)).max().unwrap_or(0);
    assert_eq!(most, 4);
}

#[test]
fn twice_the_load_begins_conversations_twice_as_fast_and_keeps_their_pace() {
    let mut trace = conversations(30, 6);
    trace.requests.iter_mut().for_each(|request| request.think_s = None);
    let (run, _) = play(config("round_robin", 4, 1), &trace, Drive::Open { load: 2.0 });
    for (request, outcome) in trace.requests.iter().zip(&run.outcomes) {
        if request.after.is_none() {
            assert_eq!(outcome.due, Nanos::from_secs_f64(request.arrival_s / 2.0));
        }
    }
}

#[test]
fn an_endpoint_that_dies_loses_its_streams_and_its_other_requests_go_elsewhere() {
    let trace = conversations(80, 7);
    let mut config = config("round_robin", 3, 1);
    config.faults = vec![
        // Slow, so that it has streams to lose.
        Fault::Slow { at: Nanos::ZERO, endpoint: 1, factor: 20.0, until: None },
        Fault::Death { at: Nanos::from_secs(6), endpoint: 1, back_at: Some(Nanos::from_secs(12)) },
    ];
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    let broken: Vec<&Outcome> = run.outcomes.iter().filter(|outcome| !outcome.is_ok()).collect();
    assert!(!broken.is_empty());
    for outcome in broken {
        assert_eq!((outcome.failure, outcome.end), (Some(Failure::Broken), Nanos::from_secs(6)));
        assert!(outcome.first_token.is_some(), "a request without a token is retried elsewhere");
    }
    assert!(run.outcomes.iter().any(|outcome| outcome.is_ok() && outcome.attempts > 1));
    let served = |from: u64, to: u64| {
        let within = |at: Nanos| Nanos::from_secs(from) <= at && at < Nanos::from_secs(to);
        run.outcomes.iter().filter(|o| o.endpoint == Some(1) && o.is_ok() && within(o.due)).count()
    };
    assert_eq!(served(7, 12), 0);
    assert!(served(13, 100) > 0, "it is back");
}

#[test]
fn a_slow_endpoint_gets_fewer_requests_where_load_counts() {
    let trace = conversations(150, 8);
    let mut config = config("least_load", 3, 1);
    config.faults = vec![Fault::Slow { at: Nanos::ZERO, endpoint: 0, factor: 8.0, until: None }];
    let (run, _) = play(config, &trace, OPEN);
    let of = |endpoint| run.outcomes.iter().filter(|outcome| outcome.endpoint == Some(endpoint)).count();
    assert!(of(0) < of(1) && of(0) < of(2), "{} {} {}", of(0), of(1), of(2));
}

#[test]
fn clients_that_give_up_leave_nothing_behind() {
    let trace = conversations(60, 10);
    let mut config = config("random", 2, 1);
    config.client_timeout = Some(Nanos::from_millis(400));
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    let gone = |outcome: &&Outcome| outcome.failure == Some(Failure::TimedOut);
    assert!(run.outcomes.iter().filter(gone).count() > 0);
    assert!(run.outcomes.iter().filter(gone).all(|o| o.end == o.due + Nanos::from_millis(400)));
}

#[test]
fn a_full_pool_queues_and_sheds_as_the_gateway_does() {
    let trace = conversations(80, 11);
    let mut config = config("least_load", 2, 1);
    config.router.scheduler.max_concurrent_requests = 3;
    config.router.scheduler.queue_size = 2;
    config.router.scheduler.queue_timeout = Nanos::from_millis(300);
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    let shed = |o: &&Outcome| matches!(o.failure, Some(Failure::Rejected(_)));
    assert!(run.outcomes.iter().filter(shed).count() > 0);
    assert!(run.outcomes.iter().filter(shed).all(|o| o.end <= o.due + Nanos::from_millis(301)));
}

#[test]
fn what_another_engine_has_is_fetched_rather_than_computed() {
    let trace = conversations(60, 13);
    let run = |fetch| {
        let mut config = config("round_robin", 3, 1);
        config.fetch_tokens_min = fetch;
        let (run, world) = play(config, &trace, OPEN);
        check(&trace, &run, &world);
        let computed = world.engine_stats().iter().map(|stats| stats.computed_tokens).sum::<u64>();
        (computed, run.outcomes.iter().map(|outcome| u64::from(outcome.moved_tokens)).sum::<u64>())
    };
    let ((computed, moved), (less, fetched)) = (run(None), run(Some(64)));
    assert_eq!(moved, 0);
    assert!(fetched > 0 && less < computed, "{fetched} {less} {computed}");
}

/// Prompt tokens found in the cache, and prompt tokens in all, of a run under a small cache.
fn found(eviction: Eviction, tier: Option<CpuTier>, batching: Batching) -> (u64, u64) {
    let trace = conversations(120, 14);
    let mut config = config("prefix_aware", 3, 1);
    for engine in &mut config.engines {
        (engine.eviction, engine.cpu_tier, engine.batching) = (eviction, tier, batching);
        // Little more than the longest prompt: what a conversation leaves is lost before its next turn.
        engine.blocks = 120;
    }
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    let sum = |what: fn(&Outcome) -> u32| run.outcomes.iter().map(|outcome| u64::from(what(outcome))).sum();
    (sum(|outcome| outcome.cached_tokens), sum(|outcome| outcome.prompt_tokens))
}

#[test]
fn a_cache_that_never_forgets_finds_most() {
    let shares = EVICTIONS.map(|eviction| found(eviction, None, Batching::Mixed).0);
    let most = shares[3];
    assert!(shares[..3].iter().all(|&found| 0 < found && found < most), "{shares:?}");
}

#[test]
fn what_the_accelerator_loses_is_found_in_the_hosts_memory() {
    for batching in [Batching::Mixed, Batching::PrefillFirst] {
        let of = |tier| found(Eviction::Lru, tier, batching).0;
        let (without, with) = (of(None), of(Some(CpuTier::new(10_000))));
        assert!(with > without, "{with} {without}");
        assert_eq!(of(Some(CpuTier::new(0))), without, "a tier without blocks holds nothing");
    }
}

/// A fault of a kind, at a millisecond, and for how many milliseconds, if it ends.
fn fault((kind, at, endpoint, lasts): (u32, u64, usize, Option<u64>)) -> Fault {
    let until = lasts.map(|lasts| Nanos::from_millis(at + lasts));
    let at = Nanos::from_millis(at);
    match kind {
        0 => Fault::Death { at, endpoint, back_at: until },
        1 => Fault::Slow { at, endpoint, factor: 3.0, until },
        2 => Fault::Pause { at, endpoint, until },
        3 => Fault::Reset { at, endpoint },
        4 => Fault::BlackHole { at, endpoint, until },
        5 => Fault::Busy { at, endpoint, retry_after: lasts.map(Nanos::from_millis), until },
        6 => Fault::CutFeed { at, endpoint, until },
        7 => Fault::FloodFeed { at, endpoint, until },
        8 => Fault::Drain { at, endpoint, until },
        9 => Fault::Replace { at, endpoint, back_at: until },
        10 => Fault::Transfers { at, endpoint, failed: 0.3, slow: 0.3, slow_by: Nanos::from_secs(3), until },
        _ => Fault::Reload { at },
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Invariant: In a simulated fleet every request ends once under any faults, and no state is left behind.
    #[test]
    fn whatever_goes_wrong_every_request_is_over_once_and_nothing_is_left(
        seed in 0u64..1000,
        engines in 1usize..4,
        policy in prop::sample::select(PolicyConfig::NAMES.to_vec()),
        faults in prop::collection::vec((0u32..12, 0u64..20_000, 0usize..4, prop::option::of(1u64..8000)), 0..9),
        (lost, duplicated, jitter) in (0.0..0.5, 0.0..0.5, 0u64..500),
        timeout in prop::option::of(300u64..5000),
        exact: bool,
        closed in prop::option::of(1u32..8),
        (parts, fetch) in (split::parts(), prop::option::of(1u32..200)),
        push: bool,
        eviction in prop::sample::select(EVICTIONS.to_vec()),
        tier in prop::option::of((0u32..900, any::<bool>())),
        (prefill_first, blocks) in (any::<bool>(), 100u32..500),
    ) {
        let trace = conversations(25, seed);
        let mut config = config(policy, engines, seed);
        for engine in &mut config.engines {
            engine.eviction = eviction;
            engine.blocks = blocks;
            engine.cpu_tier = tier.map(|(blocks, overlap)| CpuTier { overlap, ..CpuTier::new(blocks) });
            engine.batching = if prefill_first { Batching::PrefillFirst } else { Batching::Mixed };
        }
        config.faults = faults.into_iter().map(fault).collect();
        if !config.faults.iter().all(Fault::is_plain) {
            config = faults::hasty(config);
        }
        config.router.exact = EVENTS.filter(|_| exact);
        config.events =
            EventFeed { delay: Nanos::from_millis(5), jitter: Nanos::from_millis(jitter), lost, duplicated };
        config.client_timeout = timeout.map(Nanos::from_millis);
        config.fetch_tokens_min = fetch;
        config.parts = parts;
        config.link.connector = if push { Connector::Push } else { Connector::Pull };
        let drive = closed.map_or(OPEN, |clients| Drive::Closed { clients });
        let (run, world) = play(config.clone(), &trace, drive);
        check(&trace, &run, &world);
        prop_assert_eq!(run.outcomes, play(config, &trace, drive).0.outcomes);
    }
}

#[test]
fn a_slow_engine_is_known_by_its_answers_and_gets_fewer_prompts() {
    let mut builder = Builder::new(BLOCK_TOKENS);
    for n in 0..400 {
        let request = TraceRequest {
            arrival_s: f64::from(n) * 0.2,
            input_tokens: 1600,
            output_tokens: 80,
            session: n,
            ..TraceRequest::default()
        };
        builder.branch(request).expect("room");
    }
    let trace = builder.finish();
    let mut config = config("fleet_cost", 3, 1);
    config.engines.iter_mut().for_each(|engine| engine.blocks = 8000);
    config.faults = vec![Fault::Slow { at: Nanos::ZERO, endpoint: 1, factor: 3.0, until: None }];
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    let rates: Vec<_> = world
        .router()
        .read(|scheduler| scheduler.pool().endpoints().map(|endpoint| scheduler.rates(endpoint)).collect());
    for (n, others) in [(0, 2), (2, 0)] {
        let ratio = rates[n].step_s / rates[others].step_s;
        assert!((0.98..1.02).contains(&ratio), "two alike are taken for alike: {rates:?}");
        assert!(rates[1].step_s > 2.0 * rates[n].step_s, "{rates:?}");
        assert!(rates[1].prefill_token_s > 2.0 * rates[n].prefill_token_s, "{rates:?}");
    }
    let given = |n: u16| run.outcomes.iter().filter(|outcome| outcome.endpoint == Some(n)).count();
    assert!(2 * given(1) < given(0).min(given(2)), "{} {} {}", given(0), given(1), given(2));
}
