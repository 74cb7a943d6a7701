//! Calibration against the engine model in virtual time: the plan is carried out by `kvlane_sim::Engine` instead of a
//! server, so that what is tested is the arithmetic of observing and fitting and not the machine the test runs on.

use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;
use kvlane_lab::calibrate::fit::{Estimate, Fit, Parameter, Standing, fit};
use kvlane_lab::calibrate::{
    Limits, Pick, Plan, PlanOptions, Planned, Point, Probe, Timeline, Unusable, Work,
};
use kvlane_sim::{Engine, EngineConfig, EngineEvent, EngineRequest};
use proptest::prelude::*;

const BLOCK_TOKENS: u32 = 16;

fn preset(name: &str) -> TimingModel {
    TimingModel::preset(name).expect("a preset")
}

fn engine(timing: &TimingModel) -> EngineConfig {
    EngineConfig::vllm(timing.clone(), BLOCK_TOKENS, 0.9)
}

fn limits(config: &EngineConfig) -> Limits {
    Limits {
        max_model_len: Some(32_768),
        kv_capacity_tokens: Some(u64::from(config.blocks) * u64::from(BLOCK_TOKENS)),
        block_tokens: Some(BLOCK_TOKENS),
        max_num_seqs: Some(config.max_num_seqs),
        max_num_batched_tokens: Some(config.max_num_batched_tokens),
    }
}

/// One probe on an engine of its own. Requests arrive `apart` after each other, as they do over a network; the client
/// sees every token later by the time a request costs outside of steps.
fn run(config: &EngineConfig, probe: &Probe, apart: Nanos) -> Vec<Timeline> {
    let (requests, prompt_tokens, output_tokens) = probe.requests();
    let mut engine = Engine::new(config.clone());
    let request_secs = config.timing.host.request_secs;
    let blank = Timeline { prompt_tokens, cached_tokens: Some(0), ..Timeline::default() };
    let mut lines = vec![blank; requests as usize];
    let (mut at, mut events) = (Nanos::ZERO, Vec::new());
    for id in 0..u64::from(requests) {
        engine.advance(at, &mut events);
        let prompt_blocks = [].into();
        engine.enqueue(
            at,
            EngineRequest {
                id,
                prompt_blocks,
                prompt_tokens,
                output_tokens,
                output_seed: id,
                remote: None,
                adapter: None,
            },
        );
        lines[id as usize].sent_s = at.as_secs_f64();
        at += apart;
    }
    engine.advance(Nanos::MAX, &mut events);
    for (at, event) in events {
        let (EngineEvent::FirstToken { id, .. } | EngineEvent::Tokens { id, .. }) = event else { continue };
        let line = &mut lines[id as usize];
        let so_far = line.tokens.len() as u32;
        line.tokens.push((at.as_secs_f64() + request_secs, so_far + 1));
    }
    lines
}

/// The plan's figures, each off by up to `noise` as a share.
fn measure(config: &EngineConfig, plan: &Plan, noise: f64, seed: u64) -> Vec<Point> {
    let mut rng = Rng::new(seed);
    let mut point = |planned: &Planned| {
        let lines = run(config, &planned.probe, Nanos::from_micros(50));
        let observed = planned.probe.observe(&lines);
        let (work, secs) = observed.unwrap_or_else(|why| panic!("{}: {why}", planned.probe.name()));
        let rounds = (0..3).map(|_| {
            let unit = (rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
            (work, secs * (1.0 + noise * (2.0 * unit - 1.0)))
        });
        Point::new(*planned, rounds.collect(), Pick::Median).expect("three rounds")
    };
    plan.probes.iter().map(&mut point).collect()
}

/// Measures an engine that behaves as `truth`, and fits `prior` to it.
fn calibrated(truth: &TimingModel, prior: &TimingModel, noise: f64, seed: u64) -> (Fit, Vec<Point>, u32) {
    let config = engine(truth);
    let plan = Plan::new(&limits(&config), &PlanOptions::default());
    let points = measure(&config, &plan, noise, seed);
    let chunk = config.max_num_batched_tokens;
    (fit(prior, chunk, &points).expect("enough points"), points, chunk)
}

fn estimate(fit: &Fit, parameter: Parameter) -> &Estimate {
    fit.estimates.iter().find(|estimate| estimate.parameter == parameter).expect("every constant has one")
}

/// How far a fitted constant is from the true one, as a share.
fn off(fit: &Fit, truth: &TimingModel, parameter: Parameter) -> f64 {
    (parameter.get(&fit.timing) / parameter.get(truth) - 1.0).abs()
}

/// A machine that differs from its preset in every constant.
fn another(name: &str) -> TimingModel {
    let mut truth = preset(name);
    let share = &mut truth.hardware.efficiency;
    (share.compute, share.weights, share.kv, share.attention) = (0.51, 0.62, 0.58, 0.33);
    (truth.host.step_secs, truth.host.sequence_secs, truth.host.request_secs) = (2.4e-3, 14e-6, 8e-3);
    truth
}

/// Invariant: A calibration measures what the engine did and recovers its constants; a parameter that the data cannot
/// determine keeps its value.
///
/// Also held by `constants_are_recovered_within_five_percent_whatever_they_are`,
/// `what_short_contexts_cannot_tell_stays_as_it_was_and_says_so`.
#[test]
fn what_is_measured_is_what_the_engine_did() {
    let config = engine(&another("qwen2.5-7b@a100"));
    let plan = Plan::new(&limits(&config), &PlanOptions::default());
    for point in measure(&config, &plan, 0.0, 1) {
        let modelled = point.work.secs(&config.timing, config.max_num_batched_tokens);
        let off = (modelled / point.secs - 1.0).abs();
        assert!(off < 3e-4, "{}: {} s measured, {modelled} s modelled", point.work.name(), point.secs);
    }
}

#[test]
fn the_constants_of_an_engine_are_recovered_from_exact_measurements() {
    for name in ["llama-3.1-8b@a100", "qwen2.5-7b@h100", "qwen3-32b@h100x2"] {
        let truth = another(name);
        let (fit, ..) = calibrated(&truth, &preset(name), 0.0, 1);
        for parameter in Parameter::ALL {
            let off = off(&fit, &truth, parameter);
            assert!(off < 0.02, "{name}: {} is off by {:.1} %", parameter.name(), off * 100.0);
            assert_eq!(estimate(&fit, parameter).standing, Standing::Fitted, "{name}: {}", parameter.name());
        }
    }
}

#[test]
fn a_machine_of_which_nothing_is_known_is_described_by_what_it_does() {
    let truth = another("llama-3.1-8b@a100");
    let mut prior = preset("llama-3.1-8b@a100");
    (prior.hardware.peak_flops, prior.hardware.memory_bytes_per_s, prior.hardware.layer_secs) =
        (1e15, 1e13, 0.0);
    let (fit, points, chunk) = calibrated(&truth, &prior, 0.0, 1);
    let reached = |timing: &TimingModel| timing.hardware.efficiency.compute * timing.hardware.peak_flops;
    let off = (reached(&fit.timing) / reached(&truth) - 1.0).abs();
    assert!(off < 0.05, "{:.3e} FLOP/s", reached(&fit.timing));
    for point in &points {
        let off = (point.work.secs(&fit.timing, chunk) / point.secs - 1.0).abs();
        assert!(off < 0.03, "{} is off by {:.1} %", point.work.name(), off * 100.0);
    }
}

#[test]
fn what_short_contexts_cannot_tell_stays_as_it_was_and_says_so() {
    let truth = another("qwen2.5-7b@a100");
    let prior = preset("qwen2.5-7b@a100");
    let config = engine(&truth);
    let plan = Plan::new(&limits(&config), &PlanOptions::default());
    let short = |point: &Point| match point.work {
        Work::Prefill { prompt_tokens } => prompt_tokens <= 512,
        Work::Decode { seqs, context_tokens } => seqs <= 8 && context_tokens < 2000,
    };
    let mut points = measure(&config, &plan, 0.01, 1);
    points.retain(short);
    let fit = fit(&prior, config.max_num_batched_tokens, &points).expect("enough points");
    for parameter in [Parameter::Kv, Parameter::Attention] {
        let estimate = estimate(&fit, parameter);
        assert_eq!(
            (estimate.standing, estimate.value),
            (Standing::Prior, estimate.prior),
            "{}",
            parameter.name()
        );
    }
    assert_eq!(estimate(&fit, Parameter::Compute).standing, Standing::Fitted);
}

#[test]
fn a_measurement_that_was_disturbed_does_not_move_the_fit() {
    let truth = another("llama-3.1-8b@a100");
    let config = engine(&truth);
    let plan = Plan::new(&limits(&config), &PlanOptions::default());
    let mut points = measure(&config, &plan, 0.0, 1);
    for index in [2, 7, 20] {
        points[index].secs *= 2.0;
    }
    let prior = preset("llama-3.1-8b@a100");
    let fit = fit(&prior, config.max_num_batched_tokens, &points).expect("enough points");
    for parameter in [Parameter::Compute, Parameter::Weights, Parameter::Attention, Parameter::Kv] {
        let off = off(&fit, &truth, parameter);
        assert!(off < 0.05, "{} is off by {:.1} %", parameter.name(), off * 100.0);
    }
}

#[test]
fn a_batch_that_never_decodes_together_is_no_measurement() {
    let config = EngineConfig { max_num_seqs: 4, ..engine(&preset("qwen2.5-7b@a100")) };
    let probe = Probe::Decode { seqs: 8, prompt_tokens: 32, output_tokens: 100 };
    let observed = probe.observe(&run(&config, &probe, Nanos::ZERO));
    assert!(matches!(observed, Err(Unusable::NeverTogether(_))), "{observed:?}");
}

#[test]
fn a_pause_in_reading_does_not_make_steps_short() {
    let config = engine(&preset("qwen2.5-7b@a100"));
    let probe = Probe::Decode { seqs: 1, prompt_tokens: 32, output_tokens: 100 };
    let lines = run(&config, &probe, Nanos::ZERO);
    let (_, secs) = probe.observe(&lines).expect("undisturbed");
    // Everything up to some token comes only with that token.
    let paused = |until: usize| {
        let mut line = lines[0].clone();
        let late = line.tokens[until].0;
        line.tokens.iter_mut().for_each(|(at, _)| *at = at.max(late));
        probe.observe(&[line])
    };
    let (_, after_a_pause) = paused(40).expect("the other sixty tell");
    assert!((after_a_pause / secs - 1.0).abs() < 1e-2, "{after_a_pause} s instead of {secs} s");
    assert!(matches!(paused(99), Err(Unusable::NeverTogether(0))), "{:?}", paused(99));
    let mut middle = lines[0].clone();
    let late = middle.tokens[70].0;
    middle.tokens.iter_mut().skip(20).for_each(|(at, _)| *at = at.max(late));
    assert_eq!(probe.observe(&[middle]), Err(Unusable::Burst(51)));
}

#[test]
fn a_prompt_that_was_cached_is_no_measurement() {
    let probe = Probe::Prefill { prompt_tokens: 100 };
    let mut lines = run(&engine(&preset("qwen2.5-7b@a100")), &probe, Nanos::ZERO);
    lines[0].cached_tokens = Some(64);
    assert_eq!(probe.observe(&lines), Err(Unusable::NotCold(64)));
}

#[test]
fn a_plan_keeps_within_what_the_server_takes() {
    let tight = Limits {
        max_model_len: Some(4096),
        kv_capacity_tokens: Some(10_000),
        max_num_seqs: Some(10),
        ..Limits::default()
    };
    let plan = Plan::new(&tight, &PlanOptions { prompt_tokens_max: Some(3500), ..PlanOptions::default() });
    for Planned { probe, .. } in &plan.probes {
        let (requests, prompt, output) = probe.requests();
        assert!(requests <= 10 && prompt <= 3500 && prompt + output <= 4096, "{probe:?}");
        assert!(requests * (prompt + output) <= 10_000, "{probe:?}");
    }
    let held_out = plan.probes.iter().filter(|planned| planned.held_out).count();
    assert_eq!(held_out, 2, "768 and 3000");
    let has = |wanted: Probe| plan.probes.iter().any(|planned| planned.probe == wanted);
    assert!(has(Probe::Prefill { prompt_tokens: 3500 }), "the far end");
    assert!(plan.probes.iter().any(|planned| matches!(planned.probe, Probe::Decode { seqs: 8, .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn constants_are_recovered_within_five_percent_whatever_they_are(
        shares in prop::array::uniform4(0.2_f64..1.0),
        step_secs in 5e-4_f64..5e-3,
        request_secs in 1e-3_f64..2e-2,
        seed in any::<u64>(),
    ) {
        let mut truth = preset("llama-3.1-8b@a100");
        let share = &mut truth.hardware.efficiency;
        [share.compute, share.weights, share.kv, share.attention] = shares;
        (truth.host.step_secs, truth.host.request_secs) = (step_secs, request_secs);
        let (fit, points, chunk) = calibrated(&truth, &preset("llama-3.1-8b@a100"), 0.002, seed);
        for parameter in [Parameter::Compute, Parameter::Weights, Parameter::Attention, Parameter::Kv] {
            let off = off(&fit, &truth, parameter);
            prop_assert!(off < 0.05, "{} is off by {:.1} %", parameter.name(), off * 100.0);
        }
        for point in points {
            let off = (point.work.secs(&fit.timing, chunk) / point.secs - 1.0).abs();
            prop_assert!(off < 0.01, "{} is off by {:.1} %", point.work.name(), off * 100.0);
        }
    }
}
