//! What the model gives, beside what others measured and beside hand calculations. docs/simulator.md names the
//! sources and lists the figures.

use super::*;

/// `observed` within `percent` of `expected`.
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

fn decode(seqs: u32, context: u32) -> StepShape {
    let mut step = StepShape::default();
    (0..seqs).for_each(|_| step.add_decode(context));
    step
}

fn decode_ms(timing: &TimingModel, seqs: u32, context: u32) -> f64 {
    timing.step_secs(&decode(seqs, context)) * 1e3
}

#[test]
fn cold_prompts_of_8192_tokens_run_at_the_measured_rates() {
    // llm-d-router's calibration matrix, vLLM: tokens/s as 8,192 over the median time to the first token.
    for (name, rate, percent) in [
        ("qwen3-32b@h100x2", 15_928.0, 2.0),
        ("qwen3-vl-32b@h200x2", 15_751.0, 8.0),
        ("gpt-oss-120b@h100", 39_065.0, 8.0),
    ] {
        check(name, 8192.0 / preset(name).prefill_secs(0, 8192, 8192), rate, percent);
    }
}

#[test]
fn a_sliding_window_model_slows_with_length_as_measured() {
    // llm-d's measurements of gpt-oss-120b on one H200, in milliseconds from request to first token. A straight line
    // with a quadratic part through them leaves 25 ms that no token costs: the server around the engine.
    let mut timing = preset("gpt-oss-120b@h200");
    timing.host.request_secs = 25e-3;
    for (tokens, expected) in
        [(2048, 78.0), (8192, 250.0), (16_384, 510.0), (32_768, 1173.0), (49_152, 1988.0)]
    {
        let secs = timing.host.request_secs + timing.prefill_secs(0, tokens, 8192);
        check(&format!("{tokens} tokens"), secs * 1e3, expected, 12.0);
    }
}

/// Milliseconds for `tokens` tokens through all layers' matrices and element-wise work: no attention, output matrix,
/// links and host.
fn layers_ms(timing: &TimingModel, tokens: u64) -> f64 {
    let mut timing = timing.clone();
    timing.model.vocab = 0;
    timing.host.step_secs = 0.0;
    let step = StepShape { prefill_tokens: tokens, ..StepShape::default() };
    (timing.step_secs(&step) - timing.compile().parts(&step).link_s) * 1e3
}

#[test]
fn matrices_and_elementwise_work_follow_vidurs_profiles() {
    // One layer's profiled kernels times the layers (microsoft/vidur, commit 7d47513, `data/profiling/compute`).
    for (name, rows) in [
        (
            "llama-3-8b@a100",
            &[(1, 9.7), (64, 11.2), (1024, 75.0), (2048, 142.0), (4096, 273.0), (8192, 543.0)][..],
        ),
        ("llama-3-70b@a100x4", &[(1, 24.9), (64, 26.9), (2048, 341.0), (8192, 1295.0)]),
        (
            "llama-2-70b@h100x4",
            &[(1, 14.3), (64, 15.3), (512, 30.0), (1024, 62.0), (2048, 114.0), (4096, 222.0)],
        ),
        ("llama-2-70b@h100x2", &[(1, 25.5), (4096, 440.0)]),
        ("llama-2-7b@h100", &[(1, 5.6), (2048, 40.5), (4096, 83.0)]),
    ] {
        for (tokens, expected) in rows {
            check(&format!("{name} {tokens} tokens"), layers_ms(&preset(name), *tokens), *expected, 12.0);
        }
    }
    // The profile is of a model larger than the GPU's memory, so this is no preset.
    let mut one = preset("llama-2-70b@h100x2");
    one.gpus = 1;
    check("llama-2-70b@h100 1 token", layers_ms(&one, 1), 50.0, 12.0);
}

#[test]
fn profiles_of_models_that_nothing_was_fitted_to_are_met_too() {
    // From the same data set: Qwen-72B and CodeLlama-34B on H100.
    let shape = |name: &str, layers: u32, kv_heads: u32, ffn: u32| {
        let text = format!(
            r#"{{"architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "num_attention_heads": 64,
            "num_hidden_layers": {layers}, "num_key_value_heads": {kv_heads}, "intermediate_size": {ffn},
            "vocab_size": 32000}}"#
        );
        ModelShape::from_config_json(name, &text).unwrap()
    };
    let (qwen, codellama) = (shape("qwen-72b", 80, 64, 24_576), shape("codellama-34b", 48, 8, 22_016));
    for (model, gpus, tokens, expected) in [
        (&qwen, 1, 1, 51.1),
        (&qwen, 1, 64, 53.1),
        (&qwen, 1, 120, 55.5),
        (&qwen, 2, 4096, 434.7),
        (&codellama, 1, 896, 97.8),
        (&codellama, 1, 1024, 114.5),
    ] {
        let mut timing = TimingModel::new(model.clone(), "h100", 4).unwrap();
        timing.gpus = gpus;
        let what = format!("{}@h100x{gpus} {tokens} tokens", model.name);
        check(&what, layers_ms(&timing, tokens), expected, 12.0);
    }
}

#[test]
fn decode_steps_of_an_8b_model_take_as_long_as_measured() {
    // Median inter-token latency in milliseconds of Qwen3-8B on one H100, vLLM 0.30 (tgarg01/silybench-data, commit
    // 93e4887, `derived/csv/perf_points.csv`); the context is the prompt and half of the answer.
    for (name, rows) in [
        (
            "qwen3-8b@h100",
            [
                (1, 192, 6.83),
                (1, 640, 6.86),
                (16, 640, 7.53),
                (64, 640, 9.49),
                (128, 640, 12.00),
                (256, 640, 18.08),
                (1, 3072, 7.00),
                (16, 3072, 9.46),
                (64, 3072, 17.05),
                (4, 8448, 8.62),
            ],
        ),
        (
            "qwen3-8b:fp8@h100",
            [
                (1, 192, 4.62),
                (1, 640, 4.66),
                (16, 640, 5.25),
                (64, 640, 7.26),
                (128, 640, 10.16),
                (256, 640, 16.13),
                (1, 3072, 4.80),
                (16, 3072, 7.22),
                (64, 3072, 14.81),
                (4, 8448, 6.43),
            ],
        ),
    ] {
        for (seqs, context, expected) in rows {
            let what = format!("{name} {seqs} x {context}");
            check(&what, decode_ms(&preset(name), seqs, context), expected, 5.0);
        }
    }
}

#[test]
fn prefill_and_decode_reproduce_the_reference_table() {
    // Milliseconds: cold prefill of 2,048 and 8,192; decode step of 1, 32 and 128 sequences at 2,048 tokens. These
    // are calculations with the same kind of formula, not measurements.
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
    // As above, with 8,192 tokens and with 128 sequences. The table leaves out what starting kernels and routing cost,
    // so that is left out here. It takes 8-bit experts to be read as fast as others, which is not what is measured.
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
fn decode_steps_of_other_models_take_about_as_long_as_measured() {
    // Median inter-token latency in milliseconds on H100, vLLM (ml-energy/leaderboard, commit 0ea52b6,
    // `public/data/tasks/lm-arena-chat.json`). The prompts' lengths are not published: 700 tokens of context are taken,
    // prompt and half of an answer together. Nothing is fitted to the dense models.
    for (name, rows) in [
        ("qwen3-14b@h100", &[(8, 12.54), (16, 13.34), (32, 15.01)][..]),
        ("qwen3-32b@h100", &[(8, 25.21), (16, 26.35), (29, 28.81)]),
        ("qwen3-32b@h100x2", &[(8, 15.06), (16, 16.04), (32, 17.91)]),
        ("qwen3-30b-a3b@h100", &[(8, 12.85), (16, 17.55), (32, 22.57), (64, 28.94), (88, 32.07)]),
    ] {
        let timing = preset(name);
        for (seqs, expected) in rows {
            check(&format!("{name} {seqs} x 700"), decode_ms(&timing, *seqs, 700), *expected, 15.0);
        }
    }
}

#[test]
fn prompt_attention_grows_with_the_position_of_the_chunk() {
    // Milliseconds for 8,192 tokens after 96 K.
    for (name, expected) in [
        ("llama-3.1-8b@a100", 3350.0),
        ("qwen3-32b@h100x2", 2070.0),
        ("qwen3-30b-a3b@h200", 1330.0),
        // The table leaves out getting keys and values back from latent vectors.
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
        // What llm-d reports.
        ("deepseek-v3@h200x8", 0.90, 70_272, 650e3, 3.0),
    ] {
        let timing = preset(name);
        assert_eq!(timing.kv_bytes_per_token(), bytes_per_token, "{name}");
        check(name, timing.kv_capacity_tokens(share) as f64, tokens, percent);
    }
}
