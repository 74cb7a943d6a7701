//! Codecs: external formats in, core types out.
//!
//! Nothing here waits, grows without a bound or panics on bad input.
//!
//! - [`api`]: every path of the engines, with what routing needs to know of it.
//! - [`openai`]: a request body to a parsed request and a rendered prompt.
//! - [`multipart`]: a form to the value of one field.
//! - [`disaggregation`]: a request's body to those of its two legs.
//! - [`sse`]: a stream of server-sent events to token counts; [`resume`] continues it when its engine dies.
//! - [`engine`]: a metrics page to a load report; [`models`]: a model list to its entries.
//! - [`zmtp`]: a ZeroMQ peer's bytes to messages; [`sequence`] orders them, [`kv`] decodes them to cache events.
//! - [`ext_proc`]: Envoy's messages to an external processor, in [`grpc`] frames.
//! - [`replica`]: what replicas of the gateway tell each other, in [`grpc`] frames.
//! - [`yaml`]: a file to a value, with the place of what is wrong.
//! - [`server_timing`], [`trace_context`]: request stages and trace ids in headers; [`otlp`]: spans for a collector.

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

pub mod answer_end;
pub mod api;
pub mod disaggregation;
pub mod edit;
pub mod engine;
pub mod ext_proc;
pub mod failure;
pub mod grpc;
pub mod json;
pub mod kv;
pub mod mistake;
pub mod models;
pub mod msgpack;
pub mod multipart;
pub mod openai;
pub mod otlp;
pub mod prometheus;
pub mod protobuf;
pub mod replica;
pub mod resume;
pub mod sequence;
pub mod server_timing;
pub mod sse;
pub mod trace_context;
mod usage;
pub mod yaml;
pub mod zmtp;
