//! Checks of one engine's own reports, row by row.

use kvlane_core::disaggregation::Role;
use kvlane_fleet::worker::config::FeedSpec;
use kvlane_http::client::Client;
use kvlane_wire::disaggregation::{Connector, Reported};
use kvlane_wire::engine::{
    ASSUMED, ENGINES, EngineKind, FeedQuery, FeedSource, PrefixCaching, Tokenize, advice, block_tokens,
    load_report, resolve,
};
use kvlane_wire::models;
use serde_json::Value;

use super::check::Checks;
use super::workers::Engine;
use super::{Examined, Way, events, pairs, request, tokens};

/// Facts about an engine.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    pub(super) kind: Option<&'static EngineKind>,
    pub(super) version: Option<String>,
    /// The base model's name, used in requests.
    pub(super) model: Option<String>,
    /// The model directory that it reports.
    pub(super) root: Option<String>,
    pub(super) max_model_len: Option<u64>,
    pub(super) block_tokens: Option<u32>,
    /// Its KV event feeds.
    pub(super) feeds: Vec<Feed>,
    /// Its role as a worker.
    pub(super) role: Role,
    /// The bootstrap port that it is configured with.
    pub(super) bootstrap_port: Option<u16>,
    /// What it reports about its connector.
    pub(super) transfer: Reported,
    /// A hash of the ids that it returns for a set of texts: the same for the same tokenizer and template.
    pub(super) tokens_hash: Option<u64>,
}

/// The feed of one rank, as reachable from this machine.
#[derive(Clone, Debug)]
pub(super) struct Feed {
    pub(super) rank: u32,
    pub(super) address: String,
    pub(super) replay: Option<String>,
    pub(super) topic: String,
}

impl Facts {
    /// How it tokenizes.
    pub(super) fn tokenize(&self) -> &'static Tokenize {
        &self.kind.unwrap_or(ASSUMED).tokenize
    }
}

/// All checks of one engine.
pub(super) async fn examine(examined: &Engine, way: &Way) -> Examined {
    let engine = &examined.client;
    let mut checks = Checks::default();
    let mut facts =
        Facts { role: examined.role, bootstrap_port: examined.bootstrap_port, ..Facts::default() };
    if reachable(engine, &mut checks).await {
        let page = metrics(engine, &mut facts, &mut checks).await;
        version(engine, &mut facts, &mut checks).await;
        model(engine, &mut facts, &mut checks).await;
        prefix_caching(engine, page.as_deref(), &facts, &mut checks).await;
        block_size(&facts, &mut checks);
        tokens::compare(engine, way, &mut facts, &mut checks).await;
        feeds(examined, way, &mut facts, &mut checks).await;
        if let Some(connector) = way.connector {
            pairs::examine(examined, connector, page.as_deref(), &mut facts, &mut checks).await;
        }
        let serves_alone = facts.role == Role::Both || way.connector.is_none_or(Connector::is_elastic);
        match (facts.model.clone(), way.sends) {
            (Some(_), true) if !serves_alone => {
                checks.skip("usage", "it serves no request alone; see `transfer`");
            }
            (Some(model), true) => {
                let told = events::listen(engine, &model, way, &facts, &mut checks).await;
                request::compare(&model, told, &mut facts, &mut checks).await;
            }
            (None, _) => checks.skip("usage", "no model for a test request"),
            (_, false) => checks.skip("usage", "no request was sent (--no-request)"),
        }
    }
    Examined { url: engine.url().to_owned(), facts, checks }
}

/// The remedy for a bad status: a key if one is needed, `fix` otherwise.
fn key_or(status: u16, fix: &str) -> &str {
    if matches!(status, 401 | 403) {
        "the engine needs a key, or a different one: set --worker-api-key"
    } else {
        fix
    }
}

async fn reachable(engine: &Client, checks: &mut Checks) -> bool {
    let fix = "start the engine, or correct the URL: the gateway probes GET /health there";
    match engine.get("/health").await {
        Ok((200, _)) => checks.ok("reachable", "GET /health answered 200"),
        Ok((status, _)) => {
            checks.fail("reachable", format!("GET /health answered {status}"), key_or(status, fix));
        }
        Err(problem) => {
            checks.fail("reachable", problem, fix);
            return false;
        }
    }
    true
}

/// Reads the metrics page; returns it.
async fn metrics(engine: &Client, facts: &mut Facts, checks: &mut Checks) -> Option<String> {
    let flag = |kind: &&EngineKind| Some(format!("{}: {}", kind.title, kind.advice.metrics?));
    let flags: Vec<String> = ENGINES.iter().filter_map(flag).collect();
    let fix = format!(
        "turn metrics on ({}): without them the gateway does not see what else the engine is doing",
        flags.join("; ")
    );
    let page = match engine.get("/metrics").await {
        Ok((200, page)) => String::from_utf8_lossy(&page).into_owned(),
        Ok((status, _)) => {
            checks.warn("metrics", format!("GET /metrics answered {status}"), key_or(status, &fix));
            return None;
        }
        Err(problem) => {
            checks.warn("metrics", problem, fix);
            return None;
        }
    };
    match load_report(&page) {
        Some((kind, load)) => {
            facts.kind = Some(kind);
            let said = format!(
                "{} gauges: {} running, {} waiting, KV cache {:.0} % in use",
                kind.name,
                load.running,
                load.waiting,
                100.0 * load.kv_usage_ratio
            );
            checks.ok("metrics", said);
        }
        None => {
            checks.warn("metrics", format!("GET /metrics has no gauges of {}", titles(", ", " or ")), fix)
        }
    }
    facts.block_tokens = block_tokens(&page);
    Some(page)
}

/// Detects the kind of engine and its version.
async fn version(engine: &Client, facts: &mut Facts, checks: &mut Checks) {
    let candidates = ENGINES.iter().copied().filter(|kind| facts.kind.is_none_or(|known| known == *kind));
    let questions = candidates.flat_map(|kind| kind.versions.iter().map(move |question| (kind, question)));
    for (kind, (path, key)) in questions {
        let Some(told) = json(engine, path).await else { continue };
        if let Some(version) = told[*key].as_str() {
            (facts.kind, facts.version) = (Some(kind), Some(version.to_owned()));
            break;
        }
    }
    match (facts.kind, &facts.version) {
        (Some(kind), Some(version)) => checks.ok("engine", format!("{} {version}", kind.name)),
        (Some(kind), None) => checks.ok("engine", format!("{}, unknown version", kind.name)),
        (None, _) => checks.warn(
            "engine",
            format!("neither {}, by its metrics and version", titles(" nor ", " nor ")),
            "kvlane serves it with approximate knowledge (its own dispatches)",
        ),
    }
}

/// The known engines, with `between` between them and `last` before the last one.
fn titles(between: &str, last: &str) -> String {
    let titles: Vec<&str> = ENGINES.iter().map(|kind| kind.title).collect();
    match &titles[..] {
        [all @ .., end] => format!("{}{last}{end}", all.join(between)),
        [] => String::new(),
    }
}

async fn model(engine: &Client, facts: &mut Facts, checks: &mut Checks) {
    let fix = "the gateway reads the model from GET /v1/models: otherwise set `model` of the worker";
    let listed = match engine.get("/v1/models").await {
        Ok((200, body)) => models::parse(&body).map_err(|error| (error.to_string(), fix)),
        Ok((status, _)) => Err((format!("GET /v1/models answered {status}"), key_or(status, fix))),
        Err(problem) => Err((problem, fix)),
    };
    let listed = match listed {
        Ok(listed) => listed,
        Err((problem, fix)) => return checks.fail("models", problem, fix),
    };
    let Some(base) = listed.iter().find(|model| model.parent.is_none()) else {
        return checks.fail("models", "GET /v1/models lists no model", fix);
    };
    facts.model = Some(base.id.clone());
    facts.root = base.root.clone();
    facts.max_model_len = models::context_len(&base.card);
    let names: Vec<&str> = listed.iter().map(|model| model.id.as_str()).collect();
    let length = facts.max_model_len.map_or_else(String::new, |tokens| format!(", max_model_len {tokens}"));
    checks.ok("models", format!("{}{length}", names.join(", ")));
}

async fn prefix_caching(engine: &Client, page: Option<&str>, facts: &Facts, checks: &mut Checks) {
    let kind = facts.kind;
    let on = match kind.map(|kind| &kind.prefix_caching) {
        Some(PrefixCaching::Always(form)) => return checks.ok("prefix_caching", *form),
        Some(PrefixCaching::Page(read)) => page.and_then(read),
        Some(PrefixCaching::Answer(path, read)) => json(engine, path).await.and_then(|told| read(&told)),
        Some(PrefixCaching::Unreported) | None => None,
    };
    match on {
        Some(true) => checks.ok("prefix_caching", "on"),
        Some(false) => {
            let flag = kind.and_then(|kind| kind.advice.caching_off).map(|flag| format!(": {flag}"));
            let said = format!("off{}", flag.unwrap_or_default());
            checks.fail("prefix_caching", said, advice(kind, |advice| advice.caching));
        }
        None => checks.skip("prefix_caching", "not reported by the engine; see `usage`"),
    }
}

fn block_size(facts: &Facts, checks: &mut Checks) {
    match (facts.block_tokens, facts.kind) {
        (Some(tokens), _) => checks.ok("block_size", format!("{tokens} tokens, by its metrics")),
        (None, Some(kind)) if !kind.has_blocks => {
            checks.ok("block_size", format!("none: {} reuses token by token", kind.title));
        }
        (None, _) => checks.skip("block_size", "not in its metrics; see its events"),
    }
}

/// Finds its KV event feeds.
async fn feeds(examined: &Engine, way: &Way, facts: &mut Facts, checks: &mut Checks) {
    let engine = &examined.client;
    let told = told_feeds(engine).await;
    let feed = |source: &FeedSource| {
        let reached = |endpoint: &str| resolve(endpoint, engine.host());
        Some(Feed {
            rank: source.rank,
            address: reached(&source.endpoint)?,
            replay: source.replay.as_deref().and_then(reached),
            topic: source.topic.clone(),
        })
    };
    let configured = |(rank, feed): (usize, &FeedSpec)| {
        Some(Feed {
            rank: u32::try_from(rank).ok()?,
            address: resolve(&feed.endpoint, engine.host())?,
            replay: feed.replay.as_deref().and_then(|replay| resolve(replay, engine.host())),
            topic: feed.topic.clone(),
        })
    };
    let (feeds, by) = match (&told, way.kv_events_port) {
        _ if !examined.feeds.is_empty() => {
            (examined.feeds.iter().enumerate().filter_map(configured).collect(), "kv_events")
        }
        (Some((path, sources)), _) if !sources.is_empty() => {
            (sources.iter().filter_map(feed).collect::<Vec<_>>(), path.as_str())
        }
        (_, Some(port)) => {
            let at = |port: u16| resolve(&format!("tcp://*:{port}"), engine.host());
            let replay = way.kv_events_replay_port.and_then(at);
            let feed = at(port).map(|address| Feed { rank: 0, address, replay, topic: String::new() });
            (feed.into_iter().collect(), "--kv-events-port")
        }
        _ => (Vec::new(), ""),
    };
    if let Some((_, sources)) = &told
        && facts.block_tokens.is_none()
    {
        facts.block_tokens = sources.iter().find_map(|source| source.block_tokens);
    }
    if !feeds.is_empty() {
        let at: Vec<_> = feeds.iter().map(|feed| feed.address.as_str()).collect();
        checks.ok("kv_events", format!("{} ({by})", at.join(", ")));
        if feeds.iter().any(|feed| feed.replay.is_none()) {
            checks.warn(
                "kv_events_replay",
                "no replay socket: a lost message invalidates all known blocks of this engine",
                format!("set {}, as \"tcp://*:5558\"", advice(facts.kind, |advice| advice.replay_setting)),
            );
        }
    } else if let Some(kind) = facts.kind.filter(|kind| kind.feeds.is_none()) {
        let said = format!("none: {} publishes no KV events, so cache knowledge is approximate", kind.title);
        checks.ok("kv_events", said);
    } else {
        let fix = advice(facts.kind, |advice| advice.kv_events);
        checks.warn("kv_events", "announces no KV events: cache knowledge is approximate", fix);
    }
    facts.feeds = feeds;
}

/// The feeds that it announces, and where.
async fn told_feeds(engine: &Client) -> Option<(String, Vec<FeedSource>)> {
    for FeedQuery { path, parse } in ENGINES.iter().filter_map(|kind| kind.feeds.as_ref()) {
        if let Ok((200, body)) = engine.get(path).await
            && let Ok(sources) = parse(&String::from_utf8_lossy(&body))
        {
            return Some((format!("GET {path}"), sources));
        }
    }
    None
}

pub(super) async fn json(engine: &Client, path: &str) -> Option<Value> {
    let (status, body) = engine.get(path).await.ok()?;
    serde_json::from_slice(&body).ok().filter(|_| status == 200)
}
