//! Compares the model's values with published measurements (`data/measured.json`) and with hand calculations.
//! docs/simulator.md lists the figures.

use kvlane_core::timing::TimingModel;

use super::{Measured, decode_ms};

/// Asserts that `observed` is within `percent` of `expected`.
#[track_caller]
fn check(what: &str, observed: f64, expected: f64, percent: f64) {
    let off = (observed / expected - 1.0) * 100.0;
    assert!(off.abs() <= percent, "{what}: {observed:.3}, expected {expected} +- {percent} % ({off:+.1} %)");
}

fn preset(name: &str) -> TimingModel {
    TimingModel::preset(name).unwrap()
}

fn prefill_ms(timing: &TimingModel, tokens: u32) -> f64 {
    timing.prefill_secs(0, tokens, tokens) * 1e3
}

/// Invariant: One set of efficiencies per GPU and kind of model meets published kernel timings, including those of
/// models it was not fitted to.
#[test]
fn every_measured_set_is_met_within_its_percentage() {
    let measured = Measured::table();
    for set in &measured.sets {
        assert!(!set.rows.is_empty(), "{}", set.name);
        for row in &set.rows {
            let what = format!("{}: {} {} x {}", set.name, row.engine, row.seqs, row.tokens);
            check(&what, measured.modelled(set, row), row.measured, row.percent.unwrap_or(set.percent));
        }
    }
}

#[test]
fn prefill_and_decode_reproduce_the_reference_table() {
    // Milliseconds: cold prefill of 2,048 and 8,192; decode step of 1, 32 and 128 sequences at 2,048 tokens. These are
    // calculations with the same kind of formula, not measurements.
    for (name, prefill, decode) in [
        ("llama-3.1-8b@a100", [140.0, 642.0], [11.4, 17.1, 35.8]),
        ("llama-3.1-8b@h100", [48.0, 213.0], [6.7, 9.9, 19.8]),
        ("qwen2.5-7b@a100", [129.0, 578.0], [10.7, 13.3, 22.5]),
        ("qwen2.5-14b@a100", [264.0, 1212.0], [20.3, 28.8, 57.1]),
        ("qwen3-32b@h100x2", [118.0, 513.0], [14.2, 17.6, 28.4]),
        ("llama-3.3-70b@h100x4", [147.0, 611.0], [15.5, 18.2, 26.6]),
        ("llama-3.3-70b@a100x4", [372.0, 1586.0], [26.7, 31.1, 46.9]),
    ] {
        let timing = preset(name);
        for (tokens, expected) in [2048, 8192].into_iter().zip(prefill) {
            check(&format!("{name} prefill {tokens}"), prefill_ms(&timing, tokens), expected, 10.0);
        }
        for (seqs, expected) in [1, 32, 128].into_iter().zip(decode) {
            check(&format!("{name} decode {seqs}"), decode_ms(&timing, seqs, 2048), expected, 10.0);
        }
    }
}

#[test]
fn models_with_experts_come_near_the_reference_table() {
    // As above, with 8,192 tokens and with 128 sequences. The table excludes kernel launches and routing, so they are
    // excluded here. It assumes that 8-bit experts are read as fast as others, which measurements do not confirm.
    for (name, prefill, decode, percent) in [
        ("qwen3-30b-a3b@h200", 164.0, 24.0, 12.0),
        ("glm-4.5-air@h100x4", 199.0, 27.5, 12.0),
        ("glm-4.5:fp8@h200x8", 258.0, 19.9, 25.0),
        ("deepseek-v3@h200x8", 262.0, 30.7, 25.0),
    ] {
        let mut timing = preset(name);
        check(&format!("{name} prefill 8192"), prefill_ms(&timing, 8192), prefill, 12.0);
        (timing.hardware.layer_secs, timing.hardware.moe_layer_secs) = (0.0, 0.0);
        check(&format!("{name} decode 128"), decode_ms(&timing, 128, 2048), decode, percent);
    }
}

#[test]
fn prompt_attention_grows_with_the_position_of_the_chunk() {
    // Milliseconds for 8,192 tokens after 96 K.
    for (name, expected) in [
        ("llama-3.1-8b@a100", 3350.0),
        ("qwen3-32b@h100x2", 2070.0),
        ("qwen3-30b-a3b@h200", 1330.0),
        // The table excludes the expansion of latent vectors.
        ("deepseek-v3@h200x8", 1190.0),
    ] {
        check(name, preset(name).prefill_secs(98_304, 8192, 8192) * 1e3, expected, 15.0);
    }
}

#[test]
fn memory_left_for_keys_and_values_matches_the_reference_table() {
    for (name, share, bytes_per_token, tokens, percent) in [
        ("llama-3.1-8b@a100", 0.90, 131_072, 431e3, 2.0),
        ("llama-3.1-8b@h100", 0.90, 131_072, 433e3, 2.0),
        ("qwen2.5-7b@a100", 0.90, 57_344, 1e6, 2.0),
        ("qwen2.5-14b@a100", 0.90, 196_608, 218e3, 2.0),
        ("qwen3-32b@h100x2", 0.90, 262_144, 302e3, 2.0),
        ("qwen3-32b@h100x2", 0.95, 262_144, 335e3, 2.0),
        ("llama-3.3-70b@h100x4", 0.90, 327_680, 445e3, 2.0),
        ("qwen3-30b-a3b@h200", 0.90, 98_304, 702e3, 3.0),
        ("glm-4.5-air@h100x4", 0.90, 188_416, 371e3, 3.0),
        ("glm-4.5:fp8@h200x8", 0.90, 376_832, 1.73e6, 6.0),
    ] {
        let timing = preset(name);
        assert_eq!(timing.kv_bytes_per_token(), bytes_per_token, "{name}");
        check(name, timing.kv_capacity_tokens(share) as f64, tokens, percent);
    }
    assert_eq!(preset("deepseek-v3@h200x8").kv_bytes_per_token(), 70_272);
}
