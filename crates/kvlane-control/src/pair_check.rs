//! Tries a transfer of KV blocks: one small request that two engines share, of one token of output.
//!
//! What configurations and metrics pages say of two engines does not show whether blocks get from one to the other:
//! that takes both engines, their side channels and the network between them. Engines report a transfer that fails as
//! any error, some not at all, so each step has a time limit.

use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use kvlane_core::rng::Rng;
use kvlane_http::client::Client;
use kvlane_wire::api::Api;
use kvlane_wire::disaggregation::{
    Connector, Legs, NoParams, Source, Split, TransferParams, transfer_params,
};
use kvlane_wire::sse::usage_in_json;
use serde_json::json;
use tokio::time::Instant;

/// Full blocks of the prompt. Engines transfer only full blocks, and send none of a shorter prompt.
const BLOCKS: u32 = 4;
/// Letters of a word. With the space after it, a word is at least one token, in any vocabulary.
const WORD_LETTERS: usize = 5;
/// Path of both legs.
const PATH: &str = "/v1/completions";
/// Characters shown of an engine's error.
const SHOWN_CHARS: usize = 200;

/// Two engines, and how KV blocks get from one to the other.
pub struct Pair<'a> {
    /// Computes the prompt.
    pub prefill: &'a Client,
    /// Decodes the answer.
    pub decode: &'a Client,
    /// Their connector.
    pub connector: Connector,
    /// Port of the prefill engine's bootstrap server, for connectors with one.
    pub bootstrap_port: u16,
    /// The model.
    pub model: &'a str,
}

/// A transfer that has ended.
#[derive(Clone, Debug)]
pub struct Transferred {
    /// When the prompt was sent.
    pub sent: Instant,
    /// When it was computed.
    pub computed: Instant,
    /// When its first token was decoded by the other engine.
    pub decoded: Instant,
    /// Tokens of the prompt.
    pub tokens: u32,
}

/// A transfer that was tried.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Where the prefill engine's side channel is, and its tensor-parallel size, if its answer said so.
    pub source: Option<Source<'static>>,
    /// The transfer, or why there was none.
    pub result: Result<Transferred, NoTransfer>,
}

/// Why no transfer has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoTransfer {
    /// This connector is not tried.
    #[error("connector {} is not tried", .0.name())]
    Connector(Connector),
    /// The prompt was not computed: the engine is down, busy, or does not accept the request.
    #[error("prefill: {0}")]
    Prefill(String),
    /// The prefill engine keeps no blocks for another one.
    #[error("{0}")]
    NoBlocks(NoParams),
    /// The decode engine does not accept the request, or is busy.
    #[error("decode: {0}")]
    Refused(String),
    /// The decode engine did not get the blocks.
    #[error("decode: {0}")]
    Lost(String),
}

// === impl NoTransfer ===

impl NoTransfer {
    /// Whether another pair of engines might have succeeded: it is about these two together.
    pub fn is_of_the_pair(&self) -> bool {
        matches!(self, Self::NoBlocks(_) | Self::Lost(_))
    }
}

/// Random words of at least `blocks` blocks, which no cache holds.
pub fn random_prompt(rng: &mut Rng, words: u32) -> String {
    let mut text = String::new();
    for _ in 0..words.max(1) {
        text.extend((0..WORD_LETTERS).map(|_| char::from(b'a' + rng.below(26) as u8)));
        text.push(' ');
    }
    text
}

/// Words of a prompt that has a few full blocks of this many tokens.
pub fn words_of(block_tokens: u32) -> u32 {
    (BLOCKS + 1) * block_tokens
}

// === impl Pair ===

impl Pair<'_> {
    /// Has one engine compute a prompt of `words` random words, and the other decode its answer.
    pub async fn transfer(&self, words: u32, rng: &mut Rng) -> Trial {
        let mut source = None;
        let result = self.try_it(words, rng, &mut source).await;
        Trial { source, result }
    }

    async fn try_it(
        &self,
        words: u32,
        rng: &mut Rng,
        said: &mut Option<Source<'static>>,
    ) -> Result<Transferred, NoTransfer> {
        let prompt = random_prompt(rng, words);
        let body: Bytes = json!({"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
            .to_string()
            .into();
        let request_id = format!("kvlane-{:016x}", rng.next_u64());
        let source =
            Source { host: self.prefill.host().into(), port: self.bootstrap_port, ..Source::default() };
        let split = Split {
            connector: self.connector,
            api: Api::Completions,
            request_id: &request_id,
            room: rng.next_u64(),
            source,
        };
        let first = split.prefill_body(&body).map_err(|error| NoTransfer::Prefill(error.to_string()))?;
        if let Connector::NixlPush | Connector::Mooncake | Connector::TensorRtLlm | Connector::LlmdSidecar =
            self.connector
        {
            return Err(NoTransfer::Connector(self.connector));
        }
        match self.connector.legs() {
            Legs::InTurn => self.in_turn(&split, &body, &first, said).await,
            Legs::AtOnce | Legs::Decode => self.at_once(&split, &body, &first).await,
        }
    }

    async fn in_turn(
        &self,
        split: &Split<'_>,
        body: &[u8],
        first: &Bytes,
        said: &mut Option<Source<'static>>,
    ) -> Result<Transferred, NoTransfer> {
        let sent = Instant::now();
        let answer = self.prefilled(first).await?;
        let computed = Instant::now();
        let params = match self.connector.relays_params() {
            true => Some(transfer_params(&answer).map_err(NoTransfer::NoBlocks)?),
            false => None,
        };
        *said = params.and_then(TransferParams::source).map(|source| Source {
            host: source.host.into_owned().into(),
            engine_id: source.engine_id.into_owned().into(),
            ..source
        });
        let second =
            split.decode_body(body, params).map_err(|error| NoTransfer::Refused(error.to_string()))?;
        let answer = decoded(self.decode.post(PATH, &second).await)?;
        Ok(Transferred { sent, computed, decoded: Instant::now(), tokens: tokens_of(&answer) })
    }

    async fn at_once(
        &self,
        split: &Split<'_>,
        body: &[u8],
        first: &Bytes,
    ) -> Result<Transferred, NoTransfer> {
        let second = split.decode_body(body, None).map_err(|error| NoTransfer::Refused(error.to_string()))?;
        let sent = Instant::now();
        let mut answer = pin!(self.decode.post(PATH, &second));
        let early = tokio::select! {
            biased;
            said = self.prefilled(first) => said.map(|_| None)?,
            answer = answer.as_mut() => Some(answer),
        };
        let computed = Instant::now();
        let answer = match early {
            Some(answer) => answer,
            None => answer.await,
        };
        let tokens = tokens_of(&decoded(answer)?);
        Ok(Transferred { sent, computed, decoded: Instant::now(), tokens })
    }

    /// The prefill engine's whole answer.
    async fn prefilled(&self, first: &Bytes) -> Result<Bytes, NoTransfer> {
        match self.prefill.post(PATH, first).await {
            Ok((200, answer)) => Ok(answer),
            Ok((status, answer)) => Err(NoTransfer::Prefill(shown(status, &answer))),
            Err(problem) => Err(NoTransfer::Prefill(problem)),
        }
    }
}

/// The decode engine's answer. It reports lost blocks as a fault of its own, or says nothing.
fn decoded(answer: Result<(u16, Bytes), String>) -> Result<Bytes, NoTransfer> {
    match answer {
        Ok((200, answer)) => Ok(answer),
        Ok((status @ (503 | 0..=499), answer)) => Err(NoTransfer::Refused(shown(status, &answer))),
        Ok((status, answer)) => Err(NoTransfer::Lost(shown(status, &answer))),
        Err(problem) => Err(NoTransfer::Lost(problem)),
    }
}

fn shown(status: u16, answer: &[u8]) -> String {
    let said: String = String::from_utf8_lossy(answer).chars().take(SHOWN_CHARS).collect();
    format!("POST {PATH} answered {status}: {said}")
}

fn tokens_of(answer: &[u8]) -> u32 {
    usage_in_json(answer).map_or(0, |usage| usage.prompt_tokens)
}

// === impl Transferred ===

impl Transferred {
    /// Time from the computed prompt to the first token of the other engine.
    pub fn taken(&self) -> Duration {
        self.decoded - self.computed
    }
}
