//! A model's dimensions, and its parameters, bytes and operations derived from them.

use serde::{Deserialize, Serialize};

use super::GPUS_MAX;

/// A number format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 16 bits, bfloat16 or half.
    #[default]
    Bf16,
    /// 8 bits, with one scale for many numbers.
    Fp8,
    /// 4 bits, with an 8-bit scale per 32 numbers (OCP Microscaling Formats 1.0).
    Mxfp4,
}

/// The dimensions of a decoder, as in its Hugging Face `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Short name, as in a preset: `qwen2.5-7b`, `qwen2.5-7b:fp8`.
    pub name: String,
    /// `num_hidden_layers`.
    pub layers: u32,
    /// `hidden_size`.
    pub hidden: u32,
    /// `num_attention_heads`.
    pub heads: u32,
    /// `num_key_value_heads`.
    pub kv_heads: u32,
    /// `head_dim`.
    pub head_dim: u32,
    /// `intermediate_size` of layers without experts.
    pub ffn: u32,
    /// `vocab_size`.
    pub vocab: u32,
    /// `tie_word_embeddings`: the output matrix is the embedding.
    #[serde(default)]
    pub tied_embeddings: bool,
    /// Type of the layers' weights, except experts. Embedding and output matrix always have 16 bits.
    #[serde(default)]
    pub weights: Dtype,
    /// Mixture of experts, if any.
    #[serde(default)]
    pub experts: Option<Experts>,
    /// Multi-head latent attention (MLA), if used instead of keys and values per head.
    #[serde(default)]
    pub latent: Option<Latent>,
    /// Layers with sliding-window attention, if any.
    #[serde(default)]
    pub window: Option<Window>,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experts {
    /// Routed experts per layer.
    pub count: u32,
    /// Routed experts per token.
    pub per_token: u32,
    /// `intermediate_size` of one expert.
    pub ffn: u32,
    /// `intermediate_size` of the shared experts, 0 if there are none.
    pub shared_ffn: u32,
    /// Layers without experts.
    pub dense_layers: u32,
    /// Type of the routed experts' weights.
    pub weights: Dtype,
}

/// Multi-head latent attention, DeepSeek-V2 (arXiv:2405.04434): one compressed vector represents the keys and values of
/// all heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latent {
    /// `q_lora_rank`, 0 if queries are not compressed.
    pub q_rank: u32,
    /// `kv_lora_rank`: the compressed vector.
    pub kv_rank: u32,
    /// `qk_rope_head_dim`: the positional part, stored beside the compressed vector.
    pub rope_dim: u32,
    /// `qk_nope_head_dim`.
    pub nope_dim: u32,
    /// `v_head_dim`.
    pub v_dim: u32,
}

/// Sliding-window attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Window size in tokens.
    pub tokens: u32,
    /// Number of layers with a window.
    pub layers: u32,
}

// === impl Dtype ===

impl Dtype {
    /// Bytes per number.
    pub fn bytes(self) -> f64 {
        match self {
            Self::Bf16 => 2.0,
            Self::Fp8 => 1.0,
            Self::Mxfp4 => 0.53125,
        }
    }

    /// The name in a preset or a flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Mxfp4 => "mxfp4",
        }
    }
}

impl std::str::FromStr for Dtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Bf16, Self::Fp8, Self::Mxfp4];
        all.into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| format!("`{text}` is not a number type; expected bf16, fp8 or mxfp4"))
    }
}

// === impl ModelShape ===

impl ModelShape {
    /// The same model with all weights of its layers stored as `dtype`.
    #[must_use]
    pub fn with_weights(mut self, dtype: Dtype) -> Self {
        if let Some(experts) = &mut self.experts {
            experts.weights = dtype;
        }
        self.weights = dtype;
        self
    }

    /// Weights of one layer's attention.
    fn attention_parameters(&self) -> f64 {
        let [hidden, heads, kv_heads, head_dim] =
            [self.hidden, self.heads, self.kv_heads, self.head_dim].map(f64::from);
        let Some(latent) = self.latent else {
            return 2.0 * hidden * heads * head_dim + 2.0 * hidden * kv_heads * head_dim;
        };
        let [q_rank, kv_rank, rope, nope, v] =
            [latent.q_rank, latent.kv_rank, latent.rope_dim, latent.nope_dim, latent.v_dim].map(f64::from);
        let query = heads * (nope + rope);
        let queries = if latent.q_rank > 0 { q_rank * (hidden + query) } else { hidden * query };
        queries + hidden * (kv_rank + rope) + kv_rank * heads * (nope + v) + heads * v * hidden
    }

    /// Layers with experts.
    pub fn moe_layers(&self) -> f64 {
        self.experts.map_or(0.0, |experts| f64::from(self.layers.saturating_sub(experts.dense_layers)))
    }

    /// Weights of all layers' matrices that every token uses: attention, dense layers, shared experts, routers.
    pub fn common_parameters(&self) -> f64 {
        let (hidden, layers) = (f64::from(self.hidden), f64::from(self.layers));
        let dense_layers = layers - self.moe_layers();
        let shared = self.experts.map_or(0.0, |experts| {
            self.moe_layers() * hidden * (3.0 * f64::from(experts.shared_ffn) + f64::from(experts.count))
        });
        layers * self.attention_parameters() + dense_layers * 3.0 * hidden * f64::from(self.ffn) + shared
    }

    /// Weights of all layers' routed experts.
    pub fn expert_parameters(&self) -> f64 {
        self.experts.map_or(0.0, |experts| {
            let one = 3.0 * f64::from(self.hidden) * f64::from(experts.ffn);
            self.moe_layers() * f64::from(experts.count) * one
        })
    }

    /// The share of routed experts that one token uses: 0 without experts.
    pub fn expert_share(&self) -> f64 {
        self.experts.map_or(0.0, |experts| f64::from(experts.per_token) / f64::from(experts.count.max(1)))
    }

    /// Weights of all layers' matrices that one token uses.
    pub fn active_parameters(&self) -> f64 {
        self.common_parameters() + self.expert_share() * self.expert_parameters()
    }

    /// Weights of the output matrix; the embedding has as many, and is the same matrix if they are tied.
    pub fn head_parameters(&self) -> f64 {
        f64::from(self.hidden) * f64::from(self.vocab)
    }

    /// All weights. Norms and biases, less than one in a thousand, are excluded.
    pub fn parameters(&self) -> f64 {
        let ends = if self.tied_embeddings { 1.0 } else { 2.0 };
        self.common_parameters() + self.expert_parameters() + ends * self.head_parameters()
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> f64 {
        let ends = if self.tied_embeddings { 1.0 } else { 2.0 };
        self.common_parameters() * self.weights.bytes()
            + self.expert_bytes()
            + ends * self.head_parameters() * Dtype::Bf16.bytes()
    }

    /// Bytes of all routed experts.
    pub fn expert_bytes(&self) -> f64 {
        self.expert_parameters() * self.experts.map_or(0.0, |experts| experts.weights.bytes())
    }

    /// The type of most of the weights.
    pub fn main_dtype(&self) -> Dtype {
        self.experts.map_or(self.weights, |experts| experts.weights)
    }

    /// Layers with full attention.
    pub fn full_layers(&self) -> u32 {
        self.layers - self.window.map_or(0, |window| window.layers.min(self.layers))
    }

    /// Numbers that one layer stores per token, over all GPUs among which they are split.
    pub fn kv_elements_per_layer(&self) -> u64 {
        match self.latent {
            Some(latent) => u64::from(latent.kv_rank) + u64::from(latent.rope_dim),
            None => 2 * u64::from(self.kv_heads) * u64::from(self.head_dim),
        }
    }

    /// Checks that tensor parallelism can spread the model over `gpus`: vLLM and SGLang give every GPU the same number
    /// of attention heads, and the same number of key-value heads, or replicate each key-value head on the same number
    /// of GPUs.
    ///
    /// # Errors
    ///
    /// Names the heads that cannot be divided evenly, and the valid numbers of GPUs.
    pub fn check_split(&self, gpus: u32) -> Result<(), String> {
        let splits = |gpus: u32| {
            let of_kv = self.kv_heads.is_multiple_of(gpus) || gpus.is_multiple_of(self.kv_heads);
            self.heads.is_multiple_of(gpus) && (of_kv || self.latent.is_some())
        };
        // A model without heads holds only a machine's limits and fits any number of GPUs.
        if self.heads == 0 || self.kv_heads == 0 || (gpus > 0 && splits(gpus)) {
            return Ok(());
        }
        let fine: Vec<String> = (1..=self.heads.min(GPUS_MAX))
            .filter(|gpus| splits(*gpus))
            .map(|gpus| gpus.to_string())
            .collect();
        let Self { heads, kv_heads, .. } = self;
        let of_kv =
            if self.latent.is_some() { String::new() } else { format!(" and {kv_heads} key-value heads") };
        Err(format!(
            "{gpus} GPUs cannot share {heads} attention heads{of_kv} evenly (tensor parallelism); use one of {}",
            fine.join(", ")
        ))
    }

    /// Number of GPUs that one token's keys and values are split over. Key-value heads are split until each GPU has
    /// one; a latent vector is on every GPU.
    pub fn kv_split(&self, gpus: u32) -> u32 {
        if self.latent.is_some() { 1 } else { gpus.clamp(1, self.kv_heads.max(1)) }
    }

    /// FLOPs of one layer's prompt attention per query-key pair: a product with the key and one with the value, per
    /// head.
    pub fn pair_flops(&self) -> f64 {
        let widths = match self.latent {
            Some(latent) => f64::from(latent.nope_dim + latent.rope_dim + latent.v_dim),
            None => 2.0 * f64::from(self.head_dim),
        };
        2.0 * f64::from(self.heads) * widths
    }

    /// FLOPs of one layer's decode attention per context token. Latent attention works on the compressed vectors, which
    /// are longer than a head.
    pub fn context_flops(&self) -> f64 {
        let widths = match self.latent {
            Some(latent) => f64::from(2 * latent.kv_rank + latent.rope_dim),
            None => 2.0 * f64::from(self.head_dim),
        };
        2.0 * f64::from(self.heads) * widths
    }

    /// FLOPs of one layer to expand keys and values from the latent vector of a token before the chunk.
    pub fn expand_flops(&self) -> f64 {
        self.latent.map_or(0.0, |latent| {
            2.0 * f64::from(latent.kv_rank)
                * f64::from(self.heads)
                * f64::from(latent.nope_dim + latent.v_dim)
        })
    }

    /// The width of a layer's queries and keys with rotary embedding.
    pub fn rotary_width(&self) -> f64 {
        match self.latent {
            Some(latent) => f64::from((self.heads + 1) * latent.rope_dim),
            None => f64::from((self.heads + self.kv_heads) * self.head_dim),
        }
    }

    /// The width of one token's activations in a layer's feed-forward part, averaged over the layers.
    pub fn active_ffn(&self) -> f64 {
        let layers = f64::from(self.layers.max(1));
        let experts = self.experts.map_or(0.0, |experts| {
            self.moe_layers() * f64::from(experts.per_token * experts.ffn + experts.shared_ffn)
        });
        ((layers - self.moe_layers()) * f64::from(self.ffn) + experts) / layers
    }
}
