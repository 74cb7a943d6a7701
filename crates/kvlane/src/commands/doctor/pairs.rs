//! Checks of engines that share requests: what each reports about its connector, whether they fit together, and a
//! transfer between each two.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvlane_control::pair_check::{NoTransfer, Pair, Transferred, Trial, words_of};
use kvlane_core::disaggregation::{Part, Role};
use kvlane_core::rng::Rng;
use kvlane_http::client::Client;
use kvlane_http::network::Allowed;
use kvlane_wire::disaggregation::{
    BOOTSTRAP_PORT, Connector, NoParams, Reported, Source, SourceOf, reported,
};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::check::Checks;
use super::engine::{Facts, json};
use super::workers::Engine;
use super::{Examined, Way};

/// Tokens of a block if unknown.
const BLOCK_TOKENS: u32 = 16;
/// Prefill engines that are tried with each decode engine: each takes seconds, one after the other.
const PAIRS_PER_DECODE: usize = 16;
/// Answers of a transfer may take this many times as long as others: NIXL's engines take 7 s to connect.
const PATIENCE: u32 = 6;
/// Seconds by which a first transfer is longer than the next if the engines have connected.
const HANDSHAKE_S: f64 = 1.0;

/// A trial of two engines, by their positions: the first transfer, and the time of the next one.
struct Tried {
    prefill: usize,
    decode: usize,
    first: Trial,
    next: Option<Duration>,
}

/// What an engine reports about its connector, row by row.
pub(super) async fn examine(
    engine: &Engine,
    connector: Connector,
    page: Option<&str>,
    facts: &mut Facts,
    checks: &mut Checks,
) {
    let told = match facts.kind.and_then(|kind| kind.settings.path) {
        Some(path) => json(&engine.client, path).await,
        None => None,
    };
    let reported = reported(page.unwrap_or_default(), told.as_ref());
    let name = connector.name();
    match (&reported.connector, reported.kind) {
        (Some(own), Some(kind)) if kind == connector => {
            checks.ok("kv_connector", format!("{own}, for {name}"))
        }
        (Some(own), _) if own.is_empty() => {
            checks.fail("kv_connector", "it has no connector", connector.advice());
        }
        (Some(own), _) => checks.fail(
            "kv_connector",
            format!("{own}, but kvlane's connector is {name}"),
            format!("set --kv-connector of kvlane, or {}", connector.advice()),
        ),
        // Engines with NIXL have metrics of it.
        (None, _) if reported.is_without_nixl && connector.compares_engines() => {
            checks.fail("kv_connector", "its metrics page has none of NIXL", connector.advice())
        }
        (None, _) => checks.skip("kv_connector", "not reported by the engine; see `transfer`"),
    }
    let (prefills, decodes) = match facts.role {
        Role::Prefill => (true, false),
        Role::Decode => (false, true),
        Role::Both => (connector.is_elastic(), connector.is_elastic()),
        Role::Encode => (false, false),
    };
    let lacks = |wanted: bool, has: Option<bool>| wanted && has == Some(false);
    let role = facts.role.name();
    if facts.role == Role::Both && !connector.is_elastic() {
        let fix = "set the role of this worker to prefill or decode, as the engine was started";
        checks.fail("kv_role", format!("both: engines of {name} are one or the other"), fix);
    } else if lacks(prefills, reported.prefills) {
        let fix = "start the engine for this role (kv_role kv_producer or kv_both), or correct the role";
        checks.fail("kv_role", format!("{role}, but the engine only fetches blocks"), fix);
    } else if lacks(decodes, reported.decodes) {
        let fix = "start the engine for this role (kv_role kv_consumer or kv_both), or correct the role";
        checks.fail("kv_role", format!("{role}, but the engine fetches no blocks"), fix);
    } else if reported.prefills.or(reported.decodes).is_some() {
        checks.ok("kv_role", role);
    } else {
        checks.skip("kv_role", format!("{role}; not reported by the engine"));
    }
    facts.transfer = reported;
}

/// Compares the engines with each other, and tries a transfer between each two.
pub(super) async fn compare(engines: &[Engine], examined: &[Examined], way: &Way) -> Checks {
    let mut checks = Checks::default();
    let roles = |role: Role| examined.iter().filter(|one| one.facts.role == role).count();
    let Some(connector) = way.connector else {
        if roles(Role::Prefill) > 0 {
            checks.fail(
                "roles",
                "there are prefill engines, but no connector: they get no requests",
                "set disaggregation.connector (--kv-connector)",
            );
        }
        return checks;
    };
    let part = |one: &Examined| Part { role: one.facts.role, network: Some(0), ..Part::default() };
    let prefills = examined.iter().filter(|one| part(one).may_prefill()).count();
    let decodes = examined.iter().filter(|one| part(one).may_decode()).count();
    if prefills == 0 || decodes == 0 {
        let lacking = if prefills == 0 { "prefill" } else { "decode" };
        let said = format!("no engine has the role {lacking} or both: no request is split");
        checks.fail(
            "roles",
            said,
            "give the workers roles: --prefill URL, --decode URL, or `role` of a worker",
        );
        return checks;
    }
    let [prefill, decode, both] = [Role::Prefill, Role::Decode, Role::Both].map(roles);
    checks.ok("roles", format!("{prefill} prefill, {decode} decode, {both} both"));
    let mut pairs: Vec<(usize, usize)> = Vec::new();
    let mut models: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    for (to, decode) in examined.iter().enumerate() {
        if let Some(model) = decode.facts.model.as_deref() {
            let count = models.entry(model).or_default();
            count[0] += usize::from(part(decode).may_prefill());
            count[1] += usize::from(part(decode).may_decode());
        }
        for (from, prefill) in examined.iter().enumerate() {
            let is_one_model = prefill.facts.model.is_some() && prefill.facts.model == decode.facts.model;
            if from != to && is_one_model && part(prefill).can_prefill_for(&part(decode)) {
                pairs.push((from, to));
            }
        }
    }
    for (model, [prefills, decodes]) in models {
        if prefills == 0 || decodes == 0 {
            let lacking = if prefills == 0 { "prefill" } else { "decode" };
            checks.fail(
                "roles",
                format!("{model}: no {lacking} engine serves it"),
                "start both kinds of engines with the same model and --served-model-name",
            );
        }
    }
    same(&mut checks, examined, connector);
    let tried = match way.sends {
        true => try_all(engines, examined, &pairs, connector, way, &mut checks).await,
        false => {
            checks.skip("transfer", "no request was sent (--no-request)");
            Vec::new()
        }
    };
    tensor_parallel(&mut checks, examined, &pairs, &tried, connector);
    side_channels(&mut checks, engines, examined, &pairs, &tried, connector, way.patience).await;
    for one in &tried {
        show(&mut checks, examined, one, connector);
    }
    checks
}

/// What must be the same at all engines of a model that share requests.
fn same(checks: &mut Checks, examined: &[Examined], connector: Connector) {
    let mut one = |name: &'static str, fix: &str, fact: fn(&Facts) -> Option<&str>| {
        let mut known: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
        for engine in examined {
            if let (Some(model), Some(value)) = (engine.facts.model.as_deref(), fact(&engine.facts)) {
                known.entry(model).or_default().push((&engine.url, value));
            }
        }
        for (model, known) in known.into_iter().filter(|(_, known)| known.len() > 1) {
            let (first, value) = known[0];
            match known.iter().find(|(_, other)| *other != value) {
                Some((url, other)) if connector.compares_engines() => {
                    checks.fail(name, format!("{model}: {value} at {first}, {other} at {url}"), fix);
                }
                Some((url, other)) => {
                    checks.warn(name, format!("{model}: {value} at {first}, {other} at {url}"), fix);
                }
                None => checks.ok(name, format!("{model}: {value}")),
            }
        }
    };
    one(
        "same_version",
        "run one version everywhere: NIXL's engines refuse another version when they connect",
        |facts| facts.version.as_deref(),
    );
    one(
        "same_model_path",
        "start all engines with the same --model, written the same way: NIXL's engines compare it",
        |facts| facts.root.as_deref(),
    );
    one("same_kv_dtype", "start all engines with the same --kv-cache-dtype", |facts| {
        facts.transfer.kv_dtype.as_deref()
    });
}

/// Tries the pairs: those of a decode engine one after the other, because it connects to one at a time.
async fn try_all(
    engines: &[Engine],
    examined: &[Examined],
    pairs: &[(usize, usize)],
    connector: Connector,
    way: &Way,
    checks: &mut Checks,
) -> Vec<Tried> {
    let mut by_decode: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for &(from, to) in pairs {
        by_decode.entry(to).or_default().push(from);
    }
    let client = |one: &Examined| {
        let engine = engines.iter().find(|engine| engine.client.url() == one.url)?;
        Some(engine.client.within(PATIENCE * way.patience))
    };
    let (mut trials, mut left) = (JoinSet::new(), 0);
    for (to, mut senders) in by_decode {
        left += senders.len().saturating_sub(PAIRS_PER_DECODE);
        // Each starts elsewhere, so that not all try the same.
        let turn = to % senders.len();
        senders.rotate_left(turn);
        senders.truncate(PAIRS_PER_DECODE);
        let (Some(decode), Some(model)) = (client(&examined[to]), examined[to].facts.model.clone()) else {
            continue;
        };
        let senders: Vec<(usize, Client, u16)> = senders
            .into_iter()
            .filter_map(|from| Some((from, client(&examined[from])?, port_of(&examined[from].facts))))
            .collect();
        let words = words_of(examined[to].facts.block_tokens.unwrap_or(BLOCK_TOKENS));
        trials.spawn(async move {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let mut rng = Rng::new(since.as_nanos() as u64 ^ (to as u64) << 48);
            let mut tried = Vec::new();
            for (from, prefill, bootstrap_port) in senders {
                let pair =
                    Pair { prefill: &prefill, decode: &decode, connector, bootstrap_port, model: &model };
                let first = pair.transfer(words, &mut rng).await;
                let next = match &first.result {
                    Ok(_) => pair.transfer(words, &mut rng).await.result.ok(),
                    Err(_) => None,
                };
                let next = next.as_ref().map(Transferred::taken);
                tried.push(Tried { prefill: from, decode: to, first, next });
            }
            tried
        });
    }
    let mut tried: Vec<Tried> = trials.join_all().await.into_iter().flatten().collect();
    tried.sort_by_key(|one| (one.decode, one.prefill));
    if left > 0 {
        let said = format!("{left} pairs not tried: at most {PAIRS_PER_DECODE} for each decode engine");
        checks.skip("transfer", said);
    }
    tried
}

/// Shows the result of a pair.
fn show(checks: &mut Checks, examined: &[Examined], tried: &Tried, connector: Connector) {
    let Tried { prefill, decode, first, next } = tried;
    let pair = format!("{} to {}", examined[*prefill].url, examined[*decode].url);
    let error = match &first.result {
        Ok(first) => {
            let first_s = first.taken().as_secs_f64();
            let said = match next.map(|next| next.as_secs_f64()) {
                Some(next_s) if first_s > next_s + HANDSHAKE_S => {
                    format!(
                        "{pair}: the first took {first_s:.1} s, as the engines connected; the next {next_s:.3} s"
                    )
                }
                Some(next_s) => format!("{pair}: {first_s:.3} s, then {next_s:.3} s"),
                None => {
                    let fix = "run the doctor again, and see the logs of both engines";
                    let said = format!("{pair}: the first took {first_s:.3} s, and the next failed");
                    return checks.warn("transfer", said, fix);
                }
            };
            return checks.ok("transfer", said);
        }
        Err(error) => error,
    };
    let fix = match error {
        NoTransfer::Connector(_) => {
            return checks.skip("transfer", format!("{pair}: {error}"));
        }
        NoTransfer::Prefill(_) => "the prefill engine did not compute a small prompt: see its log",
        NoTransfer::NoBlocks(NoParams::Absent) => connector.advice(),
        NoTransfer::NoBlocks(_) => "the prefill engine names no blocks: see its log, and compare its version",
        NoTransfer::Refused(_) => "the decode engine did not accept a small request: see its log",
        NoTransfer::Lost(_) => {
            "the decode engine did not get the blocks: correct what differs above, see `side_channel`, and the log of the \
             decode engine"
        }
    };
    checks.fail("transfer", format!("{pair}: {error}"), fix);
}

/// Where a prefill engine's side channel is: as it said in its first answer, else as its configuration says.
fn side_channel(
    facts: &Facts,
    own: &str,
    said: Option<&Source<'_>>,
    connector: Connector,
) -> Option<(String, u16)> {
    if let Some(source) = said {
        return Some((source.host.to_string(), source.port));
    }
    let Reported { host, port, .. } = &facts.transfer;
    match connector.source() {
        SourceOf::Worker => Some((own.to_owned(), port_of(facts))),
        _ => Some((host.clone().unwrap_or_else(|| own.to_owned()), (*port)?)),
    }
}

/// The bootstrap port: as configured, else as reported, else the default.
fn port_of(facts: &Facts) -> u16 {
    facts.bootstrap_port.or(facts.transfer.port).unwrap_or(BOOTSTRAP_PORT)
}

/// Checks that the side channels can be reached by the engines that fetch blocks.
async fn side_channels(
    checks: &mut Checks,
    engines: &[Engine],
    examined: &[Examined],
    pairs: &[(usize, usize)],
    tried: &[Tried],
    connector: Connector,
    patience: Duration,
) {
    let fix = connector.side_channel_advice();
    let host = |at: usize| {
        engines.iter().find(|one| one.client.url() == examined[at].url).map(|one| one.client.host())
    };
    let prefills: BTreeSet<usize> = pairs.iter().map(|(from, _)| *from).collect();
    for from in prefills {
        let (one, Some(own)) = (&examined[from], host(from)) else { continue };
        let mut of_it = tried.iter().filter(|tried| tried.prefill == from);
        let said = of_it.clone().find_map(|tried| tried.first.source.as_ref());
        let Some((at, port)) = side_channel(&one.facts, own, said, connector) else { continue };
        let place = if at.contains(':') { format!("[{at}]:{port}") } else { format!("{at}:{port}") };
        let elsewhere = pairs.iter().filter(|(of, _)| *of == from).find_map(|(_, to)| {
            host(*to).filter(|decode| {
                is_loopback(&at) && *decode != own && !(is_loopback(decode) && is_loopback(own))
            })
        });
        if let Some(decode) = elsewhere {
            let said = format!(
                "{}: {place}, where engines of other hosts, such as {decode}, find themselves",
                one.url
            );
            checks.fail("side_channel", said, fix);
            continue;
        }
        if is_loopback(&at) && !is_loopback(own) {
            checks.skip("side_channel", format!("{}: {place}, which only its own host reaches", one.url));
            continue;
        }
        let allowed = Allowed::anywhere(!is_loopback(own));
        let problem = match timeout(patience, allowed.connect(&place)).await {
            Ok(Ok(_)) => {
                checks.ok("side_channel", format!("{}: {place}", one.url));
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no connection within {patience:?}"),
        };
        let said = format!("{}: {place} cannot be reached from here: {problem}", one.url);
        // The network between the engines may be another one.
        match of_it.any(|tried| tried.first.result.is_ok()) {
            true => checks.ok("side_channel", format!("{said}; other engines reach it")),
            false => checks.fail("side_channel", said, fix),
        }
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

/// Compares the tensor-parallel sizes of engines that share requests.
fn tensor_parallel(
    checks: &mut Checks,
    examined: &[Examined],
    pairs: &[(usize, usize)],
    tried: &[Tried],
    connector: Connector,
) {
    let size = |at: usize| {
        let said = || tried.iter().filter(|one| one.prefill == at).find_map(|one| one.first.source.as_ref());
        examined[at].facts.transfer.tp_size.or_else(|| said().map(|source| source.tp_size))
    };
    let known = pairs.iter().filter_map(|&(from, to)| Some(((from, size(from)?), (to, size(to)?))));
    let known: Vec<_> = known.collect();
    let text = |((from, of), (to, other)): &((usize, u32), (usize, u32))| {
        format!("{of} at {}, {other} at {}", examined[*from].url, examined[*to].url)
    };
    let Some(first) = known.first() else { return };
    match known.iter().find(|((_, of), (_, other))| !connector.bears_tp(*of, *other)) {
        Some(pair) => checks.fail(
            "tensor_parallel",
            format!("{}: {} cannot transfer between them", text(pair), connector.name()),
            "start the engines with the same --tensor-parallel-size, or, with nixl, one that is a multiple of the other",
        ),
        None => match known.iter().find(|((_, of), (_, other))| of != other) {
            Some(pair) => checks.ok("tensor_parallel", format!("{}: multiples", text(pair))),
            None => checks.ok("tensor_parallel", format!("{}", first.0.1)),
        },
    }
}
