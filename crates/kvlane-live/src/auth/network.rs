//! Which addresses a worker may have that somebody adds while the gateway runs.
//!
//! Whoever may add workers makes the gateway send requests to where they say. So it must not lead to what only this
//! machine or its cloud may reach: link-local addresses, under which clouds hand out credentials, are never a worker's.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use tokio::net::{TcpStream, lookup_host};

/// An IP network, as in `10.0.0.0/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Network {
    base: IpAddr,
    bits: u8,
}

/// Where added workers may be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed(Vec<Network>);

/// Why no address was found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreachable {
    /// Nobody knows the name.
    #[error(transparent)]
    Unknown(io::Error),
    /// No worker may be there.
    #[error("{0}")]
    Refused(String),
}

impl From<Unreachable> for io::Error {
    fn from(error: Unreachable) -> Self {
        match error {
            Unreachable::Unknown(error) => error,
            Unreachable::Refused(why) => Self::new(io::ErrorKind::PermissionDenied, why),
        }
    }
}

// === impl Network ===

impl Network {
    /// Whether it holds this address. An IPv4 address written as an IPv6 one is the IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        let (base, address) = (self.base, address.to_canonical());
        let (base, address, width) = match (base, address) {
            (IpAddr::V4(base), IpAddr::V4(address)) => {
                (u128::from(base.to_bits()), u128::from(address.to_bits()), 32)
            }
            (IpAddr::V6(base), IpAddr::V6(address)) => (base.to_bits(), address.to_bits(), 128),
            _ => return false,
        };
        let rest = width - u32::from(self.bits);
        (base ^ address).checked_shr(rest).unwrap_or(0) == 0
    }
}

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no network: write one as 10.0.0.0/8 or fd00::/8");
        let (base, bits) = text.split_once('/').map_or((&text[..], None), |(base, bits)| (base, Some(bits)));
        let base: IpAddr = base.parse().map_err(|_| wrong())?;
        let width = if base.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(width), str::parse).map_err(|_| wrong())?;
        if bits > width {
            return Err(wrong());
        }
        Ok(Self { base, bits })
    }
}

impl From<Network> for String {
    fn from(network: Network) -> Self {
        network.to_string()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.bits)
    }
}

// === impl Allowed ===

impl Allowed {
    /// These networks, or all if there are none.
    pub fn new(networks: &[Network]) -> Self {
        Self(networks.to_vec())
    }

    /// Where `place`, a `host:port`, is, as far as a worker may be there.
    ///
    /// # Errors
    /// That it is nowhere, or nowhere where a worker may be.
    pub(crate) async fn addresses(&self, place: &str) -> Result<Vec<SocketAddr>, Unreachable> {
        let all = lookup_host(place).await.map_err(Unreachable::Unknown)?;
        let (mut good, mut refused) = (Vec::new(), None);
        for address in all {
            match self.check(address.ip()) {
                Ok(()) => good.push(address),
                Err(why) => refused = Some(why),
            }
        }
        match refused {
            Some(why) if good.is_empty() => Err(Unreachable::Refused(format!("{place}: {why}"))),
            _ => Ok(good),
        }
    }

    /// Connects to `place`, as far as a worker may be there. The address that was looked at is the one that is used: a
    /// name that means something else a moment later leads nowhere else.
    ///
    /// # Errors
    /// Why there is no connection.
    pub(crate) async fn connect(&self, place: &str) -> io::Result<TcpStream> {
        let addresses = self.addresses(place).await.map_err(io::Error::from)?;
        TcpStream::connect(&addresses[..]).await
    }

    /// Whether a worker may be there.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, address: IpAddr) -> Result<(), String> {
        let address = address.to_canonical();
        if never_a_worker(address) {
            return Err(format!(
                "{address} is no address that a worker can have: it is link-local, or a cloud's own, or nobody's"
            ));
        }
        if !self.0.is_empty() && !self.0.iter().any(|network| network.contains(address)) {
            let networks: Vec<String> = self.0.iter().map(Network::to_string).collect();
            return Err(format!("{address} is in none of auth.allowed_networks ({})", networks.join(", ")));
        }
        Ok(())
    }
}

/// Addresses under which clouds answer for themselves (credentials, among other things), and those that name nobody or
/// many.
fn never_a_worker(address: IpAddr) -> bool {
    /// Amazon's metadata service under IPv6, and Alibaba's, which is in no link-local range.
    const METADATA: [IpAddr; 2] = [
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
        IpAddr::V4(std::net::Ipv4Addr::new(100, 100, 100, 200)),
    ];
    let range = match address {
        IpAddr::V4(address) => {
            address.is_link_local()
                || address.is_broadcast()
                || address.octets()[0] == 0
                || address.octets()[0] >= 224
        }
        IpAddr::V6(address) => {
            // 64:ff9b::/96 (RFC 6052) is translated into the IPv4 address at its end.
            let translated = address.segments()[..6] == [0x64, 0xff9b, 0, 0, 0, 0];
            let [.., a, b, c, d] = address.octets();
            address.is_unicast_link_local() || translated && never_a_worker(IpAddr::from([a, b, c, d]))
        }
    };
    range || address.is_unspecified() || address.is_multicast() || METADATA.contains(&address)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn network(text: &str) -> Network {
        Network::try_from(text.to_owned()).expect("a network")
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_network_holds_what_begins_like_it() {
        for (text, inside, outside) in [
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
            ("10.1.2.3", "10.1.2.3", "10.1.2.4"),
            ("10.1.2.3/31", "10.1.2.2", "10.1.2.4"),
            ("0.0.0.0/0", "255.1.1.1", "::1"),
            ("::/0", "fd00::1", "10.0.0.1"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("10.0.0.0/8", "::ffff:10.1.2.3", "::ffff:11.1.2.3"),
        ] {
            assert!(network(text).contains(address(inside)), "{text} {inside}");
            assert!(!network(text).contains(address(outside)), "{text} {outside}");
        }
        for text in ["", "10.0.0.0/33", "10.0.0/8", "fd00::/129", "10.0.0.0/-1", "a/8", "10.0.0.0/8/8"] {
            assert!(Network::try_from(text.to_owned()).expect_err(text).contains(text));
        }
    }

    #[test]
    fn nobody_adds_a_cloud_as_a_worker() {
        let anywhere = Allowed::new(&[network("0.0.0.0/0"), network("::/0")]);
        for refused in [
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "fe80::1",
            "fd00:ec2::254",
            "100.100.100.200",
            "0.0.0.0",
            "::",
            "255.255.255.255",
            "224.0.0.1",
            "ff02::1",
            "0.1.2.3",
            "240.0.0.1",
        ] {
            assert!(anywhere.check(address(refused)).is_err(), "{refused}");
            assert!(Allowed::default().check(address(refused)).is_err(), "{refused}");
        }
        for taken in ["127.0.0.1", "10.0.0.7", "192.168.1.1", "8.8.8.8", "fd00::7", "::1"] {
            assert_eq!(Allowed::default().check(address(taken)), Ok(()), "{taken}");
        }
    }

    #[test]
    fn where_networks_are_named_no_other_is_allowed() {
        let allowed = Allowed::new(&[network("10.0.0.0/8"), network("fd00::/8")]);
        assert_eq!(allowed.check(address("10.9.8.7")), Ok(()));
        assert_eq!(allowed.check(address("fd00::1")), Ok(()));
        for refused in ["127.0.0.1", "11.0.0.1", "::1"] {
            let problem = allowed.check(address(refused)).expect_err(refused);
            assert!(problem.contains(refused) && problem.contains("10.0.0.0/8"), "{problem}");
        }
    }

    #[tokio::test]
    async fn a_name_is_looked_up_and_looked_at_whenever_a_connection_is_made() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let place = format!("localhost:{}", listener.local_addr().expect("an address").port());
        let here = Allowed::new(&[network("127.0.0.0/8")]);
        assert!(here.connect(&place).await.is_ok());
        let elsewhere = Allowed::new(&[network("10.0.0.0/8")]);
        let refused = elsewhere.connect(&place).await.expect_err("not there");
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(refused.to_string().contains(&place), "{refused}");
    }

    proptest! {
        #[test]
        fn a_network_reads_back_as_it_is_written(base in any::<IpAddr>(), bits in 0u8..=128) {
            let bits = if base.is_ipv4() { bits.min(32) } else { bits };
            let network = Network { base, bits };
            prop_assert_eq!(Network::try_from(network.to_string()), Ok(network));
            prop_assert!(network.contains(base.to_canonical()) || base.to_canonical() != base);
        }
    }
}
