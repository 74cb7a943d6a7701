//! `/v1/models` answers: what an endpoint serves. Read at discovery, never on a request's path.

use serde::Deserialize;
use thiserror::Error;

/// Models that one answer may list; what is beyond is an error, not a silent cut.
pub const MODELS_MAX: usize = 4096;

/// One entry of the list.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Model {
    /// The name requests use.
    pub id: String,
    /// The base model, if this is a LoRA adapter (vLLM).
    #[serde(default)]
    pub parent: Option<String>,
    /// Tokens of prompt and output together that the engine accepts, where it tells (vLLM, SGLang).
    #[serde(default)]
    pub max_model_len: Option<u64>,
}

/// Why an answer is not a list of models.
#[derive(Debug, Error)]
pub enum ModelsError {
    /// Not JSON, or without a `data` array of objects that have an `id`.
    #[error("the answer to /v1/models is not a list of models: {0}; is this an OpenAI-compatible server?")]
    Malformed(#[from] serde_json::Error),
    /// More entries than anyone serves.
    #[error("the answer to /v1/models lists {count} models; at most {MODELS_MAX} are read")]
    TooMany {
        /// Entries in the answer.
        count: usize,
    },
}

/// The models an answer lists, in its order.
pub fn parse(body: &[u8]) -> Result<Vec<Model>, ModelsError> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<Model>,
    }
    let List { data } = serde_json::from_slice(body)?;
    if data.len() > MODELS_MAX {
        return Err(ModelsError::TooMany { count: data.len() });
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_model_and_its_adapter_are_told_apart() {
        let body = br#"{"object":"list","data":[
            {"id":"tiny","object":"model","created":1,"owned_by":"vllm","root":"tiny","parent":null,"max_model_len":16384},
            {"id":"lora1","object":"model","parent":"tiny","max_model_len":null}]}"#;
        let models = parse(body).expect("a list");
        assert_eq!(models[0], Model { id: "tiny".into(), parent: None, max_model_len: Some(16384) });
        assert_eq!(models[1], Model { id: "lora1".into(), parent: Some("tiny".into()), max_model_len: None });
    }

    #[test]
    fn an_answer_that_is_no_list_says_so() {
        for body in [&b"<html>"[..], b"", b"{}", br#"{"data":[{"name":"x"}]}"#, br#"{"data":{}}"#] {
            let message = parse(body).expect_err("no list").to_string();
            assert!(message.contains("/v1/models"), "{message}");
        }
    }

    #[test]
    fn an_endless_list_is_refused() {
        let entries = vec![r#"{"id":"m"}"#; MODELS_MAX + 1].join(",");
        let error = parse(format!("{{\"data\":[{entries}]}}").as_bytes()).expect_err("too many");
        assert!(matches!(error, ModelsError::TooMany { count } if count == MODELS_MAX + 1));
    }
}
