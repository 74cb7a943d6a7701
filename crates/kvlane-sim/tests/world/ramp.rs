//! How a closed loop begins, and what of it counts.

use kvlane_core::time::Nanos;
use kvlane_sim::world::{Ramp, Window};
use kvlane_sim::{Drive, Plan, Run, Send, World};
use kvlane_trace::trace::{Builder, Trace, TraceRequest};

use crate::{BLOCK_TOKENS, check, config};

const CLIENTS: u32 = 8;

/// Requests of one length.
fn alike(count: u32) -> Trace {
    let mut builder = Builder::new(BLOCK_TOKENS);
    for session in 0..count {
        let request =
            TraceRequest { input_tokens: 400, output_tokens: 100, session, ..TraceRequest::default() };
        builder.branch(request).expect("room");
    }
    builder.finish()
}

fn play(trace: &Trace, ramp: &Ramp, seed: u64) -> (Run, Window, World) {
    let plan = Plan::new(trace);
    let mut world = World::new(config("least_load", 1, seed));
    let requests = 0..trace.requests.len() as u32;
    let send =
        Send { trace, plan: &plan, requests, origin_s: 0.0, drive: Drive::Closed { clients: CLIENTS } };
    let (run, window) = world.run_ramped(&send, ramp, |_| {});
    check(trace, &run, &world);
    (run, window, world)
}

#[test]
fn clients_begin_within_the_stagger_and_each_once() {
    // Less than a request takes, so that no client begins a second one.
    let stagger = Nanos::from_millis(500);
    let trace = alike(CLIENTS);
    let (run, ..) = play(&trace, &Ramp { stagger, counted: 0..CLIENTS }, 3);
    let mut begun: Vec<Nanos> = run.outcomes.iter().map(|outcome| outcome.due).collect();
    begun.sort_unstable();
    begun.dedup();
    assert_eq!(begun.len(), CLIENTS as usize, "at different times");
    assert!(begun.iter().all(|due| *due < stagger));
    assert!(begun[CLIENTS as usize - 1] - begun[0] > Nanos::from_millis(200), "spread over it: {begun:?}");
}

/// What counts is the time in which the requests that count begin.
#[test]
fn the_window_is_from_the_first_start_that_counts_to_the_first_that_does_not() {
    let trace = alike(60);
    let ramp = Ramp { stagger: Nanos::ZERO, counted: 16..52 };
    let (run, window, world) = play(&trace, &ramp, 1);
    assert_eq!(window.start, run.outcomes[16].due);
    assert_eq!(window.end, run.outcomes[52].due);
    let computed = |stats: &[kvlane_sim::engine::EngineStats]| stats[0].computed_tokens;
    assert!(computed(&window.before) > 0, "the warm-up");
    assert!(computed(&window.after) > computed(&window.before));
    assert!(computed(&world.engine_stats()) > computed(&window.after), "the rest");
    // As many requests end in the window as begin in it, all clients being busy: the rate is the clients over a request's time.
    let span_s = (window.end - window.start).as_secs_f64();
    let rate = 36.0 / span_s;
    let mean_s = run.outcomes[16..52].iter().map(|outcome| outcome.e2e_s()).sum::<f64>() / 36.0;
    let expected = f64::from(CLIENTS) / mean_s;
    assert!((rate / expected - 1.0).abs() < 0.15, "{rate} {expected}");
}

#[test]
fn without_conversations_after_them_the_window_ends_with_the_last_that_counts() {
    let trace = alike(20);
    let (run, window, _) = play(&trace, &Ramp { stagger: Nanos::ZERO, counted: 4..20 }, 1);
    assert_eq!(window.end, run.end);
    let (none, window, _) = play(&trace, &Ramp { stagger: Nanos::ZERO, counted: 0..20 }, 1);
    assert_eq!((window.start, window.end), (none.start, none.end));
}

#[test]
fn staggered_clients_do_not_wait_for_each_others_prompts() {
    let trace = alike(64);
    let ttft_s = |stagger| {
        let (run, ..) = play(&trace, &Ramp { stagger, counted: 8..56 }, 1);
        run.outcomes[8..56].iter().filter_map(|outcome| outcome.ttft_s()).sum::<f64>() / 48.0
    };
    let (together, apart) = (ttft_s(Nanos::ZERO), ttft_s(Nanos::from_secs(3)));
    assert!(apart < 0.7 * together, "{apart} {together}");
}

#[test]
fn the_same_seed_gives_the_same_ramp_and_another_one_another() {
    let trace = alike(24);
    let due = |seed| {
        let (run, ..) = play(&trace, &Ramp { stagger: Nanos::from_secs(2), counted: 8..16 }, seed);
        run.outcomes.iter().map(|outcome| outcome.due).collect::<Vec<_>>()
    };
    assert_eq!(due(1), due(1));
    assert_ne!(due(1), due(2));
}
