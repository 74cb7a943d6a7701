//! Workers from DNS: each address behind a URL's host name is a worker, as of a headless Service or of Consul.
//!
//! A name is resolved again when the time to live of its answer has passed, within bounds. An answer replaces the
//! previous one; a failure, an empty answer or a name that does not exist replaces nothing, because those are what a
//! DNS server answers while it restarts: an engine that is really gone is found by probes.
//!
//! A certificate of an engine is checked against the host name in the URL, not against the address.

use std::collections::{BTreeMap, BTreeSet};
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

/// How often names are resolved again.
pub const REFRESH: Refresh = Refresh { least: Duration::from_secs(1), most: Duration::from_secs(30) };
/// The longest that one resolution of a URL may take, with all its queries.
const RESOLUTION_MAX: Duration = Duration::from_secs(15);
/// How long one query to one server may take.
const QUERY_MAX: Duration = Duration::from_secs(3);
/// Most targets of SRV records that are resolved at once.
const CONCURRENT_MAX: usize = 32;
/// Most addresses of one URL.
const ADDRESSES_MAX: usize = 4096;

/// Bounds of the time between two resolutions of a name, whatever its time to live.
#[derive(Clone, Copy, Debug)]
pub struct Refresh {
    /// The shortest time.
    pub least: Duration,
    /// The longest time.
    pub most: Duration,
}

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
            Ok(resolver) => return run(urls, resolver, REFRESH, source).await,
            Err(problem) => {
                if source.fail(problem.clone()) {
                    tracing::error!(problem, "DNS discovery failed; the workers stay as they were");
                }
                sleep(REFRESH.most).await;
            }
        }
    }
}

/// The workers behind `urls` now, with this machine's configuration, and what cannot be resolved.
pub async fn resolve_once(urls: &[String]) -> (Targets, Vec<String>) {
    match system() {
        Ok(resolver) => resolve_all(urls, &resolver).await,
        Err(problem) => (Targets::default(), vec![problem]),
    }
}

async fn resolve_all(urls: &[String], resolver: &TokioResolver) -> (Targets, Vec<String>) {
    let mut known = Vec::new();
    for url in urls {
        let mut one = Known::default();
        one.note(in_time(url, resolver).await.map(|(workers, _)| workers));
        known.push(one);
    }
    (union(&known), known.into_iter().filter_map(|known| known.problem).collect())
}

/// Publishes the addresses behind `urls`, and resolves them again and again.
pub async fn run(urls: Vec<String>, resolver: TokioResolver, refresh: Refresh, source: Source) {
    let (tell, mut told) = mpsc::channel(urls.len().max(1));
    let mut resolutions = JoinSet::new();
    let mut known = Vec::new();
    for (n, url) in urls.into_iter().enumerate() {
        known.push(Known::default());
        let (resolver, tell) = (resolver.clone(), tell.clone());
        resolutions.spawn(async move {
            let name = format!("resolution of {url}");
            persist(&name, || follow(n, url.clone(), resolver.clone(), refresh, tell.clone())).await;
        });
    }
    drop(tell);
    let mut published = None;
    while let Some((n, resolved)) = told.recv().await {
        known[n].note(resolved);
        let named = union(&known);
        // Before the first answer there is nothing to say: it is not that there are no workers.
        let any = known.iter().any(|known| known.workers.is_some());
        if any && published.as_ref() != Some(&named) {
            source.publish(named.clone());
            published = Some(named);
        }
        let problems: Vec<&str> = known.iter().filter_map(|known| known.problem.as_deref()).collect();
        match problems.is_empty() {
            true if known.iter().all(|known| known.workers.is_some()) => source.confirm(),
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
    /// The workers at its addresses by the last answer; none before the first.
    workers: Option<Vec<WorkerSpec>>,
    /// Why it could not be resolved the last time.
    problem: Option<String>,
}

/// The result of a resolution: the workers, or what is wrong.
type Resolved = Result<Vec<WorkerSpec>, String>;

// === impl Refresh ===

impl Refresh {
    /// The time until the next resolution, after an answer with a time to live, or after a failure.
    pub(crate) fn after(&self, ttl: Result<Duration, ()>, before: Duration) -> Duration {
        match ttl {
            Ok(ttl) => ttl.clamp(self.least, self.most),
            Err(()) => (2 * before).min(self.most),
        }
    }
}

// === impl Known ===

impl Known {
    fn note(&mut self, resolved: Resolved) {
        match resolved {
            Ok(workers) => *self = Self { workers: Some(workers), problem: None },
            Err(problem) => self.problem = Some(problem),
        }
    }
}

/// All addresses, each once: two names may lead to the same, and the first one is used.
fn union(known: &[Known]) -> Targets {
    let mut by_url = BTreeMap::new();
    for spec in known.iter().flat_map(|known| known.workers.iter().flatten()) {
        by_url.entry(&spec.url).or_insert(spec);
    }
    // The answer does not say which process runs at an address; probes find out when it restarts.
    let target = |spec: &WorkerSpec| Target { key: String::new(), spec: spec.clone(), terminating: false };
    Targets { workers: by_url.into_values().map(target).collect(), problems: Vec::new() }
}

/// Resolves one URL again and again.
async fn follow(
    n: usize,
    url: String,
    resolver: TokioResolver,
    refresh: Refresh,
    tell: mpsc::Sender<(usize, Resolved)>,
) {
    let mut pause = refresh.least;
    loop {
        let resolved = in_time(&url, &resolver).await;
        pause = refresh.after(resolved.as_ref().map(|(_, ttl)| *ttl).map_err(|_| ()), pause);
        if tell.send((n, resolved.map(|(workers, _)| workers))).await.is_err() {
            return;
        }
        sleep(pause).await;
    }
}

/// Like [`resolve`], within [`RESOLUTION_MAX`].
async fn in_time(url: &str, resolver: &TokioResolver) -> Result<(Vec<WorkerSpec>, Duration), String> {
    let late = |_| Err(format!("{url}: no answer of the DNS server within {RESOLUTION_MAX:?}"));
    timeout(RESOLUTION_MAX, resolve(url, resolver)).await.unwrap_or_else(late)
}

/// The addresses of a host, and for how long they hold.
pub(crate) async fn addresses(host: &str, port: u16, resolver: &TokioResolver) -> Query {
    let late = |_| Err(format!("{host}: no answer of the DNS server within {RESOLUTION_MAX:?}"));
    timeout(RESOLUTION_MAX, by_name(host, port, resolver)).await.unwrap_or_else(late)
}

/// The workers behind `url`, and for how long they hold.
async fn resolve(url: &str, resolver: &TokioResolver) -> Result<(Vec<WorkerSpec>, Duration), String> {
    let address = Address::parse(url)?;
    let (places, ttl) = match address.has_port {
        true => by_name(&address.host, address.port, resolver).await,
        false => by_service(&address, resolver).await,
    }
    .map_err(|problem| format!("{url}: {problem}"))?;
    if places.len() > ADDRESSES_MAX {
        return Err(format!("{url}: {} addresses; the maximum is {ADDRESSES_MAX}", places.len()));
    }
    let scheme = address.scheme();
    let worker = |place: SocketAddr| WorkerSpec {
        tls_server_name: address.tls.then(|| address.host.trim_end_matches('.').to_owned()),
        ..WorkerSpec::new(format!("{scheme}://{place}{}", address.base_path))
    };
    Ok((places.into_iter().map(worker).collect(), ttl))
}

/// The addresses of a service by its SRV records, which have the ports; by its name, where there are none.
async fn by_service(
    address: &Address,
    resolver: &TokioResolver,
) -> Result<(Vec<SocketAddr>, Duration), String> {
    let service = format!("_{}._tcp.{}", address.scheme(), address.host);
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
    let mut ttl = Duration::MAX;
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

pub(crate) type Query = Result<(Vec<SocketAddr>, Duration), String>;

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
        let mut ttl = Duration::MAX;
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

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};
    use std::sync::{Arc, Mutex};

    use hickory_resolver::proto::op::{Message, ResponseCode};
    use hickory_resolver::proto::rr::rdata::{A, AAAA, SRV};
    use hickory_resolver::proto::rr::{Name, Record};
    use kvlane_fleet::clock::Clock;
    use kvlane_fleet::discovery::{DNS, Discovery, Seen, Status};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, UdpSocket};

    use super::*;

    /// How long a test waits before it fails. It is not a measurement.
    const PATIENCE: Duration = Duration::from_secs(30);
    /// The largest answer by UDP.
    const UDP_BYTES_MAX: usize = 512;

    /// What a name has: records with a time to live, or a failure.
    #[derive(Clone)]
    enum Said {
        Records(u32, Vec<RData>),
        Fails(ResponseCode),
        /// No answer at all.
        Nothing,
    }

    /// A DNS server on loopback.
    struct Server {
        address: SocketAddr,
        names: Arc<Mutex<BTreeMap<(String, RecordType), Said>>>,
        queries: Arc<Mutex<Vec<(String, RecordType)>>>,
        _tasks: JoinSet<()>,
    }

    // === impl Server ===

    impl Server {
        async fn start() -> Self {
            let (tcp, udp) = both().await;
            let address = tcp.local_addr().expect("an address");
            let names: Arc<Mutex<BTreeMap<_, _>>> = Arc::default();
            let queries: Arc<Mutex<Vec<_>>> = Arc::default();
            let mut tasks = JoinSet::new();
            let answer = {
                let (names, queries) = (Arc::clone(&names), Arc::clone(&queries));
                move |query: &[u8]| answer(&names, &queries, query)
            };
            let by_udp = answer.clone();
            tasks.spawn(async move {
                let mut query = vec![0; 4096];
                while let Ok((length, client)) = udp.recv_from(&mut query).await {
                    let Some(message) = by_udp(&query[..length]) else { continue };
                    let mut bytes = message.to_vec().expect("it can be written");
                    if bytes.len() > UDP_BYTES_MAX {
                        bytes = message.truncate().to_vec().expect("it can be written");
                    }
                    udp.send_to(&bytes, client).await.expect("sent");
                }
            });
            tasks.spawn(async move {
                while let Ok((mut stream, _)) = tcp.accept().await {
                    let answer = answer.clone();
                    tokio::spawn(async move {
                        while let Ok(length) = stream.read_u16().await {
                            let mut query = vec![0; length.into()];
                            stream.read_exact(&mut query).await.expect("a query");
                            let Some(message) = answer(&query) else { continue };
                            let bytes = message.to_vec().expect("it can be written");
                            stream.write_u16(bytes.len() as u16).await.expect("written");
                            stream.write_all(&bytes).await.expect("written");
                        }
                    });
                }
            });
            Self { address, names, queries, _tasks: tasks }
        }

        fn says(&self, name: &str, kind: RecordType, said: Said) {
            self.names.lock().expect("no panic").insert((name.into(), kind), said);
        }

        /// Sets the IPv4 addresses of a name.
        fn has(&self, name: &str, ttl: u32, addresses: &[[u8; 4]]) {
            let record = |address: &[u8; 4]| RData::A(A(Ipv4Addr::from(*address)));
            self.says(name, RecordType::A, Said::Records(ttl, addresses.iter().map(record).collect()));
        }

        /// How often a name was asked for.
        fn asked(&self, name: &str, kind: RecordType) -> usize {
            let queries = self.queries.lock().expect("no panic");
            queries.iter().filter(|(asked, of)| asked == name && *of == kind).count()
        }

        async fn resolve(&self, url: &str) -> Result<(Vec<WorkerSpec>, Duration), String> {
            let resolver = at(self.address).expect("a resolver");
            timeout(PATIENCE, resolve(url, &resolver)).await.expect("an answer in time")
        }

        /// The URLs behind `url`.
        async fn urls(&self, url: &str) -> Vec<String> {
            urls(self.resolve(url).await.expect("it can be resolved").0)
        }
    }

    fn urls(workers: Vec<WorkerSpec>) -> Vec<String> {
        workers.into_iter().map(|worker| worker.url).collect()
    }

    /// Sockets of one port, which for either protocol may be another program's.
    async fn both() -> (TcpListener, UdpSocket) {
        for _ in 0..100 {
            let tcp = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            if let Ok(udp) = UdpSocket::bind(tcp.local_addr().expect("an address")).await {
                return (tcp, udp);
            }
        }
        panic!("no port is free for both protocols");
    }

    fn answer(
        names: &Mutex<BTreeMap<(String, RecordType), Said>>,
        queries: &Mutex<Vec<(String, RecordType)>>,
        query: &[u8],
    ) -> Option<Message> {
        let query = Message::from_vec(query).expect("a query");
        let asked = query.queries.first().expect("a question").clone();
        let name = asked.name().to_utf8().to_lowercase();
        let key = (name.trim_end_matches('.').to_owned(), asked.query_type());
        queries.lock().expect("no panic").push(key.clone());
        let names = names.lock().expect("no panic");
        let said = names.get(&key).cloned();
        let exists = names.keys().any(|(name, _)| *name == key.0);
        let mut message = query.into_response();
        message.metadata.recursion_available = true;
        match said {
            Some(Said::Records(ttl, records)) => {
                let record = |data| Record::from_rdata(asked.name().clone(), ttl, data);
                message.add_answers(records.into_iter().map(record));
            }
            Some(Said::Fails(code)) => message.metadata.response_code = code,
            Some(Said::Nothing) => return None,
            None if exists => {}
            None => message.metadata.response_code = ResponseCode::NXDomain,
        }
        Some(message)
    }

    /// A source that resolves `urls` at this server.
    fn started(server: &Server, urls: &[&str]) -> (JoinSet<()>, Seen) {
        let (source, seen) = Discovery::default().source(DNS, Clock::start(1.0));
        let mut running = JoinSet::new();
        let urls = urls.iter().map(|url| (*url).to_owned()).collect();
        let refresh = Refresh { least: Duration::from_millis(5), most: Duration::from_millis(50) };
        running.spawn(run(urls, at(server.address).expect("a resolver"), refresh, source));
        (running, seen)
    }

    async fn named(seen: &mut Seen) -> Vec<String> {
        let next = timeout(PATIENCE, seen.next()).await;
        let targets = next.expect("published in time").expect("the source runs");
        targets.workers.iter().map(|target| target.spec.url.clone()).collect()
    }

    /// Waits until the status is as `wanted` says.
    async fn becomes(seen: &Seen, wanted: impl Fn(&Status) -> bool) -> Status {
        let give_up = tokio::time::Instant::now() + PATIENCE;
        let mut ticks = tokio::time::interval(Duration::from_millis(5));
        loop {
            let status = seen.status();
            if wanted(&status) {
                return status;
            }
            assert!(tokio::time::Instant::now() < give_up, "not in time: {status:?}");
            ticks.tick().await;
        }
    }

    #[tokio::test]
    async fn each_address_of_a_name_is_a_worker() {
        let server = Server::start().await;
        server.has("vllm.test", 7, &[[10, 0, 0, 2], [10, 0, 0, 1], [10, 0, 0, 2]]);
        let (workers, ttl) = server.resolve("http://vllm.test:8000/engine").await.expect("right");
        assert!(workers.iter().all(|worker| worker.tls_server_name.is_none()));
        assert_eq!(urls(workers), ["http://10.0.0.1:8000/engine", "http://10.0.0.2:8000/engine"]);
        assert_eq!(ttl, Duration::from_secs(7));
        assert_eq!(server.asked("vllm.test", RecordType::AAAA), 0, "a host with both kinds is one engine");
    }

    #[tokio::test]
    async fn a_name_without_ipv4_addresses_has_ipv6_ones() {
        let server = Server::start().await;
        let address: Ipv6Addr = "fd00::7".parse().expect("an address");
        server.says("vllm.test", RecordType::AAAA, Said::Records(5, vec![RData::AAAA(AAAA(address))]));
        assert_eq!(server.urls("https://vllm.test:8443").await, ["https://[fd00::7]:8443"]);
    }

    /// The certificate of each is checked against the name, because engines behind one name share a certificate.
    #[tokio::test]
    async fn workers_with_tls_have_certificates_for_the_name_that_was_resolved() {
        let server = Server::start().await;
        server.has("a.test", 7, &[[10, 0, 0, 1]]);
        server.has("b.test", 7, &[[10, 0, 0, 1], [10, 0, 0, 2]]);
        let (_running, mut seen) = started(&server, &["https://a.test:8443", "https://b.test:8443"]);
        let both = |targets: &Targets| targets.workers.len() == 2;
        let targets = loop {
            let targets = timeout(PATIENCE, seen.next()).await.expect("in time").expect("it runs");
            if both(&targets) && targets.workers[0].spec.tls_server_name.as_deref() == Some("a.test") {
                break targets;
            }
        };
        let names = targets.workers.iter().map(|target| target.spec.tls_server_name.as_deref());
        assert_eq!(names.collect::<Vec<_>>(), [Some("a.test"), Some("b.test")], "the first of two names");
    }

    #[tokio::test]
    async fn a_list_that_is_too_long_for_udp_is_read_by_tcp() {
        let server = Server::start().await;
        let addresses: Vec<[u8; 4]> = (0..500u16).map(|n| [10, 1, (n >> 8) as u8, n as u8]).collect();
        server.has("vllm.test", 5, &addresses);
        assert_eq!(server.urls("http://vllm.test:1").await.len(), 500);
    }

    #[tokio::test]
    async fn a_url_without_a_port_takes_ports_from_srv_records() {
        let server = Server::start().await;
        let srv = |priority, port, target: &str| {
            RData::SRV(SRV::new(priority, 1, port, Name::from_utf8(target).expect("a name")))
        };
        let records = vec![
            srv(1, 8000, "a.test."),
            srv(1, 8001, "a.test."),
            srv(1, 9000, "b.test."),
            srv(2, 1, "spare.test."),
        ];
        server.says("_http._tcp.vllm.test", RecordType::SRV, Said::Records(9, records));
        server.has("a.test", 20, &[[10, 0, 0, 1]]);
        server.has("b.test", 4, &[[10, 0, 0, 2]]);
        server.has("spare.test", 4, &[[10, 0, 0, 9]]);
        let (workers, ttl) = server.resolve("http://vllm.test").await.expect("right");
        assert_eq!(urls(workers), ["http://10.0.0.1:8000", "http://10.0.0.1:8001", "http://10.0.0.2:9000"]);
        assert_eq!(ttl, Duration::from_secs(4), "the shortest of all answers");
        assert_eq!(server.asked("spare.test", RecordType::A), 0, "it stands by");
        // Without SRV records it is a host like others.
        server.has("plain.test", 5, &[[10, 0, 0, 3]]);
        assert_eq!(server.urls("https://plain.test").await, ["https://10.0.0.3:443"]);
    }

    #[tokio::test]
    async fn what_is_wrong_is_said_with_the_url() {
        let server = Server::start().await;
        server.says("empty.test", RecordType::A, Said::Records(5, Vec::new()));
        server.says("broken.test", RecordType::A, Said::Fails(ResponseCode::ServFail));
        for (url, words) in [
            ("http://unknown.test:1", "the host name unknown.test does not exist"),
            ("http://empty.test:1", "the host name empty.test has no addresses"),
            ("http://broken.test:1", "cannot resolve broken.test"),
        ] {
            let problem = server.resolve(url).await.expect_err(url);
            assert!(problem.starts_with(url) && problem.contains(words), "{problem}");
        }
    }

    #[tokio::test]
    async fn a_question_without_a_gateway_names_all_workers_and_all_problems() {
        let server = Server::start().await;
        server.has("a.test", 5, &[[10, 0, 0, 1], [10, 0, 0, 2]]);
        let asked = ["http://a.test:1", "http://unknown.test:1", "http://a.test:2"].map(str::to_owned);
        let resolver = at(server.address).expect("a resolver");
        let (targets, problems) = resolve_all(&asked, &resolver).await;
        assert_eq!(targets.workers.len(), 4);
        assert_eq!(problems, ["http://unknown.test:1: the host name unknown.test does not exist"]);
    }

    /// Invariant: A name that cannot be resolved, or has no addresses, leaves the fleet as it was.
    #[tokio::test]
    async fn a_failure_or_an_empty_answer_keeps_the_last_answer() {
        let server = Server::start().await;
        server.has("a.test", 0, &[[10, 0, 0, 1]]);
        let (_running, mut seen) = started(&server, &["http://a.test:1", "http://b.test:1"]);
        assert_eq!(named(&mut seen).await, ["http://10.0.0.1:1"]);
        let status = becomes(&seen, |status| status.problem.is_some()).await;
        assert!(
            status.problem.is_some_and(|problem| problem.contains("b.test") && !problem.contains("a.test"))
        );
        server.has("b.test", 0, &[[10, 0, 0, 1], [10, 0, 0, 2]]);
        assert_eq!(named(&mut seen).await, ["http://10.0.0.1:1", "http://10.0.0.2:1"], "each once");
        becomes(&seen, |status| status.problem.is_none()).await;

        for said in [
            Said::Records(0, Vec::new()),
            Said::Fails(ResponseCode::NXDomain),
            Said::Fails(ResponseCode::ServFail),
        ] {
            server.says("b.test", RecordType::A, said);
            let status = becomes(&seen, |status| status.problem.is_some()).await;
            assert_eq!(status.workers, 2);
            server.has("b.test", 0, &[[10, 0, 0, 2]]);
            becomes(&seen, |status| status.problem.is_none()).await;
        }
        server.has("b.test", 0, &[[10, 0, 0, 3]]);
        assert_eq!(named(&mut seen).await, ["http://10.0.0.1:1", "http://10.0.0.3:1"]);
    }

    #[tokio::test]
    async fn a_name_that_was_never_resolved_is_not_an_empty_fleet() {
        let server = Server::start().await;
        let (_running, seen) = started(&server, &["http://a.test:1"]);
        let status = becomes(&seen, |status| status.problem.is_some()).await;
        assert_eq!(status.confirmed, None);
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_holds_up_no_other_name() {
        let server = Server::start().await;
        server.says("slow.test", RecordType::A, Said::Nothing);
        server.has("a.test", 0, &[[10, 0, 0, 1]]);
        let (_running, mut seen) = started(&server, &["http://slow.test:1", "http://a.test:1"]);
        assert_eq!(named(&mut seen).await, ["http://10.0.0.1:1"]);
        server.has("a.test", 0, &[[10, 0, 0, 2]]);
        assert_eq!(named(&mut seen).await, ["http://10.0.0.2:1"]);
    }

    #[test]
    fn a_name_is_resolved_again_when_its_time_to_live_has_passed() {
        let pauses = [0, 5, 3600].map(|ttl| REFRESH.after(Ok(Duration::from_secs(ttl)), REFRESH.most));
        assert_eq!(pauses.map(|pause| pause.as_secs()), [1, 5, 30]);
        let mut pauses = vec![REFRESH.least];
        for _ in 0..6 {
            pauses.push(REFRESH.after(Err(()), pauses[pauses.len() - 1]));
        }
        let seconds: Vec<u64> = pauses.iter().map(Duration::as_secs).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 30, 30]);
    }
}
