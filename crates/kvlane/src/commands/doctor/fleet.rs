//! Comparison of engines, and of a gateway's view of them.

use std::collections::BTreeMap;
use std::fmt::Display;

use kvlane_http::client::Client;
use serde_json::Value;

use super::Examined;
use super::check::Checks;
use super::engine::Facts;

/// Compares the engines of each model.
pub(super) fn compare(examined: &[Examined]) -> Checks {
    let mut checks = Checks::default();
    if examined.len() < 2 {
        return checks;
    }
    let mut models: BTreeMap<&str, Vec<&Examined>> = BTreeMap::new();
    for one in examined {
        if let Some(model) = &one.facts.model {
            models.entry(model).or_default().push(one);
        }
    }
    let names: Vec<&str> = models.keys().copied().collect();
    match &names[..] {
        [] => return checks,
        [model] => checks.ok("same_model", format!("all serve {model}")),
        several => checks.warn(
            "same_model",
            format!("they serve {}: each model is a separate pool", several.join(", ")),
            "if it is one model, set the same --served-model-name",
        ),
    }
    for (model, engines) in models.iter().filter(|(_, engines)| engines.len() > 1) {
        let fix = "a pool has one index: start all its engines with the same --block-size";
        same(&mut checks, "same_block_size", model, engines, |facts| facts.block_tokens, fix);
        let fix = "start all engines of a model with the same --max-model-len";
        same(&mut checks, "same_max_model_len", model, engines, |facts| facts.max_model_len, fix);
        let fix = "start all engines of a model with the same files and --chat-template";
        same(&mut checks, "same_tokenizer", model, engines, |facts| facts.tokens_hash, fix);
    }
    checks
}

fn same<T: PartialEq + Display + Copy>(
    checks: &mut Checks,
    name: &'static str,
    model: &str,
    engines: &[&Examined],
    fact: impl Fn(&Facts) -> Option<T>,
    fix: &str,
) {
    let known: Vec<(&str, T)> =
        engines.iter().filter_map(|one| Some((one.url.as_str(), fact(&one.facts)?))).collect();
    let Some((first, value)) = known.first() else { return };
    match known.iter().find(|(_, other)| other != value) {
        Some((other, differs)) if name == "same_tokenizer" => {
            let _ = differs;
            checks.fail(
                name,
                format!("{model}: {other} and {first} tokenize the same texts differently"),
                fix,
            );
        }
        Some((other, differs)) => {
            checks.fail(name, format!("{model}: {value} at {first}, {differs} at {other}"), fix);
        }
        None if name == "same_tokenizer" => {
            checks.ok(name, format!("{model}: {} engines tokenize a set of texts equally", known.len()));
        }
        None => checks.ok(name, format!("{model}: {value} at {} engines", known.len())),
    }
}

/// Reads a gateway's view of the engines.
pub(super) async fn gateway(gateway: &Client, examined: &[Examined]) -> Checks {
    let mut checks = Checks::default();
    let told = match gateway.get("/readiness").await {
        Ok((200 | 503, body)) => serde_json::from_slice::<Value>(&body).map_err(|error| error.to_string()),
        Ok((status, _)) => Err(format!("GET /readiness answered {status}")),
        Err(problem) => Err(problem),
    };
    match told {
        Ok(told) if told["ready"] == true => checks.ok("ready", "the gateway places requests"),
        Ok(_) => checks.fail("ready", "no engine is ready", "GET /readiness gives the cause for each engine"),
        Err(problem) => {
            checks.fail(
                "ready",
                problem,
                "set --gateway to the gateway's metrics port, as http://127.0.0.1:29000",
            );
            return checks;
        }
    }
    let fix = "set --gateway to the gateway's metrics port";
    let (workers, fix) = match gateway.get("/workers").await {
        Ok((200, body)) => (serde_json::from_slice::<Value>(&body).ok(), fix),
        Ok((401 | 403, _)) => (None, "the gateway needs a key, or a different one: set --admin-api-key"),
        _ => (None, fix),
    };
    let Some(workers) = workers.as_ref().and_then(|told| told["workers"].as_array()) else {
        checks.warn("workers", "GET /workers failed", fix);
        return checks;
    };
    for one in examined {
        let known = workers.iter().find(|worker| worker["url"].as_str() == Some(&one.url));
        let Some(worker) = known else {
            checks.warn(
                "worker",
                format!("{} is not among its workers", one.url),
                "add it with exactly this URL",
            );
            continue;
        };
        let why = worker["parity"]["why"].as_str().unwrap_or_default();
        let fix = "see `tokenizer` and `chat_template` of that engine above";
        match worker["parity"]["state"].as_str() {
            Some("mismatch") => {
                checks.fail("worker", format!("{}: token ids differ: {why}", one.url), fix);
            }
            _ if worker["healthy"] != true => {
                let problem = worker["problem"].as_str().unwrap_or("not healthy");
                checks.fail("worker", format!("{}: {problem}", one.url), "start the engine, or see its log");
            }
            Some(state) => checks.ok("worker", format!("{}: healthy, token count {state}", one.url)),
            None => checks.ok("worker", format!("{}: healthy", one.url)),
        }
    }
    checks
}
