//! Other people's formats: bytes in, core types out.
//!
//! Nothing here waits, grows without a bound or panics on bad input. A request body becomes an
//! [`openai::ParsedRequest`] and a rendered prompt, a stream of server-sent events becomes token counts
//! ([`sse`]) and goes on elsewhere when its engine dies ([`resume`]), a metrics page becomes a load report ([`engine`]), a model list its entries ([`models`]), what a ZeroMQ peer
//! sends its messages ([`zmtp`]), and those, put in order ([`sequence`]), events of a cache ([`kv`]). How long the stages
//! of a request took travels in a header ([`server_timing`]), which trace it is part of in another ([`trace_context`]), and
//! spans of it go to a collector ([`otlp`]).

pub mod api;
pub mod engine;
pub mod failure;
pub mod json;
pub mod kv;
pub mod models;
pub mod msgpack;
pub mod openai;
pub mod otlp;
pub mod path;
pub mod prometheus;
pub mod resume;
pub mod salt;
pub mod sequence;
pub mod server_timing;
pub mod sse;
pub mod trace_context;
mod usage;
pub mod zmtp;
