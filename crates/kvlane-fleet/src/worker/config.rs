//! Configuration of workers and their KV event feeds.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use kvlane_wire::engine::resolve;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use kvlane_core::config::{ConfigError, wrong};
use kvlane_core::disaggregation::Role;
use kvlane_core::section;
use kvlane_http::address::{Address, worker_name};
use kvlane_http::secret::Secret;

section! {
    /// A worker: one engine.
    pub struct WorkerSpec {
        /// `http://host:port`, or `https`, with a path prefix if needed; or `grpc://host:port` of vLLM's gRPC server.
        pub url: String;
        /// The model it serves; read from its `/v1/models` if not set.
        #[serde(default, skip_serializing_if = "Option::is_none", alias = "model_id")]
        pub model: Option<String>;
        /// Its KV event feed, or a list with one per data-parallel rank; read from the worker if not set. As in
        /// `{endpoint: 'tcp://10.0.0.7:5557', replay: 'tcp://10.0.0.7:5558', topic: ''}`.
        #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_several")]
        pub kv_events: Vec<FeedSpec>;
        /// Its API key, or where it is: `{file: /run/secrets/gpu-7}`, `{env: NAME}`; `upstream.api_key` if not set.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub api_key: Option<Secret>;
        /// Its role where prefill and decode run on different engines: `both`, `prefill`, `decode` or `encode`.
        #[serde(default, skip_serializing_if = "Role::is_both")]
        pub role: Role;
        /// Its bootstrap port for the transfer of KV blocks (SGLang, Mooncake); 8998 if not set.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub bootstrap_port: Option<u16>;
        /// The directory or file of its model's tokenizer, if it is not where the engine says.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tokenizer: Option<PathBuf>;
        /// The name in its certificate, if that is not the host of its `https` URL, such as a URL with an IP address.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tls_server_name: Option<String>;
        /// The service outside the fleet that it is, as in `{name: together, tokens_per_hour: 1000000}`: it gets only requests
        /// for which `models` names it as a fallback.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub provider: Option<ProviderSpec>;
    }
}

section! {
    /// A service outside the fleet.
    #[derive(Eq)]
    pub struct ProviderSpec {
        /// Its name in `models.*.fallbacks[].provider`.
        pub name: String;
        /// Tokens of prompts and answers that it may be sent and may write in an hour; no bound if not set. While they are
        /// used up, it gets no request.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tokens_per_hour: Option<u64>;
    }
}

// === impl WorkerSpec ===

impl WorkerSpec {
    /// A worker with only a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            model: None,
            kv_events: Vec::new(),
            api_key: None,
            role: Role::Both,
            bootstrap_port: None,
            tokenizer: None,
            tls_server_name: None,
            provider: None,
        }
    }

    /// Checks that what a service outside the fleet gets is encrypted, and that its name can be part of a pool's.
    ///
    /// # Errors
    /// What is wrong; `field` is the name of the provider's section.
    pub fn validate_provider(&self, field: &str) -> Result<(), ConfigError> {
        let Some(provider) = &self.provider else { return Ok(()) };
        if provider.name.is_empty() || provider.name.contains(':') {
            let problem = format!("'{}' must be a name without `:`, as in together", provider.name);
            return wrong(&format!("{field}.name"), problem);
        }
        let address =
            Address::parse(&self.url).map_err(|problem| ConfigError { field: field.into(), problem })?;
        let host = address.host.trim_matches(['[', ']']);
        let is_here = host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        if !self.url.starts_with("https://") && !is_here {
            let problem = format!("'{}' is not encrypted: write https://", self.url);
            return wrong(field, problem);
        }
        Ok(())
    }

    /// Whether both are the same worker with the same settings.
    pub fn is(&self, other: &Self) -> bool {
        let named = |spec: &Self| Self { url: worker_name(&spec.url).to_owned(), ..spec.clone() };
        named(self) == named(other)
    }
}

section! {
    /// The addresses of one rank's KV event feed.
    #[derive(Eq)]
    pub struct FeedSpec {
        /// `tcp://host:port` of its PUB socket. A host of `*` is that of the worker.
        pub endpoint: String;
        /// `tcp://host:port` of its replay socket, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub replay: Option<String>;
        /// The prefix of its messages' topics; empty for all.
        #[serde(default)]
        pub topic: String;
    }
}

/// Workers: a list or its only entry, each with its keys, or its URL alone.
pub fn workers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<WorkerSpec>, D::Error> {
    struct One(WorkerSpec);
    impl<'de> Deserialize<'de> for One {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_any(Either).map(Self)
        }
    }
    struct Either;
    impl<'de> Visitor<'de> for Either {
        type Value = WorkerSpec;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a worker, as in `http://10.0.0.7:8000` or `{url: 'http://10.0.0.7:8000'}`")
        }

        fn visit_str<E>(self, url: &str) -> Result<WorkerSpec, E> {
            Ok(WorkerSpec::new(url))
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<WorkerSpec, A::Error> {
            WorkerSpec::deserialize(MapAccessDeserializer::new(map))
        }
    }
    struct All;
    impl<'de> Visitor<'de> for All {
        type Value = Vec<WorkerSpec>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of workers, as in `[http://10.0.0.7:8000]`")
        }

        fn visit_str<E>(self, url: &str) -> Result<Vec<WorkerSpec>, E> {
            Ok(vec![WorkerSpec::new(url)])
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Vec<WorkerSpec>, A::Error> {
            Ok(vec![WorkerSpec::deserialize(MapAccessDeserializer::new(map))?])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut workers: A) -> Result<Vec<WorkerSpec>, A::Error> {
            let mut all = Vec::new();
            while let Some(One(worker)) = workers.next_element()? {
                all.push(worker);
            }
            Ok(all)
        }
    }
    deserializer.deserialize_any(All)
}

/// A list, or its only entry.
fn one_or_several<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<FeedSpec>, D::Error> {
    struct Feeds;
    impl<'de> Visitor<'de> for Feeds {
        type Value = Vec<FeedSpec>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("{endpoint: tcp://host:port} or a list of those, one per rank")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut feeds: A) -> Result<Vec<FeedSpec>, A::Error> {
            let mut all = Vec::new();
            while let Some(feed) = feeds.next_element()? {
                all.push(feed);
            }
            Ok(all)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Vec<FeedSpec>, A::Error> {
            Ok(vec![FeedSpec::deserialize(MapAccessDeserializer::new(map))?])
        }
    }
    deserializer.deserialize_any(Feeds)
}

// === impl FeedSpec ===

impl FeedSpec {
    /// A feed without a replay socket, with any topic.
    pub fn new(endpoint: &str) -> Self {
        Self { endpoint: endpoint.into(), replay: None, topic: String::new() }
    }

    /// Checks both addresses.
    ///
    /// # Errors
    /// What is wrong; `field` is the name of this feed.
    pub fn validate(&self, field: &str) -> Result<(), ConfigError> {
        let named = [("endpoint", Some(&self.endpoint)), ("replay", self.replay.as_ref())];
        for (key, address) in named.into_iter().filter_map(|(key, address)| Some((key, address?))) {
            let resolved = resolve(address, "host");
            if resolved.is_none_or(|address| address.starts_with(':') || address.ends_with(":0")) {
                let problem = format!("'{address}' is not a ZeroMQ address, write tcp://host:port");
                return wrong(&format!("{field}.{key}"), problem);
            }
        }
        Ok(())
    }
}
