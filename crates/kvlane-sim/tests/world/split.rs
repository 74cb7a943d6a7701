//! Requests split between two engines: one computes the prompt, the other answers.

use kvlane_core::disaggregation::{Part, Role};
use kvlane_core::time::Nanos;
use kvlane_sim::fault::Fault;
use kvlane_sim::{Connector, Outcome, TransferConfig, WorldConfig};
use kvlane_trace::trace::{Builder, Trace, TraceRequest};
use proptest::prelude::*;

use super::faults::{hasty, secs};
use super::{BLOCK_TOKENS, OPEN, check, config, conversations, play};

/// A part whose engine is connected to the others.
fn part(role: Role) -> Part {
    Part { role, network: Some(0), serves_alone: true }
}

/// Parts of some engines: all alike, or any.
pub(crate) fn parts() -> impl Strategy<Value = Vec<Part>> {
    let any = (prop::sample::select(Role::ALL[..3].to_vec()), prop::option::of(0u16..2), any::<bool>())
        .prop_map(|(role, network, serves_alone)| Part { role, network, serves_alone });
    prop_oneof![
        Just(Vec::new()),
        Just(vec![part(Role::Both); 3]),
        Just([Role::Decode, Role::Decode, Role::Prefill].map(part).to_vec()),
        prop::collection::vec(any, 0..4),
    ]
}

/// The same fleet, the last `prefill` of its engines only prefilling and the others only decoding.
fn disaggregated(mut config: WorldConfig, prefill: usize) -> WorldConfig {
    let decode = config.engines.len() - prefill;
    let parts = (0..config.engines.len()).map(|n| if n < decode { Role::Decode } else { Role::Prefill });
    config.parts = parts.map(|role| Part { serves_alone: false, ..part(role) }).collect();
    config
}

/// The same fleet, each engine of which serves requests alone or with any other, split from 100 tokens on.
fn elastic(mut config: WorldConfig) -> WorldConfig {
    config.parts = vec![part(Role::Both); config.engines.len()];
    config.router.scheduler.split_tokens_min = Some(100);
    config
}

fn is_split(outcome: &&Outcome) -> bool {
    outcome.split.is_some()
}

#[test]
fn a_prompt_is_computed_by_one_engine_and_answered_by_another() {
    let trace = conversations(40, 12);
    for connector in [Connector::Pull, Connector::Push] {
        let mut config = disaggregated(config("least_load", 3, 1), 1);
        config.link.connector = connector;
        let (run, world) = play(config, &trace, OPEN);
        check(&trace, &run, &world);
        assert!(run.outcomes.iter().all(Outcome::is_ok));
        let stats = world.engine_stats();
        let output: u32 = trace.requests.iter().map(|request| request.output_tokens).sum();
        assert_eq!(stats[0].generation_tokens + stats[1].generation_tokens, u64::from(output));
        assert_eq!(stats[2].generation_tokens, trace.requests.len() as u64, "one token for each prompt");
        let moved: u64 = run.outcomes.iter().map(|outcome| u64::from(outcome.moved_tokens)).sum();
        assert_eq!(stats[0].remote_tokens + stats[1].remote_tokens, moved);
        assert!(moved > 0);
        for outcome in &run.outcomes {
            let split = outcome.split.expect("all are split");
            assert!(split.prefill == 2 && outcome.endpoint < Some(2), "{outcome:?}");
            assert!(outcome.due < split.computed.expect("it was") && split.computed <= split.arrived);
            assert!(split.arrived < outcome.first_token, "{outcome:?}");
        }
    }
}

/// Invariant: The router learns from the simulator how long transfers take.
#[test]
fn the_router_learns_how_long_transfers_take() {
    let trace = conversations(80, 12);
    let mut config = elastic(config("fleet_cost", 2, 1));
    config.link = TransferConfig { setup_s: 0.7, ..TransferConfig::default() };
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    assert!(run.outcomes.iter().filter(is_split).count() > 20);
    let links = world.router().read(|scheduler| scheduler.transfers().links(world.now()).collect::<Vec<_>>());
    assert!(links.len() == 2 && links.iter().all(|link| (0.5..1.5).contains(&link.expected_s)), "{links:?}");
}

#[test]
fn what_a_dead_engine_was_sending_does_not_arrive_and_is_computed_again() {
    let trace = conversations(20, 12);
    for connector in [Connector::Pull, Connector::Push] {
        let mut config = disaggregated(config("least_load", 4, 1), 2);
        // So slow that every transfer outlasts the sender.
        config.link = TransferConfig { setup_s: 5.0, bytes_per_s: 1e9, slots: 100, connector, ..config.link };
        config.faults = vec![Fault::Death { at: secs(4.0), endpoint: 2, back_at: None }];
        let (run, world) = play(config, &trace, OPEN);
        check(&trace, &run, &world);
        assert!(run.outcomes.iter().all(Outcome::is_ok));
        let again: Vec<&Outcome> = run.outcomes.iter().filter(|outcome| outcome.attempts > 1).collect();
        assert!(!again.is_empty());
        for outcome in again {
            // Sent again, by the other engine, after the death.
            assert!(outcome.first_token >= Some(secs(4.0 + 5.0)), "{outcome:?}");
        }
    }
}

#[test]
fn a_decode_engine_that_dies_between_the_legs_fails_no_request_without_a_first_token() {
    let trace = conversations(60, 12);
    for (connector, ruled) in [Connector::Pull, Connector::Push].into_iter().zip([true, false]) {
        let mut config = disaggregated(config("round_robin", 4, 1), 2);
        if ruled {
            config = hasty(config);
        }
        config.link = TransferConfig { setup_s: 0.5, slots: 100, connector, ..config.link };
        config.faults = vec![Fault::Death { at: secs(5.0), endpoint: 0, back_at: Some(secs(15.0)) }];
        let (run, world) = play(config, &trace, OPEN);
        check(&trace, &run, &world);
        let (ok, failed): (Vec<&Outcome>, Vec<&Outcome>) =
            run.outcomes.iter().partition(|outcome| outcome.is_ok());
        assert!(ok.iter().any(|outcome| outcome.attempts > 1), "{connector:?} {failed:?}");
        assert!(failed.iter().all(|outcome| outcome.first_token.is_some()), "{failed:?}");
    }
}

/// Invariant: Transfers that fail, or that take too long, fail no request: another endpoint serves it whole.
#[test]
fn one_transfer_in_twenty_fails_and_one_takes_twenty_seconds_and_no_client_sees_it() {
    let trace = conversations(400, 3);
    for connector in [Connector::Pull, Connector::Push] {
        let mut config = hasty(elastic(config("fleet_cost", 4, 1)));
        (config.attempts_max, config.link.connector) = (3, connector);
        let fault = |endpoint| Fault::Transfers {
            at: Nanos::ZERO,
            endpoint,
            failed: 0.05,
            slow: 0.05,
            slow_by: secs(20.0),
            until: None,
        };
        config.faults = (0..4).map(fault).collect();
        let (run, world) = play(config.clone(), &trace, OPEN);
        check(&trace, &run, &world);
        assert!(run.outcomes.iter().all(Outcome::is_ok));
        let again: Vec<&Outcome> = run.outcomes.iter().filter(|outcome| outcome.attempts > 1).collect();
        assert!(again.iter().all(|outcome| outcome.attempts == 2 && outcome.split.is_none()), "{again:?}");
        let split = run.outcomes.iter().filter(is_split).count();
        assert!(split > 200 && again.len() > split / 20, "{split} {}", again.len());
        let failed: u64 = world
            .router()
            .read(|scheduler| scheduler.transfers().links(world.now()).map(|link| link.failed).sum());
        assert_eq!(failed, again.len() as u64, "each is known");
        assert_eq!(run.outcomes, play(config, &trace, OPEN).0.outcomes, "the same again");
    }
}

#[test]
fn a_narrow_link_makes_first_tokens_late() {
    let trace = conversations(40, 12);
    let ttft = |link: TransferConfig| {
        let mut config = disaggregated(config("least_load", 3, 1), 1);
        config.link = link;
        let (run, _) = play(config, &trace, OPEN);
        run.outcomes.iter().filter_map(Outcome::ttft_s).sum::<f64>()
    };
    let wide = TransferConfig { setup_s: 0.01, bytes_per_s: 1e10, ..TransferConfig::default() };
    let narrow = TransferConfig { slots: 1, bytes_per_s: 1e8, ..wide };
    assert!(ttft(wide) < ttft(narrow), "{} {}", ttft(wide), ttft(narrow));
    let hidden = TransferConfig { overlap: 0.9, ..narrow };
    assert!(ttft(hidden) < ttft(narrow), "{} {}", ttft(hidden), ttft(narrow));
    let tail = TransferConfig { slow_share: 0.1, slow_s: 5.0, ..wide };
    assert!(ttft(tail) > ttft(wide) + 5.0, "{} {}", ttft(tail), ttft(wide));
}

#[test]
fn a_long_prompt_is_computed_where_it_stalls_no_answers() {
    let mut builder = Builder::new(BLOCK_TOKENS);
    let request = |n: u32, input_tokens, output_tokens, arrival_s| TraceRequest {
        arrival_s,
        input_tokens,
        output_tokens,
        session: n,
        ..TraceRequest::default()
    };
    for n in 0..32 {
        builder.branch(request(n, 200, 800, f64::from(n) * 0.01)).expect("room");
    }
    builder.branch(request(99, 30_000, 100, 3.0)).expect("room");
    let trace: Trace = builder.finish();
    let mut config = config("fleet_cost", 2, 1);
    config.engines.iter_mut().for_each(|engine| (engine.blocks, engine.max_num_seqs) = (8000, 64));
    config.parts = [Role::Decode, Role::Prefill].map(part).to_vec();
    let (run, world) = play(config, &trace, OPEN);
    check(&trace, &run, &world);
    let long = &run.outcomes[32];
    assert!(long.is_ok() && long.split.is_some_and(|split| split.prefill == 1), "{long:?}");
    assert!(long.transfer_s() > Some(0.0));
}
