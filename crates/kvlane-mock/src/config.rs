//! Configuration of a mock engine. Names follow vLLM and llm-d-inference-sim where those have the same setting.

use kvlane_core::timing::{PresetError, TimingFile, TimingModel};
use kvlane_sim::{AdapterSlots, EngineConfig};
use kvlane_wire::disaggregation::Connector;
use kvlane_wire::kv::version::{OLDEST, Version};
use serde::{Deserialize, Serialize};

use crate::deaths::{Death, DeathsLike};
use crate::feed::{FeedConfig, KvEventsConfig, KvEventsFaults, KvEventsHashes};
use crate::transfer::config::KvTransferConfig;

/// Maximum engines behind one API.
const RANKS_MAX: u32 = 64;

/// Context length if neither the configuration nor the KV cache sets a smaller one: that of current models with
/// extended rotary embeddings, and enough for every request of the Mooncake traces.
const MODEL_LEN_DEFAULT: u32 = 131_072;

/// Configuration of one mock engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct MockConfig {
    /// `--model`: the base model's name.
    pub model: String,
    /// `--served-model-name`: names of the model in the API instead of `model`. The first is reported.
    pub served_model_name: Vec<String>,
    /// `--lora-modules`: adapters on top of the model, by name. Their blocks are never shared with the base model's.
    pub lora_modules: Vec<String>,
    /// `--max-loras`: adapters that can be loaded at once; by default all always are.
    pub max_loras: Option<u32>,
    /// `--adapter-load-s`: then, engine seconds to load one.
    pub adapter_load_s: f64,
    /// `--preset`: model and machine of the timing model, such as `qwen2.5-7b@a100` or `qwen3-32b@h100x2`.
    pub preset: String,
    /// `--timing`: a timing model instead of a preset's; see [`MockConfig::imitate`].
    pub timing: Option<TimingModel>,
    /// `--speed`: engine seconds per wall-clock second.
    pub speed: f64,
    /// `--block-size`: tokens in a KV block.
    pub block_size: u32,
    /// `--kv-cache-size`: KV blocks; by default what fits into the preset's memory.
    pub kv_cache_size: Option<u32>,
    /// `--gpu-memory-utilization`: share of the preset's memory that weights, activations and KV cache may use.
    pub gpu_memory_utilization: f64,
    /// `--max-num-seqs`: maximum sequences in a batch. The default is vLLM's for GPUs below 70 GiB and for A100.
    pub max_num_seqs: u32,
    /// `--max-num-batched-tokens`: maximum tokens in a step. The default is vLLM's API server's on the same GPUs.
    pub max_num_batched_tokens: u32,
    /// `--max-model-len`: maximum tokens of prompt and answer together; by default 131,072 or the KV cache's
    /// capacity.
    pub max_model_len: Option<u32>,
    /// `--max-waiting-queue-length`: maximum requests in the engine's queue; further ones get 429.
    pub max_waiting_queue_length: u32,
    /// `--seed`: seed of answers, and of faults of the feed.
    pub seed: u64,
    /// `--data-parallel-size`: engines behind this API, each with its own cache.
    pub data_parallel_size: u32,
    /// `--kv-events-config`: whether and where the engine publishes KV events.
    pub kv_events_config: KvEventsConfig,
    /// `--kv-events-version`: vLLM version whose wire format is used.
    pub kv_events_version: String,
    /// `--kv-events-hashes`: type of block hashes.
    pub kv_events_hashes: KvEventsHashes,
    /// `--kv-events-faults`: faults of the feed.
    pub kv_events_faults: KvEventsFaults,
    /// `--deaths-like`: engine whose recorded failures are replayed.
    pub deaths_like: DeathsLike,
    /// Prefill/decode disaggregation.
    pub kv_transfer: KvTransferConfig,
}

impl Default for MockConfig {
    fn default() -> Self {
        Self {
            model: "mock".into(),
            served_model_name: Vec::new(),
            lora_modules: Vec::new(),
            preset: "qwen2.5-7b@a100".into(),
            timing: None,
            speed: 1.0,
            block_size: 16,
            kv_cache_size: None,
            gpu_memory_utilization: 0.90,
            max_loras: None,
            adapter_load_s: 0.5,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_model_len: None,
            max_waiting_queue_length: 10_000,
            seed: 0,
            data_parallel_size: 1,
            kv_events_config: KvEventsConfig::default(),
            kv_events_version: "0.32".into(),
            kv_events_hashes: KvEventsHashes::default(),
            kv_events_faults: KvEventsFaults::default(),
            deaths_like: DeathsLike::default(),
            kv_transfer: KvTransferConfig::default(),
        }
    }
}

/// Why a mock engine does not start.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// No such timing preset.
    #[error(transparent)]
    Preset(#[from] PresetError),
    /// An invalid value.
    #[error("{flag} is {value}; it must be {must_be}")]
    Value {
        /// The flag as typed.
        flag: &'static str,
        /// The given value.
        value: String,
        /// The valid values.
        must_be: &'static str,
    },
    /// The longest request would not fit into the KV cache.
    #[error(
        "--max-model-len {max_model_len} needs more KV cache than there is ({kv_tokens} tokens): lower it, or raise \
         --kv-cache-size or --gpu-memory-utilization"
    )]
    CacheTooSmall {
        /// Tokens of the longest request.
        max_model_len: u32,
        /// Tokens the cache holds.
        kv_tokens: u64,
    },
    /// There is no recording of this failure of this engine.
    #[error("no recording of {death} for {engine}: it has no such part, or the failure was not recorded")]
    NoSuchDeath {
        /// The failure.
        death: Death,
        /// `--deaths-like`.
        engine: DeathsLike,
    },
    /// A socket of the feed cannot be opened.
    #[error("cannot publish KV events of rank {rank} on {endpoint}: {error}")]
    Feed {
        /// As configured.
        endpoint: String,
        /// The rank; each has the next port.
        rank: u32,
        /// The cause.
        error: std::io::Error,
    },
    /// The listener's address cannot be read.
    #[error("cannot read the listening address: {0}")]
    Listener(#[from] std::io::Error),
}

/// A validated configuration with all defaults filled in.
#[derive(Clone, Debug)]
pub(crate) struct Settled {
    pub(crate) engine: EngineConfig,
    /// Names of the base model in the API, at least one.
    pub(crate) names: Vec<String>,
    pub(crate) loras: Vec<String>,
    pub(crate) model: String,
    pub(crate) max_model_len: u32,
    pub(crate) max_waiting: u32,
    pub(crate) speed: f64,
    pub(crate) seed: u64,
    pub(crate) ranks: u32,
    pub(crate) deaths_like: DeathsLike,
    pub(crate) feed: Option<FeedConfig>,
    pub(crate) connector: Option<Connector>,
    pub(crate) transfer: KvTransferConfig,
}

impl MockConfig {
    /// Takes the step timing, and the sizes it contains, from a timing file; other sizes do not change.
    pub fn imitate(&mut self, file: TimingFile) {
        self.block_size = file.block_tokens.unwrap_or(self.block_size);
        self.max_num_seqs = file.max_num_seqs.unwrap_or(self.max_num_seqs);
        self.max_num_batched_tokens = file.max_num_batched_tokens.unwrap_or(self.max_num_batched_tokens);
        if let Some(tokens) = file.kv_capacity_tokens {
            let blocks = tokens / u64::from(self.block_size.max(1));
            self.kv_cache_size = Some(u32::try_from(blocks).unwrap_or(u32::MAX));
        }
        self.timing = Some(file.timing);
    }

    /// Validates every value and computes dependent ones.
    pub(crate) fn settle(self) -> Result<Settled, ConfigError> {
        let timing = match self.timing {
            Some(timing) => timing,
            None => TimingModel::preset(&self.preset)?,
        };
        require("--speed", self.speed, (1e-3..=1e6).contains(&self.speed), "between 0.001 and 1000000")?;
        let share = self.gpu_memory_utilization;
        require("--gpu-memory-utilization", share, share > 0.0 && share <= 1.0, "above 0 and at most 1")?;
        require(
            "--block-size",
            self.block_size,
            (1..=65_536).contains(&self.block_size),
            "between 1 and 65536",
        )?;
        require("--max-loras", self.max_loras.unwrap_or(1), self.max_loras != Some(0), "at least 1")?;
        let is_span = (0.0..1000.0).contains(&self.adapter_load_s);
        require("--adapter-load-s", self.adapter_load_s, is_span, "0 to 1000")?;
        require("--max-num-seqs", self.max_num_seqs, self.max_num_seqs > 0, "at least 1")?;
        let batched = self.max_num_batched_tokens;
        require("--max-num-batched-tokens", batched, batched > 0, "at least 1")?;
        let names =
            if self.served_model_name.is_empty() { vec![self.model.clone()] } else { self.served_model_name };
        for name in names.iter().chain(&self.lora_modules) {
            let plain = !name.is_empty() && name.len() <= 256 && !name.contains(char::is_control);
            require(
                "--model, --served-model-name or --lora-modules",
                format!("{name:?}"),
                plain,
                "a name of 1 to 256 bytes",
            )?;
        }
        let blocks = self.kv_cache_size.unwrap_or_else(|| {
            u32::try_from(timing.kv_capacity_tokens(share) / u64::from(self.block_size)).unwrap_or(u32::MAX)
        });
        require(
            "--kv-cache-size",
            blocks,
            blocks > 0,
            "at least 1 block, besides the memory of the weights",
        )?;
        let kv_tokens = u64::from(blocks) * u64::from(self.block_size);
        let fitting = u32::try_from(kv_tokens).unwrap_or(u32::MAX);
        let max_model_len = self.max_model_len.unwrap_or(MODEL_LEN_DEFAULT.min(fitting));
        require(
            "--max-model-len",
            max_model_len,
            max_model_len > 1,
            "at least 2, one token each for prompt and answer",
        )?;
        if u64::from(max_model_len) > kv_tokens {
            return Err(ConfigError::CacheTooSmall { max_model_len, kv_tokens });
        }
        let ranks = self.data_parallel_size;
        require("--data-parallel-size", ranks, (1..=RANKS_MAX).contains(&ranks), "between 1 and 64")?;
        self.kv_events_faults.check()?;
        let wrong = |(flag, value, must_be)| ConfigError::Value { flag, value, must_be };
        let connector = self.kv_transfer.check().map_err(wrong)?;
        let version = Version::parse(&self.kv_events_version).filter(|version| *version >= OLDEST);
        let Some(version) = version else {
            let (value, must_be) = (self.kv_events_version, "a version of vLLM from 0.9.2 on, such as 0.32");
            return Err(ConfigError::Value { flag: "--kv-events-version", value, must_be });
        };
        let feed = self.kv_events_config.check()?.then(|| FeedConfig {
            events: self.kv_events_config,
            version,
            hashes: self.kv_events_hashes,
            faults: self.kv_events_faults,
            block_tokens: self.block_size,
            loras: self.lora_modules.clone(),
            seed: self.seed,
        });
        let engine = EngineConfig {
            blocks,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: batched,
            adapters: self.max_loras.map(|count| AdapterSlots { count, load_s: self.adapter_load_s }),
            ..EngineConfig::vllm(timing, self.block_size, share)
        };
        Ok(Settled {
            engine,
            names,
            loras: self.lora_modules,
            model: self.model,
            max_model_len,
            max_waiting: self.max_waiting_queue_length,
            speed: self.speed,
            seed: self.seed,
            ranks,
            deaths_like: self.deaths_like,
            feed,
            connector,
            transfer: self.kv_transfer,
        })
    }
}

fn require(
    flag: &'static str,
    value: impl ToString,
    holds: bool,
    must_be: &'static str,
) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::Value { flag, value: value.to_string(), must_be }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_a_7b_model_on_an_a100_with_its_own_cache_size() {
        let settled = MockConfig::default().settle().expect("the default works");
        assert_eq!(settled.names, ["mock"]);
        assert_eq!(settled.max_model_len, MODEL_LEN_DEFAULT);
        let tokens = u64::from(settled.engine.blocks) * 16;
        assert!((900_000..1_100_000).contains(&tokens), "{tokens}");
    }

    #[test]
    fn a_small_cache_bounds_the_context_unless_the_context_was_asked_for() {
        let small = MockConfig { kv_cache_size: Some(64), ..Default::default() };
        assert_eq!(small.clone().settle().expect("fits").max_model_len, 1024);
        let asked = MockConfig { max_model_len: Some(1025), ..small };
        assert!(matches!(asked.settle(), Err(ConfigError::CacheTooSmall { kv_tokens: 1024, .. })));
    }

    #[test]
    fn a_timing_file_gives_the_time_and_the_sizes_it_tells() {
        let mut timing = TimingModel::preset("llama-3.1-8b@h100").expect("a preset");
        timing.host.step_secs = 3e-3;
        let mut file = TimingFile::new(timing.clone());
        (file.block_tokens, file.kv_capacity_tokens, file.max_num_seqs) = (Some(32), Some(131_072), Some(99));
        let mut config =
            MockConfig { preset: "none".into(), max_num_batched_tokens: 777, ..Default::default() };
        config.imitate(file);
        let engine = config.settle().expect("the preset is not asked for").engine;
        assert_eq!(engine.timing, timing);
        assert_eq!((engine.block_tokens, engine.blocks, engine.max_num_seqs), (32, 4096, 99));
        assert_eq!(engine.max_num_batched_tokens, 777, "the file does not tell");
    }

    #[test]
    fn values_that_make_no_sense_are_refused_by_their_flag() {
        let refuse = |config: MockConfig, flag: &str| {
            let error = config.settle().expect_err(flag).to_string();
            assert!(error.contains(flag), "{error}");
        };
        let good = MockConfig::default;
        refuse(MockConfig { preset: "gpt@tpu".into(), ..good() }, "gpt@tpu");
        refuse(MockConfig { speed: f64::NAN, ..good() }, "--speed");
        refuse(MockConfig { speed: 0.0, ..good() }, "--speed");
        refuse(MockConfig { block_size: 0, ..good() }, "--block-size");
        refuse(MockConfig { kv_cache_size: Some(0), ..good() }, "--kv-cache-size");
        refuse(MockConfig { gpu_memory_utilization: 0.01, ..good() }, "--kv-cache-size");
        refuse(MockConfig { gpu_memory_utilization: f64::NAN, ..good() }, "--gpu-memory-utilization");
        refuse(MockConfig { max_num_seqs: 0, ..good() }, "--max-num-seqs");
        refuse(MockConfig { max_num_batched_tokens: 0, ..good() }, "--max-num-batched-tokens");
        refuse(MockConfig { max_model_len: Some(1), ..good() }, "--max-model-len");
        refuse(MockConfig { model: String::new(), ..good() }, "--model");
        refuse(MockConfig { lora_modules: vec!["a\n".into()], ..good() }, "--lora-modules");
        refuse(MockConfig { data_parallel_size: 0, ..good() }, "--data-parallel-size");
        refuse(MockConfig { kv_events_version: "0.8.5".into(), ..good() }, "--kv-events-version");
        refuse(MockConfig { kv_events_version: "latest".into(), ..good() }, "--kv-events-version");
        let config = KvEventsConfig { endpoint: "here".into(), ..KvEventsConfig::default() };
        refuse(MockConfig { kv_events_config: config, ..good() }, "--kv-events-config");
        let transfer = |kv_transfer| MockConfig { kv_transfer, ..good() };
        let plain = KvTransferConfig::default;
        refuse(transfer(KvTransferConfig { kv_lease: -1.0, ..plain() }), "--kv-lease");
        refuse(transfer(KvTransferConfig { kv_transfer_slots: 0, ..plain() }), "--kv-transfer-slots");
        refuse(transfer(KvTransferConfig { kv_connector: Some("tcp".into()), ..plain() }), "--kv-connector");
        let faults = KvEventsFaults { lie: -0.1, ..KvEventsFaults::default() };
        refuse(MockConfig { kv_events_faults: faults, ..good() }, "--kv-events-faults");
    }
}
