//! Tokenizer parity: whether an engine counts the tokens of prompts as the gateway does.

/// The result of comparing an engine's token counts with the gateway's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parity {
    /// All token ids of all prompts are equal.
    Verified,
    /// A comparison was not possible, or only in part, for this reason. The reuse that the engine reports will show
    /// whether they agree.
    Unverified(String),
    /// They differ: where, and what to do.
    Mismatch(String),
}

/// An engine's answers at the last comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// The models that it listed.
    pub models: Vec<Listed>,
    /// Tokens of a KV block, if its metrics state it.
    pub block_tokens: Option<u32>,
    /// How its count compares with ours. Whether it agrees with the other members of its pools is not in here: that
    /// depends on those members, see [`compare_members`](kvlane_control::parity_check::compare_members).
    pub with_us: Parity,
}

/// One model of an engine's model list, with the fields that affect counting.
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
    /// Its name in the admin API.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Verified => "verified",
            Self::Unverified(_) => "unverified",
            Self::Mismatch(_) => "mismatch",
        }
    }

    /// Why this engine's KV events cannot be matched with prompts, if they cannot. Where prompts are `estimated`,
    /// they are matched only if the estimate is known to equal the engine's count.
    pub fn disbelief(&self, estimated: bool) -> Option<String> {
        match (self, estimated) {
            (Self::Mismatch(why), _) => {
                Some(format!("the gateway and this engine count tokens differently: {why}"))
            }
            (Self::Unverified(why), true) => Some(format!(
                "the gateway estimates token counts, and it is not verified that the estimate equals this engine's count ({why}): set a tokenizer \
                 (--tokenizer-path or tokens.path), or let the engine count (tokens.source: engine)"
            )),
            (Self::Verified | Self::Unverified(_), _) => None,
        }
    }

    /// Whether the engine is known to count differently.
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

    /// The worse of the two.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Mismatch(_), _) | (Self::Unverified(_), Self::Verified | Self::Unverified(_)) => self,
            _ => other,
        }
    }
}
