//! Timing file: a timing model with an engine's limits, written by `kvlane calibrate`.

use serde::{Deserialize, Serialize};

use super::{TimingModel, Traffic};

/// Largest accepted host time, in seconds: with more, simulating one request could take years.
const HOST_SECS_MAX: f64 = 60.0;

/// Largest accepted bytes of element-wise work for a token, a layer and a unit of width.
const TRAFFIC_BYTES_MAX: f64 = 1e6;

/// A timing model and the limits of its engine, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimingFile {
    /// Always [`TimingFile::SCHEMA`].
    pub schema: String,
    /// The model.
    pub timing: TimingModel,
    /// KV cache capacity in tokens, if known; otherwise derived from the model and the machine.
    #[serde(default)]
    pub kv_capacity_tokens: Option<u64>,
    /// Tokens per KV block, if known.
    #[serde(default)]
    pub block_tokens: Option<u32>,
    /// Most concurrent sequences, if known.
    #[serde(default)]
    pub max_num_seqs: Option<u32>,
    /// Most tokens per step, if known.
    #[serde(default)]
    pub max_num_batched_tokens: Option<u32>,
    /// Deviations of the model from the measurements that it was fitted to.
    #[serde(default)]
    pub residuals: Vec<Residual>,
    /// Source of the figures, for information.
    #[serde(default)]
    pub source: String,
}

/// One measurement and the model's value for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Residual {
    /// What was measured: `prefill 8192`, `decode 32 x 2048`.
    pub what: String,
    /// The measurement in seconds.
    pub measured_s: f64,
    /// The model's value in seconds.
    pub modelled_s: f64,
}

/// Why a text is not a timing file.
#[derive(Debug, thiserror::Error)]
pub enum TimingFileError {
    /// Not JSON, or a field is missing or of the wrong kind.
    #[error("not a timing file: {0}; `kvlane calibrate` writes one")]
    Json(#[from] serde_json::Error),
    /// Another format or version.
    #[error("the file's schema is `{0}`, this version reads `{schema}`", schema = TimingFile::SCHEMA)]
    Schema(String),
    /// A figure that is not positive and finite.
    #[error("`{0}` must be a positive finite number")]
    NotPositive(&'static str),
    /// The number of GPUs does not divide the model's heads evenly.
    #[error("`timing.gpus`: {0}")]
    Split(String),
    /// A host time out of range.
    #[error("`{0}` must be seconds between 0 and {HOST_SECS_MAX}")]
    HostTime(&'static str),
    /// Memory traffic out of range.
    #[error("`{0}` must be between 0 and {1}")]
    Traffic(&'static str, f64),
}

// === impl TimingFile ===

impl TimingFile {
    /// Name and version of the format.
    pub const SCHEMA: &str = "kvlane.timing/1";

    /// A file with only a timing model.
    pub fn new(timing: TimingModel) -> Self {
        Self {
            schema: Self::SCHEMA.into(),
            timing,
            kv_capacity_tokens: None,
            block_tokens: None,
            max_num_seqs: None,
            max_num_batched_tokens: None,
            residuals: Vec::new(),
            source: String::new(),
        }
    }

    /// Reads the JSON text of a timing file.
    ///
    /// # Errors
    ///
    /// If the text is not JSON of this schema, or a figure would give a negative time or none.
    pub fn from_json(text: &str) -> Result<Self, TimingFileError> {
        let file: Self = serde_json::from_str(text)?;
        if file.schema != Self::SCHEMA {
            return Err(TimingFileError::Schema(file.schema));
        }
        let (hardware, host) = (&file.timing.hardware, &file.timing.host);
        let share = &hardware.efficiency;
        for (name, value) in [
            ("timing.hardware.peak_flops", hardware.peak_flops),
            ("timing.hardware.memory_bytes_per_s", hardware.memory_bytes_per_s),
            ("timing.hardware.memory_bytes", hardware.memory_bytes),
            ("timing.hardware.all_reduce_bytes_per_s", hardware.all_reduce_bytes_per_s),
            ("timing.hardware.efficiency.compute", share.compute),
            ("timing.hardware.efficiency.weights", share.weights),
            ("timing.hardware.efficiency.kv", share.kv),
            ("timing.hardware.efficiency.attention", share.attention),
            ("timing.gpus", f64::from(file.timing.gpus)),
            ("timing.model.layers", f64::from(file.timing.model.layers)),
            ("timing.model.hidden", f64::from(file.timing.model.hidden)),
            ("kv_capacity_tokens", file.kv_capacity_tokens.map_or(1.0, |tokens| tokens as f64)),
            ("block_tokens", file.block_tokens.map_or(1.0, f64::from)),
            ("max_num_seqs", file.max_num_seqs.map_or(1.0, f64::from)),
            ("max_num_batched_tokens", file.max_num_batched_tokens.map_or(1.0, f64::from)),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return Err(TimingFileError::NotPositive(name));
            }
        }
        file.timing.model.check_split(file.timing.gpus).map_err(TimingFileError::Split)?;
        for (name, value) in [
            ("timing.hardware.all_reduce_secs", hardware.all_reduce_secs),
            ("timing.host.step_secs", host.step_secs),
            ("timing.host.sequence_secs", host.sequence_secs),
            ("timing.host.request_secs", host.request_secs),
        ] {
            if !(0.0..=HOST_SECS_MAX).contains(&value) {
                return Err(TimingFileError::HostTime(name));
            }
        }
        let Traffic { norm_bytes, rotary_bytes, activation_bytes, shared_read_saved } = file.timing.traffic;
        for (name, value, most) in [
            ("timing.traffic.norm_bytes", norm_bytes, TRAFFIC_BYTES_MAX),
            ("timing.traffic.rotary_bytes", rotary_bytes, TRAFFIC_BYTES_MAX),
            ("timing.traffic.activation_bytes", activation_bytes, TRAFFIC_BYTES_MAX),
            ("timing.traffic.shared_read_saved", shared_read_saved, 1.0),
        ] {
            if !(0.0..=most).contains(&value) {
                return Err(TimingFileError::Traffic(name, most));
            }
        }
        Ok(file)
    }

    /// The file's JSON text: indented, with a trailing newline.
    pub fn to_json(&self) -> String {
        let text = serde_json::to_string_pretty(self).expect("numbers and strings can be written");
        text + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> TimingFile {
        let mut file = TimingFile::new(TimingModel::preset("qwen3-32b@h100x2").unwrap());
        file.kv_capacity_tokens = Some(302_000);
        file.residuals.push(Residual { what: "prefill 8192".into(), measured_s: 0.514, modelled_s: 0.513 });
        file
    }

    #[test]
    fn a_file_reads_back_as_it_was() {
        assert_eq!(TimingFile::from_json(&file().to_json()).unwrap(), file());
    }

    #[test]
    fn a_file_needs_no_host_and_no_limits() {
        let mut value = serde_json::to_value(TimingFile::new(file().timing)).unwrap();
        value["timing"].as_object_mut().unwrap().remove("host");
        for key in ["kv_capacity_tokens", "block_tokens", "max_num_seqs", "residuals", "source"] {
            value.as_object_mut().unwrap().remove(key);
        }
        let read = TimingFile::from_json(&value.to_string()).unwrap();
        assert_eq!(read, TimingFile::new(file().timing));
    }

    #[test]
    fn a_bad_file_is_refused_and_says_where() {
        let refuse = |path: &str, value: serde_json::Value| {
            let mut json = serde_json::to_value(file()).unwrap();
            *json.pointer_mut(path).unwrap() = value;
            TimingFile::from_json(&json.to_string()).unwrap_err().to_string()
        };
        assert!(refuse("/schema", "kvlane.timing/9".into()).contains("kvlane.timing/9"));
        assert!(refuse("/timing/gpus", 0.into()).contains("`timing.gpus`"));
        assert!(
            refuse("/timing/gpus", 3.into())
                .contains("`timing.gpus`: 3 GPUs cannot share 64 attention heads")
        );
        assert!(refuse("/timing/hardware/efficiency/kv", 0.into()).contains("efficiency.kv"));
        assert!(refuse("/timing/host/step_secs", (-1.0).into()).contains("host.step_secs"));
        let mut odd = file();
        odd.timing.traffic.shared_read_saved = 1.5;
        let why = TimingFile::from_json(&odd.to_json()).unwrap_err().to_string();
        assert_eq!(why, "`timing.traffic.shared_read_saved` must be between 0 and 1");
        assert!(refuse("/timing/model/layers", "many".into()).contains("many"));
        assert!(TimingFile::from_json("{}").unwrap_err().to_string().contains("schema"));
    }
}
