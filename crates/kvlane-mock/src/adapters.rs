//! The adapters (LoRA) that an engine lists, and vLLM's requests that change them while it runs, as with
//! `VLLM_ALLOW_RUNTIME_LORA_UPDATING`.

use std::sync::RwLock;

use http::StatusCode;
use serde::Deserialize;

use crate::error::ApiError;

/// Most adapters of an engine.
const NAMES_MAX: usize = 4096;

/// The names of an engine's adapters.
pub(crate) struct Adapters(RwLock<Vec<String>>);

#[derive(Deserialize)]
struct Load {
    lora_name: String,
    lora_path: String,
    #[serde(default)]
    load_inplace: bool,
}

#[derive(Deserialize)]
struct Unload {
    lora_name: String,
}

// === impl Adapters ===

impl Adapters {
    pub(crate) fn new(names: Vec<String>) -> Self {
        Self(RwLock::new(names))
    }

    pub(crate) fn all(&self) -> Vec<String> {
        self.0.read().expect("no panic holds this lock").clone()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.read().expect("no panic holds this lock").iter().any(|other| other == name)
    }

    /// Answers a request to load one, beside these models. Any path will do: the mock engine has no weights.
    pub(crate) fn load(&self, body: &[u8], models: &[String]) -> Result<String, ApiError> {
        let asked = serde_json::from_slice(body).map_err(ApiError::bad_request)?;
        let Load { lora_name, lora_path, load_inplace } = asked;
        if models.contains(&lora_name) {
            return Err(ApiError::bad_request(format!(
                "The lora adapter '{lora_name}' conflicts with a served base model."
            )));
        }
        let mut names = self.0.write().expect("no panic holds this lock");
        if lora_name.is_empty() || lora_path.is_empty() {
            return Err(ApiError::bad_request("Both 'lora_name' and 'lora_path' must be provided."));
        }
        let is_there = names.contains(&lora_name);
        if is_there && !load_inplace {
            return Err(ApiError::bad_request(format!(
                "The lora adapter '{lora_name}' has already been loaded."
            )));
        }
        if names.len() >= NAMES_MAX {
            return Err(ApiError::bad_request(format!("an engine has at most {NAMES_MAX} adapters")));
        }
        let said = format!("Success: LoRA adapter '{lora_name}' added successfully.");
        if !is_there {
            names.push(lora_name);
        }
        Ok(said)
    }

    /// Answers a request to unload one.
    pub(crate) fn unload(&self, body: &[u8]) -> Result<String, ApiError> {
        let Unload { lora_name: name } = serde_json::from_slice(body).map_err(ApiError::bad_request)?;
        let mut names = self.0.write().expect("no panic holds this lock");
        let Some(at) = names.iter().position(|other| *other == name) else {
            let message = format!("The lora adapter '{name}' cannot be found.");
            return Err(ApiError { status: StatusCode::NOT_FOUND, message });
        };
        names.remove(at);
        Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use serde_json::{Value, json};

    use kvlane_core::request::AdapterKey;
    use kvlane_wire::engine::adapter_report;
    use tokio::net::TcpListener;

    use crate::config::MockConfig;
    use crate::testing::{ask, chat, engine, send, text};

    #[tokio::test]
    async fn adapters_come_and_go_while_it_runs() {
        let engine = engine(MockConfig { lora_modules: vec!["law".into()], ..MockConfig::default() }).await;
        let post =
            async |path: &str, body: Value| text(send(engine.addr(), path, body.to_string()).await).await;
        let listed = async || {
            let (_, models) = text(send(engine.addr(), "/v1/models", "").await).await;
            let models: Value = serde_json::from_str(&models).expect("JSON");
            models["data"]
                .as_array()
                .expect("a list")
                .iter()
                .map(|card| card["id"].clone())
                .collect::<Vec<_>>()
        };
        let body = || {
            let mut body = chat("hi", json!({"max_tokens": 2}));
            body["model"] = "sql".into();
            body
        };
        assert_eq!(ask(&engine, "/v1/chat/completions", body()).await.0, StatusCode::NOT_FOUND);
        let (load, unload) = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter");
        let sql = json!({"lora_name": "sql", "lora_path": "/sql"});
        for (path, body, status) in [
            (load, json!({"lora_name": "sql", "lora_path": ""}), 400),
            (load, json!({"lora_name": "mock", "lora_path": "/sql"}), 400),
            (unload, json!({"lora_name": "sql"}), 404),
            (load, sql.clone(), 200),
            (load, sql, 400),
        ] {
            assert_eq!(post(path, body).await.0.as_u16(), status);
        }
        assert_eq!(listed().await, ["mock", "law", "sql"]);
        assert_eq!(ask(&engine, "/v1/chat/completions", body()).await.0, StatusCode::OK);
        assert_eq!(post(unload, json!({"lora_name": "law"})).await.0, StatusCode::OK);
        assert_eq!(listed().await, ["mock", "sql"]);
    }

    #[tokio::test]
    async fn its_page_tells_its_slots_and_the_adapters_of_its_requests() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let loras = MockConfig { lora_modules: vec!["law".into(), "sql".into()], ..MockConfig::default() };
        let config = MockConfig { max_loras: Some(2), adapter_load_s: 0.0, ..loras };
        let engine = crate::MockEngine::start(config, listener).expect("a good configuration");
        let report = async || {
            let (_, page) = text(send(engine.addr(), "/metrics", "").await).await;
            adapter_report(&page).expect("the page tells")
        };
        assert_eq!((report().await.slots, report().await.running), (Some(2), vec![]));
        let mut body = chat("hi", json!({"max_tokens": 10_000, "stream": true}));
        body["model"] = "sql".into();
        let stream = send(engine.addr(), "/v1/chat/completions", body.to_string()).await;
        assert_eq!(report().await.running, [AdapterKey::named(b"sql")]);
        drop(stream);
    }
}
