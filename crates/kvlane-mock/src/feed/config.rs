//! Settings of a feed: vLLM's `--kv-events-config`, and the faults of this mock's feed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::ConfigError;

/// vLLM's `KVEventsConfig` (`vllm/config/kv_events.py`), with its names and defaults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvEventsConfig {
    /// Whether there is a feed.
    pub enable_kv_cache_events: bool,
    /// Publisher: `zmq`, or `null` for none. By default `zmq`.
    pub publisher: Option<String>,
    /// Endpoint of batches, `tcp://HOST:PORT`; `*` for all interfaces, port 0 for a free one. Rank r has port + r.
    /// The mock listens on any given address, where vLLM connects to one without `*`.
    pub endpoint: String,
    /// Endpoint for requests of past batches, in the same form; none by default.
    pub replay_endpoint: Option<String>,
    /// Number of past batches kept for replay.
    pub buffer_steps: usize,
    /// Maximum batches queued for one subscriber; further ones are dropped.
    pub hwm: usize,
    /// vLLM's maximum of batches queued for publishing. Here none is queued.
    pub max_queue_size: usize,
    /// The first frame of every message.
    pub topic: String,
}

/// Type of block hashes on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvEventsHashes {
    /// Unsigned integers of 64 bits: vLLM's default.
    #[default]
    Int,
    /// Strings of 32 bytes, as vLLM writes them with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`.
    Bytes,
}

/// Faults of a feed. Shares are from 0 to 1, drawn for each batch from the mock's seed.
///
/// The replay socket stays correct: it returns every batch as it was made, except with `silent`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvEventsFaults {
    /// Share of batches that are not published.
    pub drop: f64,
    /// Share of batches that are published twice.
    pub duplicate: f64,
    /// Share of batches that are published after the next one.
    pub reorder: f64,
    /// Delay of published batches.
    pub delay: Duration,
    /// Share of requests whose blocks the feed reports as stored and removed as usual, although they can never be
    /// found: a later request with the same prompt computes them and reports no cached tokens.
    pub lie: f64,
    /// Batches after which both sockets send nothing more. They still accept connections, subscriptions and requests;
    /// sequence numbers continue.
    pub silent: Option<u64>,
}

// === impl KvEventsConfig ===

impl Default for KvEventsConfig {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: None,
            endpoint: "tcp://*:5557".into(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: 100_000,
            max_queue_size: 100_000,
            topic: String::new(),
        }
    }
}

impl KvEventsConfig {
    /// A feed with a replay socket, both on free ports of the loopback interface.
    pub fn loopback() -> Self {
        Self {
            enable_kv_cache_events: true,
            endpoint: "tcp://127.0.0.1:0".into(),
            replay_endpoint: Some("tcp://127.0.0.1:0".into()),
            ..Self::default()
        }
    }

    /// Whether there is a feed, after validation.
    pub(crate) fn check(&self) -> Result<bool, ConfigError> {
        let publisher = self.publisher.as_deref().unwrap_or("zmq");
        let refuse = |key: &str, value: &dyn ToString, must_be| {
            let value = format!("{key} {}", value.to_string());
            Err(ConfigError::Value { flag: "--kv-events-config", value, must_be })
        };
        if !matches!(publisher, "zmq" | "null") {
            return refuse("publisher", &publisher, "zmq or null");
        }
        if self.hwm == 0 || self.hwm > BATCHES_MAX {
            return refuse("hwm", &self.hwm, "between 1 and 10000000 batches");
        }
        if self.buffer_steps > BATCHES_MAX {
            return refuse("buffer_steps", &self.buffer_steps, "at most 10000000 batches");
        }
        for endpoint in [Some(&self.endpoint), self.replay_endpoint.as_ref()].into_iter().flatten() {
            if address(endpoint, 0).is_none() {
                return refuse("endpoint", endpoint, "tcp://HOST:PORT, where HOST is * or an IP address");
            }
        }
        Ok(self.enable_kv_cache_events && publisher == "zmq")
    }
}

/// Maximum batches of a queue or a buffer.
const BATCHES_MAX: usize = 10_000_000;

/// Address of the socket of `rank`. `None` if it is not a valid address or port.
pub(crate) fn address(endpoint: &str, rank: u32) -> Option<SocketAddr> {
    let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let host: IpAddr = match host {
        "*" => Ipv4Addr::UNSPECIFIED.into(),
        "localhost" => Ipv4Addr::LOCALHOST.into(),
        _ => match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(host) => host.parse::<Ipv6Addr>().ok()?.into(),
            None => host.parse().ok()?,
        },
    };
    let port: u16 = port.parse().ok()?;
    let port = if port == 0 { 0 } else { port.checked_add(u16::try_from(rank).ok()?)? };
    Some(SocketAddr::new(host, port))
}

impl FromStr for KvEventsConfig {
    type Err = String;

    /// Parses vLLM's JSON.
    fn from_str(json: &str) -> Result<Self, String> {
        serde_json::from_str(json).map_err(|error| {
            format!(
                "{error}; expected a JSON object such as {{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\
                 \"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\"}}"
            )
        })
    }
}

// === impl KvEventsHashes ===

impl FromStr for KvEventsHashes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "int" => Ok(Self::Int),
            "bytes" => Ok(Self::Bytes),
            _ => Err("hashes are `int` or `bytes`".into()),
        }
    }
}

// === impl KvEventsFaults ===

impl KvEventsFaults {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let shares = [
            ("drop", self.drop),
            ("duplicate", self.duplicate),
            ("reorder", self.reorder),
            ("lie", self.lie),
        ];
        match shares.into_iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
            Some((name, share)) => Err(ConfigError::Value {
                flag: "--kv-events-faults",
                value: format!("{name}={share}"),
                must_be: "a share between 0 and 1",
            }),
            None => Ok(()),
        }
    }
}

impl FromStr for KvEventsFaults {
    type Err = String;

    /// Parses `drop=0.01,delay=50ms,silent=100`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            let (name, value) = part.split_once('=').ok_or(format!("`{part}` is not NAME=VALUE"))?;
            let value = value.trim();
            let share = || value.parse::<f64>().map_err(|_| format!("`{value}` in `{part}` is not a number"));
            match name.trim() {
                "drop" => faults.drop = share()?,
                "duplicate" => faults.duplicate = share()?,
                "reorder" => faults.reorder = share()?,
                "lie" => faults.lie = share()?,
                "delay" => {
                    faults.delay = duration(value).ok_or(format!("`{part}` is not like delay=50ms"))?
                }
                "silent" => {
                    let batches = value.parse().map_err(|_| format!("`{part}` is not a count of batches"))?;
                    faults.silent = Some(batches);
                }
                other => {
                    return Err(format!(
                        "unknown fault `{other}`; known are drop, duplicate, reorder, delay, lie, silent"
                    ));
                }
            }
        }
        Ok(faults)
    }
}

/// Parses `50ms` or `1.5s`, up to an hour.
fn duration(text: &str) -> Option<Duration> {
    let (number, unit_s) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s')?, 1.0),
    };
    let secs = number.parse::<f64>().ok()? * unit_s;
    (0.0..=3600.0).contains(&secs).then(|| Duration::from_secs_f64(secs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_vllms() {
        let config: KvEventsConfig =
            r#"{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",
            "replay_endpoint":"tcp://*:5657","buffer_steps":7,"hwm":9,"topic":"kv@1"}"#
                .parse()
                .expect("vLLM takes it");
        assert!(config.check().expect("makes sense"));
        assert_eq!((config.buffer_steps, config.hwm, config.topic.as_str()), (7, 9, "kv@1"));
        let config: KvEventsConfig = "{}".parse().expect("every key has a default");
        assert!(!config.check().expect("makes sense"), "off by default");
        let null: KvEventsConfig =
            r#"{"enable_kv_cache_events":true,"publisher":"null"}"#.parse().expect("known");
        assert!(!null.check().expect("makes sense"));
    }

    #[test]
    fn what_is_wrong_with_a_configuration_is_said() {
        let error = r#"{"endpiont":"tcp://*:1"}"#.parse::<KvEventsConfig>().expect_err("no such key");
        assert!(error.contains("endpiont") && error.contains("replay_endpoint"), "{error}");
        for (json, what) in [
            (r#"{"endpoint":"ipc:///tmp/x"}"#, "tcp://HOST:PORT"),
            (r#"{"endpoint":"tcp://*:65536"}"#, "tcp://HOST:PORT"),
            (r#"{"replay_endpoint":"tcp://engine:1"}"#, "tcp://HOST:PORT"),
            (r#"{"publisher":"kafka"}"#, "zmq or null"),
            (r#"{"hwm":0}"#, "between 1 and"),
            (r#"{"buffer_steps":99999999}"#, "at most"),
        ] {
            let config: KvEventsConfig = json.parse().expect("every key is known");
            let error = config.check().expect_err(json).to_string();
            assert!(error.contains(what) && error.contains("--kv-events-config"), "{error}");
        }
    }

    #[test]
    fn each_rank_has_the_next_port_unless_any_will_do() {
        let port = |endpoint, rank| address(endpoint, rank).map(|address| address.to_string());
        assert_eq!(port("tcp://*:5557", 3).as_deref(), Some("0.0.0.0:5560"));
        assert_eq!(port("tcp://[::1]:5557", 1).as_deref(), Some("[::1]:5558"));
        assert_eq!(port("tcp://127.0.0.1:0", 3).as_deref(), Some("127.0.0.1:0"));
        assert_eq!(port("tcp://*:65535", 1), None);
    }

    #[test]
    fn faults_are_read_and_those_that_are_none_are_named() {
        let faults: KvEventsFaults = "drop=0.5,delay=50ms,lie=0.1,silent=3".parse().expect("good");
        let expected = KvEventsFaults {
            drop: 0.5,
            delay: Duration::from_millis(50),
            lie: 0.1,
            silent: Some(3),
            ..Default::default()
        };
        assert_eq!(faults, expected);
        assert_eq!("".parse(), Ok(KvEventsFaults::default()));
        for (text, what) in [
            ("crash=1", "unknown fault `crash`"),
            ("drop", "NAME=VALUE"),
            ("drop=x", "not a number"),
            ("delay=5", "50ms"),
        ] {
            let error = text.parse::<KvEventsFaults>().expect_err(text);
            assert!(error.contains(what), "{error}");
        }
        let beyond: KvEventsFaults = "reorder=1.5".parse().expect("a number");
        assert!(beyond.check().expect_err("no share").to_string().contains("reorder=1.5"));
    }
}
