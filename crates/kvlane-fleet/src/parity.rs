//! Tokenizer parity: whether an engine counts the tokens of prompts as the gateway does.

/// How an engine's count compares with ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parity {
    /// Every id of every prompt is the same.
    Verified,
    /// It could not be compared, or not all of it, for this reason. What the engine reports of each answer will tell.
    Unverified(String),
    /// They differ: where, and what to do.
    Mismatch(String),
}

/// What an engine said when it was last compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// The models that it listed.
    pub models: Vec<Listed>,
    /// Tokens of a KV block, where its metrics tell.
    pub block_tokens: Option<u32>,
    /// How its count compares with ours. Whether it agrees with the other members of its pools is not in here: that
    /// depends on who they are, see [`compare_members`](kvlane_control::parity_check::compare_members).
    pub with_us: Parity,
}

/// One model as an engine listed it, as far as its count depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The name that it is listed under.
    pub name: String,
    /// The base model's name; its own if it is no adapter.
    pub base: String,
    /// Its `root` in the list.
    pub root: Option<String>,
    /// Its context length, in tokens.
    pub max_model_len: Option<u64>,
}

// === impl Parity ===

impl Default for Parity {
    fn default() -> Self {
        Self::Unverified("not compared yet".into())
    }
}

impl Parity {
    /// Its name in what operators see.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Verified => "verified",
            Self::Unverified(_) => "unverified",
            Self::Mismatch(_) => "mismatch",
        }
    }

    /// Why this engine's KV events cannot be matched with prompts, if they cannot. Where prompts are `estimated`, they are
    /// matched only if the estimate is known to be what the engine counts.
    pub fn disbelief(&self, estimated: bool) -> Option<String> {
        match (self, estimated) {
            (Self::Mismatch(why), _) => {
                Some(format!("tokens are counted in another way here than by this engine: {why}"))
            }
            (Self::Unverified(why), true) => Some(format!(
                "prompts are estimated here, and nothing says that this engine counts so ({why}): give a tokenizer \
                 (--tokenizer-path or tokens.path), or let the engine count (tokens.source: engine)"
            )),
            (Self::Verified | Self::Unverified(_), _) => None,
        }
    }

    /// Whether the engine is known to count in another way.
    pub fn is_mismatch(&self) -> bool {
        matches!(self, Self::Mismatch(_))
    }

    /// Why it is not verified.
    pub fn why(&self) -> Option<&str> {
        match self {
            Self::Verified => None,
            Self::Unverified(why) | Self::Mismatch(why) => Some(why),
        }
    }

    /// The worse of two.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Mismatch(_), _) | (Self::Unverified(_), Self::Verified | Self::Unverified(_)) => self,
            _ => other,
        }
    }
}
