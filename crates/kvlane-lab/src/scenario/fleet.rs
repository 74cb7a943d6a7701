//! The engines of a scenario: one group of equal engines, or several groups.

use std::fmt;
use std::path::{Path, PathBuf};

use kvlane_core::timing::{Dtype, TimingFile, TimingModel};
use kvlane_sim::engine::{AdapterSlots, Batching, EngineConfig};
use kvlane_sim::pool::Eviction;
use kvlane_sim::tier::CpuTier;
use kvlane_sim::transfer::TransferConfig;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::RunError;

/// The engines, group by group. In a file, a single group stands for a list of one.
#[derive(Clone, Debug, PartialEq)]
pub struct Fleet {
    /// Groups of one pool: the block size and the link are the same in all.
    pub groups: Vec<Group>,
}

/// Equal engines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Group {
    /// Number of engines.
    pub engines: u32,
    /// Model and machine, as in `qwen3-32b@h100x2`. Instead: `model`, `gpu` and `tp`, or `timing`.
    pub preset: Option<String>,
    /// A model in the tables.
    pub model: Option<String>,
    /// A GPU in the tables.
    pub gpu: Option<String>,
    /// GPUs the model is spread over.
    pub tp: u32,
    /// A timing file that `kvlane calibrate` wrote.
    pub timing: Option<PathBuf>,
    /// Type of keys and values (`--kv-cache-dtype`): `bf16` or `fp8`; else the model's.
    pub kv_dtype: Option<String>,
    /// Tokens in a KV block.
    pub block_tokens: Option<u32>,
    /// Share of GPU memory the engine may use (`--gpu-memory-utilization`).
    pub memory_share: f64,
    /// Tokens the KV cache holds; else they follow from the model, the machine and `memory_share`.
    pub kv_capacity_tokens: Option<u64>,
    /// Eviction policy.
    pub eviction: Eviction,
    /// Host memory as a second tier of the cache.
    pub cpu_tier: Option<CpuTier>,
    /// Batching of prefill and decode.
    pub batching: Batching,
    /// Link for KV blocks between engines.
    pub link: TransferConfig,
    /// Seconds of the host in each step, beside the GPU's; else the timing's.
    pub host_step_s: Option<f64>,
    /// Maximum sequences in a step; else vLLM's default for the machine.
    pub max_num_seqs: Option<u32>,
    /// Maximum tokens in a step; else vLLM's default for the machine.
    pub max_num_batched_tokens: Option<u32>,
    /// Adapters that an engine can have loaded at once (`--max-loras`); without it, each is always loaded.
    pub max_loras: Option<u32>,
    /// Then: seconds to load one.
    pub adapter_load_s: f64,
}

/// Maximum engines of a fleet: the number of ids in a pool.
const ENGINES_MAX: u32 = 65_535;
/// Maximum KV blocks of a fleet, host memory included: their tables take up to 80 bytes for each.
const BLOCKS_MAX: u64 = 1 << 27;
/// Slowest link: a prompt has to arrive within the time of a run.
const BYTES_PER_S_MIN: f64 = 1e6;
// === impl Fleet ===

impl From<Group> for Fleet {
    fn from(group: Group) -> Self {
        Self { groups: vec![group] }
    }
}

impl Fleet {
    /// Number of engines.
    pub fn engines(&self) -> u32 {
        self.groups.iter().fold(0, |sum, group| sum.saturating_add(group.engines))
    }

    /// Link for KV blocks between engines.
    pub fn link(&self) -> TransferConfig {
        self.groups.first().map(|group| group.link).unwrap_or_default()
    }

    /// Each engine, group after group. Paths are relative to `directory`.
    ///
    /// # Errors
    /// If a model or a machine is unknown, keys are missing or conflict, a value is invalid, or groups do not match.
    pub fn configs(&self, directory: &Path) -> Result<Vec<EngineConfig>, RunError> {
        let bad = |why: String| Err(RunError::Fleet(why));
        let (groups, engines) = (&self.groups, self.engines());
        if !(1..=ENGINES_MAX).contains(&engines) || groups.iter().any(|group| group.engines == 0) {
            return bad(format!("engines must be between 1 and {ENGINES_MAX}"));
        }
        let kinds: Vec<EngineConfig> =
            groups.iter().map(|group| group.engine(directory)).collect::<Result<_, _>>()?;
        if kinds.iter().any(|kind| kind.block_tokens != kinds[0].block_tokens)
            || groups.iter().any(|group| group.link != groups[0].link)
        {
            return bad(
                "block_tokens and link must be the same in all groups of a fleet: they form one pool"
                    .to_owned(),
            );
        }
        let blocks = kinds.iter().zip(groups).fold(0u64, |sum, (kind, group)| {
            let tier = kind.cpu_tier.map_or(0, |tier| tier.blocks);
            let each = u64::from(kind.blocks) + u64::from(tier);
            sum.saturating_add(each.saturating_mul(group.engines.into()))
        });
        if blocks > BLOCKS_MAX {
            return bad(format!(
                "{engines} engines have {blocks} blocks in all, more than {BLOCKS_MAX}: use fewer or larger blocks, or fewer engines"
            ));
        }
        let each = kinds.into_iter().zip(groups);
        Ok(each.flat_map(|(kind, group)| vec![kind; group.engines as usize]).collect())
    }
}

impl Serialize for Fleet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.groups[..] {
            [group] => group.serialize(serializer),
            groups => groups.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Fleet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany;
        impl<'de> Visitor<'de> for OneOrMany {
            type Value = Fleet;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a group of engines, or a list of groups")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Fleet, A::Error> {
                Group::deserialize(MapAccessDeserializer::new(map)).map(Fleet::from)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Fleet, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(|groups| Fleet { groups })
            }
        }
        deserializer.deserialize_any(OneOrMany)
    }
}

// === impl Group ===

impl Default for Group {
    fn default() -> Self {
        Self {
            engines: 1,
            preset: None,
            model: None,
            gpu: None,
            tp: 1,
            timing: None,
            kv_dtype: None,
            block_tokens: None,
            memory_share: 0.90,
            kv_capacity_tokens: None,
            eviction: Eviction::Lru,
            cpu_tier: None,
            batching: Batching::Mixed,
            link: TransferConfig::default(),
            host_step_s: None,
            max_num_seqs: None,
            max_num_batched_tokens: None,
            max_loras: None,
            adapter_load_s: 0.5,
        }
    }
}

impl Group {
    /// The engine of this group. Paths are relative to `directory`.
    ///
    /// # Errors
    /// If the model or the machine is unknown, keys are missing or conflict, or a value is invalid.
    fn engine(&self, directory: &Path) -> Result<EngineConfig, RunError> {
        let bad = |why: &str| RunError::Fleet(why.to_owned());
        let share = self.memory_share;
        if !(share > 0.0 && share <= 1.0) {
            return Err(bad("memory_share must be above 0 and at most 1"));
        }
        let speed = |bytes_per_s: f64| bytes_per_s > 0.0 && bytes_per_s.is_finite();
        let span = |secs: f64| (0.0..1e6).contains(&secs);
        if !speed(self.link.bytes_per_s) || !span(self.link.setup_s) {
            return Err(bad("link: bytes_per_s must be above 0, and setup_s at least 0"));
        }
        if self.cpu_tier.is_some_and(|tier| !speed(tier.bytes_per_s) || !span(tier.latency_s)) {
            return Err(bad("cpu_tier: bytes_per_s must be above 0, and latency_s at least 0"));
        }
        let (mut timing, file) = match (&self.timing, &self.preset, &self.model, &self.gpu) {
            (Some(path), None, None, None) => {
                let read =
                    |why: &dyn fmt::Display| RunError::Fleet(format!("timing {}: {why}", path.display()));
                let text = std::fs::read_to_string(directory.join(path)).map_err(|why| read(&why))?;
                let file = TimingFile::from_json(&text).map_err(|why| read(&why))?;
                (file.timing.clone(), Some(file))
            }
            (None, Some(preset), None, None) => (TimingModel::preset(preset)?, None),
            (None, None, Some(model), Some(gpu)) => {
                let machine = if self.tp == 1 { gpu.clone() } else { format!("{gpu}x{}", self.tp) };
                (TimingModel::preset(&format!("{model}@{machine}"))?, None)
            }
            _ => {
                return Err(bad("set exactly one of preset, model with gpu, and timing"));
            }
        };
        let kv_dtype = match self.kv_dtype.as_deref() {
            None => timing.kv_dtype,
            Some("bf16") => Dtype::Bf16,
            Some("fp8") => Dtype::Fp8,
            Some(other) => return Err(bad(&format!("kv_dtype `{other}`: must be bf16 or fp8"))),
        };
        // The capacity in a timing file is for the data type with which it was measured.
        let measured_capacity =
            file.as_ref().filter(|f| f.timing.kv_dtype == kv_dtype).and_then(|f| f.kv_capacity_tokens);
        timing.kv_dtype = kv_dtype;
        timing.host.step_secs = self.host_step_s.unwrap_or(timing.host.step_secs);
        let file = file.as_ref();
        let block_tokens = self.block_tokens.or(file.and_then(|f| f.block_tokens)).unwrap_or(16);
        if !(1..=65_536).contains(&block_tokens) {
            return Err(bad("block_tokens must be between 1 and 65536"));
        }
        let mut engine = EngineConfig::vllm(timing, block_tokens, share);
        if let Some(tokens) = self.kv_capacity_tokens.or(measured_capacity) {
            engine.blocks = u32::try_from(tokens / u64::from(block_tokens)).unwrap_or(u32::MAX);
        }
        self.check()?;
        let or_file = |own: Option<u32>, from: fn(&TimingFile) -> Option<u32>| own.or(file.and_then(from));
        if let Some(seqs) = or_file(self.max_num_seqs, |f| f.max_num_seqs) {
            engine.max_num_seqs = seqs;
        }
        if let Some(tokens) = or_file(self.max_num_batched_tokens, |f| f.max_num_batched_tokens) {
            engine.max_num_batched_tokens = tokens;
        }
        (engine.eviction, engine.cpu_tier, engine.batching) = (self.eviction, self.cpu_tier, self.batching);
        engine.adapters = self.max_loras.map(|count| AdapterSlots { count, load_s: self.adapter_load_s });
        if engine.blocks == 0 {
            return Err(bad(
                "the KV cache holds no block: use more GPUs, a larger memory_share or a smaller model",
            ));
        }
        Ok(engine)
    }

    /// # Errors
    /// If a limit is zero or a value is so low that a transfer would not end.
    fn check(&self) -> Result<(), RunError> {
        let bad = |why: &str| Err(RunError::Fleet(why.to_owned()));
        let speed = |bytes_per_s: f64| (BYTES_PER_S_MIN..=1e18).contains(&bytes_per_s);
        let span = |secs: f64| (0.0..1e3).contains(&secs);
        if self.max_num_seqs == Some(0) || self.max_num_batched_tokens == Some(0) {
            return bad("max_num_seqs and max_num_batched_tokens must be at least 1");
        }
        if !self.host_step_s.is_none_or(|secs| (0.0..10.0).contains(&secs)) {
            return bad("host_step_s must be at least 0 and below 10");
        }
        if !speed(self.link.bytes_per_s) || !span(self.link.setup_s) || self.link.slots == 0 {
            return bad("link: bytes_per_s must be at least 1e6, setup_s 0 to 1000, and slots at least 1");
        }
        if self.max_loras == Some(0) || !span(self.adapter_load_s) {
            return bad("max_loras must be at least 1, and adapter_load_s 0 to 1000");
        }
        let share = |share: f64| (0.0..=1.0).contains(&share);
        if !share(self.link.slow_share) || !share(self.link.overlap) || !span(self.link.slow_s) {
            return bad("link: slow_share and overlap must be between 0 and 1, and slow_s 0 to 1000");
        }
        if self.cpu_tier.is_some_and(|tier| !speed(tier.bytes_per_s) || !span(tier.latency_s)) {
            return bad("cpu_tier: bytes_per_s must be at least 1e6, and latency_s 0 to 1000");
        }
        Ok(())
    }
}
