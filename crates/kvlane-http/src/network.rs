//! Allowed addresses of workers that are added while the gateway runs (protection against SSRF).
//!
//! An operator who may add workers makes the gateway send requests to an address of their choice, and an engine that
//! announces its KV event socket makes the gateway connect there. Neither may lead to services that only this machine or
//! its cloud can reach: link-local addresses, metadata services and the like are rejected, and so are IPv6 addresses that a
//! translator or tunnel turns into one of them.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use kvlane_core::setting;
use serde::{Deserialize, Serialize};
use tokio::net::{TcpStream, lookup_host};

/// An IP network, as in `10.0.0.0/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Network {
    base: IpAddr,
    bits: u8,
}

setting!(Text: Network);

/// The addresses allowed for added workers, and for feeds that engines announce.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Empty: all addresses except those that no worker can have.
    networks: Vec<Network>,
    /// Addresses of this machine are not allowed.
    elsewhere: bool,
}

/// Why an address is not used.
#[derive(Debug, thiserror::Error)]
pub enum Unreachable {
    /// The name does not resolve.
    #[error(transparent)]
    Unknown(io::Error),
    /// The address is not allowed.
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
    /// Whether it contains this address. An IPv4-mapped IPv6 address counts as its IPv4 address.
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
        let wrong = || format!("'{text}' is not a network: write one as 10.0.0.0/8 or fd00::/8");
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
    /// These networks, or all if the list is empty.
    pub fn new(networks: &[Network]) -> Self {
        Self { networks: networks.to_vec(), elsewhere: false }
    }

    /// All addresses that a worker can have; if `elsewhere`, without those of this machine.
    pub fn anywhere(elsewhere: bool) -> Self {
        Self { networks: Vec::new(), elsewhere }
    }

    /// Resolves `place`, a `host:port`, to its allowed addresses.
    ///
    /// # Errors
    /// It does not resolve, or no address is allowed.
    pub async fn addresses(&self, place: &str) -> Result<Vec<SocketAddr>, Unreachable> {
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

    /// Connects to an allowed address of `place`. The address that was checked is the one that is used, so a name that
    /// resolves differently a moment later has no effect.
    ///
    /// # Errors
    /// Why there is no connection.
    pub async fn connect(&self, place: &str) -> io::Result<TcpStream> {
        let addresses = self.addresses(place).await.map_err(io::Error::from)?;
        TcpStream::connect(&addresses[..]).await
    }

    /// Checks that an address is allowed.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, address: IpAddr) -> Result<(), String> {
        let address = address.to_canonical();
        if let Some(why) = never_a_worker(address) {
            return Err(format!("{address} is not allowed for workers: {why}"));
        }
        if self.elsewhere && leads_here(address) {
            return Err(format!("{address} is this machine's, but the worker is on another machine"));
        }
        if !self.networks.is_empty() && !self.networks.iter().any(|network| network.contains(address)) {
            let networks: Vec<String> = self.networks.iter().map(Network::to_string).collect();
            return Err(format!("{address} is in none of auth.allowed_networks ({})", networks.join(", ")));
        }
        Ok(())
    }
}

/// Networks that no worker is in, and what they are.
const NEVER: &[(Network, &str)] = &[
    (v4([0, 0, 0, 0], 8), "it is the unspecified address"),
    (v4([100, 100, 100, 200], 32), METADATA),
    (v4([168, 63, 129, 16], 32), METADATA),
    (v4([169, 254, 0, 0], 16), LINK_LOCAL),
    // IETF protocol assignments: NAT64 discovery, DS-Lite, and the metadata service of Oracle's first cloud, 192.0.0.192.
    (v4([192, 0, 0, 0], 24), "its network is reserved for protocols and for services of clouds"),
    (v4([192, 88, 99, 0], 24), "it is a 6to4 relay"),
    (v4([224, 0, 0, 0], 4), MANY),
    (v4([240, 0, 0, 0], 4), "it is reserved, or the broadcast address"),
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 128), "it is the unspecified address"),
    (v6([0x100, 0, 0, 0, 0, 0, 0, 0], 64), "it is a discard-only address"),
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), LINK_LOCAL),
    (v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10), "it is site-local, which RFC 3879 deprecates"),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), MANY),
    // Amazon, Google, Oracle, Scaleway.
    (v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0], 32), METADATA),
    (v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128), METADATA),
    (v6([0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe], 128), METADATA),
    (v6([0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42], 128), METADATA),
];

const METADATA: &str = "it is a cloud's metadata service, which hands out credentials";
const LINK_LOCAL: &str = "it is link-local, where clouds hand out credentials";
const MANY: &str = "it is a multicast address";

const fn v4(base: [u8; 4], bits: u8) -> Network {
    let [a, b, c, d] = base;
    Network { base: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), bits }
}

const fn v6(base: [u16; 8], bits: u8) -> Network {
    let [a, b, c, d, e, f, g, h] = base;
    Network { base: IpAddr::V6(Ipv6Addr::new(a, b, c, d, e, f, g, h)), bits }
}

/// Why no worker can have this address, or one that embeds it, whatever networks are allowed.
fn never_a_worker(address: IpAddr) -> Option<&'static str> {
    let address = address.to_canonical();
    if let Some((_, why)) = NEVER.iter().find(|(network, _)| network.contains(address)) {
        return Some(why);
    }
    match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => embedded(address).find_map(|inner| never_a_worker(IpAddr::V4(inner))),
    }
}

/// Whether an address is this machine's, in any notation.
pub fn leads_here(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => address.is_loopback(),
        IpAddr::V6(address) => address.is_loopback() || embedded(address).any(|inner| inner.is_loopback()),
    }
}

/// The IPv4 addresses that a translator or tunnel may extract from an IPv6 address and connect to. IPv4-mapped addresses
/// were converted before.
fn embedded(address: Ipv6Addr) -> impl Iterator<Item = Ipv4Addr> {
    let (segments, bits) = (address.segments(), address.to_bits());
    // The 32 bits that are followed by `rest` bits.
    let at = |rest: u32| (bits >> rest) as u32;
    // An IPv4 address around bits 64 to 71, which are zero: `before` of its bits precede them (RFC 6052).
    let around = |before: u32| {
        let high = u64::from((bits >> 64) as u32) << (32 - before);
        (high as u32) | (bits << 72 >> (96 + before)) as u32
    };
    let is_somewhere = |inner: &u32| inner >> 24 != 0;
    let (plain, translated, nat64, own_nat64, tunnel, teredo, isatap) = (
        matches!(segments, [0, 0, 0, 0, 0, 0, ..]) && !address.is_loopback(),
        matches!(segments, [0, 0, 0, 0, 0xffff, 0, ..]),
        matches!(segments, [0x64, 0xff9b, 0, 0, 0, 0, ..]),
        matches!(segments, [0x64, 0xff9b, 1, ..]),
        matches!(segments, [0x2002, ..]),
        matches!(segments, [0x2001, 0, ..]),
        matches!(segments, [_, _, _, _, 0 | 0x200, 0x5efe, ..]),
    );
    [
        // IPv4-compatible (RFC 4291), IPv4-translated (RFC 2765), NAT64 under its well-known prefix (RFC 6052), ISATAP in
        // any network (RFC 5214).
        (plain || translated || nat64 || isatap).then(|| at(0)),
        // NAT64 under a prefix for one's own network (RFC 8215), of 96, 64, 56 or 48 bits. Which of them it is cannot be
        // known. With zeros in the wrong place, it is no address that a translator connects to.
        own_nat64.then(|| at(0)).filter(is_somewhere),
        own_nat64.then(|| around(0)).filter(is_somewhere),
        own_nat64.then(|| around(8)).filter(is_somewhere),
        own_nat64.then(|| around(16)).filter(is_somewhere),
        // 6to4 (RFC 3056).
        tunnel.then(|| at(80)),
        // Teredo (RFC 4380): its server, and its client behind a mask.
        teredo.then(|| at(64)),
        teredo.then(|| !at(0)),
    ]
    .into_iter()
    .flatten()
    .map(Ipv4Addr::from_bits)
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

    /// Every way in which an IPv6 address has an IPv4 address within it.
    fn written_as_ipv6(inner: Ipv4Addr) -> Vec<Ipv6Addr> {
        let bits = u128::from(inner.to_bits());
        let prefix = |text: &str| text.parse::<Ipv6Addr>().expect("an address").to_bits();
        let (high, low) = (|n: u32| bits >> (32 - n), |n: u32| bits & ((1 << (32 - n)) - 1));
        let around = |n: u32| prefix("64:ff9b:1::") | high(n) << 64 | low(n) << (24 + n);
        [
            prefix("::ffff:0:0") | bits,
            bits,
            prefix("::ffff:0:0:0") | bits,
            prefix("64:ff9b::") | bits,
            prefix("64:ff9b:1:abcd::") | bits,
            prefix("64:ff9b:1:abcd::") | bits << 24,
            around(8),
            around(16),
            prefix("2002::") | bits << 80 | 0xabcd,
            prefix("2001::") | bits << 64 | !u128::from(u32::from(Ipv4Addr::new(8, 8, 8, 8))) & 0xffff_ffff,
            prefix("2001:0:808:808::") | !bits & 0xffff_ffff,
            prefix("fd00:1:2:3:0:5efe::") | bits,
            prefix("2620:1:2:3:200:5efe::") | bits,
        ]
        .map(Ipv6Addr::from_bits)
        .to_vec()
    }

    #[test]
    fn a_cloud_metadata_address_cannot_be_a_worker() {
        let anywhere = Allowed::new(&[network("0.0.0.0/0"), network("::/0")]);
        let refused = |address: IpAddr| {
            assert!(anywhere.check(address).is_err(), "{address}");
            assert!(Allowed::default().check(address).is_err(), "{address}");
        };
        for inner in [
            "169.254.169.254",
            "169.254.170.2",
            "169.254.0.23",
            "168.63.129.16",
            "192.0.0.192",
            "192.0.0.170",
            "192.88.99.1",
            "100.100.100.200",
            "0.0.0.0",
            "0.1.2.3",
            "224.0.0.1",
            "239.255.255.250",
            "240.0.0.1",
            "255.255.255.255",
        ] {
            let inner: Ipv4Addr = inner.parse().expect("an address");
            refused(inner.into());
            let disguised = written_as_ipv6(inner);
            let under_own_prefix = |address: &Ipv6Addr| address.segments()[..3] == [0x64, 0xff9b, 1];
            let nowhere = inner.octets()[0] == 0;
            let disguised = disguised.into_iter().filter(|address| !(nowhere && under_own_prefix(address)));
            disguised.for_each(|address| refused(address.into()));
        }
        for text in [
            "fe80::1",
            "fe80::a9fe:a9fe",
            "febf::1",
            "fec0::1",
            "feff::1",
            "fd00:ec2::254",
            "fd00:ec2::253",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "100::1",
            "::",
            "ff02::1",
            "ff0e::1",
            // As they are commonly written.
            "::169.254.169.254",
            "2002:a9fe:a9fe::",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1:a9fe:a9:fe00::",
            "2001:0:a9fe:a9fe::",
            "2001:0:808:808:0:0:5601:5601",
        ] {
            refused(address(text));
        }
        for taken in [
            "127.0.0.1",
            "10.0.0.7",
            "100.100.100.201",
            "168.63.129.17",
            "172.16.0.1",
            "192.0.1.1",
            "192.168.1.1",
            "8.8.8.8",
            "::1",
            "fd00::7",
            "fd00:ec3::254",
            "fd20:ce::255",
            "2001:4860:4860::8888",
            "2606:4700:4700::1111",
        ] {
            assert_eq!(Allowed::default().check(address(taken)), Ok(()), "{taken}");
        }
        for address in written_as_ipv6(Ipv4Addr::new(10, 0, 0, 7)) {
            assert_eq!(Allowed::default().check(address.into()), Ok(()), "{address}");
        }
    }

    #[test]
    fn this_machine_is_known_however_it_is_written() {
        let mut here = written_as_ipv6(Ipv4Addr::new(127, 9, 9, 9));
        here.push(Ipv6Addr::LOCALHOST);
        for address in here {
            assert!(leads_here(address.into()), "{address}");
            assert!(Allowed::anywhere(true).check(address.into()).is_err(), "{address}");
            assert_eq!(Allowed::anywhere(false).check(address.into()), Ok(()), "{address}");
        }
        for elsewhere in ["10.0.0.7", "::ffff:10.0.0.7", "fd00::1", "128.0.0.1"] {
            assert_eq!(Allowed::anywhere(true).check(address(elsewhere)), Ok(()), "{elsewhere}");
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
        /// An IPv6 address that has a refused IPv4 address within it, in any of the known ways, is refused.
        #[test]
        fn an_address_within_an_address_is_looked_at(bits in any::<u32>(), low in 0u32..256) {
            for bits in [bits, 0xa9fe_0000 | low, 0xc000_0000 | low, 0xe000_0000 | bits >> 4] {
                let inner = Ipv4Addr::from_bits(bits);
                let refused = Allowed::default().check(inner.into()).is_err();
                let nowhere = inner.octets()[0] == 0;
                for address in written_as_ipv6(inner) {
                    let why = Allowed::default().check(address.into());
                    prop_assert!(!refused || nowhere || why.is_err(), "{} in {}", inner, address);
                }
            }
        }

        #[test]
        fn a_network_reads_back_as_it_is_written(base in any::<IpAddr>(), bits in 0u8..=128) {
            let bits = if base.is_ipv4() { bits.min(32) } else { bits };
            let network = Network { base, bits };
            prop_assert_eq!(Network::try_from(network.to_string()), Ok(network));
            prop_assert!(network.contains(base.to_canonical()) || base.to_canonical() != base);
        }
    }
}
