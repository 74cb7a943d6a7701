//! Faults of every kind: their effects on requests, their detection, and combination of overlapping faults.

use kvlane_core::bounded::Share;
use kvlane_core::budget::{self, PerSecond};
use kvlane_core::cache_accuracy::Feed;
use kvlane_core::decision::Rejection;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::time::Nanos;
use kvlane_sim::fault::Fault;
use kvlane_sim::rules::{Probes, Rules};
use kvlane_sim::{Failure, Outcome, WorldConfig};
use kvlane_trace::trace::{Builder, TraceRequest};

use super::{BLOCK_TOKENS, EVENTS, OPEN, check, config, conversations, play};

/// A gateway that does not wait long.
pub(crate) fn hasty(config: WorldConfig) -> WorldConfig {
    let probes = Probes { interval: secs(0.5), timeout: secs(1.0), ..Rules::default().probes };
    let rules = Rules {
        first_token: secs(2.0),
        transfer: secs(1.5),
        between_tokens: secs(3.0),
        probes,
        ..Rules::default()
    };
    WorldConfig { rules: Some(rules), attempts_max: 6, ..config }
}

pub(crate) fn secs(secs: f64) -> Nanos {
    Nanos::from_secs_f64(secs)
}

/// Invariant: Overlapping faults of one endpoint add up.
///
/// Also held by `factors_of_faults_that_overlap_multiply_and_each_goes_with_its_fault`.
#[test]
fn an_endpoint_is_back_when_the_last_death_is_over_and_no_sooner() {
    let trace = conversations(80, 7);
    let mut config = config("round_robin", 3, 1);
    let death =
        |at: f64, back_at: f64| Fault::Death { at: secs(at), endpoint: 1, back_at: Some(secs(back_at)) };
    config.faults = vec![death(3.0, 6.0), death(4.0, 12.0), death(5.0, 7.0)];
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    let served = |from: f64, to: f64| {
        let within = |o: &&Outcome| secs(from) <= o.due && o.due < secs(to);
        run.outcomes.iter().filter(|o| o.endpoint == Some(1) && o.is_ok()).filter(within).count()
    };
    assert_eq!(served(3.0, 12.0), 0);
    assert!(served(0.0, 2.0) > 0 && served(13.0, 100.0) > 0);
}

#[test]
fn factors_of_faults_that_overlap_multiply_and_each_goes_with_its_fault() {
    let trace = conversations(60, 8);
    let outcomes = |faults: &[(f64, f64, Option<f64>)]| {
        let slow = |&(at, factor, until): &(f64, f64, Option<f64>)| Fault::Slow {
            at: secs(at),
            endpoint: 0,
            factor,
            until: until.map(secs),
        };
        let faults = faults.iter().map(slow).collect();
        play(WorldConfig { faults, ..config("least_load", 2, 1) }, &trace, OPEN).0.outcomes
    };
    let both = outcomes(&[(0.0, 2.0, Some(5.0)), (0.0, 4.0, None)]);
    assert_eq!(both, outcomes(&[(0.0, 8.0, Some(5.0)), (5.0, 4.0, None)]));
    assert_ne!(both, outcomes(&[(0.0, 8.0, Some(5.0))]));
}

#[test]
fn an_engine_that_stands_still_answers_later_by_as_long() {
    let mut builder = Builder::new(BLOCK_TOKENS);
    let request = TraceRequest { input_tokens: 3000, output_tokens: 100, ..TraceRequest::default() };
    builder.branch(request).expect("room");
    let trace = builder.finish();
    let end = |faults: Vec<Fault>| {
        let (run, world) = play(WorldConfig { faults, ..config("round_robin", 1, 1) }, &trace, OPEN);
        check(&trace, &run, &world);
        assert!(run.outcomes[0].is_ok());
        run.outcomes[0].end
    };
    let pause = |at, until| Fault::Pause { at: secs(at), endpoint: 0, until: Some(secs(until)) };
    let usual = end(Vec::new());
    assert!(usual > secs(0.5), "{usual:?}");
    // One while it computes the prompt, of two faults that overlap, and one while it decodes.
    let paused = end(vec![pause(0.05, 2.0), pause(1.0, 3.05), pause(3.45, 4.45)]);
    assert_eq!(paused, usual + secs(4.0));
}

#[test]
fn who_does_not_answer_is_given_up_found_out_and_known_when_it_is_back() {
    let trace = conversations(120, 7);
    let fault = |hole| match hole {
        true => Fault::BlackHole { at: secs(3.0), endpoint: 1, until: Some(secs(15.0)) },
        false => Fault::Pause { at: secs(3.0), endpoint: 1, until: Some(secs(15.0)) },
    };
    for hole in [true, false] {
        let mut config = hasty(config("round_robin", 3, 1));
        config.faults = vec![fault(hole)];
        let (run, world) = play(config, &trace, OPEN);
        check(&trace, &run, &world);
        for outcome in run.outcomes.iter().filter(|outcome| !outcome.is_ok()) {
            assert!(outcome.first_token.is_some_and(|first| first <= secs(3.0)), "{outcome:?}");
        }
        let late: Vec<&Outcome> = run.outcomes.iter().filter(|outcome| outcome.attempts > 1).collect();
        assert!(!late.is_empty());
        // After the deadline, or once the third probe has failed.
        let waits =
            |o: &&Outcome| o.first_token.is_none_or(|first| first >= secs(6.0).min(o.due + secs(2.0)));
        assert!(late.iter().all(waits), "{late:?}");
        // Three probes of a second each, then nothing is placed there until two have been answered.
        let given = |from: f64, to: f64| {
            let within = |o: &&Outcome| secs(from) <= o.due && o.due < secs(to);
            run.outcomes.iter().filter(within).filter(|o| o.endpoint == Some(1) || o.attempts > 1).count()
        };
        assert_eq!(given(6.6, 15.0), 0);
        assert!(given(18.0, 100.0) > 0);
    }
}

#[test]
fn requests_without_a_first_token_are_retried_elsewhere_when_probes_fail() {
    let trace = conversations(60, 7);
    let mut config = hasty(config("round_robin", 3, 1));
    if let Some(rules) = &mut config.rules {
        rules.first_token = secs(60.0);
    }
    config.faults = vec![Fault::BlackHole { at: Nanos::ZERO, endpoint: 1, until: None }];
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    assert!(run.outcomes.iter().all(Outcome::is_ok));
    let waited: Vec<&Outcome> = run.outcomes.iter().filter(|outcome| outcome.attempts > 1).collect();
    assert!(!waited.is_empty());
    // The third probe has failed after three seconds and what went by until the first began.
    assert!(waited.iter().all(|o| (secs(3.0)..secs(5.0)).contains(&o.end)), "{waited:?}");
}

#[test]
fn a_reset_breaks_what_has_begun_and_the_rest_is_tried_again() {
    let trace = conversations(120, 7);
    let mut config = hasty(config("round_robin", 2, 1));
    // Slow, so that it has something to lose.
    config.faults = vec![Fault::Slow { at: Nanos::ZERO, endpoint: 1, factor: 10.0, until: None }];
    config.faults.extend([4, 6, 8].map(|at| Fault::Reset { at: Nanos::from_secs(at), endpoint: 1 }));
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    let resets = [4, 6, 8].map(Nanos::from_secs);
    let broken: Vec<&Outcome> = run.outcomes.iter().filter(|outcome| !outcome.is_ok()).collect();
    assert!(!broken.is_empty());
    assert!(broken.iter().all(|o| o.failure == Some(Failure::Broken) && o.first_token.is_some()));
    assert!(broken.iter().all(|o| resets.contains(&o.end)), "{broken:?}");
    assert!(run.outcomes.iter().any(|outcome| outcome.is_ok() && outcome.attempts > 1));
}

/// A gateway that has not probed yet, so that only the outcomes of requests count.
fn unprobed(config: WorldConfig) -> WorldConfig {
    let mut config = hasty(config);
    if let Some(rules) = &mut config.rules {
        rules.probes.interval = secs(1e6);
    }
    config
}

/// Invariant: Retries to a failing fleet stay within the budget; a circuit breaker keeps requests from a failing
/// endpoint and lets it recover.
///
/// Also held by `a_breaker_spares_requests_the_endpoint_that_fails_them_and_lets_it_come_back`.
#[test]
fn a_fleet_that_does_not_answer_is_given_no_more_work_than_the_budget_allows() {
    let trace = conversations(150, 7);
    let mut config = unprobed(config("round_robin", 4, 1));
    config.router.scheduler.retries =
        budget::Config { share: Share::of(0.2), per_second: PerSecond::of(0.0) };
    config.faults =
        (0..4).map(|endpoint| Fault::BlackHole { at: Nanos::ZERO, endpoint, until: None }).collect();
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    assert!(run.outcomes.iter().all(|outcome| !outcome.is_ok()));
    let refused = |o: &&Outcome| o.failure == Some(Failure::Rejected(Rejection::BudgetSpent));
    let wanted: u32 = run.outcomes.iter().map(|outcome| u32::from(outcome.attempts) - 1).sum();
    let again = wanted as usize - run.outcomes.iter().filter(refused).count();
    assert!(again > 0 && 5 * again <= run.outcomes.len(), "{again} of {}", run.outcomes.len());
}

#[test]
fn a_breaker_spares_requests_the_endpoint_that_fails_them_and_lets_it_come_back() {
    let trace = conversations(150, 7);
    let wasted = |failure_threshold| {
        let mut config = unprobed(config("round_robin", 3, 1));
        config.router.scheduler.breaker.failure_threshold = failure_threshold;
        config.faults = vec![Fault::Death { at: Nanos::ZERO, endpoint: 1, back_at: Some(secs(12.0)) }];
        let (run, world) = play(config, &trace, OPEN);
        check(&trace, &run, &world);
        assert!(run.outcomes.iter().all(Outcome::is_ok));
        let late = |o: &&Outcome| o.endpoint == Some(1) && o.due > secs(22.0);
        assert!(run.outcomes.iter().filter(late).count() > 0, "it is back");
        run.outcomes.iter().filter(|outcome| outcome.attempts > 1).count()
    };
    let (with, without) = (wasted(3), wasted(0));
    assert!(3 < with && 5 * with < without, "{with} {without}");
}

#[test]
fn a_busy_engine_fails_no_request_and_a_busy_fleet_rejects_with_429() {
    let trace = conversations(60, 7);
    let busy =
        |endpoint| Fault::Busy { at: Nanos::ZERO, endpoint, retry_after: Some(secs(1.0)), until: None };
    let run = |faults| {
        let (run, world) = play(WorldConfig { faults, ..hasty(config("round_robin", 2, 1)) }, &trace, OPEN);
        check(&trace, &run, &world);
        run.outcomes
    };
    let one = run(vec![busy(0)]);
    assert!(one.iter().all(|outcome| outcome.is_ok() && outcome.endpoint == Some(1)));
    assert!(one.iter().any(|outcome| outcome.attempts > 1));
    let both = run(vec![busy(0), busy(1)]);
    assert!(both.iter().all(|outcome| outcome.failure == Some(Failure::Busy)), "{both:?}");
}

#[test]
fn every_engine_is_replaced_and_no_request_fails() {
    let trace = conversations(120, 7);
    for exact in [false, true] {
        let mut config = hasty(config("prefix_aware", 3, 1));
        config.router.exact = EVENTS.filter(|_| exact);
        config.faults = (0..3)
            .map(|endpoint| {
                let at = 3.0 + 6.0 * endpoint as f64;
                Fault::Replace { at: secs(at), endpoint, back_at: Some(secs(at + 4.0)) }
            })
            .collect();
        let (run, world) = play(config, &trace, OPEN);
        check(&trace, &run, &world);
        assert!(run.outcomes.iter().all(|outcome| outcome.is_ok() && outcome.attempts == 1));
        let ids: Vec<_> = world.router().read(|s| s.pool().endpoints().map(|e| e.id).collect());
        assert_eq!(ids, [0, 1, 2].map(|slot| EndpointId::new(slot, 1)), "others sit there");
        let held = world
            .router()
            .exact()
            .map_or(0, |index| (0..3).map(|slot| index.blocks_of(EndpointId::new(slot, 0))).sum::<u64>());
        assert_eq!(held, 0, "entries of an endpoint that left are removed");
    }
}

#[test]
fn a_feed_that_was_cut_or_flooded_begins_anew() {
    let trace = conversations(80, 7);
    let run = |fault| {
        let mut config = hasty(config("prefix_aware", 2, 1));
        (config.router.exact, config.faults) = (EVENTS, vec![fault]);
        let (run, world) = play(config, &trace, OPEN);
        check(&trace, &run, &world);
        assert!(run.outcomes.iter().all(|outcome| outcome.is_ok() && outcome.attempts == 1));
        let blocks = world.router().exact().map_or(0, |index| index.blocks_of(EndpointId::new(0, 0)));
        let feed =
            world.router().read(|s| s.pool().get(EndpointId::new(0, 0)).map(|e| e.cache_accuracy.feed()));
        (blocks, feed)
    };
    let (at, endpoint, end) = (secs(3.0), 0, Some(secs(8.0)));
    let fits = 1..=400;
    let (blocks, feed) = run(Fault::FloodFeed { at, endpoint, until: end });
    assert!(fits.contains(&blocks) && feed == Some(Feed::Live), "{blocks} {feed:?}");
    let (blocks, _) = run(Fault::FloodFeed { at, endpoint, until: None });
    assert!(!fits.contains(&blocks), "{blocks} while it lasts");
    let (blocks, feed) = run(Fault::CutFeed { at, endpoint, until: end });
    assert!(fits.contains(&blocks) && feed == Some(Feed::Live), "{blocks} {feed:?}");
    let (_, feed) = run(Fault::CutFeed { at, endpoint, until: None });
    assert_eq!(feed, Some(Feed::Syncing), "while it lasts");
}
