//! A gateway, engines and clients for tests, all on loopback and free ports.
//!
//! [`TestGateway`] is the gateway as `kvlane serve` runs it. A [`FakeEngine`] answers probes by itself and hands
//! every other request to the test as a [`Call`], to which the test writes any bytes at any time. A [`FakeFeed`]
//! publishes KV events; an engine with one, and a cache, is a [`CachingEngine`]. A [`Client`] is a socket with just
//! enough HTTP to read responses. Nothing here sleeps: tests wait for bytes, for calls, or with [`eventually`] for a
//! condition.

mod caching;
mod client;
mod engine;
mod feed;
mod gateway;
pub mod parsers;
mod wait;

pub use self::caching::{
    BLOCK, CachingEngine, FeedEndpoint, caching_config, caching_gateway, caching_gateway_at_speed, chain,
    tokens,
};
pub use self::client::{Client, Reply};
pub use self::engine::{Call, FakeEngine, next_call};
pub use self::feed::FakeFeed;
pub use self::gateway::{TestGateway, config, in_turn, is_zero};
pub use self::wait::{PATIENCE, eventually, soon};
pub use kvlane_control::testing::{Told, batch};

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
