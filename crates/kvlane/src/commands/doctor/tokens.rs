//! Compares the engine's tokenizer and chat template with the gateway's.

use std::path::Path;

use kvlane_control::parity_check::{self, GatewayCount, Outcome};
use kvlane_http::client::Client;
use kvlane_tokens::{Source, Tokenizer};
use kvlane_wire::api::Api;
use kvlane_wire::engine::Tokenize;

use super::Way;
use super::check::Checks;
use super::engine::Facts;

/// Result of a set of samples.
#[derive(Default)]
struct Tally {
    same: usize,
    all: usize,
    refused: Vec<&'static str>,
    unknown: Option<String>,
    differs: Option<String>,
}

/// Compares the engine's ids of every sample with ours.
pub(super) async fn compare(engine: &Client, way: &Way, facts: &mut Facts, checks: &mut Checks) {
    let Some(model) = facts.model.clone() else {
        return checks.skip("tokenizer", "no model");
    };
    let found = match &way.tokenizer {
        None => facts.root.as_deref().and_then(beside),
        Some(_) => None,
    };
    let tokenizer = way.tokenizer.as_ref().or(found.as_ref());
    let ours = tokenizer.map_or(GatewayCount::Estimate, GatewayCount::Tokenizer);
    let (mut text, mut chat) = (Tally::default(), Tally::default());
    for sample in parity_check::samples() {
        let tally = if sample.api == Api::Completions { &mut text } else { &mut chat };
        tally.all += 1;
        match parity_check::compare(engine, facts.tokenize(), &model, &sample, ours).await.outcome {
            Outcome::Same => tally.same += 1,
            Outcome::Refused(_) => tally.refused.push(sample.name),
            Outcome::Unknown(why) => tally.unknown = Some(why),
            Outcome::Differs(why) => _ = tally.differs.get_or_insert(why),
            Outcome::Silent(why) => {
                checks.warn(
                    "tokenizer",
                    format!("cannot compare: {why}"),
                    "the cached tokens in answers then show whether predictions are correct",
                );
                return;
            }
        }
    }
    facts.tokens_hash = hash(engine, facts.tokenize(), &model).await;
    let estimates = tokenizer.is_none();
    told(checks, "tokenizer", &text, estimates, "plain texts");
    if estimates && text.differs.is_some() {
        return checks.skip("chat_template", "no tokenizer to compare with");
    }
    told(checks, "chat_template", &chat, estimates, "conversations");
}

/// A tokenizer in the model directory that the engine reports, if it can be read on this machine.
fn beside(root: &str) -> Option<Tokenizer> {
    let path = Path::new(root);
    let there = path.is_absolute() && path.is_dir();
    there.then(|| Tokenizer::load(&Source::at(path), &kvlane_tokens::Config::default()).ok()).flatten()
}

fn told(checks: &mut Checks, name: &'static str, tally: &Tally, estimates: bool, what: &str) {
    let Tally { same, all, refused, unknown, differs } = tally;
    let refused = match &refused[..] {
        [] => String::new(),
        names => format!("; the engine rejects {}", names.join(", ")),
    };
    match (differs, unknown) {
        (Some(_), _) if estimates => checks.warn(
            name,
            "not compared: no tokenizer; the gateway would estimate tokens",
            "set --tokenizer-path to the model's directory, here and for kvlane serve",
        ),
        (Some(why), _) => checks.fail(
            name,
            why.clone(),
            "use the same files as the engine; with a mismatch its KV events are ignored",
        ),
        (None, Some(why)) => checks.warn(
            name,
            format!("{same} of {all} {what} are the same; not compared: {why}{refused}"),
            "requests that cannot be counted are estimated",
        ),
        (None, None) if *same == 0 => {
            checks.warn(
                name,
                format!("not compared{refused}"),
                "its tokenize API does not accept such prompts; the cached tokens in answers will show whether predictions are correct",
            );
        }
        (None, None) if estimates => {
            checks.ok(
                name,
                format!("{same} {what}: the engine counts four bytes as a token, like the estimate{refused}"),
            );
        }
        (None, None) => checks.ok(name, format!("{same} {what} have equal token ids{refused}")),
    }
}

/// A hash of the ids that the engine's tokenizer returns for the samples.
async fn hash(engine: &Client, form: &Tokenize, model: &str) -> Option<u64> {
    let mut all = Vec::new();
    for sample in parity_check::samples() {
        all.extend_from_slice(&tokenized(engine, form, sample.body(model)).await.unwrap_or_default());
        all.push(u32::MAX);
    }
    let bytes: Vec<u8> = all.iter().flat_map(|id| id.to_le_bytes()).collect();
    (all.len() > parity_check::samples().len()).then(|| kvlane_core::block::ContentHash::of(&bytes).0)
}

/// The engine's ids of a body.
pub(super) async fn tokenized(engine: &Client, form: &Tokenize, body: bytes::Bytes) -> Option<Vec<u32>> {
    let (status, answer) = engine.post(form.path, &body).await.ok()?;
    let told = (form.parse)(&answer).ok().filter(|_| status == 200)?;
    Some(told.tokens).filter(|ids| !ids.is_empty())
}
