//! Traffic: requests of every API, whole and streamed, over both versions of HTTP, and other client behaviour.

use std::time::Duration;

use bytes::Bytes;
use http::Method;
use kvlane_core::rng::Rng;
use serde_json::json;

use super::client::{Order, Shape};
use super::fleet::MODEL;

/// Repeated prompts, for caches and comparisons.
const PROMPTS: usize = 400;

/// A request and its expected result.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) order: Order,
    pub(crate) expected: Expected,
}

/// Expected result of a request if nothing fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    /// An answer. Answers to the same prompt are equal, whichever engine generates them.
    Answer { prompt: Option<usize> },
    /// A rejection with this status, in any state of the fleet.
    Refusal(u16),
}

/// Draws requests.
#[derive(Debug)]
pub(crate) struct Traffic {
    rng: Rng,
    drawn: u64,
}

// === impl Asked ===

impl Asked {
    /// A streamed chat with a unique prompt.
    pub(crate) fn stream(number: u64, tokens: u32) -> Self {
        let shape = Shape::Chat;
        let order = Order {
            method: Method::POST,
            path: path(shape),
            body: body(shape, number, tokens, true),
            shape,
            stream: true,
            tokens,
            h2: number.is_multiple_of(4),
            leaves_after: None,
            reads_every: None,
        };
        Self { order, expected: Expected::Answer { prompt: None } }
    }
}

// === impl Traffic ===

impl Traffic {
    pub(crate) fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), drawn: 0 }
    }

    /// Time to the next request, as of many independent clients.
    pub(crate) fn gap(&mut self, per_second: f64) -> Duration {
        Duration::from_secs_f64(-(1.0 - self.rng.unit()).ln() / per_second)
    }

    /// The next request.
    pub(crate) fn next(&mut self) -> Asked {
        self.drawn += 1;
        let h2 = self.rng.unit() < 0.2;
        if self.rng.unit() < 0.06 {
            return self.bad(h2);
        }
        let (shape, streamed) = match self.rng.below(100) {
            0..55 => (Shape::Chat, 0.75),
            55..75 => (Shape::Completion, 0.75),
            75..85 => (Shape::Messages, 0.75),
            85..93 => (Shape::Responses, 0.75),
            _ => (Shape::Embedding, 0.0),
        };
        let stream = self.rng.unit() < streamed;
        // One in five prompts is not repeated.
        let prompt = (self.rng.unit() < 0.8).then(|| self.rng.below(PROMPTS));
        let number = prompt.map_or(self.drawn + PROMPTS as u64, |prompt| prompt as u64);
        let tokens = 4 + (number * 37 % 120) as u32;
        let patience = self.rng.unit();
        let leaves_after = (patience < 0.08 && shape != Shape::Embedding)
            .then(|| Duration::from_millis(10 + self.rng.below(600) as u64));
        let reads_every = (stream && patience > 0.97).then(|| Duration::from_millis(40));
        let order = Order {
            method: Method::POST,
            path: path(shape),
            body: body(shape, number, tokens, stream),
            shape,
            stream,
            tokens,
            h2,
            leaves_after,
            reads_every,
        };
        Asked { order, expected: Expected::Answer { prompt } }
    }

    /// A request that must not reach an engine.
    fn bad(&mut self, h2: bool) -> Asked {
        let good = body(Shape::Chat, 1, 8, false);
        let (method, path, body, status) = match self.rng.below(5) {
            0 => (
                Method::POST,
                "/v1/chat/completions",
                Bytes::from_static(b"{\"model\": \"m\", \"messages\": ["),
                400,
            ),
            1 => (
                Method::POST,
                "/v1/chat/completions",
                Bytes::from(json!({"model": "nobody", "messages": []}).to_string()),
                404,
            ),
            2 => (Method::GET, "/v1/chat/completions", Bytes::new(), 405),
            3 => (Method::POST, "/v1/nothing", good, 404),
            _ => (Method::POST, "/v1/completions", Bytes::from("[".repeat(4000)), 400),
        };
        let order = Order {
            method,
            path,
            body,
            shape: Shape::Chat,
            stream: false,
            tokens: 0,
            h2,
            leaves_after: None,
            reads_every: None,
        };
        Asked { order, expected: Expected::Refusal(status) }
    }
}

fn path(shape: Shape) -> &'static str {
    match shape {
        Shape::Chat => "/v1/chat/completions",
        Shape::Completion => "/v1/completions",
        Shape::Messages => "/v1/messages",
        Shape::Responses => "/v1/responses",
        Shape::Embedding => "/v1/embeddings",
    }
}

/// One of eight long prefixes, and a unique question.
pub(crate) fn body(shape: Shape, number: u64, tokens: u32, stream: bool) -> Bytes {
    let system = format!("You are number {} and answer briefly. ", number % 8).repeat(60);
    let question = format!("What is there to say of {number}? ").repeat(1 + (number % 11) as usize);
    let text = format!("{system}{question}");
    let mut body = match shape {
        Shape::Chat => json!({
            "max_tokens": tokens,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        }),
        Shape::Completion => json!({"max_tokens": tokens, "prompt": text}),
        Shape::Messages => json!({
            "max_tokens": tokens, "system": system, "messages": [{"role": "user", "content": question}],
        }),
        Shape::Responses => json!({"max_output_tokens": tokens, "instructions": system, "input": question}),
        Shape::Embedding => json!({"input": text}),
    };
    body["model"] = MODEL.into();
    if shape != Shape::Embedding {
        body["stream"] = stream.into();
    }
    if stream && matches!(shape, Shape::Chat | Shape::Completion) {
        body["stream_options"] = json!({"include_usage": true});
    }
    Bytes::from(body.to_string())
}
