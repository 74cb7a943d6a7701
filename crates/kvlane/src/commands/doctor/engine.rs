//! Checks of one engine's own reports, row by row.

use kvlane_control::parity_check;
use kvlane_http::client::Client;
use kvlane_wire::engine::{Dialect, FeedSource, load_report, resolve, sglang_feeds, vllm_feeds};
use kvlane_wire::models::{self, Model};
use kvlane_wire::prometheus;
use serde_json::Value;

use super::check::Checks;
use super::{Examined, Way, events, request, tokens};

/// Facts about an engine.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    pub(super) dialect: Option<Dialect>,
    pub(super) version: Option<String>,
    /// The base model's name, used in requests.
    pub(super) model: Option<String>,
    /// The model directory that it reports.
    pub(super) root: Option<String>,
    pub(super) max_model_len: Option<u64>,
    pub(super) block_tokens: Option<u32>,
    /// Its KV event feeds.
    pub(super) feeds: Vec<Feed>,
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

/// All checks of one engine.
pub(super) async fn examine(engine: &Client, way: &Way) -> Examined {
    let mut checks = Checks::default();
    let mut facts = Facts::default();
    if reachable(engine, &mut checks).await {
        let page = metrics(engine, &mut facts, &mut checks).await;
        version(engine, &mut facts, &mut checks).await;
        model(engine, &mut facts, &mut checks).await;
        prefix_caching(engine, page.as_deref(), &facts, &mut checks).await;
        block_size(&facts, &mut checks);
        tokens::compare(engine, way, &mut facts, &mut checks).await;
        feeds(engine, way, &mut facts, &mut checks).await;
        match (facts.model.clone(), way.sends) {
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
    let fix = "turn metrics on (SGLang: --enable-metrics; llama.cpp: --metrics): without them the gateway does not see \
               what else the engine is doing";
    let page = match engine.get("/metrics").await {
        Ok((200, page)) => String::from_utf8_lossy(&page).into_owned(),
        Ok((status, _)) => {
            checks.warn("metrics", format!("GET /metrics answered {status}"), key_or(status, fix));
            return None;
        }
        Err(problem) => {
            checks.warn("metrics", problem, fix);
            return None;
        }
    };
    match load_report(&page) {
        Some((dialect, load)) => {
            facts.dialect = Some(dialect);
            let said = format!(
                "{} gauges: {} running, {} waiting, KV cache {:.0} % in use",
                dialect.name(),
                load.running,
                load.waiting,
                100.0 * load.kv_usage_ratio
            );
            checks.ok("metrics", said);
        }
        None => checks.warn("metrics", "GET /metrics has no gauges of vLLM, SGLang or llama.cpp", fix),
    }
    facts.block_tokens = parity_check::block_tokens(&page);
    Some(page)
}

/// Detects the kind of engine and its version.
async fn version(engine: &Client, facts: &mut Facts, checks: &mut Checks) {
    for (path, key, dialect) in [
        ("/version", "version", Dialect::Vllm),
        ("/server_info", "version", Dialect::Sglang),
        ("/get_server_info", "version", Dialect::Sglang),
        ("/props", "build_info", Dialect::LlamaCpp),
    ] {
        if facts.dialect.is_some_and(|known| known != dialect) {
            continue;
        }
        let Some(told) = json(engine, path).await else { continue };
        if let Some(version) = told[key].as_str() {
            (facts.dialect, facts.version) = (Some(dialect), Some(version.to_owned()));
            break;
        }
    }
    match (facts.dialect, &facts.version) {
        (Some(dialect), Some(version)) => checks.ok("engine", format!("{} {version}", dialect.name())),
        (Some(dialect), None) => checks.ok("engine", format!("{}, unknown version", dialect.name())),
        (None, _) => checks.warn(
            "engine",
            "neither vLLM nor SGLang nor llama.cpp, by its metrics and version",
            "kvlane serves it with approximate knowledge (its own dispatches)",
        ),
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
    facts.max_model_len = length(base);
    let names: Vec<&str> = listed.iter().map(|model| model.id.as_str()).collect();
    let length = facts.max_model_len.map_or_else(String::new, |tokens| format!(", max_model_len {tokens}"));
    checks.ok("models", format!("{}{length}", names.join(", ")));
}

/// The longest context: vLLM's `max_model_len`, llama.cpp's `meta.n_ctx_train`.
fn length(model: &Model) -> Option<u64> {
    model.card["max_model_len"].as_u64().or_else(|| model.card["meta"]["n_ctx_train"].as_u64())
}

async fn prefix_caching(engine: &Client, page: Option<&str>, facts: &Facts, checks: &mut Checks) {
    let on = match facts.dialect {
        Some(Dialect::Vllm) => page.and_then(|page| {
            let info = prometheus::samples(page).find(|sample| sample.name == "vllm:cache_config_info")?;
            Some(!info.label("enable_prefix_caching")?.eq_ignore_ascii_case("false"))
        }),
        Some(Dialect::Sglang) => {
            let told = json(engine, "/server_info").await;
            told.and_then(|told| Some(!told["disable_radix_cache"].as_bool()?))
        }
        _ => None,
    };
    match (on, facts.dialect) {
        (Some(true), _) => checks.ok("prefix_caching", "on"),
        (Some(false), Some(Dialect::Sglang)) => checks.fail(
            "prefix_caching",
            "off: --disable-radix-cache",
            "start the engine without --disable-radix-cache",
        ),
        (Some(false), _) => {
            checks.fail("prefix_caching", "off", "start the engine with --enable-prefix-caching");
        }
        (None, Some(Dialect::LlamaCpp)) => {
            checks.ok("prefix_caching", "one prefix per slot, as llama.cpp keeps it");
        }
        (None, _) => checks.skip("prefix_caching", "not reported by the engine; see `usage`"),
    }
}

fn block_size(facts: &Facts, checks: &mut Checks) {
    match (facts.block_tokens, facts.dialect) {
        (Some(tokens), _) => checks.ok("block_size", format!("{tokens} tokens, by its metrics")),
        (None, Some(Dialect::LlamaCpp)) => checks.ok("block_size", "none: llama.cpp reuses token by token"),
        (None, _) => checks.skip("block_size", "not in its metrics; see its events"),
    }
}

/// Finds its KV event feeds.
async fn feeds(engine: &Client, way: &Way, facts: &mut Facts, checks: &mut Checks) {
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
    let (feeds, by) = match (&told, way.kv_events_port) {
        (Some((path, sources)), _) if !sources.is_empty() => {
            (sources.iter().filter_map(feed).collect::<Vec<_>>(), *path)
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
                "set replay_endpoint in --kv-events-config, as \"tcp://*:5558\"",
            );
        }
    } else if facts.dialect == Some(Dialect::LlamaCpp) {
        checks.ok("kv_events", "none: llama.cpp publishes no KV events, so cache knowledge is approximate");
    } else {
        let fix = match facts.dialect {
            Some(Dialect::Sglang) => {
                "start the engine with --kv-events-config '{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\
                 \"replay_endpoint\":\"tcp://*:5558\"}'"
            }
            _ => {
                "start the engine with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\
                 \"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5558\"}'; if it is set and the engine is too old to report its port, give --kv-events-port 5557"
            }
        };
        checks.warn("kv_events", "announces no KV events: cache knowledge is approximate", fix);
    }
    facts.feeds = feeds;
}

async fn told_feeds(engine: &Client) -> Option<(&'static str, Vec<FeedSource>)> {
    if let Ok((200, body)) = engine.get("/kv_event_sources").await
        && let Ok(sources) = vllm_feeds(&String::from_utf8_lossy(&body))
    {
        return Some(("GET /kv_event_sources", sources));
    }
    if let Ok((200, body)) = engine.get("/server_info").await
        && let Ok(sources) = sglang_feeds(&String::from_utf8_lossy(&body))
    {
        return Some(("GET /server_info", sources));
    }
    None
}

async fn json(engine: &Client, path: &str) -> Option<Value> {
    let (status, body) = engine.get(path).await.ok()?;
    serde_json::from_slice(&body).ok().filter(|_| status == 200)
}
