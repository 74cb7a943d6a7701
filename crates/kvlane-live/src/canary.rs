//! Whether an engine counts as we do: asked when it registers, when it has been gone, and when its models change.
//!
//! Knowing exactly what a cache holds is worth nothing if the prompts that are looked up in it are counted in another
//! way: another tokenizer, another chat template, another block size. Nothing fails then, requests just go to the wrong
//! engine. So a few prompts with all that tends to differ are counted on both sides, by us and by the engine's own
//! `/tokenize`, and the ids compared one by one. One difference is enough for [`Parity::Mismatch`]: what this engine
//! says of its cache is not believed.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use kvlane_tokens::{Prompt, Tokenizer};
use kvlane_wire::api::Api;
use kvlane_wire::{openai, prometheus};
use serde_json::{Value, json};

use crate::ask::Engine;
use crate::clock::date;
use crate::config::BYTES_PER_TOKEN;
use crate::gateway::Gateway;
use crate::tokenize::{Counting, tokenized};
use crate::upstream::Upstreams;
use crate::worker::{ServedName, Worker};

/// Characters shown of either side where texts part.
const SHOWN_CHARS: usize = 24;

/// How an engine's count compares with ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parity {
    /// Every id of every prompt is the same.
    Verified,
    /// It could not be compared, or not all of it, for this reason. What the engine reports of each answer will tell.
    Unverified(String),
    /// They differ: where, and what to do.
    Mismatch(String),
}

/// What an engine says that counts as ours must too, remembered from the last time it was compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Name, root and longest context of each model.
    models: Vec<(String, Option<String>, Option<u64>)>,
    /// Tokens of a KV block, where its metrics tell.
    pub block_tokens: Option<u32>,
}

/// One prompt of the set.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// What it is about.
    pub name: &'static str,
    /// The API it is a request to.
    pub api: Api,
    /// A template may refuse it: then the engine refuses it too, and nothing can be told from it.
    pub optional: bool,
    body: Value,
}

/// How the samples are counted on our side.
#[derive(Clone, Copy)]
pub enum Ours<'a> {
    /// By this tokenizer.
    Tokenizer(&'a Tokenizer),
    /// Four bytes are a token.
    Estimate,
    /// As the engine says.
    Theirs,
}

/// What came of one sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Both count the same.
    Same,
    /// The engine refuses the prompt, with this status.
    Refused(u16),
    /// We cannot count it, for this reason.
    Unknown(String),
    /// The engine cannot be asked at all, for this reason.
    Silent(String),
    /// They differ: where, and what to do.
    Differs(String),
}

/// [`compare`]'s answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What came of it.
    pub outcome: Outcome,
    /// The longest context, as `/tokenize` tells it.
    pub max_model_len: Option<u64>,
}

/// Where two lists of ids part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    at: usize,
    ours: Vec<u32>,
    theirs: Vec<u32>,
    lengths: (usize, usize),
}

// === impl Parity ===

impl Default for Parity {
    fn default() -> Self {
        Self::Unverified("not compared yet".into())
    }
}

impl Parity {
    /// Its name in what operators see.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Verified => "verified",
            Self::Unverified(_) => "unverified",
            Self::Mismatch(_) => "mismatch",
        }
    }

    /// Why blocks of such an engine cannot be those of prompts that are counted so, if they cannot. An estimate is
    /// believed only where it is known to be what the engine counts.
    pub(crate) fn disbelief(&self, counting: &Counting) -> Option<String> {
        match (self, counting) {
            (Self::Mismatch(why), _) => {
                Some(format!("tokens are counted in another way here than by this engine: {why}"))
            }
            (Self::Unverified(why), Counting::Estimate) => Some(format!(
                "prompts are estimated here, and nothing says that this engine counts so ({why}): give a tokenizer \
                 (--tokenizer-path or tokens.path), or let the engine count (tokens.source: engine)"
            )),
            (Self::Verified | Self::Unverified(_), _) => None,
        }
    }

    /// Why it is not verified.
    pub fn why(&self) -> Option<&str> {
        match self {
            Self::Verified => None,
            Self::Unverified(why) | Self::Mismatch(why) => Some(why),
        }
    }

    /// The worse of two.
    #[must_use]
    fn and(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Mismatch(_), _) | (Self::Unverified(_), Self::Verified | Self::Unverified(_)) => self,
            _ => other,
        }
    }
}

// === impl Sample ===

/// The prompts that are compared: plain text with unicode and with space at its edges, a conversation of several turns,
/// one with tools.
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
    /// It as a body for `/tokenize`, and for the API itself.
    pub fn body(&self, model: &str) -> Bytes {
        let mut body = self.body.clone();
        body["model"] = json!(model);
        body.to_string().into()
    }
}

// === impl Difference ===

impl Difference {
    /// Ids shown of either side.
    const SHOWN: usize = 4;

    /// Where `ours` and `theirs` part; nothing if they are the same.
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
            "token {at} on, the engine has {theirs:?} and we have {ours:?} ({} and {} tokens)",
            lengths.1, lengths.0
        )
    }
}

/// Where two texts part, with what stands there on either side; nothing if they are the same.
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
        format!("after {before:?} the engine's text goes on {:?} and ours {:?}", shown(theirs), shown(ours))
    })
}

/// Settles how the pools of `names` count, and compares with the worker if that is due. Called before it is seated, so
/// that whoever listens to its events knows what they are worth.
pub(crate) async fn check(
    gateway: &Arc<Gateway>,
    upstreams: &Arc<Upstreams>,
    worker: &Arc<Worker>,
    names: &[ServedName],
) {
    for base in bases(names) {
        let root = base.card["root"].as_str();
        gateway.settle_counting(&base.base, root.map(str::to_owned)).await;
    }
    let mut compared = Compared {
        models: names.iter().map(|served| (served.name.clone(), root(served), length(served))).collect(),
        block_tokens: None,
    };
    {
        let state = worker.state();
        let before = state.compared.as_ref();
        if !worker.is_gone() && before.is_some_and(|before| before.models == compared.models) {
            return;
        }
    }
    let engine = Engine {
        worker: Arc::clone(worker),
        upstreams: Arc::clone(upstreams),
        limit: gateway.config().health.timeout,
        rank: None,
    };
    compared.block_tokens = block_tokens_of(&engine).await;
    let mut parity = compare_with_others(gateway, worker, &compared, names);
    for base in bases(names) {
        let counting = gateway.tokenizers.counting(&base.base);
        let ours = match &counting {
            Counting::Local(local) => Ours::Tokenizer(&local.tokenizer),
            Counting::Engine => Ours::Theirs,
            Counting::Estimate => Ours::Estimate,
        };
        parity = parity.and(compare_all(&engine, base, ours).await);
    }
    let before = {
        let mut state = worker.state();
        state.compared = Some(compared);
        std::mem::replace(&mut state.parity, parity.clone())
    };
    if before != parity {
        tell(worker, &parity);
        gateway.parity_changed(worker);
    }
}

/// One name of each base model.
fn bases(names: &[ServedName]) -> impl Iterator<Item = &ServedName> {
    names.iter().enumerate().filter_map(|(n, served)| {
        let first = names[..n].iter().all(|before| before.base != served.base);
        // The base itself where it is listed: an adapter's card says less.
        let named = names.iter().find(|other| other.base == served.base && other.name == other.base);
        first.then_some(named.unwrap_or(served))
    })
}

fn root(served: &ServedName) -> Option<String> {
    served.card["root"].as_str().map(str::to_owned)
}

fn length(served: &ServedName) -> Option<u64> {
    served.card["max_model_len"].as_u64()
}

fn tell(worker: &Worker, parity: &Parity) {
    match parity {
        Parity::Verified => tracing::info!(worker = %worker.url, "the engine counts tokens as we do"),
        Parity::Unverified(why) => {
            tracing::info!(worker = %worker.url, why, "the engine's count of tokens could not be compared");
        }
        Parity::Mismatch(why) => {
            tracing::warn!(worker = %worker.url, why, "the engine counts differently: its KV events are not used");
        }
    }
}

/// Tokens of its KV blocks, where its metrics tell.
async fn block_tokens_of(engine: &Engine) -> Option<u32> {
    let (status, page) = engine.get("/metrics").await.ok()?;
    block_tokens(std::str::from_utf8(&page).ok().filter(|_| status == 200)?)
}

/// Whether blocks and contexts are as long as those of the others that serve the same models: one index serves them
/// all.
fn compare_with_others(
    gateway: &Gateway,
    worker: &Worker,
    compared: &Compared,
    names: &[ServedName],
) -> Parity {
    let others: Vec<_> = {
        let workers = gateway.workers();
        workers.values().filter(|other| other.id < worker.id).cloned().collect()
    };
    for other in others {
        let state = other.state();
        let Some(its) = state.compared.as_ref().filter(|_| !state.seats.is_empty()) else { continue };
        let shared = names.iter().filter(|served| state.names.iter().any(|name| name.base == served.base));
        for served in shared {
            if let (Some(ours), Some(theirs)) = (its.block_tokens, compared.block_tokens)
                && ours != theirs
            {
                return Parity::Mismatch(format!(
                    "its KV blocks have {theirs} tokens, those of {} have {ours}: give both the same --block-size",
                    other.url
                ));
            }
            let its_length = state.names.iter().find(|name| name.name == served.name).and_then(length);
            if let (Some(ours), Some(theirs)) = (its_length, length(served))
                && ours != theirs
            {
                return Parity::Mismatch(format!(
                    "it serves {} with max_model_len {theirs}, {} with {ours}: give both the same --max-model-len",
                    served.name, other.url
                ));
            }
        }
    }
    Parity::Verified
}

/// Counts every sample on both sides.
async fn compare_all(engine: &Engine, served: &ServedName, ours: Ours<'_>) -> Parity {
    let mut parity = Parity::Verified;
    for sample in samples() {
        let Answer { outcome, max_model_len } = compare(engine, &served.name, &sample, ours).await;
        // SGLang tells the tokenizer's own length there, which may be more than the engine was started with.
        if let (Some(told), Some(listed)) = (max_model_len, length(served))
            && told < listed
        {
            return Parity::Mismatch(format!(
                "GET /v1/models lists {} with max_model_len {listed}, its /tokenize says {told}",
                served.name
            ));
        }
        let of_it = match outcome {
            Outcome::Same => continue,
            Outcome::Refused(_) if sample.optional => continue,
            Outcome::Refused(status) => {
                Parity::Unverified(format!("POST /tokenize answered {status} to {}", sample.name))
            }
            Outcome::Unknown(why) => Parity::Unverified(format!("{}: {why}", sample.name)),
            Outcome::Silent(why) => return parity.and(Parity::Unverified(why)),
            Outcome::Differs(why) => return Parity::Mismatch(why),
        };
        parity = parity.and(of_it);
    }
    parity
}

/// Counts one sample on both sides.
pub async fn compare(engine: &Engine, model: &str, sample: &Sample, ours: Ours<'_>) -> Answer {
    let body = sample.body(model);
    let nothing = |outcome| Answer { outcome, max_model_len: None };
    let theirs = match engine.post("/tokenize", &body).await {
        Ok((200, answer)) => match tokenized(&answer) {
            Ok(theirs) if !theirs.tokens.is_empty() => theirs,
            _ => return nothing(Outcome::Silent("its /tokenize answers in another form than vLLM's".into())),
        },
        Ok((404 | 405, _)) => return nothing(Outcome::Silent("it has no /tokenize".into())),
        Ok((status, _)) => return nothing(Outcome::Refused(status)),
        Err(problem) => return nothing(Outcome::Silent(problem)),
    };
    let outcome = match ours {
        Ours::Theirs => Outcome::Same,
        Ours::Estimate if estimated(sample.api, &body) == theirs.tokens => Outcome::Same,
        Ours::Estimate => Outcome::Differs(
            "tokens are estimated, four bytes each: give the model's tokenizer with --tokenizer-path".into(),
        ),
        Ours::Tokenizer(tokenizer) => {
            let mut prompt = Prompt::default();
            match tokenizer.prompt(sample.api, &body, date(), &mut prompt) {
                Err(unknown) => Outcome::Unknown(unknown.to_string()),
                Ok(()) => match Difference::between(&prompt.tokens, &theirs.tokens) {
                    None => Outcome::Same,
                    Some(difference) => {
                        let text = text_of(engine, model, &theirs.tokens).await;
                        Outcome::Differs(mismatch(sample.name, &difference, &prompt.text, text.as_deref()))
                    }
                },
            }
        }
    };
    Answer { outcome, max_model_len: theirs.max_model_len }
}

/// The text of an engine's ids, if it tells: where texts differ, the template does; otherwise the tokenizer.
async fn text_of(engine: &Engine, model: &str, tokens: &[u32]) -> Option<String> {
    let body = json!({"model": model, "tokens": tokens}).to_string().into();
    let (status, answer) = engine.post("/detokenize", &body).await.ok()?;
    let told: Value = serde_json::from_slice(&answer).ok().filter(|_| status == 200)?;
    Some(told["prompt"].as_str()?.to_owned())
}

/// What differs, and what to do about it.
pub fn mismatch(sample: &str, difference: &Difference, ours: &str, theirs: Option<&str>) -> String {
    match theirs.map(|theirs| text_difference(ours, theirs)) {
        Some(Some(text)) => format!(
            "{sample}: from {difference}; {text}. If the chat template differs, give the engine's with --chat-template"
        ),
        Some(None) => format!(
            "{sample}: from {difference}, for the same text. The tokenizer differs: give the engine's with --tokenizer-path"
        ),
        None => format!(
            "{sample}: from {difference}. Give the engine's own files with --tokenizer-path and --chat-template"
        ),
    }
}

/// The ids that an estimate stands for: four bytes each of the prompt as it is rendered, as the mock engine counts.
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

/// Tokens of a KV block, where a metrics page tells: vLLM's `cache_config_info{block_size}`, SGLang's
/// `cache_config_info{page_size}`.
pub fn block_tokens(page: &str) -> Option<u32> {
    let told = |sample: prometheus::Sample<'_>| {
        sample.label("block_size").or_else(|| sample.label("page_size"))?.parse().ok()
    };
    prometheus::samples(page)
        .filter(|sample| sample.name.ends_with("cache_config_info"))
        .find_map(told)
        .filter(|tokens| *tokens > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_with_its_place() {
        assert_eq!(Difference::between(&[1, 2, 3], &[1, 2, 3]), None);
        let said =
            |ours: &[u32], theirs: &[u32]| Difference::between(ours, theirs).expect("differ").to_string();
        assert_eq!(
            said(&[1, 2, 3], &[1, 9, 3]),
            "token 1 on, the engine has [9, 3] and we have [2, 3] (3 and 3 tokens)"
        );
        assert_eq!(said(&[1], &[1, 2]), "token 1 on, the engine has [2] and we have [] (2 and 1 tokens)");
    }

    #[test]
    fn texts_that_part_are_shown_where_they_do() {
        assert_eq!(text_difference("same", "same"), None);
        let said = text_difference("<s>user\nhé", "<s>user\nhe").expect("differ");
        assert_eq!(said, r#"after "<s>user\nh" the engine's text goes on "e" and ours "é""#);
    }

    #[test]
    fn one_mismatch_outweighs_all_that_agrees() {
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
    fn the_block_size_is_read_from_either_engines_page() {
        let page = "vllm:cache_config_info{block_size=\"32\",engine=\"0\",num_gpu_blocks=\"4096\"} 1.0\n";
        assert_eq!(block_tokens(page), Some(32));
        assert_eq!(block_tokens("sglang:cache_config_info{num_pages=\"7\",page_size=\"1\"} 1\n"), Some(1));
        assert_eq!(
            block_tokens("vllm:cache_config_info{block_size=\"None\"} 1\nother{block_size=\"8\"} 1\n"),
            None
        );
    }

    #[test]
    fn an_estimate_stands_for_the_bytes_of_the_prompt() {
        let body = br#"{"model":"m","prompt":"abcdefg"}"#;
        assert_eq!(estimated(Api::Completions, body), [0x6463_6261, 0x0067_6665]);
    }
}
