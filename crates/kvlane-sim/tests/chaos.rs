//! A thousand fleets under scripts with all kinds of faults, and the invariants that hold in all of them.
//!
//! `make chaos` plays such scripts against real processes; here they are played in virtual time, each with another fleet,
//! policy and limits.

#[path = "world/turns.rs"]
mod turns;

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvlane_core::decision::Rejection;
use kvlane_core::disaggregation::{Part, Role};
use kvlane_core::index::{approx, exact};
use kvlane_core::load::InFlight;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::replica::LEASE;
use kvlane_core::rng::Rng;
use kvlane_core::router::Router;
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;
use kvlane_core::{breaker, router, scheduler};
use kvlane_sim::chaos::{self, Action, Death, Script};
use kvlane_sim::fault::{EventFeed, Fault, Side};
use kvlane_sim::rules::{Probes, Rules};
use kvlane_sim::{
    Connector, Drive, EngineConfig, Exchange, Failure, GatewaysConfig, Hints, Outcome, Plan, ReportFeed, Run,
    Send, TransferConfig, World, WorldConfig,
};
use kvlane_trace::trace::{Builder, Trace};

const SEEDS: std::ops::Range<u64> = 0..1000;
/// One in this many seeds is played twice.
const TWICE_EVERY: u64 = 25;
const BLOCK_TOKENS: u32 = 16;
/// Time within which a repaired endpoint is known to be healthy: a probe that hangs, then two that succeed.
const SETTLE: Nanos = Nanos::from_secs(3);

/// The settings of a seed.
struct Case {
    script: Script,
    config: WorldConfig,
    trace: Trace,
    /// Whether requests may be shed.
    queues: bool,
}

/// Outcomes of the requests of all seeds.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    requests: u32,
    split: u32,
    /// Had a healthy endpoint all the time.
    promised: u32,
    retried: u32,
    broken: u32,
    busy: u32,
    nobody: u32,
    shed: u32,
    given_up: u32,
    resent: u32,
    /// Looks at gateways that were to agree.
    agreed: u32,
}

/// Conversations of up to three turns, for as long as the script lasts.
fn conversations(rng: &mut Rng, length: Nanos) -> Trace {
    let mut builder = Builder::new(BLOCK_TOKENS);
    let (mut arrival_s, mut session) = (0.0, 0);
    while arrival_s < length.as_secs_f64() {
        let mut before = None;
        for _ in 0..1 + rng.below(3) {
            turns::add(&mut builder, rng, arrival_s, session, &mut before);
        }
        arrival_s += rng.unit() * 0.9;
        session += 1;
    }
    builder.finish()
}

/// The script's actions as faults of a world: each with the one that ends it. Some that drain are replaced, some that
/// are slow are busy instead, and some feeds that are cut are links that fail; a world has no certificates.
fn faults(script: &Script, rng: &mut Rng) -> Vec<Fault> {
    let ends = |begun: Action, ended: Action| match begun {
        Action::Kill { engine } | Action::Die { engine, .. } => ended == Action::Restart { engine },
        Action::Pause { engine } => ended == Action::Resume { engine },
        Action::Slow { engine, .. } | Action::BlackHole { engine } => ended == Action::Heal { engine },
        Action::CutFeed { engine } | Action::FloodFeed { engine } => ended == Action::RestoreFeed { engine },
        Action::Drain { engine } => ended == Action::Undrain { engine },
        _ => false,
    };
    let mut faults = Vec::new();
    for (n, step) in script.steps.iter().enumerate() {
        let at = step.at;
        let until = script.steps[n..].iter().find(|end| ends(step.action, end.action)).map(|end| end.at);
        let other = rng.below(2) == 0;
        faults.extend(match step.action {
            Action::Kill { engine } => Some(Fault::Death { at, endpoint: engine, back_at: until }),
            // Connections stay open without data, except that probes of a world are not answered either.
            Action::Die { engine, death: Death::CoreStopped | Death::Terminated } => {
                Some(Fault::BlackHole { at, endpoint: engine, until })
            }
            Action::Die { engine, .. } => Some(Fault::Death { at, endpoint: engine, back_at: until }),
            Action::Pause { engine } => Some(Fault::Pause { at, endpoint: engine, until }),
            Action::Slow { engine, .. } if other => {
                let retry_after = (rng.below(2) == 0).then_some(Nanos::from_secs(1));
                Some(Fault::Busy { at, endpoint: engine, retry_after, until })
            }
            Action::Slow { engine, factor } => {
                Some(Fault::Slow { at, endpoint: engine, factor: f64::from(factor), until })
            }
            Action::Reset { engine } => Some(Fault::Reset { at, endpoint: engine }),
            Action::BlackHole { engine } => Some(Fault::BlackHole { at, endpoint: engine, until }),
            Action::CutFeed { engine } if other => Some(Fault::Transfers {
                at,
                endpoint: engine,
                failed: 0.3,
                slow: 0.3,
                slow_by: Nanos::from_secs(3),
                until,
            }),
            Action::CutFeed { engine } => Some(Fault::CutFeed { at, endpoint: engine, until }),
            Action::FloodFeed { engine } => Some(Fault::FloodFeed { at, endpoint: engine, until }),
            Action::Drain { engine } if other => {
                Some(Fault::Replace { at, endpoint: engine, back_at: until })
            }
            Action::Drain { engine } => Some(Fault::Drain { at, endpoint: engine, until }),
            Action::Reload => Some(Fault::Reload { at }),
            _ => None,
        });
    }
    faults
}

/// Engines' parts in one fleet of two, and their link: each engine is for all or has a role, and all are connected, so
/// that each can serve a request alone where no other can.
fn disaggregation(engines: usize, rng: &mut Rng) -> (Vec<Part>, TransferConfig) {
    let (is_on, has_roles, is_slow) = (rng.below(2) == 0, rng.below(2) == 0, rng.below(2) == 0);
    let connector = if rng.below(2) == 0 { Connector::Pull } else { Connector::Push };
    let mut part = |_| {
        let role = if has_roles { Role::ALL[rng.below(3)] } else { Role::Both };
        Part { role, network: Some(0), serves_alone: true }
    };
    let parts = if is_on { (0..engines).map(&mut part).collect() } else { Vec::new() };
    let link = TransferConfig { connector, ..TransferConfig::default() };
    (parts, if is_slow { TransferConfig { slow_share: 0.05, slow_s: 20.0, ..link } } else { link })
}

/// Another policy, and other limits.
fn reloaded(router: &router::Config, rng: &mut Rng) -> router::Config {
    let mut other = router.clone();
    let policy = PolicyConfig::NAMES[rng.below(PolicyConfig::NAMES.len())];
    other.scheduler.policy = PolicyConfig::by_name(policy).expect("a policy");
    if other.scheduler.max_concurrent_requests > 0 {
        other.scheduler.max_concurrent_requests = 8 * rng.below(2) as u32;
        other.scheduler.queue_size = 1;
    }
    other
}

/// Time in which gateways hear of the end of the last request, although half of all news is lost.
const HEARD_WITHIN: Nanos = Nanos::from_secs(20);

/// Most seconds between two gateways' clocks.
const SKEW: Nanos = Nanos::from_secs(7);
/// Time between two looks at the gateways' ledgers.
const SAMPLE_EVERY: Nanos = Nanos::from_millis(100);

/// One gateway, or up to four that tell each other what they place, over a network that delays, reorders, loses and
/// repeats news. A third of the networks lose nothing: there one can say when news have come.
fn gateways(rng: &mut Rng) -> GatewaysConfig {
    let up_to = |rng: &mut Rng, millis: usize| Nanos::from_millis(rng.below(millis) as u64);
    let every = Nanos::from_millis(10) + up_to(rng, 200);
    let exchange = Exchange {
        every,
        gap: if rng.below(2) == 0 { every } else { Nanos::from_millis(2) },
        delay: up_to(rng, 100),
        jitter: up_to(rng, 500),
        lost: if rng.below(3) == 0 { 0.0 } else { 0.5 * rng.unit() },
        duplicated: 0.5 * rng.unit(),
    };
    GatewaysConfig {
        count: [1, 1, 2, 4][rng.below(4)],
        cells: None,
        exchange: Some(exchange),
        skew: SKEW,
        sample_every: Some(SAMPLE_EVERY),
    }
}

/// Faults of gateways while the script lasts: partitions into two sides or of a pair, and deaths, of which there is one at a
/// time, so that a load balancer always has a gateway.
fn gateway_faults(gateways: &GatewaysConfig, end: Nanos, rng: &mut Rng) -> Vec<Fault> {
    let count = usize::from(gateways.count);
    let mut faults = Vec::new();
    let span = |rng: &mut Rng, at: Nanos, secs: f64| {
        let at = at + Nanos::from_secs_f64(secs * rng.unit());
        (at, at + Nanos::from_millis(100) + Nanos::from_secs_f64(1.6 * secs * rng.unit()))
    };
    let (mut at, mut until);
    (_, until) = span(rng, Nanos::ZERO, 6.0);
    while count > 1 && until < end {
        (at, until) = span(rng, until, 6.0);
        let first = 1 + rng.below(count - 1);
        let (one, other) = match rng.below(2) {
            0 => (Side { first: 0, count: first }, Side { first, count: count - first }),
            _ => (Side { first: first - 1, count: 1 }, Side { first, count: 1 }),
        };
        faults.push(Fault::Partition { at, one, other, until: Some(until) });
    }
    (_, until) = span(rng, Nanos::ZERO, 8.0);
    while count > 1 && until < end {
        (at, until) = span(rng, until, 8.0);
        faults.push(Fault::GatewayDeath { at, gateway: rng.below(count), back_at: Some(until) });
    }
    faults
}

fn case(seed: u64) -> Case {
    let mut rng = Rng::new(seed);
    let engines = 2 + rng.below(4);
    let script = Script::new(
        seed,
        &chaos::Config {
            engines,
            length: Nanos::from_secs(40),
            calm: Nanos::from_secs(8),
            fault_every: Nanos::from_millis(1200),
            fault: Nanos::from_millis(300)..Nanos::from_secs(6),
            settle: SETTLE,
            shift: Nanos::from_secs(8),
            blackouts: rng.below(2) as u32,
        },
    );
    let timing = TimingModel::preset("qwen2.5-7b@a100").expect("in the tables");
    let engine =
        EngineConfig { blocks: 400, max_num_seqs: 16, ..EngineConfig::vllm(timing, BLOCK_TOKENS, 0.9) };
    let (queues, exact, leaves) = (rng.below(4) == 0, rng.below(2) == 0, rng.below(4) == 0);
    let policy = PolicyConfig::NAMES[rng.below(PolicyConfig::NAMES.len())];
    let mut scheduler = scheduler::Config {
        seed,
        breaker: breaker::Config { slow_start: Nanos::from_secs(2), ..breaker::Config::default() },
        ..scheduler::Config::new(PolicyConfig::by_name(policy).expect("a policy"))
    };
    if queues {
        scheduler.max_concurrent_requests = 3;
        scheduler.max_requests_per_endpoint = 2;
        scheduler.queue_size = 2;
        scheduler.queue_timeout = Nanos::from_secs(2);
    }
    let router = router::Config {
        scheduler,
        index: approx::Config { memory_bytes_max: 1 << 22, ttl: Nanos::from_secs(1800) },
        exact: exact.then_some(exact::Config { memory_bytes_max: 1 << 22 }),
        block_tokens: BLOCK_TOKENS,
    };
    let (parts, link) = disaggregation(engines, &mut rng);
    let mut own = Rng::new(!seed);
    let gateways = gateways(&mut own);
    let mut faults = faults(&script, &mut rng);
    faults.extend(gateway_faults(&gateways, script.config.length - script.config.calm, &mut own));
    let config = WorldConfig {
        engines: vec![engine; engines],
        reloaded: Some(reloaded(&router, &mut rng)),
        router,
        parts,
        gateways,
        fetch_tokens_min: None,
        link,
        routing_delay: Nanos::from_millis(1),
        reports: Some(ReportFeed { interval: Nanos::from_millis(500), age: Nanos::from_millis(20) }),
        events: EventFeed { delay: Nanos::from_millis(5), ..EventFeed::default() },
        faults,
        health_delay: Nanos::ZERO,
        attempts_max: 6,
        rules: Some(Rules {
            first_token: Nanos::from_secs(2),
            transfer: Nanos::from_secs(1),
            between_tokens: Nanos::from_secs(3),
            probes: Probes {
                interval: Nanos::from_millis(500),
                timeout: Nanos::from_secs(1),
                ..Rules::default().probes
            },
            ..Rules::default()
        }),
        hints: Hints::default(),
        client_timeout: leaves.then(|| Nanos::from_secs(1 + rng.below(10) as u64)),
        seed,
        stopwatch: None,
    };
    let trace = conversations(&mut rng, script.config.length);
    Case { script, config, trace, queues }
}

fn play(case: &Case) -> (Run, World) {
    let plan = Plan::new(&case.trace);
    let mut world = World::new(case.config.clone());
    let (trace, requests) = (&case.trace, 0..case.trace.requests.len() as u32);
    let send = Send { trace, plan: &plan, requests, origin_s: 0.0, drive: Drive::Open { load: 1.0 } };
    let run = world.run(&send, |_| {});
    // All faults end after the last answer.
    let left = case.script.config.length - world.now();
    world.rest(left + SETTLE + if case.config.gateways.count > 1 { HEARD_WITHIN } else { Nanos::ZERO });
    (run, world)
}

/// Every request is answered, possibly after retries, or fails once, with a reason; requests without any output that
/// had a healthy endpoint do not fail.
fn check_requests(case: &Case, run: &Run, tally: &mut Tally) {
    assert_eq!(run.outcomes.len(), case.trace.requests.len(), "every request is over once");
    for (request, outcome) in case.trace.requests.iter().zip(&run.outcomes) {
        let Outcome { due, end, first_token, output_tokens, attempts, failure, .. } = *outcome;
        assert!(due <= end && first_token.is_none_or(|first| due <= first && first <= end), "{outcome:?}");
        assert!((1..=case.config.attempts_max).contains(&attempts), "{outcome:?}");
        assert!(failure.is_some() || output_tokens == request.output_tokens, "{outcome:?}");
        let shed = matches!(failure, Some(Failure::Rejected(Rejection::QueueFull | Rejection::QueueTimeout)));
        let excused =
            shed && case.queues || failure == Some(Failure::TimedOut) && case.config.client_timeout.is_some();
        let had_healthy = case.script.had_healthy(due, end);
        assert!(
            failure.is_none() || first_token.is_some() || excused || !had_healthy,
            "it had a healthy endpoint: {outcome:?}"
        );
        let count = |which: &mut u32, it: bool| *which += u32::from(it);
        count(&mut tally.requests, true);
        count(&mut tally.split, outcome.split.is_some());
        count(&mut tally.promised, had_healthy);
        count(&mut tally.retried, failure.is_none() && attempts > 1);
        count(&mut tally.broken, failure == Some(Failure::Broken) && first_token.is_some());
        count(&mut tally.busy, failure == Some(Failure::Busy));
        count(&mut tally.nobody, failure == Some(Failure::Rejected(Rejection::NoEndpoint)));
        count(&mut tally.shed, shed);
        count(&mut tally.given_up, failure == Some(Failure::TimedOut));
        count(&mut tally.resent, outcome.resent > 0);
    }
}

/// Once all gateways hear each other, each knows the load of all of them, but for what has changed since the last news: a
/// lease and an exchange after a partition or a death.
fn check_views(case: &Case, world: &World, tally: &mut Tally) {
    let GatewaysConfig { count, exchange: Some(exchange), .. } = case.config.gateways else { return };
    if count == 1 || exchange.lost > 0.0 {
        return;
    }
    let heard_within = exchange.every + exchange.delay + exchange.jitter;
    let ends_nothing = |at: Nanos| {
        case.config.faults.iter().all(|fault| match *fault {
            Fault::Partition { at: from, until: Some(to), .. }
            | Fault::GatewayDeath { at: from, back_at: Some(to), .. } => {
                at < from || at >= to + LEASE + heard_within
            }
            _ => true,
        })
    };
    let samples = world.samples();
    for sample in samples.iter().filter(|sample| ends_nothing(sample.at)) {
        let earlier = samples.partition_point(|earlier| earlier.at + heard_within < sample.at);
        let changes = sample.changes - earlier.checked_sub(1).map_or(0, |place| samples[place].changes);
        assert!(sample.view_error <= changes, "{sample:?}, {changes} changes in {heard_within:?}");
        tally.agreed += u32::from(sample.requests > 0);
    }
}

/// At the end no state is left in engines, ledgers, the queue or an index.
fn check_world(case: &Case, world: &World) {
    for stats in world.engine_stats() {
        assert_eq!((stats.running, stats.waiting, stats.kv_blocks_used), (0, 0, 0));
    }
    let gateways = usize::from(case.config.gateways.count);
    assert_eq!(world.routers().count(), gateways, "each gateway that died has a successor");
    for router in world.routers() {
        check_router(world, router);
        assert_eq!(router.peers().len(), gateways - 1, "it hears the others, and no dead one");
    }
}

fn check_router(world: &World, router: &Router) {
    assert_eq!(router.read(|scheduler| (scheduler.in_flight(), scheduler.queued())), (0, 0));
    let ids = router.read(|scheduler| {
        let transfers = scheduler.transfers();
        assert!(transfers.links(world.now()).all(|link| link.in_flight == 0));
        for endpoint in scheduler.pool().endpoints() {
            assert_eq!(transfers.in_flight(endpoint.id), 0);
            assert_eq!(endpoint.in_flight(), InFlight::default(), "here or in another gateway");
            assert!(endpoint.healthy && !endpoint.draining, "{} is fit again", endpoint.name);
        }
        scheduler.pool().endpoints().map(|endpoint| endpoint.id).collect::<Vec<_>>()
    });
    assert_eq!(ids.len(), world.engine_stats().len(), "all endpoints are present");
    // The state of endpoints that left is gone.
    ids.into_iter().for_each(|id| router.leave(world.now(), id, &mut Vec::new()));
    assert_eq!(router.index_size().1, 0);
    assert_eq!(router.exact().map_or(0, |index| index.blocks_held()), 0);
}

fn live_through(seed: u64, tally: &mut Tally) {
    let case = case(seed);
    let (run, world) = play(&case);
    check_requests(&case, &run, tally);
    check_views(&case, &world, tally);
    check_world(&case, &world);
    if seed.is_multiple_of(TWICE_EVERY) {
        let (again, other) = play(&case);
        assert_eq!(format!("{:?}", run.outcomes), format!("{:?}", again.outcomes), "the same again");
        assert_eq!(world.engine_stats(), other.engine_stats());
        assert_eq!(world.decisions(), other.decisions());
    }
}

/// Invariant: In the simulator every request ends exactly once under any faults; a request of which nothing was sent
/// and that had a healthy endpoint never fails; no state is left behind. Gateways that die, are parted or have other clocks
/// change nothing of this, and a lease and an exchange later all know the same load.
///
/// Also held by `outside_a_blackout_an_engine_was_sound_and_stays_so`.
#[test]
fn whatever_goes_wrong_each_request_has_one_end_and_fails_only_where_it_must() {
    let mut tally = Tally::default();
    for seed in SEEDS {
        let lived = catch_unwind(AssertUnwindSafe(|| live_through(seed, &mut tally)));
        assert!(
            lived.is_ok(),
            "seed {seed}: see above; make SEEDS {seed}..{} to see only this one",
            seed + 1
        );
    }
    // Every kind of event has occurred.
    let Tally { requests, split, promised, retried, broken, busy, nobody, shed, given_up, resent, agreed } =
        tally;
    assert!(requests > 100_000 && promised > requests / 2 && retried > requests / 50, "{tally:?}");
    assert!(split > requests / 20, "{tally:?}");
    let failed = [broken, nobody, shed, given_up];
    assert!(failed.iter().all(|&count| (100..requests / 20).contains(&count)), "{tally:?}");
    assert!(busy < requests / 100, "{tally:?}");
    assert!(resent > 100 && agreed > 10_000, "{tally:?}");
}
