//! The configuration section `replicas`.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvlane_core::config::{ConfigError, wrong};
use kvlane_core::section;
use kvlane_http::secret::Secret;
use kvlane_http::tls::Mutual;

section! {
    /// Exchange of requests in flight and of sent prompts with other replicas of the gateway (docs/replicas.md).
    pub struct Replicas {
        /// The address at which other replicas are heard, as in `0.0.0.0:3006`, or a host name of this machine with a port; null, and
        /// no `broker`: nothing is exchanged.
        pub listen: Option<String> = None;
        /// The addresses of the replicas, as in `kvlane-replicas.default.svc:3006` for a headless Service, or one
        /// `host:port` for each. Every address of a host name is a replica; the gateway's own are skipped.
        pub peers: Vec<String> = Vec::new(), in 0..=256;
        /// A NATS server, as in `nats://nats:4222`, or `tls://nats:4222` with TLS: news go through it, instead of `listen` and
        /// `peers`.
        pub broker: Option<String> = None;
        /// The user at the broker.
        pub broker_user: Option<String> = None;
        /// The password of that user; it is read again for each connection.
        pub broker_password: Option<Secret> = None;
        /// A token for the broker, instead of user and password; it is read again for each connection.
        pub broker_token: Option<Secret> = None;
        /// Only replicas with the same name exchange news.
        pub cluster: String = "kvlane".into();
        /// Longest time that news waits before it is told. Placements are told sooner: after 2 ms, or later while the exchange
        /// takes more than a twentieth of the CPU time of the rest of the gateway and two per cent of a core.
        #[serde(with = "humantime_serde")]
        pub interval: Duration = Duration::from_millis(20),
            in Duration::from_millis(5)..=Duration::from_millis(500);
        /// Most bytes a second to each replica, or to the broker, on average. If it is used up, marks of sent prompts are left out.
        pub bandwidth: u64 = 1_000_000, in 65_536..=1_000_000_000;
        /// Longest wait of readiness at the start for the snapshot of a replica that is older, if one is reached within a
        /// second; from when the workers are known.
        #[serde(with = "humantime_serde")]
        pub sync_timeout: Duration = Duration::from_secs(5),
            in Duration::ZERO..=Duration::from_secs(3600);
        /// Certificate that this replica shows to others or to the broker, with its chain (PEM); null: without TLS, or without
        /// a certificate of its own at the broker.
        pub certificate: Option<PathBuf> = None;
        /// Private key of that certificate (PEM).
        pub private_key: Option<PathBuf> = None;
        /// CA of the replicas' certificates (PEM): others are refused. With `broker`: CA of the broker's certificate; null: those of
        /// the system.
        pub ca: Option<PathBuf> = None;
    }
}

/// A broker that replicas exchange news through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Broker {
    /// Its URL, without a user.
    pub(super) url: String,
    pub(super) host: String,
    pub(super) has_tls: bool,
}

/// Where replicas may be found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Seed {
    /// A host name, or an address. A certificate must be for it.
    pub(super) host: String,
    /// Their port.
    pub(super) port: u16,
}

// === impl Replicas ===

impl Replicas {
    /// Checks what bounds cannot, without reading files.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.address()?;
        self.validate_broker()?;
        for (n, peer) in self.peers.iter().enumerate() {
            let field = format!("replicas.peers[{n}]");
            Seed::parse(peer).or_else(|problem| wrong(&field, problem))?;
        }
        if !self.peers.is_empty() && self.listen.is_none() {
            return wrong("replicas.listen", "replicas.peers needs an address to listen on".into());
        }
        if self.cluster.is_empty() || self.cluster.len() > 200 {
            return wrong("replicas.cluster", "write a name of 1 to 200 bytes".into());
        }
        Ok(())
    }

    /// The host and the port to listen on, if there are any: an IP address, or a name that is to be resolved.
    ///
    /// # Errors
    /// It is neither.
    pub fn address(&self) -> Result<Option<(&str, u16)>, ConfigError> {
        let Some(listen) = &self.listen else { return Ok(None) };
        match host_and_port(listen) {
            Some(place) => Ok(Some(place)),
            None => wrong("replicas.listen", format!("'{listen}' is not HOST:PORT, as in 0.0.0.0:3006")),
        }
    }

    /// How long readiness waits for a snapshot; zero if there is no other replica to send one.
    pub fn snapshot_timeout(&self) -> Duration {
        let has_peers = self.listen.is_some() && !self.peers.is_empty();
        if has_peers || self.broker.is_some() { self.sync_timeout } else { Duration::ZERO }
    }

    /// The broker, if there is one.
    ///
    /// # Errors
    /// It is not the URL of one.
    pub(super) fn broker(&self) -> Result<Option<Broker>, ConfigError> {
        let Some(url) = &self.broker else { return Ok(None) };
        match Broker::parse(url) {
            Ok(broker) => Ok(Some(broker)),
            Err(problem) => wrong("replicas.broker", problem),
        }
    }

    fn validate_broker(&self) -> Result<(), ConfigError> {
        let keys = [
            ("replicas.broker_user", self.broker_user.is_some()),
            ("replicas.broker_password", self.broker_password.is_some()),
            ("replicas.broker_token", self.broker_token.is_some()),
        ];
        let Some(broker) = self.broker()? else {
            return match keys.into_iter().find(|(_, is_set)| *is_set) {
                Some((key, _)) => wrong(key, "it is for replicas.broker, which is not set".into()),
                None => Ok(()),
            };
        };
        if !cfg!(feature = "nats") {
            return wrong(
                "replicas.broker",
                "this build has no NATS client: build kvlane with its feature `nats`".into(),
            );
        }
        if self.listen.is_some() || !self.peers.is_empty() {
            return wrong(
                "replicas.broker",
                "set it, or replicas.listen and replicas.peers, not both".into(),
            );
        }
        if self.broker_user.is_some() != self.broker_password.is_some() {
            return wrong("replicas.broker_user", "set it together with replicas.broker_password".into());
        }
        if self.broker_user.is_some() && self.broker_token.is_some() {
            return wrong("replicas.broker_token", "set it, or user and password, not both".into());
        }
        if !broker.has_tls && self.files_of_tls().next().is_some() {
            return wrong("replicas.broker", "certificates are for TLS: write tls://HOST:PORT".into());
        }
        Ok(())
    }

    /// The files it names.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        let secrets = [&self.broker_password, &self.broker_token].into_iter().flatten();
        self.files_of_tls().chain(secrets.filter_map(Secret::file)).map(PathBuf::from)
    }

    fn files_of_tls(&self) -> impl Iterator<Item = &Path> {
        [&self.certificate, &self.private_key, &self.ca].into_iter().flatten().map(PathBuf::as_path)
    }

    /// Reads certificates and keys; none: the exchange is plain, or with a broker, whose connection reads them itself.
    ///
    /// # Errors
    /// The first file that cannot be used or is missing.
    pub fn tls(&self) -> Result<Option<Mutual>, ConfigError> {
        if self.broker.is_some() {
            return self.check_broker_files().map(|()| None);
        }
        match (&self.certificate, &self.private_key, &self.ca) {
            (None, None, None) => Ok(None),
            (Some(certificate), Some(key), Some(ca)) => {
                Mutual::read("replicas", certificate, key, ca).map(Some)
            }
            _ => wrong("replicas.certificate", "set certificate, private_key and ca, or none of them".into()),
        }
    }

    /// Whether the files for the broker can be read.
    fn check_broker_files(&self) -> Result<(), ConfigError> {
        let secrets = [
            ("replicas.broker_password", &self.broker_password),
            ("replicas.broker_token", &self.broker_token),
        ];
        for (field, secret) in secrets {
            if let Some(secret) = secret {
                secret.read().or_else(|problem| wrong(field, problem))?;
            }
        }
        if self.certificate.is_some() != self.private_key.is_some() {
            return wrong("replicas.certificate", "set certificate and private_key, or none of them".into());
        }
        let files = [
            ("replicas.certificate", &self.certificate),
            ("replicas.private_key", &self.private_key),
            ("replicas.ca", &self.ca),
        ];
        for (field, path) in files {
            if let Some(path) = path
                && let Err(error) = std::fs::read(path)
            {
                return wrong(field, format!("cannot read {}: {error}", path.display()));
            }
        }
        Ok(())
    }

    pub(super) fn seeds(peers: &[String]) -> Vec<Seed> {
        let mut seeds: Vec<_> = peers.iter().filter_map(|peer| Seed::parse(peer).ok()).collect();
        seeds.sort();
        seeds.dedup();
        seeds
    }
}

// === impl Broker ===

impl Broker {
    fn parse(url: &str) -> Result<Self, String> {
        let wrong = || format!("'{url}' is not nats://HOST:PORT or tls://HOST:PORT");
        let (scheme, rest) = url.split_once("://").ok_or_else(wrong)?;
        let has_tls = match scheme {
            "nats" => false,
            "tls" => true,
            _ => return Err(wrong()),
        };
        if rest.contains('@') {
            return Err(
                "write user and password into replicas.broker_user and broker_password, not into the URL"
                    .into(),
            );
        }
        let Seed { host, .. } = Seed::parse(rest.trim_end_matches('/')).map_err(|_| wrong())?;
        Ok(Self { url: url.trim_end_matches('/').into(), host, has_tls })
    }
}

// === impl Seed ===

impl Seed {
    fn parse(peer: &str) -> Result<Self, String> {
        let wrong = || format!("'{peer}' is not HOST:PORT, as in kvlane-replicas:3006");
        let (host, port) = host_and_port(peer).filter(|(_, port)| *port != 0).ok_or_else(wrong)?;
        Ok(Self { host: host.to_owned(), port })
    }

    /// The address, if it needs no resolution.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.host.parse().ok()?, self.port))
    }
}

/// A host name or an IP address, without brackets, and a port.
fn host_and_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_good = match bare {
        Some(bare) => bare.parse::<IpAddr>().is_ok(),
        None => !host.is_empty() && !host.contains(['/', ':', ' ', '@', '[', ']']),
    };
    Some((bare.unwrap_or(host), port.parse().ok()?)).filter(|_| is_good)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_hosts_with_ports() {
        let seed = |peer: &str| {
            Seed::parse(peer).map(|seed| (seed.host.clone(), seed.port, seed.address().is_some()))
        };
        assert_eq!(
            seed("kvlane-replicas.default.svc:3006"),
            Ok(("kvlane-replicas.default.svc".into(), 3006, false))
        );
        assert_eq!(seed("10.0.0.7:1"), Ok(("10.0.0.7".into(), 1, true)));
        assert_eq!(seed("[fd00::7]:1"), Ok(("fd00::7".into(), 1, true)));
        for wrong in
            ["", "a", "a:", ":1", "a:0", "a:65536", "http://a:1", "a b:1", "fd00::7:1", "[a]:1", "a@b:1"]
        {
            assert!(seed(wrong).is_err(), "{wrong}");
        }
    }

    #[cfg(feature = "nats")]
    #[test]
    fn a_broker_is_a_nats_url_and_takes_the_place_of_addresses() {
        let with = |url: &str| Replicas { broker: Some(url.into()), ..Replicas::default() };
        for good in ["nats://nats:4222", "tls://10.0.0.7:4222", "nats://[fd00::7]:4222/"] {
            assert_eq!(with(good).validate(), Ok(()), "{good}");
            assert!(with(good).snapshot_timeout() > Duration::ZERO);
        }
        let refused = |config: Replicas| config.validate().expect_err("refused");
        for url in
            ["nats:4222", "nats://", "nats://nats", "redis://nats:6379", "nats://a b:1", "nats://a:1/x"]
        {
            assert_eq!(refused(with(url)).field, "replicas.broker", "{url}");
        }
        assert!(refused(with("nats://me:secret@nats:4222")).problem.contains("replicas.broker_user"));
        let (url, key) = ("nats://nats:4222", Some(Secret::new("k")));
        for (config, field) in [
            (Replicas { listen: Some("127.0.0.1:1".into()), ..with(url) }, "replicas.broker"),
            (Replicas { ca: Some("ca.pem".into()), ..with(url) }, "replicas.broker"),
            (Replicas { broker_user: Some("me".into()), ..with(url) }, "replicas.broker_user"),
            (Replicas { broker_password: key.clone(), ..with(url) }, "replicas.broker_user"),
            (
                Replicas {
                    broker_user: Some("me".into()),
                    broker_password: key.clone(),
                    broker_token: key.clone(),
                    ..with(url)
                },
                "replicas.broker_token",
            ),
            (Replicas { broker_token: key, ..Replicas::default() }, "replicas.broker_token"),
        ] {
            assert_eq!(refused(config).field, field);
        }
        let missing = Replicas { ca: Some("/nowhere/ca.pem".into()), ..with("tls://nats:4222") };
        assert_eq!(missing.validate(), Ok(()));
        assert!(missing.tls().is_err_and(|error| error.field == "replicas.ca"));
    }

    #[cfg(not(feature = "nats"))]
    #[test]
    fn a_build_without_nats_refuses_a_broker() {
        let config = Replicas { broker: Some("nats://nats:4222".into()), ..Replicas::default() };
        assert!(config.validate().is_err_and(|error| error.problem.contains("feature `nats`")));
    }

    #[test]
    fn an_exchange_needs_an_address_and_all_of_tls() {
        let config = Replicas { peers: vec!["a:1".into()], ..Replicas::default() };
        assert_eq!(config.validate().expect_err("nowhere to listen").field, "replicas.listen");
        let config = Replicas { listen: Some("0.0.0.0:3006".into()), ..config };
        assert_eq!(config.validate(), Ok(()));
        let listening = |on: &str| Replicas { listen: Some(on.into()), ..config.clone() };
        for (on, place) in [
            ("localhost:3006", ("localhost", 3006)),
            ("[::1]:3006", ("::1", 3006)),
            ("10.0.0.7:0", ("10.0.0.7", 0)),
        ] {
            assert_eq!(listening(on).address(), Ok(Some(place)));
        }
        for on in [
            "localhost",
            "localhost:",
            ":3006",
            "localhost:65536",
            "http://localhost:3006",
            "a b:1",
            "::1:3006",
        ] {
            assert_eq!(listening(on).validate().expect_err(on).field, "replicas.listen");
        }
        let half = Replicas { ca: Some("ca.pem".into()), ..config.clone() };
        assert!(half.tls().is_err_and(|error| error.field == "replicas.certificate"));
        assert!(config.tls().is_ok_and(|tls| tls.is_none()));
        let long = Replicas { cluster: "x".repeat(201), ..config };
        assert_eq!(long.validate().expect_err("too long").field, "replicas.cluster");
    }
}
