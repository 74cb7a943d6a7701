//! The server to calibrate: its address, its reported sizes, and streamed completions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use kvlane_wire::engine::{ENGINES, EngineKind, Settings, block_tokens, load_report};
use kvlane_wire::models;
use serde_json::Value;

use super::{Limits, Timeline};
use crate::client::{self, Connection, Target, bearer, describe};

/// Timeout of queries about the server itself.
const FACTS_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum bytes read of an answer to such a query.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Maximum bytes of an error answer that are shown.
const ERROR_DETAIL_BYTES_MAX: usize = 300;

/// Maximum depth to which a server's description of itself is searched.
const SEARCH_DEPTH_MAX: usize = 8;

/// Errors of requests to the server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address is invalid.
    #[error("cannot calibrate `{url}`: {why}; the URL must be http://host:port")]
    Url {
        /// As given.
        url: String,
        /// The cause.
        why: String,
    },
    /// The API key is not a valid header value.
    #[error("the API key contains characters that are not allowed in a header")]
    ApiKey,
    /// No answer, or one that broke off.
    #[error("{path} of {authority}: {why}")]
    Broken {
        /// Host and port.
        authority: String,
        /// The path.
        path: String,
        /// The cause.
        why: String,
    },
    /// A status other than 200.
    #[error("{path} of {authority} answered {status}: {detail}")]
    Status {
        /// Host and port.
        authority: String,
        /// The path.
        path: String,
        /// The status.
        status: u16,
        /// The beginning of the answer.
        detail: String,
    },
    /// A probe timed out.
    #[error("not finished after {0:?}")]
    Late(Duration),
    /// Its list of models cannot be parsed.
    #[error(transparent)]
    Models(#[from] models::ModelsError),
    /// It does not have the model, or has several and none was selected.
    #[error("the server has {}; select one with --model", match .0.as_slice() { [] => "no models".into(), all => format!("the models {}", all.join(", ")) })]
    Model(Vec<String>),
    /// It is serving other requests.
    #[error(
        "the server is busy ({running} requests running, {waiting} waiting); it must be idle for the measurement"
    )]
    Busy {
        /// Requests in its batch.
        running: u32,
        /// Requests in its queue.
        waiting: u32,
    },
}

/// The server's reports about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The model's name, as requests use it.
    pub model: String,
    /// The engine, if its metrics show it.
    pub engine: Option<&'static EngineKind>,
    /// Its sizes.
    pub limits: Limits,
}

/// The server.
#[derive(Clone, Debug)]
pub struct Server(Arc<Target>);

// === impl Server ===

impl Server {
    /// A server at `http://host:port`, with or without `/v1` behind it.
    ///
    /// # Errors
    ///
    /// If the address or key is invalid.
    pub fn new(url: &str, api_key: Option<&str>) -> Result<Self, ServerError> {
        let wrong = |why: String| ServerError::Url { url: url.into(), why };
        let mut headers = HeaderMap::new();
        if let Some(key) = api_key {
            headers.extend([bearer(key).ok_or(ServerError::ApiKey)?]);
        }
        if url.starts_with("https://") {
            return Err(wrong("TLS is not supported here; use http://".into()));
        }
        Ok(Self(Arc::new(Target::new(url, None, headers).map_err(wrong)?)))
    }

    /// Queries the server. Values that it does not report are `None`; only its list of models is required.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached, does not have `model`, or is busy.
    pub async fn facts(&self, model: Option<&str>) -> Result<Facts, ServerError> {
        let listed = models::parse(&self.get("/v1/models").await?)?;
        let names = || ServerError::Model(listed.iter().map(|model| model.id.clone()).collect());
        let found = match model {
            Some(name) => listed.iter().find(|listed| listed.id == name),
            None => listed.iter().find(|listed| listed.parent.is_none()).filter(|first| {
                // Several names of one model are one model.
                listed.iter().all(|other| {
                    other.parent.is_some()
                        || (other.root.is_some() && other.root == first.root)
                        || other.id == first.id
                })
            }),
        };
        let found = found.ok_or_else(names)?;
        let mut facts = Facts { model: found.id.clone(), engine: None, limits: Limits::default() };
        facts.limits.max_model_len = number(&found.card, &known_names(|settings| settings.max_model_len));
        if let Ok(page) = self.get("/metrics").await {
            let page = String::from_utf8_lossy(&page);
            if let Some((engine, reported)) = load_report(&page) {
                if reported.running + reported.waiting > 0 {
                    return Err(ServerError::Busy { running: reported.running, waiting: reported.waiting });
                }
                facts.engine = Some(engine);
                facts.limits.kv_capacity_tokens = reported.kv_capacity_tokens.filter(|tokens| *tokens > 0);
            }
            facts.limits.block_tokens = block_tokens(&page);
        }
        for path in known_names(|settings| settings.path) {
            let Ok(body) = self.get(path).await else { continue };
            let Ok(told) = serde_json::from_slice::<Value>(&body) else { continue };
            facts.limits.complete(&told);
            break;
        }
        Ok(facts)
    }

    async fn get(&self, path: &str) -> Result<Bytes, ServerError> {
        let answered = self.0.ask(Method::GET, path, FACTS_TIMEOUT, ANSWER_BYTES_MAX).await;
        match answered.map_err(|why| self.broken(path, &why))? {
            (StatusCode::OK, body) => Ok(body),
            (status, body) => {
                let shown = &body[..body.len().min(ERROR_DETAIL_BYTES_MAX)];
                Err(self.status(path, status, String::from_utf8_lossy(shown).trim().to_owned()))
            }
        }
    }

    /// A separate connection for each request: opened before the clock starts, so it is not one that the server has
    /// closed in the meantime.
    pub(super) async fn connect(&self, path: &str) -> Result<Connection, ServerError> {
        self.0.connect().await.map_err(|error| self.broken(path, &error))
    }

    /// A completion in token events. `prompt` is JSON.
    pub(super) fn completion(&self, model: &str, prompt: &str, output_tokens: u32) -> Request<Full<Bytes>> {
        let model = Value::from(model);
        let body = format!(
            r#"{{"model":{model},"prompt":{prompt},"max_tokens":{output_tokens},"min_tokens":{output_tokens},"ignore_eos":true,"temperature":0,"stream":true,"stream_options":{{"include_usage":true,"continuous_usage_stats":true}}}}"#
        );
        let json = (CONTENT_TYPE, HeaderValue::from_static("application/json"));
        self.0.request(Method::POST, COMPLETIONS, Bytes::from(body), [json])
    }

    /// Sends a completion and records the arrival of each of its tokens, in seconds of `clock`. Events are only
    /// timestamped on arrival and parsed afterwards, so that parsing one does not delay the timestamp of the next.
    pub(super) async fn complete(
        &self,
        mut connection: Connection,
        request: Request<Full<Bytes>>,
        clock: Instant,
    ) -> Result<Timeline, ServerError> {
        let sent_s = clock.elapsed().as_secs_f64();
        let answer = connection.send_request(request).await;
        let answer = answer.map_err(|error| self.broken(COMPLETIONS, &describe(&error)))?;
        let (status, mut body) = (answer.status(), answer.into_body());
        if status != StatusCode::OK {
            let detail = client::beginning(body, ERROR_DETAIL_BYTES_MAX).await;
            return Err(self.status(COMPLETIONS, status, detail));
        }
        let (mut pieces, mut bytes) = (Vec::new(), 0);
        let broken = |error: hyper::Error| self.broken(COMPLETIONS, &describe(&error));
        while let Some(data) = client::next(&mut body).await.map_err(broken)? {
            bytes += data.len();
            if bytes > ANSWER_BYTES_MAX {
                return Err(self.broken(COMPLETIONS, &"the response is incomplete"));
            }
            pieces.push((clock.elapsed().as_secs_f64(), data));
        }
        Ok(read(sent_s, &pieces))
    }

    fn status(&self, path: &str, status: StatusCode, detail: String) -> ServerError {
        let (authority, path) = (self.0.authority().to_owned(), path.to_owned());
        ServerError::Status { authority, path, status: status.as_u16(), detail }
    }

    fn broken(&self, path: &str, why: &dyn std::fmt::Display) -> ServerError {
        ServerError::Broken {
            authority: self.0.authority().to_owned(),
            path: path.into(),
            why: why.to_string(),
        }
    }
}

const COMPLETIONS: &str = "/v1/completions";

// === impl Limits ===

impl Limits {
    /// Reads a server's description of its configuration, under the names of every engine.
    fn complete(&mut self, told: &Value) {
        let fill = |place: &mut Option<u32>, name: fn(&Settings) -> Option<&'static str>| {
            *place = place.or_else(|| number(told, &known_names(name)));
        };
        fill(&mut self.max_model_len, |settings| settings.max_model_len);
        fill(&mut self.block_tokens, |settings| settings.block_tokens);
        fill(&mut self.max_num_seqs, |settings| settings.max_num_seqs);
        fill(&mut self.max_num_batched_tokens, |settings| settings.max_num_batched_tokens);
        let mut capacity = None;
        fill(&mut capacity, |settings| settings.kv_capacity_tokens);
        self.kv_capacity_tokens = self.kv_capacity_tokens.or(capacity.map(u64::from));
    }
}

/// What each engine calls a setting, in the order of the table.
fn known_names(name: fn(&Settings) -> Option<&'static str>) -> Vec<&'static str> {
    ENGINES.iter().filter_map(|kind| name(&kind.settings)).collect()
}

/// The first positive number under one of `names`, at any depth; earlier names take precedence.
fn number(value: &Value, names: &[&str]) -> Option<u32> {
    fn search(value: &Value, name: &str, depth: usize) -> Option<u32> {
        if depth == 0 {
            return None;
        }
        match value {
            Value::Object(fields) => {
                let here =
                    fields.get(name).and_then(Value::as_u64).and_then(|number| u32::try_from(number).ok());
                here.filter(|number| *number > 0)
                    .or_else(|| fields.values().find_map(|value| search(value, name, depth - 1)))
            }
            Value::Array(values) => values.iter().find_map(|value| search(value, name, depth - 1)),
            _ => None,
        }
    }
    names.iter().find_map(|name| search(value, name, SEARCH_DEPTH_MAX))
}

/// Parses a stream of events from timestamped pieces. An event has the timestamp of the piece that ends it. If events
/// contain the number of tokens so far (vLLM and SGLang, on request), it is used: a server that has fallen behind
/// sends several tokens in one event. Otherwise each event is one token, and the number is scaled to the total in the
/// last one.
fn read(sent_s: f64, pieces: &[(f64, Bytes)]) -> Timeline {
    let mut line = Timeline { sent_s, ..Timeline::default() };
    let (mut rest, mut counted, mut total) = (Vec::new(), false, None);
    for (at, piece) in pieces {
        rest.extend_from_slice(piece);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let text: Vec<u8> = rest.drain(..=end).collect();
            let Some(data) = text.strip_prefix(b"data:") else { continue };
            let Ok(event) = serde_json::from_slice::<Value>(data) else { continue };
            let usage = &event["usage"];
            let said = usage["completion_tokens"].as_u64().and_then(|tokens| u32::try_from(tokens).ok());
            if let Some(tokens) = number(usage, &["prompt_tokens"]) {
                line.prompt_tokens = tokens;
            }
            if let Some(tokens) = usage["prompt_tokens_details"]["cached_tokens"].as_u64() {
                line.cached_tokens = u32::try_from(tokens).ok();
            }
            if event["choices"].as_array().is_some_and(|choices| !choices.is_empty()) {
                let so_far = line.tokens.last().map_or(0, |(_, tokens)| *tokens);
                let tokens = said.unwrap_or(so_far + 1);
                counted |= said.is_some() && so_far > 0;
                if tokens > so_far {
                    line.tokens.push((*at, tokens));
                }
            }
            total = said.or(total);
        }
    }
    let events = line.tokens.len() as u32;
    if let Some(total) = total.filter(|total| !counted && events > 1 && *total != events) {
        let scale = f64::from(total) / f64::from(events);
        line.tokens.iter_mut().for_each(|(_, tokens)| *tokens = (f64::from(*tokens) * scale).round() as u32);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(texts: &[(f64, &str)]) -> Vec<(f64, Bytes)> {
        texts.iter().map(|(at, text)| (*at, Bytes::copy_from_slice(text.as_bytes()))).collect()
    }

    const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"text\":\"\"}]}\n\n";

    #[test]
    fn a_token_without_text_is_a_token_and_as_old_as_the_piece_that_ends_it() {
        let (half, other) = TOKEN.split_at(20);
        let end = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\ndata: [DONE]\n\n";
        let line = read(0.5, &pieces(&[(1.0, half), (2.0, other), (3.0, TOKEN), (4.0, end)]));
        assert_eq!((line.sent_s, line.prompt_tokens, line.cached_tokens), (0.5, 9, Some(0)));
        assert_eq!(line.tokens, [(2.0, 1), (3.0, 2)]);
    }

    #[test]
    fn an_event_of_several_tokens_counts_as_many_as_it_says() {
        let event = |tokens: u32| {
            format!(
                "data: {{\"choices\":[{{\"text\":\"a\"}}],\"usage\":{{\"prompt_tokens\":9,\"completion_tokens\":{tokens}}}}}\n\n"
            )
        };
        let (one, four) = (event(1), event(4));
        assert_eq!(read(0.0, &pieces(&[(1.0, &one), (2.0, &four)])).tokens, [(1.0, 1), (2.0, 4)]);
    }

    #[test]
    fn events_that_do_not_count_are_scaled_to_the_total() {
        let end = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":4}}\n\n";
        let line = read(0.0, &pieces(&[(1.0, TOKEN), (2.0, TOKEN), (3.0, end)]));
        assert_eq!(line.tokens, [(1.0, 2), (2.0, 4)]);
    }

    #[test]
    fn what_a_server_tells_of_itself_is_found_under_each_engines_names() {
        let of = |text: &str| {
            let mut limits = Limits::default();
            limits.complete(&serde_json::from_str(text).expect("JSON"));
            (
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                limits.block_tokens,
                limits.kv_capacity_tokens,
            )
        };
        let vllm = r#"{"vllm_config":{"cache_config":{"block_size":32,"kv_cache_size_tokens":131072},
            "scheduler_config":{"max_num_batched_tokens":2048,"max_num_seqs":128,"max_num_scheduled_tokens":null}}}"#;
        assert_eq!(of(vllm), (Some(128), Some(2048), Some(32), Some(131_072)));
        let sglang = r#"{"page_size":16,"chunked_prefill_size":8192,"max_total_num_tokens":4096,
            "internal_states":[{"max_running_requests":64}]}"#;
        assert_eq!(of(sglang), (Some(64), Some(8192), Some(16), Some(4096)));
        assert_eq!(of(r#"{"total_slots":4,"chunked_prefill_size":-1}"#), (Some(4), None, None, None));
    }

    #[test]
    fn an_address_that_cannot_be_used_says_what_to_give() {
        for url in ["127.0.0.1:8000", "https://x", "http://", ""] {
            let error = Server::new(url, None).expect_err(url).to_string();
            assert!(error.contains("http://host:port"), "{error}");
        }
        let server = Server::new("http://h:1/some/v1/", None).expect("good");
        assert_eq!(server.0.authority(), "h:1");
    }
}
