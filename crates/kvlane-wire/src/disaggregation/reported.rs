//! What an engine reports about its part in disaggregated serving: its metrics page and its configuration.
//!
//! vLLM 0.32 says little: its page has metrics of NIXL if NIXL is on, and of fetched blocks if the engine may fetch any.
//! Its configuration is there only with `VLLM_SERVER_DEV_MODE=1`. SGLang's `/get_server_info` has everything.

use serde_json::Value;

use super::connector::Connector;
use crate::prometheus::samples;

/// What an engine reports. What it does not is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    /// Its connector or transfer backend, in its own words; empty if it has none.
    pub connector: Option<String>,
    /// That connector, if kvlane knows it.
    pub kind: Option<Connector>,
    /// Whether its metrics page shows that NIXL is off.
    pub is_without_nixl: bool,
    /// Whether it sends blocks to other engines.
    pub prefills: Option<bool>,
    /// Whether it fetches blocks from other engines.
    pub decodes: Option<bool>,
    /// Its tensor-parallel size.
    pub tp_size: Option<u32>,
    /// The type of the numbers in its KV cache.
    pub kv_dtype: Option<String>,
    /// Host of its side channel or bootstrap server; its own host if there is only a port.
    pub host: Option<String>,
    /// Port of its side channel or bootstrap server.
    pub port: Option<u16>,
}

/// Reads a metrics page and, where the engine has one, the description of its configuration.
pub fn reported(page: &str, settings: Option<&Value>) -> Reported {
    let mut reported = of_page(page);
    match settings {
        Some(told) if told["vllm_config"].is_object() => of_vllm(told, &mut reported),
        Some(told) if told["disaggregation_mode"].is_string() => of_sglang(told, &mut reported),
        _ => {}
    }
    reported
}

fn of_page(page: &str) -> Reported {
    let (mut is_vllm, mut has_nixl, mut fetches, mut kv_dtype) = (false, false, false, None);
    for sample in samples(page) {
        let Some(name) = sample.name.strip_prefix("vllm:") else { continue };
        is_vllm = true;
        has_nixl |= name.starts_with("nixl_");
        fetches |= name.starts_with("num_requests_kv_fetch_by_stage");
        if name == "cache_config_info" {
            kv_dtype = sample.label("cache_dtype").map(|dtype| dtype.to_string());
        }
    }
    Reported {
        connector: has_nixl.then(|| "NIXL".into()),
        kind: has_nixl.then_some(Connector::Nixl),
        is_without_nixl: is_vllm && !has_nixl,
        // An engine that only fetches sends blocks, too, if it is asked to.
        prefills: None,
        decodes: (is_vllm && (fetches || has_nixl)).then_some(fetches),
        kv_dtype,
        ..Reported::default()
    }
}

fn of_vllm(told: &Value, reported: &mut Reported) {
    let config = &told["vllm_config"];
    let transfer = &config["kv_transfer_config"];
    let name = transfer["kv_connector"].as_str().unwrap_or_default();
    (reported.connector, reported.kind) = (Some(name.into()), Connector::named(name));
    reported.is_without_nixl = false;
    if let Some(role) = transfer["kv_role"].as_str() {
        reported.prefills = Some(role != "kv_consumer");
        reported.decodes = Some(role != "kv_producer");
    }
    reported.tp_size = number(&config["parallel_config"]["tensor_parallel_size"]);
    if let Some(dtype) = config["cache_config"]["cache_dtype"].as_str() {
        reported.kv_dtype = Some(dtype.into());
    }
    if matches!(reported.kind, Some(Connector::Nixl | Connector::NixlPush)) {
        let env = &told["vllm_env"];
        reported.host = env["VLLM_NIXL_SIDE_CHANNEL_HOST"].as_str().map(str::to_owned);
        reported.port = number(&env["VLLM_NIXL_SIDE_CHANNEL_PORT"]);
    }
}

fn of_sglang(told: &Value, reported: &mut Reported) {
    let mode = told["disaggregation_mode"].as_str().unwrap_or_default();
    let takes_part = matches!(mode, "prefill" | "decode");
    let backend = told["disaggregation_transfer_backend"].as_str().filter(|_| takes_part);
    reported.connector = Some(backend.unwrap_or_default().into());
    reported.kind = takes_part.then_some(Connector::Sglang);
    (reported.prefills, reported.decodes) = (Some(mode == "prefill"), Some(mode == "decode"));
    reported.tp_size = number(&told["tp_size"]);
    reported.kv_dtype = told["kv_cache_dtype"].as_str().map(str::to_owned);
    reported.port = number(&told["disaggregation_bootstrap_port"]).filter(|_| mode == "prefill");
}

fn number<T: TryFrom<u64>>(value: &Value) -> Option<T> {
    T::try_from(value.as_u64()?).ok()
}

// === impl Connector ===

impl Connector {
    /// Whether its engines can transfer blocks between these tensor-parallel sizes. NIXL's engines need one to be a
    /// multiple of the other (vLLM 0.32's `TransferTopology`); the others are not known to bear any difference.
    pub const fn bears_tp(self, prefill: u32, decode: u32) -> bool {
        if prefill == 0 || decode == 0 {
            return false;
        }
        match self {
            Self::Nixl | Self::NixlPush => prefill.is_multiple_of(decode) || decode.is_multiple_of(prefill),
            _ => prefill == decode,
        }
    }

    /// Whether its engines refuse each other if their versions, the names of their models or the types of their KV
    /// caches differ: vLLM's NIXL compares a hash of these when two engines connect.
    pub const fn compares_engines(self) -> bool {
        matches!(self, Self::Nixl | Self::NixlPush)
    }

    /// How an operator turns it on.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Nixl => {
                "start the engine with --kv-transfer-config '{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_both\"}'"
            }
            Self::Sglang => "start the engine with --disaggregation-mode prefill or decode",
            _ => {
                "start the engine with this connector in --kv-transfer-config, or change kvlane's --kv-connector"
            }
        }
    }

    /// How an operator lets the engines reach a side channel.
    pub const fn side_channel_advice(self) -> &'static str {
        match self {
            Self::Nixl | Self::NixlPush => {
                "start the engine with VLLM_NIXL_SIDE_CHANNEL_HOST set to an address that the other engines reach, and \
                 open VLLM_NIXL_SIDE_CHANNEL_PORT (5600 by default, one port per rank) between them"
            }
            _ => {
                "open the bootstrap port (8998 by default) between the engines, or correct --prefill URL PORT"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_page_says_whether_nixl_is_on_and_whether_blocks_are_fetched() {
        let page = |more: &str| {
            format!(
                "vllm:num_requests_running{{engine=\"0\"}} 0\n\
                 vllm:cache_config_info{{block_size=\"16\",cache_dtype=\"auto\"}} 1\n{more}"
            )
        };
        let none = reported(&page(""), None);
        assert_eq!((none.kind, none.decodes, none.is_without_nixl), (None, None, true));
        assert_eq!(none.kv_dtype.as_deref(), Some("auto"));
        let nixl = "vllm:nixl_num_failed_transfers_total{engine=\"0\"} 0\n";
        let producer = reported(&page(nixl), None);
        assert_eq!((producer.kind, producer.decodes), (Some(Connector::Nixl), Some(false)));
        let fetch = "vllm:num_requests_kv_fetch_by_stage{engine=\"0\",stage=\"a\"} 0\n";
        assert_eq!(reported(&page(&[nixl, fetch].concat()), None).decodes, Some(true));
        assert_eq!(reported("sglang:num_running_reqs 0\n", None), Reported::default());
    }

    #[test]
    fn a_configuration_says_more() {
        let vllm = json!({
            "vllm_config": {
                "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
                "parallel_config": {"tensor_parallel_size": 4},
                "cache_config": {"cache_dtype": "fp8"},
            },
            "vllm_env": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost", "VLLM_NIXL_SIDE_CHANNEL_PORT": 5600},
        });
        let expected = Reported {
            connector: Some("NixlConnector".into()),
            kind: Some(Connector::Nixl),
            is_without_nixl: false,
            prefills: Some(true),
            decodes: Some(false),
            tp_size: Some(4),
            kv_dtype: Some("fp8".into()),
            host: Some("localhost".into()),
            port: Some(5600),
        };
        assert_eq!(reported("", Some(&vllm)), expected);
        let none = reported("", Some(&json!({"vllm_config": {"kv_transfer_config": null}})));
        assert_eq!((none.connector.as_deref(), none.kind), (Some(""), None));
        let sglang = json!({
            "disaggregation_mode": "prefill", "disaggregation_transfer_backend": "mooncake",
            "disaggregation_bootstrap_port": 9000, "tp_size": 8, "kv_cache_dtype": "auto",
        });
        let expected = Reported {
            connector: Some("mooncake".into()),
            kind: Some(Connector::Sglang),
            is_without_nixl: false,
            prefills: Some(true),
            decodes: Some(false),
            tp_size: Some(8),
            kv_dtype: Some("auto".into()),
            host: None,
            port: Some(9000),
        };
        assert_eq!(reported("", Some(&sglang)), expected);
        let alone = json!({"disaggregation_mode": "null", "disaggregation_transfer_backend": "mooncake"});
        let alone = reported("", Some(&alone));
        assert_eq!((alone.connector.as_deref(), alone.kind, alone.decodes), (Some(""), None, Some(false)));
    }

    #[test]
    fn sizes_that_do_not_divide_each_other_are_not_borne() {
        for (connector, prefill, decode, expect) in [
            (Connector::Nixl, 2, 8, true),
            (Connector::Nixl, 8, 2, true),
            (Connector::Nixl, 2, 3, false),
            (Connector::Nixl, 0, 3, false),
            (Connector::SharedStorage, 2, 4, false),
            (Connector::SharedStorage, 4, 4, true),
        ] {
            assert_eq!(connector.bears_tp(prefill, decode), expect, "{connector:?} {prefill} {decode}");
        }
    }
}
