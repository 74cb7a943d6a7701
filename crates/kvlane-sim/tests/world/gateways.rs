//! Several gateways in front of one fleet.

use kvlane_core::load::InFlight;
use kvlane_core::replica::LEASE;
use kvlane_core::router::Router;
use kvlane_core::scheduler::TOKENS_TOLD;
use kvlane_core::time::Nanos;
use kvlane_sim::fault::{Fault, Side};
use kvlane_sim::{Exchange, Failure, GatewaysConfig, Outcome, Run, Sample, World, WorldConfig};
use kvlane_trace::trace::Trace;

use super::{EVENTS, OPEN, check, config, conversations, play};

const EXCHANGE: Exchange = Exchange {
    every: Nanos::from_millis(20),
    gap: Nanos::from_millis(20),
    delay: Nanos::from_millis(1),
    jitter: Nanos::ZERO,
    lost: 0.0,
    duplicated: 0.0,
};

/// So many gateways in front of six engines.
fn gateways(count: u16, exchange: Option<Exchange>) -> WorldConfig {
    let gateways = GatewaysConfig {
        count,
        exchange,
        sample_every: Some(Nanos::from_millis(50)),
        ..GatewaysConfig::default()
    };
    WorldConfig { gateways, ..config("fleet_cost", 6, 1) }
}

/// A run with this many gateways.
fn with(count: u16, exchange: Option<Exchange>, exact: bool, trace: &Trace) -> (Run, World) {
    let mut config = gateways(count, exchange);
    config.router.exact = EVENTS.filter(|_| exact);
    run(config, trace)
}

fn run(config: WorldConfig, trace: &Trace) -> (Run, World) {
    let (run, world) = play(config, trace, OPEN);
    check(trace, &run, &world);
    (run, world)
}

/// The largest error of a gateway's view of the load among the samples of a time.
fn view_error(world: &World, from: Nanos, to: Nanos) -> u64 {
    let within = |sample: &&Sample| from <= sample.at && sample.at < to;
    world.samples().iter().filter(within).map(|sample| sample.view_error).max().expect("samples")
}

/// That of so many gateways that hear each other.
fn usual_error(count: u16, trace: &Trace) -> u64 {
    view_error(&with(count, Some(EXCHANGE), false, trace).1, Nanos::ZERO, Nanos::MAX)
}

/// The most requests in flight at an engine over the mean over engines, in the mean over time.
fn imbalance(world: &World) -> f64 {
    let sum = |of: fn(&Sample) -> f64| world.samples().iter().map(of).sum::<f64>();
    sum(|sample| sample.requests_max as f64) / sum(|sample| sample.requests as f64 / sample.endpoints as f64)
}

/// Mean seconds to the first token, and the share of reusable tokens that were cached.
fn figures(run: &Run) -> (f64, f64) {
    let count = run.outcomes.len() as f64;
    let ttft_s =
        |outcome: &Outcome| outcome.first_token.map_or(0.0, |first| (first - outcome.due).as_secs_f64());
    let sum = |tokens: fn(&Outcome) -> u32| run.outcomes.iter().map(tokens).map(f64::from).sum::<f64>();
    let mean_s = run.outcomes.iter().map(ttft_s).sum::<f64>() / count;
    (mean_s, sum(|outcome| outcome.cached_tokens) / sum(|outcome| outcome.reusable_tokens))
}

/// Invariant: Gateways that tell each other what they place have the hit share of one gateway, and its times.
#[test]
fn gateways_that_tell_each_other_place_like_one() {
    let trace = conversations(1200, 5);
    for exact in [false, true] {
        let one = figures(&with(1, None, exact, &trace).0);
        for count in [2, 8] {
            let (run, world) = with(count, Some(EXCHANGE), exact, &trace);
            let together = figures(&run);
            let told = world.exchanged();
            assert!(told.shares > 0 && told.marks > 0);
            assert!(
                together.0 < one.0 / 0.95 && together.1 > 0.95 * one.1,
                "{count}: {together:?}, one {one:?}"
            );
        }
        let apart = figures(&with(8, None, exact, &trace).0);
        assert!(exact || apart.1 < 0.9 * one.1, "8 that tell nothing: {apart:?}, one {one:?}");
    }
}

#[test]
fn what_gateways_told_of_ended_requests_is_gone_however_news_travelled() {
    let trace = conversations(60, 7);
    let bad = Exchange { jitter: Nanos::from_millis(300), lost: 0.4, duplicated: 0.3, ..EXCHANGE };
    let (_, mut world) = with(4, Some(bad), false, &trace);
    // Everything is told each second, and four of ten news are lost.
    world.rest(Nanos(8 * LEASE.0));
    for router in world.routers() {
        router.read(|scheduler| {
            assert!(scheduler.pool().endpoints().all(|endpoint| endpoint.elsewhere == InFlight::default()));
        });
        assert_eq!(router.peers().len(), 3);
    }
}

#[test]
fn gateways_that_tell_nothing_know_no_others() {
    let (_, world) = with(3, None, true, &conversations(20, 1));
    assert!(world.routers().all(|router| router.peers().is_empty()));
    assert_eq!(world.exchanged().news, 0);
}

/// Invariant: Gateways that place at the same time do not herd: the most loaded engine has at most 1.3 times the share of
/// requests in flight that it has with one gateway.
#[test]
fn gateways_that_tell_each_other_do_not_herd() {
    let trace = conversations(1200, 5);
    let one = imbalance(&with(1, None, false, &trace).1);
    for count in [2, 8, 16] {
        let together = imbalance(&with(count, Some(EXCHANGE), false, &trace).1);
        assert!(together <= 1.3 * one, "{count}: {together}, one {one}");
    }
}

#[test]
fn a_partition_keeps_loads_from_the_other_side_and_ends_with_a_lease_and_an_exchange() {
    let trace = conversations(400, 5);
    let (from, to) = (Nanos::from_secs(20), Nanos::from_secs(50));
    let side = |first| Side { first, count: 2 };
    let parted = Fault::Partition { at: from, one: side(0), other: side(2), until: Some(to) };
    let (run, world) = run(WorldConfig { faults: vec![parted], ..gateways(4, Some(EXCHANGE)) }, &trace);
    assert!(run.outcomes.iter().all(Outcome::is_ok));
    let usual = usual_error(4, &trace);
    let meanwhile = view_error(&world, from + LEASE, to);
    let after = view_error(&world, to + EXCHANGE.every + EXCHANGE.delay, to + Nanos::from_secs(30));
    assert!(after <= usual && 2 * usual <= meanwhile, "{usual}, {meanwhile}, {after}");
    assert!(run.end > to + Nanos::from_secs(30), "there is load to compare");
}

#[test]
fn a_gateway_that_dies_loses_its_streams_and_its_other_requests_are_sent_again() {
    let trace = conversations(400, 5);
    let (at, back) = (Nanos::from_secs(20), Nanos::from_secs(40));
    let death = Fault::GatewayDeath { at, gateway: 1, back_at: Some(back) };
    let mut config = WorldConfig { faults: vec![death], ..gateways(3, Some(EXCHANGE)) };
    // So that some of its requests wait for their first token.
    let slow = |endpoint| Fault::Slow { at: at - LEASE, endpoint, factor: 20.0, until: Some(at + LEASE) };
    config.faults.extend((0..6).map(slow));
    let (run, world) = run(config, &trace);
    let is_lost = |outcome: &&Outcome| !outcome.is_ok();
    assert!(run.outcomes.iter().any(|outcome| !outcome.is_ok()), "it had streams");
    for lost in run.outcomes.iter().filter(is_lost) {
        assert!(lost.first_token.is_some() && lost.end == at, "{lost:?}");
        assert_eq!(lost.failure, Some(Failure::Broken));
    }
    assert!(run.outcomes.iter().any(|outcome| outcome.is_ok() && outcome.resent == 1));
    let streams = run.outcomes.iter().filter(is_lost).count() as u64;
    let received = run.outcomes.iter().map(|outcome| u64::from(outcome.output_tokens)).sum::<u64>();
    let generated = world.engine_stats().iter().map(|stats| stats.generation_tokens).sum::<u64>();
    assert!(generated <= received + streams * u64::from(TOKENS_TOLD), "engines end what no client awaits");
    let heard = EXCHANGE.every + EXCHANGE.delay;
    let usual = usual_error(3, &trace);
    let (leased, after) =
        (view_error(&world, at, at + LEASE), view_error(&world, at + LEASE + heard + heard, back));
    assert!(
        leased > usual && leased > 2 * after,
        "what it had counts until its lease ends: {leased}, {after}"
    );
    let successor = view_error(&world, back + heard + heard, run.end);
    assert!(leased > 2 * successor, "its successor knows all loads: {successor}, {leased}, {usual}");
    assert!(world.exchanged().snapshot_marks > 0, "and the prompts of others");
    assert_eq!(world.routers().count(), 3);
}

/// Invariant: A gateway that starts reckons with the speed of engines that others have learned.
#[test]
fn a_gateway_that_starts_reckons_with_the_rates_that_others_have_learned() {
    let trace = conversations(200, 5);
    let back = Nanos::from_secs(500);
    let rates = |exchange| {
        let slow = |endpoint| Fault::Slow { at: Nanos::ZERO, endpoint, factor: 3.0, until: None };
        let death = Fault::GatewayDeath { at: Nanos::from_secs(20), gateway: 1, back_at: Some(back) };
        let faults = (0..2).map(slow).chain([death]).collect();
        let (run, mut world) = run(WorldConfig { faults, ..gateways(2, exchange) }, &trace);
        assert!(run.end < back, "its successor has no answers of its own");
        world.rest(back + Nanos::from_secs(3) - run.end);
        let of = |router: &Router| {
            router.read(|scheduler| {
                let endpoints = scheduler.pool().endpoints();
                endpoints.map(|endpoint| scheduler.rates(endpoint).step_s).collect::<Vec<_>>()
            })
        };
        world.routers().map(of).collect::<Vec<_>>()
    };
    let told = rates(Some(EXCHANGE));
    assert!(told[0][2..].iter().all(|fast| *fast < 0.5 * told[0][0].min(told[0][1])), "{told:?}");
    for (old, new) in told[0].iter().zip(&told[1]) {
        assert!((new / old - 1.0).abs() < 0.02, "{told:?}");
    }
    let alone = rates(None);
    assert!(alone[1].iter().all(|step_s| *step_s == alone[1][0]), "it assumes the same of all: {alone:?}");
}

#[test]
fn requests_fail_while_no_gateway_lives() {
    let trace = conversations(100, 5);
    let (at, back) = (Nanos::from_secs(10), Nanos::from_secs(20));
    let death = |gateway| Fault::GatewayDeath { at, gateway, back_at: Some(back) };
    let config = WorldConfig { faults: vec![death(0), death(1)], ..gateways(2, Some(EXCHANGE)) };
    let (run, _) = run(config, &trace);
    for outcome in &run.outcomes {
        let meets = outcome.due < back && at <= outcome.end;
        assert!(outcome.is_ok() || meets && outcome.failure == Some(Failure::Broken), "{outcome:?}");
    }
    let sent = |from, to| run.outcomes.iter().filter(move |outcome| from <= outcome.due && outcome.due < to);
    assert!(sent(at, back).all(|outcome| !outcome.is_ok()) && sent(at, back).count() > 0);
    assert!(sent(back, run.end).all(Outcome::is_ok) && sent(back, run.end).count() > 0);
}

/// Invariant: Gateways' clocks need not agree: with any difference between them they place the same.
#[test]
fn clocks_that_differ_change_nothing() {
    let trace = conversations(200, 5);
    let run = |skew| {
        let mut config = gateways(4, Some(EXCHANGE));
        config.gateways.skew = skew;
        run(config, &trace).0.outcomes
    };
    assert_eq!(run(Nanos::ZERO), run(Nanos::from_secs(5)));
}
