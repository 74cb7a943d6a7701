//! `kv_transfer_params` in the answer to a first leg.

use std::borrow::Cow;

use thiserror::Error;

use super::connector::Source;
use crate::json::{JsonError, Kind, Scanner};

/// `kv_transfer_params` of an answer, a JSON object, as it was written: a second leg relays it with all fields, also
/// unknown ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferParams<'a>(&'a str);

/// Why a second leg cannot be sent after this answer. The request can still be served by one engine.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NoParams {
    /// The answer is no JSON object, for example because it is streamed.
    #[error("the answer to a first leg is not a JSON object; serve the request on one engine")]
    NotJson,
    /// There is no object: the engine has no KV connector, or another one.
    #[error(
        "the answer to a first leg has no `kv_transfer_params`; start the engine with --kv-transfer-config, or change \
         the pool's connector"
    )]
    Absent,
    /// A member without which a decode engine dies.
    #[error(
        "`kv_transfer_params` of the answer to a first leg has no `{0}`; serve the request on one engine"
    )]
    Incomplete(&'static str),
    /// TensorRT-LLM: there is no state for another engine.
    #[error(
        "the answer to a first leg has no choice with `disaggregated_params`; start the engine with \
         cache_transceiver_config, or change the pool's connector"
    )]
    NoContext,
    /// TensorRT-LLM: the first token ended the answer, so nothing is left to decode.
    #[error("the answer ended with the first leg; serve the request on one engine")]
    Ended,
    /// The request's body cannot be changed.
    #[error("the body of the request is not a JSON object")]
    Body,
}

/// Reads `kv_transfer_params` in the whole answer to a first leg.
///
/// # Errors
/// If there is no such object, or if it would kill the engine that gets it: `do_remote_prefill` without
/// `remote_block_ids` ends vLLM 0.32's scheduler.
pub fn transfer_params(answer: &[u8]) -> Result<TransferParams<'_>, NoParams> {
    let text = text(answer)?;
    let params =
        member(text, "kv_transfer_params").map_err(|_| NoParams::NotJson)?.ok_or(NoParams::Absent)?;
    let params = TransferParams(params);
    if params.member("do_remote_prefill") != Some("true") {
        return Err(NoParams::Incomplete("do_remote_prefill"));
    }
    for (name, starts_with) in [("remote_block_ids", '['), ("remote_engine_id", '"')] {
        if !params.member(name).is_some_and(|value| value.starts_with(starts_with)) {
            return Err(NoParams::Incomplete(name));
        }
    }
    Ok(params)
}

/// The text of an answer.
pub(super) fn text(answer: &[u8]) -> Result<&str, NoParams> {
    simdutf8::basic::from_utf8(answer).map_err(|_| NoParams::NotJson)
}

/// The value of an object's last member of this name, unless it is null.
pub(super) fn member<'a>(object: &'a str, name: &str) -> Result<Option<&'a str>, JsonError> {
    let mut scanner = Scanner::new(object);
    let mut found = None;
    let mut walk = scanner.object()?;
    while let Some(key) = walk.key(&mut scanner)? {
        let is_null = scanner.peek()? == Kind::Null;
        let value = scanner.skip()?;
        if key.decode() == name {
            found = (!is_null).then_some(value);
        }
    }
    scanner.end()?;
    Ok(found)
}

// === impl TransferParams ===

impl<'a> TransferParams<'a> {
    /// The object's JSON.
    pub fn json(self) -> &'a str {
        self.0
    }

    /// Tokens of the prompt that the prefill engine had in its cache. vLLM 0.32 reports this number, which comes back
    /// with the second leg, as `cached_tokens` of the second answer: it says nothing of the decode engine's cache.
    pub fn prefill_cached_tokens(self) -> Option<u32> {
        self.member("remote_prefill_cached_tokens")?.parse().ok()
    }

    /// Where the prefill engine is, for later requests whose legs are sent at once. It stays the same as long as the
    /// engine's process lives.
    pub fn source(self) -> Option<Source<'a>> {
        Some(Source {
            host: self.string("remote_host")?,
            port: self.member("remote_port")?.parse().ok()?,
            engine_id: self.string("remote_engine_id")?,
            tp_size: self.member("tp_size")?.parse().ok()?,
            pp_size: self.size("pp_size"),
            dcp_size: self.size("dcp_size"),
        })
    }

    fn size(self, name: &str) -> u32 {
        self.member(name).and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    fn member(self, name: &str) -> Option<&'a str> {
        member(self.0, name).ok().flatten()
    }

    fn string(self, name: &str) -> Option<Cow<'a, str>> {
        Scanner::new(self.member(name)?).string().ok().map(|text| text.decode())
    }
}
