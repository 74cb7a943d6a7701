//! Several gateways in front of one fleet.

use kvlane_core::load::InFlight;
use kvlane_core::replica::LEASE;
use kvlane_core::time::Nanos;
use kvlane_sim::{Exchange, GatewaysConfig, Outcome, Run, World, WorldConfig};
use kvlane_trace::trace::Trace;

use super::{EVENTS, OPEN, check, config, conversations, play};

const EXCHANGE: Exchange = Exchange {
    every: Nanos::from_millis(20),
    delay: Nanos::from_millis(1),
    jitter: Nanos::ZERO,
    lost: 0.0,
    duplicated: 0.0,
};

/// A run with this many gateways.
fn with(count: u16, exchange: Option<Exchange>, exact: bool, trace: &Trace) -> (Run, World) {
    let mut config =
        WorldConfig { gateways: GatewaysConfig { count, exchange }, ..config("fleet_cost", 6, 1) };
    config.router.exact = EVENTS.filter(|_| exact);
    let (run, world) = play(config, trace, OPEN);
    check(trace, &run, &world);
    (run, world)
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
    world.rest(LEASE);
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
