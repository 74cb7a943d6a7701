//! Published figures of offline benchmarks and the engine model's values for them: the tables `data/offline.json`.
//!
//! An offline benchmark sends requests of one length all at once and ends with the last of them. Nothing is fitted to these tables.
//! Every second row of a column, from its second, is held out: nothing may ever be fitted to it. That rule was set before any row
//! was compared with the model.

use kvlane_core::time::Nanos;
use kvlane_core::timing::{Dtype, TimingModel};
use kvlane_sim::{Engine, EngineConfig, EngineEvent, EngineRequest};
use serde::Deserialize;

use super::{MEMORY_SHARE, Measured};

/// Share of the free memory that `trtllm-bench` is given for keys and values.
const TRTLLM_FREE_SHARE: f64 = 0.95;
/// Most sequences and most tokens that `trtllm-bench` gives a step.
const TRTLLM_SEQS_MAX: u32 = 4096;
const TRTLLM_TOKENS_MAX: f64 = 32_768.0;
/// Fewest tokens that it gives a step.
const TRTLLM_TOKENS_MIN: u32 = 2048;

/// `data/offline.json`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offline {
    /// Tables, each of one source.
    pub tables: Vec<OfflineTable>,
}

/// One table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OfflineTable {
    /// Name of the table.
    pub name: String,
    /// The figure that is published.
    pub figure: Figure,
    /// Limits of a step.
    pub limits: Limits,
    /// Tokens in a KV block.
    pub block_tokens: u32,
    /// The same requests were sent before those that were measured, so that all of a prompt but its last block is cached.
    #[serde(default)]
    pub repeated: bool,
    /// What was measured.
    pub about: String,
    /// Author, place of publication and settings.
    pub source: String,
    /// One for each engine.
    pub columns: Vec<OfflineColumn>,
}

/// Measurements of one engine.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OfflineColumn {
    /// Model and machine, in the form of a preset.
    pub engine: String,
    /// Type of keys and values.
    pub kv_dtype: Dtype,
    /// Largest error of the model that the test admits, in percent.
    pub percent: f64,
    /// The measurements, in the order of the source.
    pub rows: Vec<OfflineRow>,
}

/// Tokens of a prompt, tokens of an answer, requests, and the published figure.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct OfflineRow(pub u32, pub u32, pub u32, pub f64);

/// A published figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    /// Output tokens per second of the engine, from the first request to the last end.
    OutTokS,
    /// Seconds from the first request to the last end.
    Secs,
}

/// Limits of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limits {
    /// Those that `trtllm-bench` computes from the memory and the lengths. Its scheduler admits a request only with room for the
    /// whole answer, so that nothing is preempted, and does not divide prompts.
    TrtllmBench,
    /// All requests in one batch, and so many tokens a step.
    AllRequests {
        /// Most tokens in a step.
        step_tokens: u32,
    },
}

// === impl Offline ===

impl Offline {
    /// The built-in tables.
    ///
    /// # Panics
    ///
    /// Never: a test reads the tables.
    pub fn tables() -> Self {
        serde_json::from_str(include_str!("../../data/offline.json")).expect("a test reads the tables")
    }
}

// === impl OfflineTable ===

impl OfflineTable {
    /// The model's value for a row.
    ///
    /// # Panics
    ///
    /// If the engine is unknown or the requests do not all end; a test computes every row.
    pub fn modelled(&self, measured: &Measured, column: &OfflineColumn, row: OfflineRow) -> f64 {
        self.modelled_by(measured, column, row, |_| ())
    }

    /// The same by a changed model.
    ///
    /// # Panics
    ///
    /// As [`OfflineTable::modelled`].
    pub fn modelled_by(
        &self,
        measured: &Measured,
        column: &OfflineColumn,
        row: OfflineRow,
        change: impl Fn(&mut TimingModel),
    ) -> f64 {
        let OfflineRow(_, output_tokens, requests, _) = row;
        let mut timing = measured.timing(&column.engine).expect("a test computes every row");
        timing.kv_dtype = column.kv_dtype;
        change(&mut timing);
        let mut engine = Engine::new(self.config(timing, row));
        let warm_up = if self.repeated { send_all(&mut engine, Nanos::ZERO, row) } else { Nanos::ZERO };
        let secs = (send_all(&mut engine, warm_up, row) - warm_up).as_secs_f64();
        match self.figure {
            Figure::OutTokS => f64::from(output_tokens) * f64::from(requests) / secs,
            Figure::Secs => secs,
        }
    }

    /// The engine, with the limits of the source.
    fn config(&self, timing: TimingModel, row: OfflineRow) -> EngineConfig {
        let OfflineRow(input_tokens, output_tokens, requests, _) = row;
        let kv_tokens = match self.limits {
            Limits::TrtllmBench => TRTLLM_FREE_SHARE * timing.kv_capacity_tokens(1.0) as f64,
            Limits::AllRequests { .. } => timing.kv_capacity_tokens(MEMORY_SHARE) as f64,
        };
        let mut config = EngineConfig::vllm(timing, self.block_tokens, MEMORY_SHARE);
        config.blocks = (kv_tokens / f64::from(self.block_tokens)) as u32;
        config.token_every = 0;
        (config.max_num_seqs, config.max_num_batched_tokens) = match self.limits {
            Limits::TrtllmBench => {
                let whole = (input_tokens + output_tokens).div_ceil(self.block_tokens);
                let seqs = (config.blocks / whole).clamp(1, TRTLLM_SEQS_MAX);
                (seqs, trtllm_step_tokens(seqs, input_tokens, output_tokens))
            }
            Limits::AllRequests { step_tokens } => (requests, step_tokens),
        };
        config
    }
}

// === impl OfflineColumn ===

impl OfflineColumn {
    /// Whether nothing may ever be fitted to a row.
    pub fn is_held_out(row: usize) -> bool {
        row % 2 == 1
    }
}

/// Tokens of a step that `finetune_setting` in `tensorrt_llm/bench/build/tuning.py` gives a benchmark, at least a whole prompt beside
/// all sequences.
fn trtllm_step_tokens(seqs: u32, input_tokens: u32, output_tokens: u32) -> u32 {
    let share = f64::from(input_tokens) / f64::from(output_tokens);
    let tokens = (f64::from(seqs) * (1.0 + share)).min(TRTLLM_TOKENS_MAX).ceil() as u32;
    let unit = match tokens {
        ..4096 => 256,
        4096..8192 => 512,
        _ => 1024,
    };
    tokens.next_multiple_of(unit).max(TRTLLM_TOKENS_MIN).max(input_tokens + seqs)
}

/// Sends all requests of a row at once to an idle engine; the time at which the last of them has ended.
fn send_all(engine: &mut Engine, at: Nanos, row: OfflineRow) -> Nanos {
    let OfflineRow(prompt_tokens, output_tokens, requests, _) = row;
    for id in 0..u64::from(requests) {
        let prompt_blocks = [].into();
        let request = EngineRequest {
            id,
            prompt_blocks,
            prompt_tokens,
            output_tokens,
            output_seed: id,
            remote: None,
            adapter: None,
        };
        engine.enqueue(at, request);
    }
    let mut events = Vec::new();
    engine.advance(Nanos::MAX, &mut events);
    let ends: Vec<Nanos> = events
        .iter()
        .filter(|(_, event)| matches!(event, EngineEvent::Finished { .. }))
        .map(|(at, _)| *at)
        .collect();
    assert_eq!(ends.len(), requests as usize, "{row:?}: all requests must end");
    ends.into_iter().max().unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trtllm_bench_gives_a_step_the_tokens_of_its_own_formula() {
        // finetune_setting(kv_cache_max_requests, input_len, output_len, 1), and a whole prompt beside all sequences.
        assert_eq!(trtllm_step_tokens(4096, 128, 128), 8192);
        assert_eq!(trtllm_step_tokens(480, 128, 2048), 2048);
        assert_eq!(trtllm_step_tokens(480, 2048, 128), 8192);
        assert_eq!(trtllm_step_tokens(4096, 2048, 128), 32_768);
        assert_eq!(trtllm_step_tokens(47, 20_000, 2000), 20_047);
    }

    #[test]
    fn a_batch_of_one_takes_its_prompt_and_a_step_for_each_further_token() {
        let (measured, offline) = (Measured::table(), Offline::tables());
        let mut table = offline.tables.into_iter().find(|table| table.name == "mi300x-batch").unwrap();
        let column = table.columns.remove(0);
        let timing = measured.timing(&column.engine).unwrap();
        let steps = (1..16).map(|token| super::super::decode_ms(&timing, 1, 128 + token) * 1e-3);
        let steps: f64 = steps.sum();
        for (repeated, cached) in [(false, 0), (true, 112)] {
            table.repeated = repeated;
            let expected = timing.prefill_secs(cached, 128 - cached, 16_384) + steps;
            let modelled = table.modelled(&measured, &column, OfflineRow(128, 16, 1, 0.0));
            assert!((modelled / expected - 1.0).abs() < 1e-3, "{repeated}: {modelled} {expected}");
        }
    }

    #[test]
    fn every_offline_benchmark_is_met_within_the_percentage_of_its_column() {
        let measured = Measured::table();
        for table in Offline::tables().tables {
            for column in &table.columns {
                for &row in &column.rows {
                    let off = 100.0 * (table.modelled(&measured, column, row) / row.3 - 1.0);
                    let (name, engine) = (&table.name, &column.engine);
                    assert!(off.abs() <= column.percent, "{name}: {engine}: {row:?}: {off:+.1} %");
                }
            }
        }
    }

    #[test]
    fn half_of_every_column_is_held_out_the_odd_row_more_being_open() {
        for table in Offline::tables().tables {
            for column in &table.columns {
                let held_out = (0..column.rows.len()).filter(|&row| OfflineColumn::is_held_out(row)).count();
                assert_eq!(held_out, column.rows.len() / 2, "{}: {}", table.name, column.engine);
            }
        }
    }
}
