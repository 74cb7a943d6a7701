//! Prefill/decode disaggregation: one endpoint computes a prompt, another decodes its answer, and the KV blocks move
//! from the first to the second.
//!
//! A split placement is one more candidate with a price, so the choice is made for each request: [`Role`] says what an
//! endpoint may be used for, [`Transfers`] what moving blocks between two endpoints takes.

mod median;
mod transfers;
mod window;

use serde::{Deserialize, Serialize};

use crate::setting;
use crate::time::Nanos;

pub use transfers::{Link, Transfers};

/// What an endpoint is used for. llm-d's label `llm-d.ai/role` has the same names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Prompts and answers.
    #[default]
    Both,
    /// Prompts, for other endpoints to decode.
    Prefill,
    /// Answers, and prompts that are not worth a transfer.
    Decode,
    /// Images and audio of prompts, for other endpoints. No request is placed here.
    Encode,
}

/// An endpoint's part in disaggregated serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// What it is used for.
    pub role: Role,
    /// Endpoints with the same number can send KV blocks to each other; `None` where it can send none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<u16>,
    /// Whether it can serve a request alone. SGLang's engines in a disaggregation mode cannot.
    pub serves_alone: bool,
}

/// What is known of a transfer that is tried before requests are split between two endpoints: the first transfer of a
/// pair may take much longer than later ones, because the engines connect first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarmUp {
    /// It will be tried. Until then no request is split between these endpoints, if another way serves it.
    Due,
    /// The blocks have arrived.
    Ended {
        /// Time of the first transfer.
        first: Nanos,
        /// Time of the one after it.
        next: Nanos,
        /// Tokens of the latter.
        tokens: u32,
    },
    /// The blocks did not arrive. No request is split between these endpoints, if another way serves it, until a transfer
    /// that is tried later has ended.
    Failed {
        /// Time that was lost.
        lost: Nanos,
    },
    /// Nothing is known: there was no transfer, for a reason that is not the pair's.
    Skipped,
}

setting!(Text: Role);

// === impl Role ===

impl Role {
    /// All roles.
    pub const ALL: [Self; 4] = [Self::Both, Self::Prefill, Self::Decode, Self::Encode];

    /// Whether it is for whole requests.
    pub const fn serves_requests(self) -> bool {
        matches!(self, Self::Both | Self::Decode)
    }

    /// Whether it is the default.
    pub fn is_both(&self) -> bool {
        *self == Self::Both
    }

    /// Its name in configuration, labels and the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Encode => "encode",
        }
    }
}

// === impl Part ===

impl Default for Part {
    /// An endpoint that serves requests alone and sends no KV blocks.
    fn default() -> Self {
        Self { role: Role::Both, network: None, serves_alone: true }
    }
}

impl Part {
    /// Whether it may compute prompts that another endpoint decodes.
    pub fn may_prefill(&self) -> bool {
        self.network.is_some() && matches!(self.role, Role::Both | Role::Prefill)
    }

    /// Whether it may decode answers whose prompt another endpoint has computed.
    pub fn may_decode(&self) -> bool {
        self.network.is_some() && matches!(self.role, Role::Both | Role::Decode)
    }

    /// Whether it may compute prompts for another endpoint with this part.
    pub fn can_prefill_for(&self, decode: &Self) -> bool {
        self.may_prefill() && decode.may_decode() && self.network == decode.network
    }

    /// Whether it may serve a request alone.
    pub fn may_serve_alone(&self) -> bool {
        self.serves_alone && self.role.serves_requests()
    }

    /// Whether it may serve a request alone where no other endpoint may.
    pub fn could_serve_alone(&self) -> bool {
        self.serves_alone && self.role != Role::Encode
    }
}
