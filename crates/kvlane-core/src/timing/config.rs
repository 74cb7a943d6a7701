//! Reads a model's shape from its Hugging Face `config.json`. The built-in models have the same format and the same
//! reader.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::shape::{Dtype, Experts, Latent, ModelShape, Window};

/// Architectures whose layers [`ModelShape`] describes.
const ARCHITECTURES: [&str; 16] = [
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "Mistral3ForConditionalGeneration",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
];

/// The built-in models that presets may name.
static MODELS: LazyLock<BTreeMap<String, Value>> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../../data/models.json")).expect("a test reads the table")
});

/// Why a `config.json` cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, or not an object.
    #[error("not a model's config.json: {0}")]
    Json(#[from] serde_json::Error),
    /// A required key is missing.
    #[error("the config has no `{0}`")]
    Missing(&'static str),
    /// A key has an invalid value.
    #[error("`{key}` is {value}, expected {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// The expected value.
        expected: &'static str,
    },
    /// An unsupported kind of layer.
    #[error("architecture `{0}` is not modelled; known are {list}", list = ARCHITECTURES.join(", "))]
    Architecture(String),
    /// An unsupported quantisation.
    #[error(
        "quantisation `{0}` is not modelled; known are fp8 and mxfp4. To model 16-bit weights, remove \
         `quantization_config`"
    )]
    Quantisation(String),
}

/// The config's JSON object.
struct Config<'a>(&'a Map<String, Value>);

// === impl ModelShape ===

impl ModelShape {
    /// The built-in model of that name.
    pub fn of(name: &str) -> Option<Self> {
        let shape = Self::from_config(name, MODELS.get(name)?);
        Some(shape.expect("a test reads every built-in model"))
    }

    /// The names that [`ModelShape::of`] accepts, in order.
    pub fn names() -> Vec<&'static str> {
        MODELS.keys().map(String::as_str).collect()
    }

    /// The shape of the model whose Hugging Face `config.json` is `text`, under the name `name`.
    ///
    /// # Errors
    ///
    /// If `text` is not a JSON object, a key is missing, or the layers are of a kind that the timing model does not
    /// support.
    pub fn from_config_json(name: &str, text: &str) -> Result<Self, ConfigError> {
        Self::from_config(name, &serde_json::from_str(text)?)
    }

    fn from_config(name: &str, value: &Value) -> Result<Self, ConfigError> {
        let outer = Config(value.as_object().ok_or(ConfigError::Missing("architectures"))?);
        let architecture = outer
            .get("architectures")
            .and_then(|names| names.get(0))
            .and_then(Value::as_str)
            .ok_or(ConfigError::Missing("architectures"))?;
        if !ARCHITECTURES.contains(&architecture) {
            return Err(ConfigError::Architecture(architecture.to_owned()));
        }
        // Multimodal models keep their decoder's dimensions in an object of their own.
        let config = Config(outer.get("text_config").and_then(Value::as_object).unwrap_or(outer.0));
        let layers = config.count("num_hidden_layers")?;
        let hidden = config.count("hidden_size")?;
        let heads = config.count("num_attention_heads")?;
        let tied = config.get("tie_word_embeddings").or(outer.get("tie_word_embeddings"));
        let quantised = outer.quantised()?.or(config.quantised()?);
        let experts = config.experts(layers, quantised.unwrap_or_default())?;
        let latent = config.latent()?;
        Ok(Self {
            name: name.to_owned(),
            layers,
            hidden,
            heads,
            kv_heads: config.optional_count("num_key_value_heads")?.unwrap_or(heads),
            head_dim: config.optional_count("head_dim")?.unwrap_or(hidden / heads),
            ffn: config.count("intermediate_size")?,
            vocab: config.count("vocab_size")?,
            tied_embeddings: tied.and_then(Value::as_bool).unwrap_or(false),
            // The 4-bit format is used for experts only.
            weights: quantised.filter(|dtype| *dtype == Dtype::Fp8).unwrap_or_default(),
            experts,
            latent,
            window: config.window(layers)?,
        })
    }
}

// === impl Config ===

impl<'a> Config<'a> {
    /// The value of a key; `null` counts as missing.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// A required number above zero.
    fn count(&self, key: &'static str) -> Result<u32, ConfigError> {
        self.optional_count(key)?.ok_or(ConfigError::Missing(key))
    }

    /// An optional number above zero.
    fn optional_count(&self, key: &'static str) -> Result<Option<u32>, ConfigError> {
        match self.optional_number(key)? {
            Some(0) => Err(unexpected(key, &Value::from(0), "a number above zero")),
            number => Ok(number),
        }
    }

    fn optional_number(&self, key: &'static str) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        // Larger values would overflow the arithmetic, and no model comes close.
        let number = value.as_u64().filter(|number| *number < 1 << 24);
        match number {
            Some(number) => Ok(Some(number as u32)),
            None => Err(unexpected(key, value, "a whole number below 16,777,216")),
        }
    }

    /// The first present key of several: model families use different names.
    fn first_of(&self, keys: &[&'static str]) -> Result<Option<u32>, ConfigError> {
        for key in keys {
            if let Some(count) = self.optional_count(key)? {
                return Ok(Some(count));
            }
        }
        Ok(None)
    }

    /// The storage type of the weights, if not 16 bits.
    fn quantised(&self) -> Result<Option<Dtype>, ConfigError> {
        let Some(quantisation) = self.get("quantization_config") else { return Ok(None) };
        let method = quantisation.get("quant_method").and_then(Value::as_str).unwrap_or_default();
        let format = quantisation.get("format").and_then(Value::as_str).unwrap_or_default();
        match (method, format) {
            ("fp8" | "fbgemm_fp8", _) | ("compressed-tensors", "float-quantized") => Ok(Some(Dtype::Fp8)),
            ("mxfp4", _) => Ok(Some(Dtype::Mxfp4)),
            _ => Err(ConfigError::Quantisation(format!("{method} {format}").trim().to_owned())),
        }
    }

    fn experts(&self, layers: u32, weights: Dtype) -> Result<Option<Experts>, ConfigError> {
        let names = ["n_routed_experts", "num_experts", "num_local_experts"];
        let Some(count) = self.first_of(&names)? else { return Ok(None) };
        let per_token = self
            .first_of(&["num_experts_per_tok", "experts_per_token"])?
            .ok_or(ConfigError::Missing("num_experts_per_tok"))?;
        let ffn = match self.optional_count("moe_intermediate_size")? {
            Some(ffn) => ffn,
            None => self.count("intermediate_size")?,
        };
        let shared = self.optional_number("n_shared_experts")?.unwrap_or(0);
        let shared_ffn = match self.optional_number("shared_expert_intermediate_size")? {
            Some(shared_ffn) => shared_ffn,
            None => shared * ffn,
        };
        let listed = self.get("mlp_only_layers").and_then(Value::as_array).map_or(0, Vec::len);
        let step = self.optional_count("decoder_sparse_step")?.unwrap_or(1);
        let leading = self.optional_number("first_k_dense_replace")?.unwrap_or(0);
        let dense_layers = (leading.max(listed as u32) + (layers - layers / step)).min(layers);
        if per_token > count {
            return Err(unexpected(
                "num_experts_per_tok",
                &Value::from(per_token),
                "at most the number of experts",
            ));
        }
        Ok(Some(Experts { count, per_token, ffn, shared_ffn, dense_layers, weights }))
    }

    fn latent(&self) -> Result<Option<Latent>, ConfigError> {
        let Some(kv_rank) = self.optional_count("kv_lora_rank")? else { return Ok(None) };
        Ok(Some(Latent {
            q_rank: self.optional_count("q_lora_rank")?.unwrap_or(0),
            kv_rank,
            rope_dim: self.count("qk_rope_head_dim")?,
            nope_dim: self.count("qk_nope_head_dim")?,
            v_dim: self.count("v_head_dim")?,
        }))
    }

    /// The layers with sliding-window attention: those listed, or all, unless switched off.
    fn window(&self, layers: u32) -> Result<Option<Window>, ConfigError> {
        if self.get("use_sliding_window").is_some_and(|value| value == &Value::Bool(false)) {
            return Ok(None);
        }
        let Some(tokens) = self.optional_count("sliding_window")? else { return Ok(None) };
        let windowed = match self.get("layer_types").and_then(Value::as_array) {
            Some(types) => types.iter().filter(|kind| *kind == "sliding_attention").count() as u32,
            None => layers - self.optional_number("max_window_layers")?.unwrap_or(0).min(layers),
        };
        Ok((windowed > 0).then_some(Window { tokens, layers: windowed.min(layers) }))
    }
}

fn unexpected(key: &'static str, value: &Value, expected: &'static str) -> ConfigError {
    ConfigError::Value { key, value: value.to_string(), expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Invariant: Parameter counts of the timing model are those that models publish, within 1 %.
    #[test]
    fn parameters_are_those_the_models_publish() {
        // Billions of parameters: all, and those active per token where the publisher states them.
        for (name, all, active) in [
            ("llama-2-7b", 6.74, None),
            ("llama-2-70b", 68.98, None),
            ("llama-3-8b", 8.03, None),
            ("llama-3.1-8b", 8.03, None),
            ("llama-3.3-70b", 70.55, None),
            ("llama-3.2-1b", 1.24, None),
            ("mistral-7b", 7.25, None),
            ("mixtral-8x7b", 46.7, Some(12.9)),
            ("qwen2.5-0.5b", 0.494, None),
            ("qwen2.5-7b", 7.62, None),
            ("qwen2.5-14b", 14.77, None),
            ("qwen2.5-32b", 32.76, None),
            ("qwen2.5-72b", 72.71, None),
            ("qwen3-8b", 8.19, None),
            ("qwen3-32b", 32.76, None),
            ("qwen3-vl-32b", 32.76, None),
            ("qwen3-30b-a3b", 30.53, Some(3.35)),
            ("qwen3-235b-a22b", 235.1, Some(22.2)),
            ("glm-4.5", 352.7, Some(33.6)),
            ("glm-4.5-air", 106.8, None),
            ("gpt-oss-120b", 116.8, Some(5.7)),
            ("gpt-oss-20b", 20.9, Some(4.2)),
            ("deepseek-v3", 671.0, Some(37.5)),
            ("deepseek-r1", 671.0, None),
        ] {
            let shape = ModelShape::of(name).unwrap();
            let near = |what: &str, observed: f64, expected: f64, share: f64| {
                let off = observed / (expected * 1e9) - 1.0;
                assert!(off.abs() < share, "{name} {what}: {observed:e}, expected {expected} ({off:+.4})");
            };
            near("all", shape.parameters(), all, 0.01);
            if let Some(active) = active {
                let ends = 2.0 * shape.head_parameters();
                near("active", shape.active_parameters() + ends, active, 0.03);
            }
        }
    }

    #[test]
    fn every_built_in_model_can_be_read() {
        assert!(ModelShape::names().len() > 25);
        for name in ModelShape::names() {
            let shape = ModelShape::of(name).unwrap();
            assert!(shape.weight_bytes() > 0.5e9 && shape.full_layers() > 0, "{name}");
        }
    }

    #[test]
    fn a_config_json_of_ones_own_is_read_as_the_built_in_ones() {
        let text = r#"{
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_size": 3584,
            "intermediate_size": 18944, "max_window_layers": 28, "num_attention_heads": 28,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
            "vocab_size": 152064
        }"#;
        let own = ModelShape::from_config_json("qwen2.5-7b", text).unwrap();
        assert_eq!(own, ModelShape::of("qwen2.5-7b").unwrap());
        assert_eq!(own.head_dim, 128, "derived from the hidden size");
    }

    #[test]
    fn quantisation_windows_and_leading_layers_are_read() {
        let gpt = ModelShape::of("gpt-oss-120b").unwrap();
        assert_eq!(gpt.window, Some(Window { tokens: 128, layers: 18 }));
        assert_eq!((gpt.weights, gpt.main_dtype()), (Dtype::Bf16, Dtype::Mxfp4));
        let deepseek = ModelShape::of("deepseek-v3").unwrap();
        assert_eq!((deepseek.weights, deepseek.main_dtype()), (Dtype::Fp8, Dtype::Fp8));
        assert_eq!((deepseek.moe_layers(), deepseek.kv_elements_per_layer()), (58.0, 576));
        let mistral = r#"{"architectures": ["MistralForCausalLM"], "hidden_size": 4096, "sliding_window": 4096,
            "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}"#;
        let window = ModelShape::from_config_json("m", mistral).unwrap().window;
        assert_eq!(window, Some(Window { tokens: 4096, layers: 32 }));
    }

    #[test]
    fn what_is_wrong_with_a_config_is_said() {
        let error = |text: &str| ModelShape::from_config_json("m", text).unwrap_err().to_string();
        assert!(error("{").contains("config.json"));
        assert!(error("[]").contains("`architectures`"));
        assert!(error(r#"{"architectures": ["MambaForCausalLM"]}"#).contains("MambaForCausalLM"));
        let llama = |more: &str| {
            let base = r#""architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
                "intermediate_size": 128, "vocab_size": 100"#;
            error(&format!("{{{base}, {more}}}"))
        };
        assert!(llama(r#""x": 1"#).contains("no `num_attention_heads`"));
        assert!(llama(r#""num_attention_heads": 0"#).contains("above zero"));
        assert!(llama(r#""num_attention_heads": "4""#).contains("whole number"));
        let awq = r#""num_attention_heads": 4, "quantization_config": {"quant_method": "awq"}"#;
        assert!(llama(awq).contains("`awq`"));
        let experts = r#""num_attention_heads": 4, "num_experts": 8"#;
        assert!(llama(experts).contains("`num_experts_per_tok`"));
    }
}
