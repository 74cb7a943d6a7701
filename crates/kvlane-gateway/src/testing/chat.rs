//! Bodies of chat requests, and an event of their streams.

/// A chat body for `model` whose user message is `text`.
pub fn chat(model: &str, text: &str) -> String {
    serde_json::json!({"model": model, "messages": [{"role": "user", "content": text}]}).to_string()
}

/// A chat body with `stream`.
pub fn chat_stream(model: &str, text: &str) -> String {
    serde_json::json!({"model": model, "stream": true, "messages": [{"role": "user", "content": text}]})
        .to_string()
}

/// One SSE event with one token of a chat completion.
pub fn event(text: &str) -> String {
    let chunk = serde_json::json!({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]});
    format!("data: {chunk}\n\n")
}
