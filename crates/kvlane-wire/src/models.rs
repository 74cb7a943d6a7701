//! `/v1/models` answers: the models that an endpoint serves. Read at discovery, not per request.

use serde_json::Value;
use thiserror::Error;

/// Most models in one answer; more are an error instead of a silent truncation.
pub const MODELS_MAX: usize = 4096;

/// One model.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// The name used in requests.
    pub id: String,
    /// The base model, if this is a LoRA adapter (vLLM).
    pub parent: Option<String>,
    /// Location of the weights: entries with the same root are one model under several names (vLLM).
    pub root: Option<String>,
    /// The complete entry, as the engine sent it.
    pub card: Value,
}

/// Why an answer is not a list of models.
#[derive(Debug, Error)]
pub enum ModelsError {
    /// Not JSON.
    #[error("the answer to GET /v1/models is not JSON ({0}); is this an OpenAI-compatible server?")]
    Malformed(#[from] serde_json::Error),
    /// Without a `data` array.
    #[error("the answer to GET /v1/models has no array `data`; is this an OpenAI-compatible server?")]
    NoList,
    /// More entries than supported.
    #[error("the answer to GET /v1/models lists {count} models; at most {MODELS_MAX} are supported")]
    TooMany {
        /// Entries in the answer.
        count: usize,
    },
}

/// The models in an answer, in its order. Entries without an `id` are ignored.
///
/// # Errors
/// Why the answer is not a list of models.
pub fn parse(body: &[u8]) -> Result<Vec<Model>, ModelsError> {
    let mut answer: Value = serde_json::from_slice(body)?;
    let Some(Value::Array(cards)) = answer.get_mut("data").map(Value::take) else {
        return Err(ModelsError::NoList);
    };
    if cards.len() > MODELS_MAX {
        return Err(ModelsError::TooMany { count: cards.len() });
    }
    let model = |card: Value| {
        let text = |key| card.get(key).and_then(Value::as_str).map(str::to_owned);
        Some(Model { id: text("id")?, parent: text("parent"), root: text("root"), card })
    };
    Ok(cards.into_iter().filter_map(model).collect())
}

// === impl Model ===

impl Model {
    /// The maximum of prompt and output tokens together, if the engine reports it (vLLM, SGLang).
    pub fn max_model_len(&self) -> Option<u32> {
        self.card.get("max_model_len")?.as_u64()?.try_into().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_model_and_its_adapter_are_told_apart() {
        let body = br#"{"object":"list","data":[
            {"id":"tiny","object":"model","created":1,"owned_by":"vllm","root":"/m/tiny","parent":null,"max_model_len":16384},
            {"id":"lora1","object":"model","parent":"tiny","max_model_len":null},{"object":"model"}]}"#;
        let models = parse(body).expect("a list");
        let told: Vec<_> =
            models.iter().map(|m| (m.id.as_str(), m.parent.as_deref(), m.root.as_deref())).collect();
        assert_eq!(told, [("tiny", None, Some("/m/tiny")), ("lora1", Some("tiny"), None)]);
        assert_eq!(models[0].card["owned_by"], "vllm");
        assert_eq!((models[0].max_model_len(), models[1].max_model_len()), (Some(16_384), None));
    }

    #[test]
    fn an_answer_that_is_no_list_says_so() {
        for body in [&b"<html>"[..], b"", b"{}", b"[]", br#"{"data":{}}"#] {
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
