//! What a request says of the other leg.

use http::HeaderMap;
use kvlane_wire::disaggregation::{Connector, REQUEST_ID_HEADER};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::config::KvRole;

/// A request's part in a split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    /// None.
    Alone,
    /// Its blocks are kept under this key.
    First {
        /// The name that the second leg gives, too.
        key: String,
        /// Whether the answer has an object for the second leg.
        answers: bool,
        /// Whether the engine stops after the first token by itself, as SGLang's prefill engines do.
        one_token: bool,
    },
    /// Its blocks come from elsewhere.
    Second(Elsewhere),
    /// It kills the engine.
    Deadly,
}

/// Where the blocks of a second leg are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Elsewhere {
    /// `host:port` of the prefill engine's store.
    pub(crate) address: String,
    pub(crate) engine_id: Option<String>,
    pub(crate) key: String,
    /// Whether the second leg may come before the first has ended, and waits for it.
    pub(crate) waits: bool,
    /// The cached tokens of the first leg, which the second reports as its own.
    pub(crate) cached: Option<u32>,
}

/// Members of a body for transfers.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Members {
    kv_transfer_params: Option<Map<String, Value>>,
    bootstrap_host: Option<String>,
    bootstrap_port: Option<u16>,
    bootstrap_room: Option<i64>,
}

// === impl Leg ===

impl Leg {
    /// Reads it. `unique` is an id for a first leg whose client sent none.
    pub(crate) fn read(
        connector: Option<Connector>,
        role: KvRole,
        headers: &HeaderMap,
        members: &Members,
        unique: &str,
    ) -> Self {
        let Some(connector) = connector else { return Self::Alone };
        if connector == Connector::Sglang {
            return Self::sglang(role, members);
        }
        let Some(params) = &members.kv_transfer_params else { return Self::Alone };
        let is = |name: &str| params.get(name).is_some_and(|value| *value == true);
        let text = |name: &str| params.get(name).and_then(Value::as_str).map(str::to_owned);
        let sent_id = headers.get(REQUEST_ID_HEADER).and_then(|id| id.to_str().ok()).map(str::to_owned);
        let (first, second) = (is("do_remote_decode"), is("do_remote_prefill"));
        match connector {
            Connector::Nixl | Connector::NixlPush if second => {
                let pushes = connector == Connector::NixlPush;
                let has_blocks = params.get("remote_block_ids").is_some_and(Value::is_array);
                let (Some(id), true) = (text("remote_request_id"), has_blocks || pushes) else {
                    return Self::Deadly;
                };
                let (host, port) = (
                    text("remote_host").unwrap_or_default(),
                    params.get("remote_port").and_then(Value::as_u64),
                );
                let cached = params.get("remote_prefill_cached_tokens").and_then(Value::as_u64);
                Self::Second(Elsewhere {
                    address: format!("{host}:{}", port.unwrap_or(0)),
                    engine_id: text("remote_engine_id"),
                    key: if pushes { sent_id.unwrap_or_default() } else { id },
                    waits: pushes,
                    cached: cached.and_then(|cached| u32::try_from(cached).ok()),
                })
            }
            Connector::Nixl if first => {
                let key = format!("chatcmpl-{}-{unique}", sent_id.as_deref().unwrap_or(unique));
                Self::First { key, answers: true, one_token: false }
            }
            Connector::NixlPush if first => Self::First {
                key: sent_id.unwrap_or_else(|| unique.to_owned()),
                answers: true,
                one_token: false,
            },
            // Roles are asserted in its scheduler.
            Connector::Mooncake if first && role == KvRole::Decode || second && role == KvRole::Prefill => {
                Self::Deadly
            }
            Connector::Mooncake if first => {
                let Some(key) = text("transfer_id") else { return Self::Deadly };
                Self::First { key, answers: false, one_token: false }
            }
            Connector::Mooncake if second => {
                let (Some(key), Some(address)) = (text("transfer_id"), text("remote_bootstrap_addr")) else {
                    return Self::Deadly;
                };
                let address = address.trim_start_matches("http://").to_owned();
                let engine_id = text("remote_engine_id");
                Self::Second(Elsewhere { address, engine_id, key, waits: true, cached: None })
            }
            _ => Self::Alone,
        }
    }

    /// SGLang: both legs are the same, and the role says which one it is.
    fn sglang(role: KvRole, members: &Members) -> Self {
        let (Some(room), Some(host)) = (members.bootstrap_room, &members.bootstrap_host) else {
            return Self::Alone;
        };
        let key = room.to_string();
        match role {
            KvRole::Prefill => Self::First { key, answers: false, one_token: true },
            KvRole::Decode => {
                let address = format!("{host}:{}", members.bootstrap_port.unwrap_or(8998));
                Self::Second(Elsewhere { address, key, waits: true, ..Elsewhere::default() })
            }
            KvRole::Both => Self::Alone,
        }
    }
}

/// `kv_transfer_params` of the answer to a first leg, as vLLM 0.32 writes it.
pub(crate) struct Handover<'a> {
    pub(crate) connector: Connector,
    pub(crate) key: &'a str,
    pub(crate) engine_id: &'a str,
    pub(crate) address: std::net::SocketAddr,
    pub(crate) prompt_tokens: u32,
    pub(crate) block_tokens: u32,
    pub(crate) cached_tokens: u32,
}

// === impl Handover ===

impl Handover<'_> {
    pub(crate) fn json(&self) -> Value {
        let blocks: Vec<u32> = (1..=self.prompt_tokens.div_ceil(self.block_tokens)).collect();
        let mut params = json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.key,
            "remote_host": self.address.ip().to_string(),
            "remote_port": self.address.port(),
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": self.prompt_tokens,
            "transfer_mode": "push",
            "remote_prefill_cached_tokens": self.cached_tokens,
        });
        if self.connector == Connector::Nixl {
            (params["transfer_mode"], params["remote_blocks_expiry_time"]) = ("pull".into(), Value::Null);
        }
        params
    }
}
