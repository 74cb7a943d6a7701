//! Settings of KV transfers.

use kvlane_wire::disaggregation::Connector;
use serde::{Deserialize, Serialize};

/// What an engine does of a request: `--role`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvRole {
    /// First legs: vLLM's `kv_producer`.
    Prefill,
    /// Second legs: vLLM's `kv_consumer`.
    Decode,
    /// Both: vLLM's `kv_both`.
    #[default]
    Both,
}

/// KV transfers of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct KvTransferConfig {
    /// `--kv-connector`: a name of [`Connector`]; none by default.
    pub kv_connector: Option<String>,
    /// `--role`.
    pub role: KvRole,
    /// `--kv-lease`: engine seconds for which a first leg's blocks are kept without news of the second. The default is
    /// vLLM's.
    pub kv_lease: f64,
    /// `--kv-transfer-latency`: engine seconds of a transfer before its first byte. The default is NIXL's over TCP on
    /// one machine.
    pub kv_transfer_latency: f64,
    /// `--kv-transfer-handshake`: engine seconds that the first transfer from an engine takes longer. NIXL over TCP took
    /// 7 s on one machine.
    pub kv_transfer_handshake: f64,
    /// `--kv-transfer-tokens-per-second`: tokens of KV cache per engine second. The default is 128 KiB a token over a
    /// port of 400 Gbit/s.
    pub kv_transfer_tokens_per_second: f64,
    /// `--kv-transfer-slots`: transfers to an engine at the same time; further ones wait.
    pub kv_transfer_slots: u32,
    /// `--kv-transfer-faults`.
    pub kv_transfer_faults: KvTransferFaults,
}

/// Faults of the transfers to an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvTransferFaults {
    /// Share of transfers that fail.
    pub fail: f64,
    /// Share of transfers that never end.
    pub hang: f64,
    /// Share of transfers that take `slow_s` longer.
    pub slow: f64,
    /// Engine seconds.
    pub slow_s: f64,
    /// Whether a client that leaves during a transfer kills the engine's core, as in vLLM 0.18.1: the blocks arrive for
    /// a request that the scheduler has forgotten.
    pub abort_race: bool,
}

impl Default for KvTransferConfig {
    fn default() -> Self {
        Self {
            kv_connector: None,
            role: KvRole::Both,
            kv_lease: 30.0,
            kv_transfer_latency: 0.01,
            kv_transfer_handshake: 0.0,
            kv_transfer_tokens_per_second: 40e9 / 131_072.0,
            kv_transfer_slots: 4,
            kv_transfer_faults: KvTransferFaults::default(),
        }
    }
}

// === impl KvTransferConfig ===

impl KvTransferConfig {
    /// The connector.
    ///
    /// # Errors
    /// The flag, its value and the valid values, if one is invalid.
    pub(crate) fn check(&self) -> Result<Option<Connector>, (&'static str, String, &'static str)> {
        let seconds = |flag, value: f64| match value {
            0.0..=1e6 => Ok(()),
            _ => Err((flag, value.to_string(), "between 0 and 1000000")),
        };
        seconds("--kv-lease", self.kv_lease)?;
        seconds("--kv-transfer-latency", self.kv_transfer_latency)?;
        seconds("--kv-transfer-handshake", self.kv_transfer_handshake)?;
        let speed = self.kv_transfer_tokens_per_second;
        if !(1.0..=1e12).contains(&speed) {
            return Err(("--kv-transfer-tokens-per-second", speed.to_string(), "between 1 and 1e12"));
        }
        if !(1..=4096).contains(&self.kv_transfer_slots) {
            return Err(("--kv-transfer-slots", self.kv_transfer_slots.to_string(), "between 1 and 4096"));
        }
        self.kv_transfer_faults.check()?;
        let Some(name) = &self.kv_connector else { return Ok(None) };
        match Connector::named(name) {
            Some(Connector::LlmdSidecar | Connector::TensorRtLlm) | None => {
                let must_be = "nixl, nixl-push, mooncake, sglang, lmcache or shared-storage";
                Err(("--kv-connector", name.clone(), must_be))
            }
            found => Ok(found),
        }
    }
}

// === impl KvTransferFaults ===

impl KvTransferFaults {
    pub(crate) fn check(&self) -> Result<(), (&'static str, String, &'static str)> {
        for (flag, share) in [("fail", self.fail), ("hang", self.hang), ("slow", self.slow)] {
            if !(0.0..=1.0).contains(&share) {
                return Err((flag, share.to_string(), "a share from 0 to 1"));
            }
        }
        match self.slow_s {
            0.0..=1e6 => Ok(()),
            _ => Err(("slow_s", self.slow_s.to_string(), "between 0 and 1000000")),
        }
    }
}

impl std::str::FromStr for KvTransferFaults {
    type Err = String;

    /// Reads `fail=0.01,hang=0.001,slow=0.2,slow_s=20,abort_race=1`; empty for none.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let wrong =
                || format!("{pair:?} is no fault of KV transfers, such as fail=0.01,slow=0.2,slow_s=20");
            let (name, value) = pair.split_once('=').ok_or_else(wrong)?;
            let value: f64 = value.trim().parse().map_err(|_| wrong())?;
            match name.trim() {
                "fail" => faults.fail = value,
                "hang" => faults.hang = value,
                "slow" => faults.slow = value,
                "slow_s" => faults.slow_s = value,
                "abort_race" => faults.abort_race = value != 0.0,
                _ => return Err(wrong()),
            }
        }
        faults
            .check()
            .map_err(|(name, value, must_be)| format!("{name} is {value}; it must be {must_be}"))?;
        Ok(faults)
    }
}
