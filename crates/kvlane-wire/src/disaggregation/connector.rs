//! Connectors, and what a request that is split needs of them.

use std::borrow::Cow;

use kvlane_core::setting;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::api::Api;

/// The header that must have the same value on both legs, and another one for each attempt: with
/// [`Connector::NixlPush`] the engines find one another by it.
pub const REQUEST_ID_HEADER: &str = "x-request-id";

/// How engines pass the KV blocks of a prompt on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Connector {
    /// vLLM's `NixlConnector`: the decode engine reads the blocks from the prefill engine.
    Nixl,
    /// vLLM's `NixlPushConnector`: the prefill engine writes the blocks to the decode engine.
    NixlPush,
    /// vLLM's `MooncakeConnector`.
    Mooncake,
    /// SGLang, whatever its transfer backend.
    Sglang,
    /// vLLM's `LMCacheConnectorV1` with a cache that both engines reach.
    LmCache,
    /// vLLM's `ExampleConnector` (`SharedStorageConnector` in older versions): files that both engines reach.
    SharedStorage,
    /// TensorRT-LLM, whatever its transfer backend.
    TensorRtLlm,
    /// llm-d's sidecar in front of the decode engine, which sends the first leg itself.
    LlmdSidecar,
}

/// When the legs of a request are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Legs {
    /// The second after the answer to the first.
    InTurn,
    /// Both at once. The answer to the first is not needed, but if it fails the second waits without end: it must be
    /// cancelled.
    AtOnce,
    /// Only the second is sent.
    Decode,
}

/// A request that is split between two engines.
#[derive(Clone, Debug)]
pub struct Split<'a> {
    /// The connector of both engines.
    pub connector: Connector,
    /// The API of both legs.
    pub api: Api,
    /// The value of [`REQUEST_ID_HEADER`] on both legs.
    pub request_id: &'a str,
    /// A random number, another one for each attempt: Mooncake's `transfer_id`, and without its highest bit SGLang's
    /// `bootstrap_room`.
    pub room: u64,
    /// Where the blocks are, if the legs are sent at once.
    pub source: Source<'a>,
}

/// Port of an engine's bootstrap server where it names none: the default of SGLang and of vLLM's Mooncake connector.
pub const BOOTSTRAP_PORT: u16 = 8998;

/// Where a decode engine finds the KV blocks of a prefill engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source<'a> {
    /// NIXL: host of the side channel. Mooncake, SGLang: host of the bootstrap server.
    pub host: Cow<'a, str>,
    /// NIXL: port of the side channel. Mooncake, SGLang: port of the bootstrap server, 8998 by default in both.
    pub port: u16,
    /// NIXL and Mooncake: the engine's id, with the data-parallel rank where the engine has several. See
    /// [`engine_ids`] and [`TransferParams::source`].
    pub engine_id: Cow<'a, str>,
    /// NIXL: the engine's tensor-parallel size.
    pub tp_size: u32,
    /// NIXL: its pipeline-parallel size; 0 if the engine does not say.
    pub pp_size: u32,
    /// NIXL: its decode-context-parallel size; 0 if the engine does not say.
    pub dcp_size: u32,
}

/// What says where a prompt's blocks will be before the first leg is answered; see [`Source`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceOf {
    /// The prefill worker's address and its bootstrap port.
    Worker,
    /// The answer to an earlier first leg.
    EarlierAnswer,
    /// The prefill worker's bootstrap server, which is asked.
    BootstrapServer,
    /// Nothing: its answer tells, or no second leg needs to know.
    Nothing,
}

setting!(Text: Connector);

impl Serialize for Connector {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Connector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::named(&name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            D::Error::custom(format!("'{name}' is no KV connector: use one of {names}"))
        })
    }
}

// === impl Connector ===

impl Connector {
    /// Every connector, in the order of the enum.
    pub const ALL: [Connector; 8] = [
        Connector::Nixl,
        Connector::NixlPush,
        Connector::Mooncake,
        Connector::Sglang,
        Connector::LmCache,
        Connector::SharedStorage,
        Connector::TensorRtLlm,
        Connector::LlmdSidecar,
    ];

    /// Its name in `--kv-connector` and as a metric label. vLLM's router and llm-d's sidecar have the same names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::NixlPush => "nixl-push",
            Self::Mooncake => "mooncake",
            Self::Sglang => "sglang",
            Self::LmCache => "lmcache",
            Self::SharedStorage => "shared-storage",
            Self::TensorRtLlm => "tensorrt-llm",
            Self::LlmdSidecar => "llm-d",
        }
    }

    /// The connector with this name, or with this class name in vLLM's `--kv-transfer-config`.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "NixlConnector" | "NixlPullConnector" | "nixlv2" => Self::Nixl,
            "NixlPushConnector" => Self::NixlPush,
            "MooncakeConnector" => Self::Mooncake,
            "LMCacheConnectorV1" => Self::LmCache,
            "ExampleConnector" | "SharedStorageConnector" => Self::SharedStorage,
            _ => return Self::ALL.into_iter().find(|connector| connector.name() == name),
        })
    }

    /// Whether an engine that is not started for one leg takes either. SGLang's always are; vLLM with Mooncake ends if it
    /// gets the leg that is not its own.
    pub const fn takes_either_leg(self) -> bool {
        !matches!(self, Self::Sglang | Self::Mooncake)
    }

    /// Whether an engine that is started for one leg can also serve requests alone.
    pub const fn is_elastic(self) -> bool {
        !matches!(self, Self::Sglang)
    }

    /// When its legs are sent, if what the second must say of the first is known.
    pub const fn legs(self) -> Legs {
        match self {
            Self::Nixl | Self::LmCache | Self::SharedStorage | Self::TensorRtLlm => Legs::InTurn,
            Self::NixlPush | Self::Mooncake | Self::Sglang => Legs::AtOnce,
            Self::LlmdSidecar => Legs::Decode,
        }
    }

    /// Whether both legs may be sent at once.
    pub(super) const fn is_parallel(self) -> bool {
        matches!(self.legs(), Legs::AtOnce)
    }

    /// The connector of engines of which nothing else is said: only SGLang's are given with bootstrap ports.
    pub const fn implied(has_bootstrap_ports: bool) -> Self {
        if has_bootstrap_ports { Self::Sglang } else { Self::Nixl }
    }

    /// What says where a prompt's blocks will be before the first leg is answered.
    pub const fn source(self) -> SourceOf {
        match self {
            Self::Sglang => SourceOf::Worker,
            Self::NixlPush => SourceOf::EarlierAnswer,
            Self::Mooncake => SourceOf::BootstrapServer,
            _ => SourceOf::Nothing,
        }
    }

    /// Whether the answer to a first leg has `kv_transfer_params`, which a second leg in turn must relay.
    pub const fn relays_params(self) -> bool {
        matches!(self, Self::Nixl | Self::NixlPush)
    }

    /// Whether two engines connect before the first transfer between them, which takes seconds: 7.0 s with vLLM 0.32 and
    /// NIXL over TCP on one machine, 8 to 18 ms for each transfer after it.
    pub const fn shakes_hands(self) -> bool {
        matches!(self, Self::Nixl | Self::NixlPush)
    }
}
