//! The bodies of requests.

use kvlane_trace::trace::Trace;
use serde_json::{Map, Value, json};

use super::{Api, Prompts, ReplayConfig, ReplayError};
use crate::prompt::Words;
use crate::prompt::given::{Given, Prompt};

/// Fields with the maximum length of an answer, in all APIs.
const LENGTHS: [&str; 3] = ["max_tokens", "max_completion_tokens", "max_output_tokens"];

/// Writes bodies.
pub(super) struct Bodies {
    api: Api,
    trace: std::sync::Arc<Trace>,
    prompts: Prompts,
    words: Words,
    seed: u64,
    model: String,
    /// Further fields of every body.
    fields: Map<String, Value>,
    /// Fields of bodies with a given answer length.
    ignore_eos: bool,
    tell_lengths: bool,
    /// The body up to the prompt's text, if prompts are words.
    head: Vec<u8>,
}

// === impl Bodies ===

impl Bodies {
    pub(super) fn new(config: &ReplayConfig) -> Result<Self, ReplayError> {
        let reserved =
            ["messages", "prompt", "stream"].into_iter().find(|key| config.fields.contains_key(*key));
        if let Some(key) = reserved {
            return Err(ReplayError::Field(key.into()));
        }
        if matches!(&config.prompts, Prompts::Given(all) if all.is_empty() && !config.trace.requests.is_empty())
        {
            return Err(ReplayError::NoPrompts);
        }
        let words = match &config.prompts {
            Prompts::Words(words) => words.clone(),
            Prompts::Given(_) => Words::default(),
        };
        let tell_lengths = config.tell_lengths && !LENGTHS.iter().any(|key| config.fields.contains_key(*key));
        let mut bodies = Self {
            api: config.api,
            trace: config.trace.clone(),
            prompts: config.prompts.clone(),
            words,
            seed: config.seed,
            model: config.model.clone(),
            fields: config.fields.clone(),
            ignore_eos: config.ignore_eos,
            tell_lengths,
            head: Vec::new(),
        };
        let mut head = Value::Object(bodies.frame(Map::new(), 0)).to_string().into_bytes();
        head.pop();
        head.extend_from_slice(match bodies.api {
            Api::Chat => br#","messages":[{"role":"user","content":""#,
            Api::Completions => br#","prompt":""#,
        });
        bodies.head = head;
        Ok(bodies)
    }

    /// The body of a request, and its API.
    pub(super) fn write(&self, request: u32) -> (Api, Vec<u8>) {
        match &self.prompts {
            Prompts::Words(_) => (self.api, self.of_words(request)),
            Prompts::Given(all) => self.of_given(&all[request as usize % all.len()], request),
        }
    }

    fn of_words(&self, request: u32) -> Vec<u8> {
        let mut body = self.head.clone();
        self.words.append(&mut body, self.seed, &self.trace, request);
        body.extend_from_slice(match self.api {
            Api::Chat => br#""}]"#,
            Api::Completions => br#"""#,
        });
        if self.tell_lengths {
            let length = self.trace.requests[request as usize].output_tokens.max(1);
            body.extend_from_slice(format!(r#","max_tokens":{length}"#).as_bytes());
            if self.ignore_eos {
                body.extend_from_slice(br#","ignore_eos":true"#);
            }
        }
        body.push(b'}');
        body
    }

    fn of_given(&self, given: &Given, request: u32) -> (Api, Vec<u8>) {
        let length = self.trace.requests[request as usize].output_tokens;
        let (api, body) = match &given.prompt {
            Prompt::Messages(messages) => (Api::Chat, json!({ "messages": messages })),
            Prompt::Text(prompt) => (Api::Completions, json!({ "prompt": prompt })),
            Prompt::Body(body) => {
                let api = if body.contains_key("messages") { Api::Chat } else { Api::Completions };
                (api, Value::Object(body.clone()))
            }
        };
        let Value::Object(body) = body else { unreachable!("each is an object") };
        (api, Value::Object(self.frame(body, length)).to_string().into_bytes())
    }

    /// A given body: its fields are kept, except that streaming and usage are turned on and fields from the command
    /// line are set.
    fn frame(&self, mut body: Map<String, Value>, length: u32) -> Map<String, Value> {
        if !self.model.is_empty() {
            body.insert("model".into(), self.model.clone().into());
        }
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({ "include_usage": true }));
        if self.tell_lengths && length > 0 && !LENGTHS.iter().any(|key| body.contains_key(*key)) {
            body.insert("max_tokens".into(), length.into());
            if self.ignore_eos {
                body.insert("ignore_eos".into(), true.into());
            }
        }
        body.extend(self.fields.clone());
        body
    }
}
