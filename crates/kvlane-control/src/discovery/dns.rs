//! Workers from DNS: each address behind a URL's host name is a worker, as of a headless Service or of Consul.
//!
//! A name is resolved again when the time to live of its answer has passed, within bounds. An answer replaces the
//! previous one; a failure, an empty answer or a name that does not exist replaces nothing, because those are what a
//! DNS server answers while it restarts: an engine that is really gone is found by probes.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{RData, RecordType};
use kvlane_fleet::discovery::{Source, Target, Targets};
use kvlane_fleet::panics::persist;
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_http::address::Address;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// The shortest time between two resolutions of a name, whatever its time to live.
pub const REFRESH_MIN: Duration = Duration::from_secs(1);
/// The longest time between two resolutions of a name, whatever its time to live.
pub const REFRESH_MAX: Duration = Duration::from_secs(30);
/// The longest that one resolution of a URL may take, with all its queries.
const RESOLUTION_MAX: Duration = Duration::from_secs(15);
/// How long one query to one server may take.
const QUERY_MAX: Duration = Duration::from_secs(3);
/// Most targets of SRV records that are resolved at once.
const CONCURRENT_MAX: usize = 32;
/// Most addresses of one URL.
const ADDRESSES_MAX: usize = 4096;

/// A resolver with this machine's configuration (`/etc/resolv.conf`, `/etc/hosts`).
///
/// # Errors
/// The configuration cannot be read.
pub fn system() -> Result<TokioResolver, String> {
    let mut builder = TokioResolver::builder_tokio().map_err(|error| of_system(&error))?;
    set(builder.options_mut());
    builder.build().map_err(|error| of_system(&error))
}

/// A resolver that asks the DNS server at this address.
///
/// # Errors
/// The resolver cannot be made.
pub fn at(server: SocketAddr) -> Result<TokioResolver, String> {
    let connection = |mut connection: ConnectionConfig| {
        connection.port = server.port();
        connection
    };
    let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()].map(connection);
    let server = NameServerConfig::new(server.ip(), true, connections.to_vec());
    let config = ResolverConfig::from_name_servers(vec![server]);
    let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    set(builder.options_mut());
    builder.build().map_err(|error| error.to_string())
}

fn of_system(error: &NetError) -> String {
    format!("cannot use this machine's DNS configuration (/etc/resolv.conf): {error}")
}

fn set(options: &mut ResolverOpts) {
    // When to ask again is decided here.
    options.cache_size = 0;
    options.timeout = QUERY_MAX;
    options.attempts = 1;
    // Lists of hundreds of addresses are read by TCP.
    options.edns0 = true;
}

/// Like [`run`], with this machine's configuration. If that cannot be read, tries again later.
pub async fn run_with_system(urls: Vec<String>, source: Source) {
    loop {
        match system() {
            Ok(resolver) => return run(urls, resolver, source).await,
            Err(problem) => {
                if source.fail(problem.clone()) {
                    tracing::error!(problem, "DNS discovery failed; the workers stay as they were");
                }
                sleep(REFRESH_MAX).await;
            }
        }
    }
}

/// Publishes the addresses behind `urls`, and resolves them again and again.
pub async fn run(urls: Vec<String>, resolver: TokioResolver, source: Source) {
    let (tell, mut told) = mpsc::channel(urls.len().max(1));
    let mut resolutions = JoinSet::new();
    let mut known = Vec::new();
    for (n, url) in urls.into_iter().enumerate() {
        known.push(Known::default());
        let (resolver, tell) = (resolver.clone(), tell.clone());
        resolutions.spawn(async move {
            let name = format!("resolution of {url}");
            persist(&name, || follow(n, url.clone(), resolver.clone(), tell.clone())).await;
        });
    }
    drop(tell);
    let mut published = None;
    while let Some((n, resolved)) = told.recv().await {
        known[n].note(resolved);
        let named = union(&known);
        // Before the first answer there is nothing to say: it is not that there are no workers.
        let any = known.iter().any(|known| known.addresses.is_some());
        if any && published.as_ref() != Some(&named) {
            source.publish(named.clone());
            published = Some(named);
        }
        let problems: Vec<&str> = known.iter().filter_map(|known| known.problem.as_deref()).collect();
        match problems.is_empty() {
            true if known.iter().all(|known| known.addresses.is_some()) => source.confirm(),
            true => {}
            false => {
                let problem = problems.join("; ");
                if source.fail(problem.clone()) {
                    tracing::warn!(problem, "DNS discovery failed; the workers stay as they were");
                }
            }
        }
    }
}

/// What is known about one URL.
#[derive(Default)]
struct Known {
    /// The URLs of its addresses by the last answer; none before the first.
    addresses: Option<Vec<String>>,
    /// Why it could not be resolved the last time.
    problem: Option<String>,
}

/// The result of a resolution: the workers' URLs, or what is wrong.
type Resolved = Result<Vec<String>, String>;

// === impl Known ===

impl Known {
    fn note(&mut self, resolved: Resolved) {
        match resolved {
            Ok(addresses) => *self = Self { addresses: Some(addresses), problem: None },
            Err(problem) => self.problem = Some(problem),
        }
    }
}

/// All addresses, each once: two names may lead to the same.
fn union(known: &[Known]) -> Targets {
    let urls: BTreeSet<&String> = known.iter().flat_map(|known| known.addresses.iter().flatten()).collect();
    // The answer does not say which process runs at an address; probes find out when it restarts.
    let target = |url: &String| Target { key: String::new(), spec: WorkerSpec::new(url), terminating: false };
    Targets { workers: urls.into_iter().map(target).collect(), problems: Vec::new() }
}

/// Resolves one URL again and again.
async fn follow(n: usize, url: String, resolver: TokioResolver, tell: mpsc::Sender<(usize, Resolved)>) {
    let mut pause = REFRESH_MIN;
    loop {
        let resolved = match timeout(RESOLUTION_MAX, resolve(&url, &resolver)).await {
            Ok(resolved) => resolved,
            Err(_) => Err(format!("{url}: no answer of the DNS server within {RESOLUTION_MAX:?}")),
        };
        pause = match &resolved {
            Ok((_, ttl)) => (*ttl).clamp(REFRESH_MIN, REFRESH_MAX),
            Err(_) => (2 * pause).min(REFRESH_MAX),
        };
        if tell.send((n, resolved.map(|(urls, _)| urls))).await.is_err() {
            return;
        }
        sleep(pause).await;
    }
}

/// The workers' URLs behind `url`, and for how long they hold.
async fn resolve(url: &str, resolver: &TokioResolver) -> Result<(Vec<String>, Duration), String> {
    let address = Address::parse(url)?;
    let (places, ttl) = match address.has_port {
        true => by_name(&address.host, address.port, resolver).await,
        false => by_service(&address, resolver).await,
    }
    .map_err(|problem| format!("{url}: {problem}"))?;
    if places.len() > ADDRESSES_MAX {
        return Err(format!("{url}: {} addresses; the maximum is {ADDRESSES_MAX}", places.len()));
    }
    let scheme = if address.tls { "https" } else { "http" };
    let worker = |place: SocketAddr| format!("{scheme}://{place}{}", address.base_path);
    Ok((places.into_iter().map(worker).collect(), ttl))
}

/// The addresses of a service by its SRV records, which have the ports; by its name, where there are none.
async fn by_service(
    address: &Address,
    resolver: &TokioResolver,
) -> Result<(Vec<SocketAddr>, Duration), String> {
    let service = format!("{}._tcp.{}", if address.tls { "_https" } else { "_http" }, address.host);
    let found = match resolver.lookup(service.as_str(), RecordType::SRV).await {
        Ok(found) => found,
        Err(error) if error.is_no_records_found() => {
            return by_name(&address.host, address.port, resolver).await;
        }
        Err(error) => return Err(format!("cannot resolve the SRV records of {service}: {error}")),
    };
    let records: Vec<_> = found
        .answers()
        .iter()
        .filter_map(|record| match &record.data {
            RData::SRV(srv) => Some((srv.priority, srv.target.to_utf8(), srv.port, record.ttl)),
            _ => None,
        })
        .collect();
    // Targets of a higher number stand by for those of the lowest (RFC 2782).
    let Some(first) = records.iter().map(|(priority, ..)| *priority).min() else {
        return Err(format!("{service} has no SRV records"));
    };
    let mut ttl = REFRESH_MAX;
    let (mut places, mut queries) = (BTreeSet::new(), JoinSet::new());
    for (_, target, port, record_ttl) in records.into_iter().filter(|(priority, ..)| *priority == first) {
        ttl = ttl.min(Duration::from_secs(record_ttl.into()));
        if queries.len() >= CONCURRENT_MAX {
            collect(queries.join_next().await, &mut places, &mut ttl)?;
        }
        let resolver = resolver.clone();
        queries.spawn(async move { by_name(&target, port, &resolver).await });
    }
    while let Some(done) = queries.join_next().await {
        collect(Some(done), &mut places, &mut ttl)?;
    }
    Ok((places.into_iter().collect(), ttl))
}

type Query = Result<(Vec<SocketAddr>, Duration), String>;

fn collect(
    done: Option<Result<Query, tokio::task::JoinError>>,
    places: &mut BTreeSet<SocketAddr>,
    ttl: &mut Duration,
) -> Result<(), String> {
    let Some(done) = done else { return Ok(()) };
    let (found, its_ttl) = done.map_err(|error| error.to_string())??;
    places.extend(found);
    *ttl = its_ttl.min(*ttl);
    Ok(())
}

/// The addresses of a host: IPv4, and IPv6 where there are none, because a host with both is one engine.
async fn by_name(host: &str, port: u16, resolver: &TokioResolver) -> Query {
    let mut reason = None;
    for kind in [RecordType::A, RecordType::AAAA] {
        let found = match resolver.lookup(host, kind).await {
            Ok(found) => found,
            Err(error) if error.is_no_records_found() => {
                reason.get_or_insert(error);
                continue;
            }
            Err(error) => return Err(format!("cannot resolve {host}: {error}")),
        };
        let mut ttl = REFRESH_MAX;
        let mut addresses = BTreeSet::new();
        for record in found.answers() {
            let ip: IpAddr = match &record.data {
                RData::A(address) => address.0.into(),
                RData::AAAA(address) => address.0.into(),
                _ => continue,
            };
            ttl = ttl.min(Duration::from_secs(record.ttl.into()));
            addresses.insert(SocketAddr::new(ip, port));
        }
        if !addresses.is_empty() {
            return Ok((addresses.into_iter().collect(), ttl));
        }
    }
    Err(match reason {
        Some(reason) if reason.is_nx_domain() => format!("the host name {host} does not exist"),
        _ => format!("the host name {host} has no addresses"),
    })
}
