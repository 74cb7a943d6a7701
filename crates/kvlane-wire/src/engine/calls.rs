//! vLLM's gRPC service, `vllm.grpc.engine.VllmEngine` (PyPI: smg-grpc-proto 0.4): requests to prompts, answers to token
//! counts.
//!
//! Messages are read where they lie, by field number. Fields that are not read here pass unchanged.

use bytes::Bytes;
use kvlane_core::load::LoadReport;
use kvlane_core::request::AnswerEnd;
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use crate::api::Api;
use crate::grpc::{Frames, frame, message};
use crate::openai::parsed::{ParseError, ParsedRequest};
use crate::protobuf::{Field, Invalid, bytes_of, checked_fields, fields, number_of, without};
use crate::sse::Usage;

/// The program that serves it.
pub const SERVER: &str = "vLLM's gRPC server (python -m vllm.entrypoints.launchers.grpc_server)";
/// Its name.
pub const SERVICE: &str = "vllm.grpc.engine.VllmEngine";
/// The beginning of the paths of all methods.
pub const SERVICE_PATH: &str = "/vllm.grpc.engine.VllmEngine/";
/// The method that aborts requests by their ids.
pub const ABORT_PATH: &str = "/vllm.grpc.engine.VllmEngine/Abort";
/// The method that says whether the engine is alive.
pub const HEALTH_PATH: &str = "/vllm.grpc.engine.VllmEngine/HealthCheck";
/// The method that names the model.
pub const MODEL_PATH: &str = "/vllm.grpc.engine.VllmEngine/GetModelInfo";
/// The method that reports the load of each data-parallel rank.
pub const LOADS_PATH: &str = "/vllm.grpc.engine.VllmEngine/GetLoads";

/// Largest message of an answer that is read. Larger ones pass unread.
const READ_BYTES_MAX: usize = 16 << 20;

/// Fields of `GenerateRequest`.
mod request {
    pub(super) const TOKENIZED: u64 = 2;
    pub(super) const TEXT: u64 = 3;
    pub(super) const SAMPLING: u64 = 4;
    pub(super) const STREAM: u64 = 5;
    pub(super) const RANK: u64 = 9;
    /// Where an engine fetches KV blocks from, in two forms.
    pub(super) const TRANSFER: [u64; 2] = [6, 8];
    /// Images and videos, in three forms.
    pub(super) const MEDIA: [u64; 3] = [7, 10, 11];
}

/// What a request of the service has for a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt<'a> {
    /// Token ids.
    Ids(Vec<u32>),
    /// A text, which the engine tokenizes.
    Text(&'a str),
}

/// A model as an engine describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// The name that it is served under.
    pub name: String,
    /// A card of it, in the form of `/v1/models`.
    pub card: Value,
}

/// Parses the body of a request, one gRPC frame, and writes its rendered prompt to `prompt`, as
/// [`openai::parse`](crate::openai::parse) does.
///
/// # Errors
/// The body is not one frame with one valid message, or has no prompt.
pub fn parse<'a>(api: Api, body: &'a [u8], prompt: &mut Vec<u8>) -> Result<ParsedRequest<'a>, ParseError> {
    prompt.clear();
    let message = message(body)?;
    let mut request = ParsedRequest { prompts: 1, ..ParsedRequest::default() };
    let mut media = None::<Xxh3>;
    for field in checked_fields(message) {
        match field? {
            (number, Field::Bytes(bytes))
                if request::MEDIA.contains(&number) && api == Api::EngineGenerate =>
            {
                media.get_or_insert_default().update(bytes);
            }
            (number, _) if request::TRANSFER.contains(&number) => request.reserved = true,
            (request::SAMPLING, Field::Bytes(sampling)) => {
                let most = number_of(sampling, 8).and_then(|most| u32::try_from(most).ok());
                request.output_tokens_max = most.or(request.output_tokens_max);
            }
            (request::STREAM, Field::Number(stream)) => request.stream = stream != 0,
            _ => {}
        }
    }
    // Prompts with the same placeholders for other images are others.
    request.cache_salt = media.map(|media| format!("media {:016x}", media.digest()).into());
    match prompt_of(message)? {
        Prompt::Ids(ids) => {
            request.token_ids = true;
            prompt.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        }
        Prompt::Text(text) => prompt.extend_from_slice(text.as_bytes()),
    }
    if prompt.is_empty() {
        return Err(ParseError::Missing { field: "tokenized.input_ids" });
    }
    Ok(request)
}

/// The prompt of a request's body.
///
/// # Errors
/// The body is not one frame with one valid message.
pub fn read_prompt(body: &[u8]) -> Result<Prompt<'_>, ParseError> {
    prompt_of(message(body)?)
}

/// Of the two kinds of prompt the last one counts, and parts of one message are joined, as Protocol Buffers says.
fn prompt_of(message: &[u8]) -> Result<Prompt<'_>, ParseError> {
    let mut prompt = Prompt::Ids(Vec::new());
    for field in checked_fields(message) {
        match field? {
            (request::TOKENIZED, Field::Bytes(tokenized)) => {
                let mut ids = match prompt {
                    Prompt::Ids(ids) => ids,
                    Prompt::Text(_) => Vec::new(),
                };
                read_ids(tokenized, &mut ids)?;
                prompt = Prompt::Ids(ids);
            }
            (request::TEXT, Field::Bytes(text)) => {
                let text = std::str::from_utf8(text);
                prompt = Prompt::Text(text.map_err(|error| ParseError::NotUtf8 { at: error.valid_up_to() })?);
            }
            _ => {}
        }
    }
    Ok(prompt)
}

/// The ids of a `TokenizedInput`: packed, or one by one.
fn read_ids(tokenized: &[u8], ids: &mut Vec<u32>) -> Result<(), Invalid> {
    const IDS: u64 = 2;
    for field in checked_fields(tokenized) {
        match field? {
            (IDS, Field::Bytes(packed)) => {
                ids.reserve(packed.len() / 2);
                let (mut id, mut shift) = (0_u64, 0);
                for byte in packed {
                    if shift > 63 {
                        return Err(Invalid);
                    }
                    id |= u64::from(byte & 0x7f) << shift;
                    shift += 7;
                    if byte & 0x80 == 0 {
                        // Longer numbers are cut to 32 bits, as Protocol Buffers says.
                        ids.push(id as u32);
                        (id, shift) = (0, 0);
                    }
                }
                if shift > 0 {
                    return Err(Invalid);
                }
            }
            (IDS, Field::Number(id)) => ids.push(id as u32),
            _ => {}
        }
    }
    Ok(())
}

/// A body without what only a gateway may say to an engine: where it fetches KV blocks from.
///
/// # Errors
/// The body is not one frame with one valid message.
pub fn strip_transfer_params(body: &[u8]) -> Result<Bytes, ParseError> {
    let kept = without(message(body)?, &request::TRANSFER)?;
    let mut stripped = Vec::with_capacity(body.len());
    frame(&mut stripped, |message| message.0.extend_from_slice(&kept));
    Ok(stripped.into())
}

/// A body of `Generate` for this data-parallel rank. A body that cannot be read stays as it is.
pub fn with_rank(body: &Bytes, rank: u32) -> Bytes {
    let Ok(whole) = message(body) else { return body.clone() };
    let mut ranked = Vec::with_capacity(body.len() + 8);
    frame(&mut ranked, |message| {
        message.0.extend_from_slice(whole);
        // The last value of a field counts.
        message.number(request::RANK, rank.into());
    });
    ranked.into()
}

/// Counts the tokens of an answer of `Generate` while it passes.
#[derive(Debug, Default)]
pub struct AnswerScanner {
    frames: Frames,
    /// A message cannot be read, so neither can those after it.
    is_lost: bool,
    /// Tokens of chunks.
    streamed: u32,
    usage: Option<Usage>,
    end: AnswerEnd,
}

// === impl AnswerScanner ===

impl AnswerScanner {
    /// Reads a piece; returns how many tokens of the answer it has.
    pub fn push(&mut self, piece: Bytes) -> u32 {
        const CHUNK: u64 = 1;
        const COMPLETE: u64 = 2;
        if self.is_lost {
            return 0;
        }
        self.frames.push(piece);
        let mut tokens = 0_u32;
        loop {
            let message = match self.frames.next(READ_BYTES_MAX) {
                Ok(Some(message)) => message,
                Ok(None) => return tokens,
                Err(_) => {
                    (self.is_lost, self.frames) = (true, Frames::default());
                    return tokens;
                }
            };
            for field in fields(&message) {
                match field {
                    (CHUNK, Field::Bytes(chunk)) => {
                        let ids = ids_in(chunk);
                        tokens = tokens.saturating_add(ids);
                        self.streamed = self.streamed.saturating_add(ids);
                    }
                    (COMPLETE, Field::Bytes(complete)) => self.complete(complete),
                    _ => {}
                }
            }
        }
    }

    /// One of the answer's alternatives is complete.
    fn complete(&mut self, complete: &[u8]) {
        const REASON: u64 = 2;
        let number =
            |field| number_of(complete, field).map_or(0, |number| u32::try_from(number).unwrap_or(u32::MAX));
        let written = self.usage.map_or(0, |usage| usage.completion_tokens);
        self.usage = Some(Usage {
            prompt_tokens: number(3),
            completion_tokens: written.saturating_add(number(4)),
            cached_tokens: Some(number(5)),
        });
        if matches!(bytes_of(complete, REASON), Some(b"stop" | b"length")) {
            self.end = AnswerEnd::Complete;
        }
    }

    /// What the engine has counted, once the answer is complete. The last message of a stream counts its own tokens only.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
            .map(|usage| Usage { completion_tokens: usage.completion_tokens.max(self.streamed), ..usage })
    }

    /// How the answer ended.
    pub fn end(&self) -> AnswerEnd {
        self.end
    }
}

/// The number of token ids in a `GenerateStreamChunk`: packed, or one by one.
fn ids_in(chunk: &[u8]) -> u32 {
    const IDS: u64 = 1;
    let ids = fields(chunk).map(|field| match field {
        (IDS, Field::Bytes(packed)) => packed.iter().filter(|&&byte| byte & 0x80 == 0).count(),
        (IDS, Field::Number(_)) => 1,
        _ => 0,
    });
    u32::try_from(ids.sum::<usize>()).unwrap_or(u32::MAX)
}

/// Whether a `HealthCheckResponse` says that the engine is alive; if not, what it says.
///
/// # Errors
/// What the engine says.
pub fn health(answer: &[u8]) -> Result<(), String> {
    match number_of(answer, 1) {
        Some(1..) => Ok(()),
        _ => Err(text(answer, 2).unwrap_or_default()),
    }
}

/// The model that a `GetModelInfoResponse` names.
pub fn model_info(answer: &[u8]) -> Option<ModelInfo> {
    let root = text(answer, 1);
    let name = text(answer, 6).filter(|name| !name.is_empty()).or_else(|| root.clone())?;
    let mut card = json!({"id": name, "object": "model", "owned_by": "vllm", "root": root});
    if let Some(longest) = number_of(answer, 3) {
        card["max_model_len"] = longest.into();
    }
    (!name.is_empty()).then_some(ModelInfo { name, card })
}

/// The load of each data-parallel rank in a `GetLoadsResponse`.
pub fn loads(answer: &[u8]) -> Vec<(u32, LoadReport)> {
    const LOADS: u64 = 4;
    let of_rank = |load: &[u8]| {
        let number = |field| number_of(load, field).and_then(|number| u32::try_from(number).ok());
        let report = LoadReport {
            running: number(2).unwrap_or(0),
            waiting: number(3).unwrap_or(0),
            kv_usage_ratio: f64::from_bits(number_of(load, 7).unwrap_or(0)).clamp(0.0, 1.0) as f32,
            kv_capacity_tokens: number_of(load, 6).filter(|&tokens| tokens > 0 && tokens < 1 << 31),
        };
        (number(1).unwrap_or(0), report)
    };
    let loads = fields(answer).filter_map(|field| match field {
        (LOADS, Field::Bytes(load)) => Some(of_rank(load)),
        _ => None,
    });
    loads.collect()
}

fn text(message: &[u8], field: u64) -> Option<String> {
    Some(String::from_utf8_lossy(bytes_of(message, field)?).into_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::protobuf::Message;

    /// The body of a request whose message is written by `write`.
    fn body(write: impl FnOnce(&mut Message)) -> Vec<u8> {
        let mut body = Vec::new();
        frame(&mut body, write);
        body
    }

    fn packed(ids: &[u32]) -> Vec<u8> {
        let mut packed = Vec::new();
        for id in ids {
            let mut one = Message::default();
            one.number(0, (*id).into());
            packed.extend_from_slice(&one.0[1..]);
        }
        packed
    }

    fn parsed(body: &[u8]) -> Result<(ParsedRequest<'_>, Vec<u8>), ParseError> {
        let mut prompt = Vec::new();
        let request = parse(Api::EngineGenerate, body, &mut prompt)?;
        Ok((request, prompt))
    }

    #[test]
    fn a_request_is_read_by_its_fields() {
        let body = body(|message| {
            message.bytes(1, b"request-1");
            message.message(2, |tokenized| {
                tokenized.bytes(1, b"the text");
                tokenized.bytes(2, &packed(&[1, 300, u32::MAX]));
                // As writers without packing do.
                tokenized.number(2, 7);
            });
            message.message(4, |sampling| sampling.number(8, 64));
            message.number(5, 1);
        });
        assert_eq!(read_prompt(&body), Ok(Prompt::Ids(vec![1, 300, u32::MAX, 7])));
        let (request, prompt) = parsed(&body).expect("valid");
        assert_eq!((request.stream, request.output_tokens_max, request.token_ids), (true, Some(64), true));
        assert_eq!((request.reserved, request.cache_salt), (false, None));
        assert_eq!(prompt, [[1, 0, 0, 0], [44, 1, 0, 0], [255; 4], [7, 0, 0, 0]].concat());
    }

    #[test]
    fn of_text_and_token_ids_the_last_one_counts() {
        let ids = |message: &mut Message| message.message(2, |tokenized| tokenized.bytes(2, &[1, 2]));
        let text_last = body(|message| {
            ids(message);
            message.bytes(3, b"Hello");
        });
        assert_eq!(read_prompt(&text_last), Ok(Prompt::Text("Hello")));
        assert_eq!(parsed(&text_last).expect("valid").1, b"Hello");
        let ids_last = body(|message| {
            message.bytes(3, b"Hello");
            ids(message);
            ids(message);
        });
        assert_eq!(read_prompt(&ids_last), Ok(Prompt::Ids(vec![1, 2, 1, 2])));
    }

    #[test]
    fn a_body_that_is_no_request_is_refused() {
        let parsed = |body: &[u8]| parsed(body).map(drop);
        assert_eq!(
            parsed(b"{\"prompt\": \"Hello\"}"),
            Err(ParseError::Frame(crate::grpc::FrameError::Compressed))
        );
        assert_eq!(parsed(&body(|_| {})), Err(ParseError::Missing { field: "tokenized.input_ids" }));
        for invalid in [&b"\xff"[..], b"\x12\x05\x12", b"\x12\x03\x12\x01\x80"] {
            let body = body(|message| message.0.extend_from_slice(invalid));
            assert_eq!(parsed(&body), Err(ParseError::Message(Invalid)), "{invalid:?}");
        }
        assert_eq!(parsed(&body(|message| message.bytes(3, b"a\xff"))), Err(ParseError::NotUtf8 { at: 1 }));
    }

    #[test]
    fn the_same_ids_with_other_images_are_another_prompt() {
        let salt = |pixels: &[u8]| {
            let body = body(|message| {
                message.message(2, |tokenized| tokenized.bytes(2, &[1, 2]));
                message.bytes(7, pixels);
            });
            parsed(&body).expect("valid").0.cache_salt.map(std::borrow::Cow::into_owned)
        };
        assert!(salt(b"cat").is_some() && salt(b"cat") == salt(b"cat") && salt(b"cat") != salt(b"dog"));
    }

    #[test]
    fn where_blocks_are_fetched_from_is_not_passed_on() {
        let with = |transfer: bool| {
            body(|message| {
                message.bytes(1, b"id");
                if transfer {
                    message.bytes(6, b"host");
                    message.bytes(8, b"{}");
                }
                message.bytes(3, b"Hello");
            })
        };
        assert!(
            parsed(&with(true)).expect("valid").0.reserved
                && !parsed(&with(false)).expect("valid").0.reserved
        );
        assert_eq!(strip_transfer_params(&with(true)), Ok(Bytes::from(with(false))));
    }

    #[test]
    fn the_rank_of_the_endpoint_replaces_the_clients() {
        let asked = body(|message| {
            message.number(9, 5);
            message.bytes(3, b"Hello");
        });
        let ranked = with_rank(&asked.into(), 1);
        let ranks = fields(message(&ranked).expect("one")).filter(|(number, _)| *number == 9);
        assert_eq!(ranks.last(), Some((9, Field::Number(1))));
    }

    fn chunk(ids: &[u32]) -> Vec<u8> {
        body(|message| message.message(1, |chunk| chunk.bytes(1, &packed(ids))))
    }

    fn complete(counts: [u64; 3]) -> Vec<u8> {
        body(|message| {
            message.message(2, |complete| {
                complete.bytes(2, b"length");
                complete.number(3, counts[0]);
                complete.number(4, counts[1]);
                complete.number(5, counts[2]);
            });
        })
    }

    proptest! {
        #[test]
        fn tokens_are_counted_in_whatever_pieces_an_answer_arrives(cuts in prop::collection::vec(1usize..30, 0..40)) {
            let wire = [chunk(&[1, 70_000]), chunk(&[]), chunk(&[3]), complete([40, 3, 32])].concat();
            let (mut scanner, mut tokens, mut left) = (AnswerScanner::default(), 0, Bytes::from(wire));
            let mut cuts = cuts.into_iter();
            while !left.is_empty() {
                let at = cuts.next().unwrap_or(left.len()).min(left.len());
                tokens += scanner.push(left.split_to(at));
            }
            let usage = Usage { prompt_tokens: 40, completion_tokens: 3, cached_tokens: Some(32) };
            prop_assert_eq!((tokens, scanner.usage(), scanner.end()), (3, Some(usage), AnswerEnd::Complete));
        }

        #[test]
        fn no_bytes_break_the_reader(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parsed(&bytes);
            let framed = body(|message| message.0.extend_from_slice(&bytes));
            let _ = (parsed(&framed), strip_transfer_params(&framed), with_rank(&framed.clone().into(), 1));
            let _ = (model_info(&bytes), loads(&bytes), health(&bytes));
            AnswerScanner::default().push(framed.into());
        }
    }

    #[test]
    fn the_last_message_of_a_stream_counts_its_own_tokens_only() {
        let mut scanner = AnswerScanner::default();
        scanner.push([chunk(&[1, 2]), chunk(&[3]), complete([40, 1, 32])].concat().into());
        assert_eq!(scanner.usage().map(|usage| usage.completion_tokens), Some(3));
    }

    #[test]
    fn the_alternatives_of_an_answer_are_counted_together() {
        let mut scanner = AnswerScanner::default();
        scanner.push([complete([40, 3, 32]), complete([40, 5, 32])].concat().into());
        let usage = Usage { prompt_tokens: 40, completion_tokens: 8, cached_tokens: Some(32) };
        assert_eq!(scanner.usage(), Some(usage));
    }

    #[test]
    fn an_answer_that_cannot_be_read_is_not_counted() {
        let mut scanner = AnswerScanner::default();
        assert_eq!(scanner.push([&chunk(&[1])[..], &[1; 40]].concat().into()), 1);
        assert_eq!(scanner.push(chunk(&[1]).into()), 0);
    }

    #[test]
    fn an_engine_describes_itself() {
        let mut model = Message::default();
        model.bytes(1, b"/models/tiny");
        model.number(3, 4096);
        let card = |name: &str| json!({"id": name, "object": "model", "owned_by": "vllm", "root": "/models/tiny", "max_model_len": 4096});
        let info = |name: &str| Some(ModelInfo { name: name.into(), card: card(name) });
        assert_eq!(model_info(&model.0), info("/models/tiny"));
        model.bytes(6, b"tiny");
        assert_eq!(model_info(&model.0), info("tiny"));
        assert_eq!(model_info(&[]), None);
        let mut ill = Message::default();
        ill.bytes(2, b"Engine is not alive");
        assert_eq!(health(&ill.0), Err("Engine is not alive".into()));
        ill.number(1, 1);
        assert_eq!(health(&ill.0), Ok(()));
        let mut answer = Message::default();
        answer.message(4, |load| {
            load.number(1, 1);
            load.number(2, 3);
            load.number(3, 4);
            load.number(6, 8192);
            load.fixed64(7, 0.5_f64.to_bits());
        });
        let report =
            LoadReport { running: 3, waiting: 4, kv_usage_ratio: 0.5, kv_capacity_tokens: Some(8192) };
        assert_eq!(loads(&answer.0), [(1, report)]);
    }
}
