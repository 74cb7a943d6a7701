//! The configuration section `replicas`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use kvlane_core::config::{ConfigError, wrong};
use kvlane_core::section;
use kvlane_http::tls::Mutual;

section! {
    /// Exchange of requests in flight and of sent prompts with other replicas of the gateway (docs/replicas.md).
    pub struct Replicas {
        /// The address at which other replicas are heard, as in `0.0.0.0:3006`; null: nothing is exchanged.
        pub listen: Option<String> = None;
        /// The addresses of the replicas, as in `kvlane-replicas.default.svc:3006` for a headless Service, or one
        /// `host:port` for each. Every address of a host name is a replica; the gateway's own are skipped.
        pub peers: Vec<String> = Vec::new(), in 0..=256;
        /// Only replicas with the same name exchange news.
        pub cluster: String = "kvlane".into();
        /// Longest time that news waits before it is told. Placements are told sooner: after 2 ms, or later while the exchange
        /// takes more than a twentieth of the CPU time of the rest of the gateway and two per cent of a core.
        #[serde(with = "humantime_serde")]
        pub interval: Duration = Duration::from_millis(20),
            in Duration::from_millis(5)..=Duration::from_millis(500);
        /// Most bytes a second to each replica, on average. If it is used up, marks of sent prompts are left out.
        pub bandwidth: u64 = 1_000_000, in 65_536..=1_000_000_000;
        /// Longest wait of readiness at the start for the snapshot of a replica that is older, if one is reached within a
        /// second; from when the workers are known.
        #[serde(with = "humantime_serde")]
        pub sync_timeout: Duration = Duration::from_secs(5),
            in Duration::ZERO..=Duration::from_secs(3600);
        /// Certificate that this replica shows to others, with its chain (PEM); null: without TLS.
        pub certificate: Option<PathBuf> = None;
        /// Private key of that certificate (PEM).
        pub private_key: Option<PathBuf> = None;
        /// CA of the replicas' certificates (PEM): others are refused.
        pub ca: Option<PathBuf> = None;
    }
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

    /// The address to listen on, if there is one.
    ///
    /// # Errors
    /// It is not an address with a port.
    pub fn address(&self) -> Result<Option<SocketAddr>, ConfigError> {
        let Some(listen) = &self.listen else { return Ok(None) };
        match listen.parse() {
            Ok(address) => Ok(Some(address)),
            Err(_) => wrong(
                "replicas.listen",
                format!("'{listen}' is not an IP address with a port, as in 0.0.0.0:3006"),
            ),
        }
    }

    /// How long readiness waits for a snapshot; zero if there is no other replica to send one.
    pub fn snapshot_timeout(&self) -> Duration {
        if self.listen.is_none() || self.peers.is_empty() { Duration::ZERO } else { self.sync_timeout }
    }

    /// The files it names.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        [&self.certificate, &self.private_key, &self.ca].into_iter().flatten().cloned()
    }

    /// Reads certificates and keys; none: the exchange is plain.
    ///
    /// # Errors
    /// The first file that cannot be used or is missing.
    pub fn tls(&self) -> Result<Option<Mutual>, ConfigError> {
        match (&self.certificate, &self.private_key, &self.ca) {
            (None, None, None) => Ok(None),
            (Some(certificate), Some(key), Some(ca)) => {
                Mutual::read("replicas", certificate, key, ca).map(Some)
            }
            _ => wrong("replicas.certificate", "set certificate, private_key and ca, or none of them".into()),
        }
    }

    pub(super) fn seeds(peers: &[String]) -> Vec<Seed> {
        let mut seeds: Vec<_> = peers.iter().filter_map(|peer| Seed::parse(peer).ok()).collect();
        seeds.sort();
        seeds.dedup();
        seeds
    }
}

// === impl Seed ===

impl Seed {
    fn parse(peer: &str) -> Result<Self, String> {
        let wrong = || format!("'{peer}' is not HOST:PORT, as in kvlane-replicas:3006");
        let (host, port) = peer.rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let good = match bare {
            Some(bare) => bare.parse::<IpAddr>().is_ok(),
            None => !host.is_empty() && !host.contains(['/', ':', ' ', '@', '[', ']']),
        };
        if !good {
            return Err(wrong());
        }
        Ok(Self { host: bare.unwrap_or(host).to_owned(), port })
    }

    /// The address, if it needs no resolution.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.host.parse().ok()?, self.port))
    }
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

    #[test]
    fn an_exchange_needs_an_address_and_all_of_tls() {
        let config = Replicas { peers: vec!["a:1".into()], ..Replicas::default() };
        assert_eq!(config.validate().expect_err("nowhere to listen").field, "replicas.listen");
        let config = Replicas { listen: Some("0.0.0.0:3006".into()), ..config };
        assert_eq!(config.validate(), Ok(()));
        let named = Replicas { listen: Some("localhost:3006".into()), ..config.clone() };
        assert_eq!(named.validate().expect_err("a name").field, "replicas.listen");
        let half = Replicas { ca: Some("ca.pem".into()), ..config.clone() };
        assert!(half.tls().is_err_and(|error| error.field == "replicas.certificate"));
        assert!(config.tls().is_ok_and(|tls| tls.is_none()));
        let long = Replicas { cluster: "x".repeat(201), ..config };
        assert_eq!(long.validate().expect_err("too long").field, "replicas.cluster");
    }
}
