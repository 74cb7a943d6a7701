//! Compares the gateway's token ids with the engine's `/tokenize`: when a worker is registered, when it has been
//! unreachable, and when its models or its block size change. Block sizes and context lengths are also compared
//! between the members of a pool, whenever a pool gains, changes or loses a member.
//!
//! Exact knowledge of a cache is useless if prompts are counted differently from the engine: with another tokenizer,
//! another chat template, another block size. Nothing fails then; requests just go to the wrong engine. So a few
//! prompts with typical differences are counted by the gateway and by the engine's own `/tokenize`, and their ids are
//! compared one by one. One difference is enough for [`Parity::Mismatch`]: the engine's KV events are not used.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvlane_core::block::BYTES_PER_TOKEN;
use kvlane_http::address::Protocol;
use kvlane_http::client::Client;
use kvlane_http::connections::Connections;
use kvlane_tokens::{Prompt, Tokenizer};
use kvlane_wire::api::Api;
use kvlane_wire::engine::{self, Tokenize, block_tokens};
use kvlane_wire::{models, openai};
use serde_json::{Value, json};

use kvlane_fleet::Fleet;
use kvlane_fleet::clock::date;
use kvlane_fleet::parity::{Compared, Listed, Parity};
use kvlane_fleet::tokenize::{Counting, Places};
use kvlane_fleet::worker::{ServedName, Worker, WorkerId};

/// Characters shown of each text where they differ.
const SHOWN_CHARS: usize = 24;

/// One prompt of the set.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// What it tests.
    pub name: &'static str,
    /// The API of the request.
    pub api: Api,
    /// A template may reject it: then the engine rejects it too, and there is nothing to compare.
    pub optional: bool,
    body: Value,
}

/// How the gateway counts the samples.
#[derive(Clone, Copy)]
pub enum GatewayCount<'a> {
    /// With this tokenizer.
    Tokenizer(&'a Tokenizer),
    /// Four bytes count as a token.
    Estimate,
    /// With the engine's `/tokenize`.
    Theirs,
}

/// The result for one sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Both ids are equal.
    Same,
    /// The engine rejects the prompt, with this status.
    Refused(u16),
    /// The gateway cannot count it, for this reason.
    Unknown(String),
    /// The engine cannot be queried at all, for this reason.
    Silent(String),
    /// They differ: where, and what to do.
    Differs(String),
}

/// The result of [`compare`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The outcome.
    pub outcome: Outcome,
    /// The longest context according to `/tokenize`.
    pub max_model_len: Option<u64>,
}

/// Where two lists of ids differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    at: usize,
    ours: Vec<u32>,
    theirs: Vec<u32>,
    lengths: (usize, usize),
}

// === impl Sample ===

/// The prompts of the comparison: plain text with unicode and with space at its edges, a conversation of several
/// turns, one with tools.
pub fn samples() -> Vec<Sample> {
    let text = |name, prompt: &str| Sample {
        name,
        api: Api::Completions,
        optional: false,
        body: json!({"prompt": prompt}),
    };
    let turns = json!([
        {"role": "system", "content": "You answer in one sentence.\n"},
        {"role": "user", "content": "  Où est le café?  "},
        {"role": "assistant", "content": "À gauche, 3 rue de l'Église."},
        {"role": "user", "content": "And \"it's\" open?\n\n```rust\nfn main() {}\n```"},
    ]);
    let tools = json!([{"type": "function", "function": {
        "name": "weather", "description": "The weather in a city.",
        "parameters": {
            "type": "object", "required": ["city"],
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
        },
    }}]);
    let chat = |name, optional, body| Sample { name, api: Api::ChatCompletions, optional, body };
    vec![
        text("plain text", "The year 2024: naïve façade, 北京 and Ελλάδα, 👩‍👩‍👧‍👦 e\u{301} 12345678."),
        text("space at the edges", " \n\t two  spaces \r\n and a tail \n"),
        chat("a conversation", false, json!({ "messages": turns })),
        chat(
            "a conversation without a system prompt",
            false,
            json!({"messages": [{"role": "user", "content": "Hi"}]}),
        ),
        chat(
            "tools",
            true,
            json!({"messages": [{"role": "user", "content": "Will it rain in Łódź?"}], "tools": tools}),
        ),
    ]
}

impl Sample {
    /// The sample as a body for `/tokenize`, and for the API itself.
    pub fn body(&self, model: &str) -> Bytes {
        let mut body = self.body.clone();
        body["model"] = json!(model);
        body.to_string().into()
    }
}

// === impl Difference ===

impl Difference {
    /// Ids shown of each list.
    const SHOWN: usize = 4;

    /// Where `ours` and `theirs` differ; none if they are equal.
    pub fn between(ours: &[u32], theirs: &[u32]) -> Option<Self> {
        let at = ours.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count();
        let differ = at < ours.len().max(theirs.len());
        let from = |ids: &[u32]| ids[at..].iter().copied().take(Self::SHOWN).collect();
        differ.then(|| Self {
            at,
            ours: from(ours),
            theirs: from(theirs),
            lengths: (ours.len(), theirs.len()),
        })
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, ours, theirs, lengths } = self;
        write!(
            f,
            "token {at} on, the engine has {theirs:?} and the gateway has {ours:?} ({} and {} tokens)",
            lengths.1, lengths.0
        )
    }
}

/// Where two texts differ, with an excerpt of each; none if they are equal.
pub fn text_difference(ours: &str, theirs: &str) -> Option<String> {
    let same: usize =
        ours.chars().zip(theirs.chars()).take_while(|(a, b)| a == b).map(|(same, _)| same.len_utf8()).sum();
    let shown = |text: &str| -> String { text[same..].chars().take(SHOWN_CHARS).collect() };
    let before: String = {
        let mut chars: Vec<char> = ours[..same].chars().rev().take(SHOWN_CHARS).collect();
        chars.reverse();
        chars.into_iter().collect()
    };
    (same < ours.len().max(theirs.len())).then(|| {
        format!(
            "after {before:?} the engine's text continues with {:?} and the gateway's with {:?}",
            shown(theirs),
            shown(ours)
        )
    })
}

/// Sets how the pools of `names` count, and compares the worker's ids with the gateway's if that is due: the worker
/// is new, has been unreachable, or its models or its block size have changed. `page` is its metrics page, empty if
/// there is none. Returns whether it was compared: then [`compare_members`] is due.
pub async fn check(
    fleet: &Arc<Fleet>,
    upstreams: &Arc<Connections>,
    worker: &Arc<Worker>,
    names: &[ServedName],
    page: &str,
    limit: Duration,
) -> bool {
    for base in bases(names) {
        let root = base.card["root"].as_str().map(str::to_owned);
        let places = Places { named: worker.spec.tokenizer.clone(), root };
        fleet.settle_counting(&base.base, places).await;
    }
    let models: Vec<Listed> = names.iter().map(listed).collect();
    let mut block_tokens = block_tokens(page);
    if let Some(before) = worker.state().compared.as_ref()
        && !worker.upstream.is_gone()
        && before.models == models
    {
        // A missing page does not reset the value.
        block_tokens = block_tokens.or(before.block_tokens);
        if before.block_tokens == block_tokens {
            return false;
        }
    }
    let engine = Client::new(Arc::clone(&worker.upstream), Arc::clone(upstreams), limit);
    let mut with_us = Parity::Verified;
    // A prompt of gRPC is token ids: both count the same ones.
    let has_texts = worker.upstream.address.protocol == Protocol::Http;
    for base in bases(names).filter(|_| has_texts) {
        let counting = fleet.tokenizers.counting(&base.base);
        let ours = match &counting {
            Counting::Local(local) => GatewayCount::Tokenizer(&local.tokenizer),
            Counting::Engine => GatewayCount::Theirs,
            Counting::Estimate => GatewayCount::Estimate,
        };
        with_us = with_us.and(compare_all(&engine, base, ours).await);
    }
    worker.state().compared = Some(Arc::new(Compared { models, block_tokens, with_us }));
    true
}

/// Compares all members of all pools with each other, and sets the parity of each. Called whenever a pool gains,
/// changes or loses a member. A worker that is `joining` counts as a member although it is not registered yet, so that
/// its parity is set before its KV event feeds are opened. Callers hold the fleet's lock.
pub fn compare_members(fleet: &Fleet, joining: Option<WorkerId>) {
    if joining.is_some_and(|worker| joins_in_agreement(fleet, worker)) {
        return;
    }
    let workers: Vec<Arc<Worker>> = fleet.workers().values().cloned().collect();
    let seated: HashSet<WorkerId> =
        fleet.snapshot().endpoints().map(|(_, endpoint)| endpoint.worker.id).collect();
    let members: Vec<(&Arc<Worker>, Arc<Compared>)> = workers
        .iter()
        .filter_map(|worker| {
            let state = worker.state();
            let is_member = Some(worker.id) == joining || seated.contains(&worker.id);
            Some((worker, Arc::clone(state.compared.as_ref().filter(|_| is_member)?)))
        })
        .collect();
    let said: Vec<(&str, &Compared)> =
        members.iter().map(|(worker, compared)| (&*worker.url, &**compared)).collect();
    for ((worker, compared), agreement) in members.iter().zip(agreements(&said)) {
        set_parity(fleet, worker, agreement.and(compared.with_us.clone()));
    }
}

/// Sets the parity of a worker that joins and said the same as a member that agrees with the majority. Returns whether
/// it did: then the majorities are larger than before and otherwise the same, so the parity of no other member changes.
/// This keeps the time in which many workers join in proportion to their number.
fn joins_in_agreement(fleet: &Fleet, joining: WorkerId) -> bool {
    let table = fleet.snapshot();
    let is_member = |worker: WorkerId| table.pools.iter().any(|pool| !pool.endpoints_of(worker).is_empty());
    if is_member(joining) {
        // What it said before counts until now.
        return false;
    }
    let (worker, own) = {
        let workers = fleet.workers();
        let Some(worker) = workers.get(&joining).cloned() else { return false };
        let Some(own) = worker.state().compared.clone() else { return false };
        let agrees = |other: &Arc<Worker>| {
            let state = other.state();
            let said = state.compared.as_ref();
            let is_same =
                said.is_some_and(|said| said.models == own.models && said.block_tokens == own.block_tokens);
            is_same && !state.parity.is_mismatch()
        };
        if !workers.values().any(|other| other.id != joining && agrees(other) && is_member(other.id)) {
            return false;
        }
        (worker, own)
    };
    set_parity(fleet, &worker, own.with_us.clone());
    true
}

fn set_parity(fleet: &Fleet, worker: &Worker, parity: Parity) {
    let before = std::mem::replace(&mut worker.state().parity, parity.clone());
    if before != parity {
        tell(worker, &parity);
        // The KV events of an engine that counts differently are not used.
        for (_, endpoint) in fleet.snapshot().endpoints_of(worker.id) {
            if let Some(feed) = &endpoint.feed {
                feed.set_parity(worker.parity());
            }
        }
    }
}

/// Whether each member's block size and context length equal those of the other members that serve the same models:
/// one index serves them all. Where they differ, the value of the majority is the pool's; in a tie, that of the first
/// member in the list. The time of registration does not matter.
fn agreements(members: &[(&str, &Compared)]) -> Vec<Parity> {
    let (mut sizes, mut lengths): (HashMap<&str, Votes<'_>>, HashMap<&str, Votes<'_>>) = Default::default();
    for (url, compared) in members {
        for base in listed_bases(compared) {
            if let Some(size) = compared.block_tokens {
                sizes.entry(base).or_default().add(url, size.into());
            }
        }
        for Listed { name, max_model_len, .. } in &compared.models {
            if let Some(length) = max_model_len {
                lengths.entry(name).or_default().add(url, *length);
            }
        }
    }
    let agreement = |compared: &Compared| {
        for base in listed_bases(compared) {
            if let Some(its) = compared.block_tokens
                && let Some((other, size)) = winner(&sizes, base).filter(|(_, size)| *size != u64::from(its))
            {
                return Parity::Mismatch(format!(
                    "its KV blocks have {its} tokens, those of {other} have {size}: give both the same --block-size"
                ));
            }
        }
        for Listed { name, max_model_len, .. } in &compared.models {
            if let Some(its) = *max_model_len
                && let Some((other, length)) = winner(&lengths, name).filter(|(_, length)| *length != its)
            {
                return Parity::Mismatch(format!(
                    "it serves {name} with max_model_len {its}, {other} with {length}: give both the same \
                     --max-model-len"
                ));
            }
        }
        Parity::Verified
    };
    members.iter().map(|(_, compared)| agreement(compared)).collect()
}

fn winner<'a>(votes: &HashMap<&str, Votes<'a>>, of: &str) -> Option<(&'a str, u64)> {
    votes.get(of)?.winner()
}

/// The members' values: each with the first member that has it, and the number of members.
#[derive(Default)]
struct Votes<'a>(Vec<(&'a str, u64, usize)>);

// === impl Votes ===

impl<'a> Votes<'a> {
    fn add(&mut self, url: &'a str, value: u64) {
        match self.0.iter_mut().find(|(_, other, _)| *other == value) {
            Some((.., count)) => *count += 1,
            None => self.0.push((url, value, 1)),
        }
    }

    /// The most frequent value; in a tie, the first one.
    fn winner(&self) -> Option<(&'a str, u64)> {
        // `max_by_key` takes the last of several maxima.
        let (url, value, _) = self.0.iter().rev().max_by_key(|(.., count)| *count)?;
        Some((url, *value))
    }
}

/// Each base model that an engine listed, once.
fn listed_bases(compared: &Compared) -> impl Iterator<Item = &str> {
    let bases = compared.models.iter().map(|listed| listed.base.as_str());
    bases
        .enumerate()
        .filter(|(n, base)| compared.models[..*n].iter().all(|before| before.base != *base))
        .map(|(_, base)| base)
}

fn listed(served: &ServedName) -> Listed {
    let ServedName { name, base, card } = served;
    let root = card["root"].as_str().map(str::to_owned);
    Listed { name: name.clone(), base: base.clone(), root, max_model_len: length(served) }
}

/// One name of each base model.
fn bases(names: &[ServedName]) -> impl Iterator<Item = &ServedName> {
    names.iter().enumerate().filter_map(|(n, served)| {
        let first = names[..n].iter().all(|before| before.base != served.base);
        // The base itself if it is listed: an adapter's card has fewer fields.
        let named = names.iter().find(|other| other.base == served.base && other.name == other.base);
        first.then_some(named.unwrap_or(served))
    })
}

fn length(served: &ServedName) -> Option<u64> {
    models::max_model_len(&served.card)
}

fn tell(worker: &Worker, parity: &Parity) {
    match parity {
        Parity::Verified => tracing::info!(worker = %worker.url, "tokenizer parity verified"),
        Parity::Unverified(why) => {
            tracing::info!(worker = %worker.url, why, "tokenizer parity not verified");
        }
        Parity::Mismatch(why) => {
            tracing::warn!(worker = %worker.url, why, "tokenizer parity: the engine counts tokens differently; its KV events are not used");
        }
    }
}

/// Counts every sample with the gateway and with the engine.
async fn compare_all(engine: &Client, served: &ServedName, ours: GatewayCount<'_>) -> Parity {
    let form = engine::tokenize(Some(&served.card));
    let mut parity = Parity::Verified;
    for sample in samples() {
        let Answer { outcome, max_model_len } = compare(engine, form, &served.name, &sample, ours).await;
        // SGLang's `/tokenize` reports the tokenizer's own length, which may exceed the length that the engine was
        // started with.
        if let (Some(told), Some(listed)) = (max_model_len, length(served))
            && told < listed
        {
            return Parity::Mismatch(format!(
                "GET /v1/models lists {} with max_model_len {listed}, but its {} reports {told}",
                served.name, form.path
            ));
        }
        let of_it = match outcome {
            Outcome::Same => continue,
            Outcome::Refused(_) if sample.optional => continue,
            Outcome::Refused(status) => {
                Parity::Unverified(format!("POST {} answered {status} to {}", form.path, sample.name))
            }
            Outcome::Unknown(why) => Parity::Unverified(format!("{}: {why}", sample.name)),
            Outcome::Silent(why) => return parity.and(Parity::Unverified(why)),
            Outcome::Differs(why) => return Parity::Mismatch(why),
        };
        parity = parity.and(of_it);
    }
    parity
}

/// Counts one sample with the gateway and with the engine, which tokenizes in this form.
pub async fn compare(
    engine: &Client,
    form: &Tokenize,
    model: &str,
    sample: &Sample,
    ours: GatewayCount<'_>,
) -> Answer {
    let Tokenize { path, like, .. } = form;
    let body = sample.body(model);
    let nothing = |outcome| Answer { outcome, max_model_len: None };
    let theirs = match engine.post(path, &body).await {
        Ok((200, answer)) => match (form.parse)(&answer) {
            Ok(theirs) if !theirs.tokens.is_empty() => theirs,
            _ => {
                let why = format!("its {path} answers in another form than {like}'s");
                return nothing(Outcome::Silent(why));
            }
        },
        Ok((404 | 405, _)) => return nothing(Outcome::Silent(format!("it has no {path}"))),
        Ok((status, _)) => return nothing(Outcome::Refused(status)),
        Err(problem) => return nothing(Outcome::Silent(problem)),
    };
    let outcome = match ours {
        GatewayCount::Theirs => Outcome::Same,
        GatewayCount::Estimate if estimated(sample.api, &body) == theirs.tokens => Outcome::Same,
        GatewayCount::Estimate => Outcome::Differs(
            "tokens are estimated, four bytes each: give the model's tokenizer with --tokenizer-path".into(),
        ),
        GatewayCount::Tokenizer(tokenizer) => {
            let mut prompt = Prompt::default();
            match tokenizer.prompt(sample.api, &body, date(), &mut prompt) {
                Err(unknown) => Outcome::Unknown(unknown.to_string()),
                Ok(()) => match Difference::between(&prompt.tokens, &theirs.tokens) {
                    None => Outcome::Same,
                    Some(difference) => {
                        let text = text_of(engine, form, model, &theirs.tokens).await;
                        Outcome::Differs(mismatch(sample.name, &difference, &prompt.text, text.as_deref()))
                    }
                },
            }
        }
    };
    Answer { outcome, max_model_len: theirs.max_model_len }
}

/// The text of these ids by the engine, if it has a path for that: if the texts differ, the template differs;
/// otherwise the tokenizer.
async fn text_of(engine: &Client, form: &Tokenize, model: &str, tokens: &[u32]) -> Option<String> {
    let body = (form.text_body)(model, tokens).to_string().into();
    let (status, answer) = engine.post(form.text_path, &body).await.ok()?;
    (form.text_parse)(&answer).filter(|_| status == 200)
}

/// The difference, and what to do about it.
pub fn mismatch(sample: &str, difference: &Difference, ours: &str, theirs: Option<&str>) -> String {
    match theirs.map(|theirs| text_difference(ours, theirs)) {
        Some(Some(text)) => format!(
            "{sample}: from {difference}; {text}. If the chat template differs, set the engine's with --chat-template"
        ),
        Some(None) => format!(
            "{sample}: from {difference}, for the same text. The tokenizer differs: set the engine's with --tokenizer-path"
        ),
        None => format!(
            "{sample}: from {difference}. Set the engine's own files with --tokenizer-path and --chat-template"
        ),
    }
}

/// The estimated ids: four bytes each of the rendered prompt, as the mock engine counts.
pub fn estimated(api: Api, body: &[u8]) -> Vec<u32> {
    let mut rendered = Vec::new();
    if openai::parse(api, body, &mut rendered).is_err() {
        return Vec::new();
    }
    let id = |piece: &[u8]| {
        let mut bytes = [0; BYTES_PER_TOKEN];
        bytes[..piece.len()].copy_from_slice(piece);
        u32::from_le_bytes(bytes)
    };
    rendered.chunks(BYTES_PER_TOKEN).map(id).collect()
}

#[cfg(test)]
mod tests {
    use kvlane_fleet::clock::Clock;
    use kvlane_fleet::settings::Settings;
    use kvlane_fleet::tokenize::{Tokenizers, Tokens};
    use kvlane_fleet::worker::config::WorkerSpec;
    use kvlane_fleet::worker::{Origin, Rank};

    use super::*;

    #[test]
    fn the_first_difference_is_named_with_its_position() {
        assert_eq!(Difference::between(&[1, 2, 3], &[1, 2, 3]), None);
        let said =
            |ours: &[u32], theirs: &[u32]| Difference::between(ours, theirs).expect("differ").to_string();
        assert_eq!(
            said(&[1, 2, 3], &[1, 9, 3]),
            "token 1 on, the engine has [9, 3] and the gateway has [2, 3] (3 and 3 tokens)"
        );
        assert_eq!(
            said(&[1], &[1, 2]),
            "token 1 on, the engine has [2] and the gateway has [] (2 and 1 tokens)"
        );
    }

    #[test]
    fn the_first_difference_of_two_texts_is_quoted() {
        assert_eq!(text_difference("same", "same"), None);
        let said = text_difference("<s>user\nhé", "<s>user\nhe").expect("differ");
        assert_eq!(
            said,
            r#"after "<s>user\nh" the engine's text continues with "e" and the gateway's with "é""#
        );
    }

    fn said(block_tokens: u32, max_model_len: u64) -> Compared {
        let listed =
            Listed { name: "m".into(), base: "m".into(), root: None, max_model_len: Some(max_model_len) };
        Compared { models: vec![listed], block_tokens: Some(block_tokens), with_us: Parity::Verified }
    }

    #[test]
    fn the_most_frequent_block_size_is_the_pools() {
        let (small, large) = (said(16, 4096), said(32, 4096));
        let mismatched = |members: &[(&str, &Compared)]| -> Vec<bool> {
            agreements(members).iter().map(Parity::is_mismatch).collect()
        };
        assert_eq!(mismatched(&[("a", &small)]), [false]);
        assert_eq!(mismatched(&[("a", &small), ("b", &large)]), [false, true], "the first one in a tie");
        assert_eq!(mismatched(&[("a", &small), ("b", &large), ("c", &large)]), [true, false, false]);
        let longer = said(16, 8192);
        assert_eq!(mismatched(&[("a", &longer), ("b", &small), ("c", &small)]), [true, false, false]);
        let silent = Compared { block_tokens: None, ..said(16, 4096) };
        assert_eq!(mismatched(&[("a", &silent), ("b", &large)]), [false, false]);
    }

    /// A fleet whose workers join the pool of `m` after they were compared, in the order of `said`: after each, the parity
    /// of all must be what a comparison of all with all says.
    fn join_in_turn(said: &[Compared]) {
        let (drained, _) = tokio::sync::mpsc::unbounded_channel();
        let tokenizers = Tokenizers::start(&Tokens::default(), &Default::default()).expect("threads");
        let clock = Clock::start(1.0);
        let fleet = Fleet::new(Settings::default(), Arc::default(), clock, tokenizers, drained);
        let pool = Arc::new(fleet.new_pool("m"));
        fleet.change_snapshot(|snapshot| snapshot.pools.push(Arc::clone(&pool)));
        let mut workers: Vec<Arc<Worker>> = Vec::new();
        for (n, compared) in said.iter().enumerate() {
            let id = fleet.next_worker_id();
            let spec = WorkerSpec::new(format!("http://h{n}"));
            let worker = Arc::new(Worker::new(id, &spec, Origin::Config, None).expect("a good URL"));
            worker.state().compared = Some(Arc::new(compared.clone()));
            fleet.workers().insert(id, Arc::clone(&worker));
            compare_members(&fleet, Some(id));
            pool.join(&worker, Rank { number: 0, source: None }, false, None, Default::default())
                .expect("room");
            workers.push(worker);
            let members: Vec<(&str, &Compared)> =
                workers.iter().zip(said).map(|(worker, said)| (&*worker.url, said)).collect();
            let expect = agreements(&members).into_iter().zip(said);
            let expect: Vec<Parity> = expect.map(|(parity, said)| parity.and(said.with_us.clone())).collect();
            let parities: Vec<Parity> = workers.iter().map(|worker| worker.parity()).collect();
            assert_eq!(parities, expect, "after {} of {said:?}", n + 1);
        }
    }

    #[test]
    fn a_worker_that_joins_changes_the_parity_that_a_comparison_of_all_would_change() {
        let (small, large, silent) = (said(16, 4096), said(32, 4096), said(16, 8192));
        let open = Compared { with_us: Parity::Unverified("no /tokenize".into()), ..small.clone() };
        let wrong = Compared { with_us: Parity::Mismatch("other ids".into()), ..small.clone() };
        let kinds = [&small, &large, &silent, &open, &wrong];
        // All orders of four joins of these kinds.
        for mut n in 0..kinds.len().pow(4) {
            let mut order = Vec::new();
            for _ in 0..4 {
                order.push(kinds[n % kinds.len()].clone());
                n /= kinds.len();
            }
            join_in_turn(&order);
        }
    }

    #[test]
    fn members_of_other_pools_are_not_compared() {
        let mut other = said(32, 8192);
        (other.models[0].name, other.models[0].base) = ("n".into(), "n".into());
        let all = [("a", &said(16, 4096)), ("b", &other)];
        assert_eq!(agreements(&all), [Parity::Verified, Parity::Verified]);
    }

    #[test]
    fn one_mismatch_outweighs_all_matches() {
        let (bad, open) = (Parity::Mismatch("a".into()), Parity::Unverified("b".into()));
        for (one, other, expect) in [
            (Parity::Verified, Parity::Verified, &Parity::Verified),
            (Parity::Verified, open.clone(), &open),
            (open.clone(), Parity::Verified, &open),
            (open.clone(), bad.clone(), &bad),
            (bad.clone(), Parity::Verified, &bad),
        ] {
            assert_eq!(one.and(other), *expect);
        }
    }

    #[test]
    fn an_estimate_encodes_the_bytes_of_the_prompt() {
        let body = br#"{"model":"m","prompt":"abcdefg"}"#;
        assert_eq!(estimated(Api::Completions, body), [0x6463_6261, 0x0067_6665]);
    }
}
