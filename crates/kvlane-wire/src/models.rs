//! `/v1/models` answers: the models that an endpoint serves. Read at discovery, not per request.

use serde_json::Value;
use thiserror::Error;

use crate::engine::{CardNames, ENGINES};

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

/// The maximum of prompt and output tokens together in a model's entry, if the engine reports it.
pub fn max_model_len(card: &Value) -> Option<u64> {
    length(card, |names| names.max_model_len)
}

/// [`max_model_len`], or the context length that the model was trained for, if the engine reports only that.
pub fn context_len(card: &Value) -> Option<u64> {
    max_model_len(card).or_else(|| length(card, |names| names.trained_len))
}

fn length(card: &Value, pointer: fn(&CardNames) -> Option<&'static str>) -> Option<u64> {
    ENGINES.iter().find_map(|engine| card.pointer(pointer(&engine.card)?)?.as_u64())
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
        assert_eq!(models.iter().map(|m| max_model_len(&m.card)).collect::<Vec<_>>(), [Some(16_384), None]);
    }

    #[test]
    fn a_trained_length_stands_in_for_a_served_one() {
        let told: Value = serde_json::from_str(r#"{"meta":{"n_ctx_train":8192}}"#).expect("JSON");
        assert_eq!((max_model_len(&told), context_len(&told)), (None, Some(8192)));
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
