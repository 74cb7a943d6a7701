//! The span of one attempt: a request sent to one worker, following the GenAI conventions.
//!
//! Attributes follow OpenTelemetry's semantic conventions for generative AI (semantic-conventions-genai,
//! docs/gen-ai/gen-ai-spans.md, status Development, of 2026).

use std::sync::{Arc, OnceLock};

use kvlane_core::decision::Placement;
use kvlane_core::time::Nanos;
use kvlane_fleet::pool::PoolEndpoint;
use kvlane_wire::api::Api;
use kvlane_wire::otlp::{Span, SpanKind, Value};
use kvlane_wire::sse::Usage;
use kvlane_wire::trace_context::SpanId;

use crate::proxy::Proxy;
use crate::routed::Routed;
use crate::traces::{RequestTrace, SPANS_MAX, made_span};

/// Most bytes of a provider's name.
const PROVIDER_LEN_MAX: usize = 64;

/// One attempt of a recorded request.
#[derive(Debug)]
pub struct Attempt {
    trace: Arc<RequestTrace>,
    id: SpanId,
    began: Nanos,
    /// When it ended, if before it is dropped.
    ended: Option<Nanos>,
    name: String,
    attributes: Vec<(&'static str, Value)>,
    error: OnceLock<&'static str>,
}

// === impl Attempt ===

impl Attempt {
    /// A request was placed. None if it is not recorded.
    pub fn begin(
        proxy: &Proxy,
        routed: &Routed,
        endpoint: &PoolEndpoint,
        placement: &Placement,
        began: Nanos,
    ) -> Option<Box<Self>> {
        let trace = routed.timeline.trace().filter(|trace| trace.is_recorded())?;
        let record = trace.record.as_ref()?;
        let served = &routed.served;
        let model = served.adapter.as_deref().unwrap_or(&served.pool.model);
        let operation = record.api.and_then(operation);
        let address = &endpoint.worker.upstream.address;
        let mut attributes: Vec<(&'static str, Value)> = vec![
            ("server.address", address.host.clone().into()),
            ("server.port", Value::Int(address.port.into())),
            ("kvlane.worker", endpoint.name.to_string().into()),
            ("kvlane.reason", placement.reason.name().into()),
            ("kvlane.knowledge", placement.knowledge.name().into()),
            ("kvlane.prompt_tokens", routed.prompt_tokens.into()),
            ("kvlane.predicted_cached_tokens", placement.overlap_tokens.into()),
        ];
        let mut name = record.method.clone();
        if let Some(operation) = operation {
            name = format!("{operation} {model}");
            attributes.push(("gen_ai.operation.name", operation.into()));
            attributes.push(("gen_ai.provider.name", provider(proxy, &served.pool.model).into()));
            attributes.push(("gen_ai.request.model", model.to_owned().into()));
            if routed.attributes.streams() {
                attributes.push(("gen_ai.request.stream", Value::Bool(true)));
            }
            let most = routed.attributes.output_tokens_max();
            attributes.extend(most.map(|tokens| ("gen_ai.request.max_tokens", tokens.into())));
        }
        let error = OnceLock::new();
        let (trace, id) = (Arc::clone(trace), made_span());
        Some(Box::new(Self { trace, id, began, ended: None, name, attributes, error }))
    }

    /// Its span id, for the engine.
    pub fn id(&self) -> SpanId {
        self.id
    }

    /// It computes the prompt of a split request.
    pub fn computes(&mut self) {
        self.attributes.push(("kvlane.leg", "prefill".into()));
        if let Some(record) = &self.trace.record {
            record.note_prefill(self.id);
        }
    }

    /// It decodes a split request, whose prompt is computed at `prefill`.
    pub fn decodes(&mut self, prefill: &str) {
        self.attributes.push(("kvlane.leg", "decode".into()));
        self.attributes.push(("kvlane.prefill_worker", prefill.to_owned().into()));
    }

    /// The KV blocks of these prompt tokens were fetched from another engine.
    pub fn received(&mut self, tokens: u32) {
        self.attributes.push(("kvlane.transferred_tokens", tokens.into()));
    }

    /// It has ended, though its reservation has not.
    pub fn end(&mut self, now: Nanos) {
        self.ended = Some(now);
    }

    /// The attempt failed. The first reason counts.
    pub fn failed(&self, why: &'static str) {
        let _ = self.error.set(why);
    }

    /// The first token of a stream has arrived.
    pub fn first_token(&mut self, now: Nanos) {
        let seconds = Value::Float((now - self.began).as_secs_f64());
        self.attributes.push(("gen_ai.response.time_to_first_chunk", seconds));
    }

    /// The response is complete.
    pub fn complete(&mut self, output_tokens: u64, usage: Option<Usage>) {
        let output_tokens = Value::Int(i64::try_from(output_tokens).unwrap_or(i64::MAX));
        self.attributes.push(("gen_ai.usage.output_tokens", output_tokens));
        if let Some(usage) = usage {
            self.attributes.push(("gen_ai.usage.input_tokens", usage.prompt_tokens.into()));
            let cached = usage.cached_tokens;
            self.attributes
                .extend(cached.map(|tokens| ("gen_ai.usage.cache_read.input_tokens", tokens.into())));
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let Some(record) = &self.trace.record else { return };
        let mut attempts = record.attempts();
        if attempts.len() == SPANS_MAX {
            return;
        }
        let error = self.error.get().copied();
        let mut attributes = std::mem::take(&mut self.attributes);
        attributes.extend(error.map(|why| ("error.type", why.into())));
        let name = std::mem::take(&mut self.name);
        let (own, now) = (self.trace.context.span, self.ended.unwrap_or_else(|| record.clock.now()));
        attempts.push(Span {
            kind: SpanKind::Client,
            attributes,
            error: error.map(Into::into),
            ..self.trace.span(record, self.id, own, name.into(), self.began, now)
        });
    }
}

/// The provider of a model, from the model list; otherwise that of its API.
fn provider(proxy: &Proxy, model: &str) -> String {
    let table = proxy.fleet.snapshot();
    let owner = table.cards.get(model).and_then(|card| card["owned_by"].as_str());
    owner.filter(|owner| (1..=PROVIDER_LEN_MAX).contains(&owner.len())).unwrap_or("openai").to_owned()
}

/// The conventions' operation name for this API, if they define one.
fn operation(api: Api) -> Option<&'static str> {
    match api {
        Api::ChatCompletions | Api::Responses | Api::Messages => Some("chat"),
        Api::Completions
        | Api::Generate
        | Api::TokensIn
        | Api::Completion
        | Api::Infill
        | Api::EngineGenerate => Some("text_completion"),
        Api::Embeddings | Api::Embedding | Api::EngineEmbed => Some("embeddings"),
        Api::Rerank | Api::Score | Api::Pooling | Api::Tokenize | Api::Detokenize | Api::Invocations => None,
    }
}
