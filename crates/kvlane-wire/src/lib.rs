//! Other people's formats: bytes in, core types out.
//!
//! Nothing here waits, allocates without a bound or panics on bad input. A request body becomes a
//! [`openai::ParsedRequest`] and a rendered prompt, a stream of server-sent events becomes token counts
//! ([`sse`]), a metrics page becomes a load report ([`engine`]).

pub mod api;
pub mod json;
pub mod openai;
