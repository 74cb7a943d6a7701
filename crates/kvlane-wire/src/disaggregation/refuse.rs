//! Requests that must not be split: the legs would not have the same one prompt, or splitting would be of no use.

use thiserror::Error;

use super::connector::Connector;
use crate::api::Api;
use crate::json::{JsonError, Scanner};

/// Why a request is not split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WhyNot {
    /// The API generates nothing, or its engines do not split it.
    #[error("{} is not split with this connector", .0.name())]
    Api(Api),
    /// There are several prompts. vLLM transfers the blocks of the first and computes the answers to the others from
    /// them, without an error.
    #[error("a request with several prompts is not split")]
    Prompts,
    /// A parameter.
    #[error("a request with `{0}` is not split")]
    Parameter(&'static str),
    /// The body is not a JSON object.
    #[error("a body that is not a JSON object is not split")]
    Body,
}

/// The members that [`may_split`] looks at.
const TELLING: [&str; 19] = [
    "prompt",
    "text",
    "input_ids",
    "echo",
    "logprobs",
    "prompt_embeds",
    "input_embeds",
    "use_beam_search",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "truncation",
    "previous_response_id",
    "conversation",
    "background",
    "n",
    "best_of",
    "return_logprob",
    "return_hidden_states",
    "sampling_params",
];

/// Whether a member can be a reason not to split a request. A prompt that is one text is none.
pub(crate) fn may_forbid(key: &str, is_text: bool) -> bool {
    TELLING.contains(&key) && !(is_text && matches!(key, "prompt" | "text"))
}

/// Checks that a request gives the same answer when it is split. Where
/// [`ParsedRequest::telling`](crate::openai::ParsedRequest::telling) says that the body has nothing to look at, this is
/// [`splits`].
///
/// # Errors
/// The first reason found why it may not.
pub fn may_split(connector: Connector, api: Api, body: &[u8]) -> Result<(), WhyNot> {
    if !splits(connector, api) {
        return Err(WhyNot::Api(api));
    }
    let text = simdutf8::basic::from_utf8(body).map_err(|_| WhyNot::Body)?;
    let mut request = Request { connector, ..Request::default() };
    request.read(text).map_err(|_| WhyNot::Body)?;
    request.why_not.map_or(Ok(()), Err)
}

/// Whether engines with this connector accept both legs at this API.
pub fn splits(connector: Connector, api: Api) -> bool {
    match api {
        Api::ChatCompletions | Api::Completions => true,
        // Mooncake's first leg needs `ignore_eos`, which these have not; SGLang's have no bootstrap members,
        // TensorRT-LLM's no `disaggregated_params`.
        Api::Responses => {
            !matches!(connector, Connector::Mooncake | Connector::Sglang | Connector::TensorRtLlm)
        }
        Api::Messages => matches!(
            connector,
            Connector::Nixl | Connector::NixlPush | Connector::LmCache | Connector::SharedStorage
        ),
        Api::Generate => connector == Connector::Sglang,
        _ => false,
    }
}

/// What is found in a body.
#[derive(Debug)]
struct Request {
    connector: Connector,
    why_not: Option<WhyNot>,
    echoes: bool,
    logprobs: bool,
}

impl Default for Request {
    fn default() -> Self {
        Self { connector: Connector::Nixl, why_not: None, echoes: false, logprobs: false }
    }
}

// === impl Request ===

impl Request {
    fn read(&mut self, body: &str) -> Result<(), JsonError> {
        let mut scanner = Scanner::new(body);
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(&mut scanner)? {
            self.member(&key.decode(), scanner.skip()?)?;
        }
        scanner.end()?;
        // Logprobs of the prompt: an engine that has to compute them reads no cache.
        if self.echoes && self.logprobs {
            self.refuse(WhyNot::Parameter("echo"));
        }
        Ok(())
    }

    fn member(&mut self, key: &str, value: &str) -> Result<(), JsonError> {
        let is_sglang = self.connector == Connector::Sglang;
        let has_one_answer = self.connector.is_parallel() || self.connector == Connector::TensorRtLlm;
        if matches!(value, "null" | "false") {
            return Ok(());
        }
        match key {
            "prompt" | "text" | "input_ids" if self.has_several_prompts(value)? => {
                self.refuse(WhyNot::Prompts)
            }
            "echo" => self.echoes = true,
            "logprobs" => self.logprobs = true,
            // Of an unknown number of prompts.
            "prompt_embeds" | "input_embeds" => self.refuse(WhyNot::Prompts),
            // vLLM answers a first leg without `kv_transfer_params`.
            "use_beam_search" => self.refuse(WhyNot::Parameter("use_beam_search")),
            "prompt_logprobs" => self.refuse(WhyNot::Parameter("prompt_logprobs")),
            // The length to which vLLM truncates depends on the limit of output tokens, so a first leg would have
            // another prompt.
            "truncate_prompt_tokens" => self.refuse(WhyNot::Parameter("truncate_prompt_tokens")),
            "truncation" if value != "\"disabled\"" => self.refuse(WhyNot::Parameter("truncation")),
            // Stored at one engine.
            "previous_response_id" => self.refuse(WhyNot::Parameter("previous_response_id")),
            "conversation" => self.refuse(WhyNot::Parameter("conversation")),
            "background" => self.refuse(WhyNot::Parameter("background")),
            // Several answers: read by the blocks of one first leg with NIXL; elsewhere each would need a transfer of
            // its own, or (TensorRT-LLM) a first token.
            "n" if value != "1" && has_one_answer => self.refuse(WhyNot::Parameter("n")),
            "best_of" if value != "1" && has_one_answer => self.refuse(WhyNot::Parameter("best_of")),
            // Of the prompt: computed by the prefill engine, whose answer is not read.
            "return_logprob" if is_sglang => self.refuse(WhyNot::Parameter("return_logprob")),
            "return_hidden_states" if is_sglang => self.refuse(WhyNot::Parameter("return_hidden_states")),
            // One object per prompt, or `n` in it.
            "sampling_params" if is_sglang => self.sampling_params(value)?,
            _ => {}
        }
        Ok(())
    }

    /// Whether a prompt is a list of prompts. SGLang takes a list of one as a batch, which needs lists of rooms.
    fn has_several_prompts(&self, value: &str) -> Result<bool, JsonError> {
        if !value.starts_with('[') {
            return Ok(false);
        }
        let mut scanner = Scanner::new(value);
        let (mut prompts, mut walk) = (0_u32, scanner.array()?);
        while walk.item(&mut scanner)? {
            // A list that starts with a token id is one prompt.
            if !scanner.skip()?.starts_with(['"', '[', '{']) {
                return Ok(false);
            }
            prompts += 1;
            if prompts > 1 || self.connector == Connector::Sglang {
                return Ok(true);
            }
        }
        Ok(prompts == 0)
    }

    fn sampling_params(&mut self, value: &str) -> Result<(), JsonError> {
        if !value.starts_with('{') {
            self.refuse(WhyNot::Prompts);
            return Ok(());
        }
        let mut scanner = Scanner::new(value);
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(&mut scanner)? {
            if scanner.skip()? != "1" && key.decode() == "n" {
                self.refuse(WhyNot::Parameter("n"));
            }
        }
        Ok(())
    }

    fn refuse(&mut self, why_not: WhyNot) {
        self.why_not.get_or_insert(why_not);
    }
}
