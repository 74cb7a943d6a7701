//! The way of one request: listen, admit, read, place, forward, relay.
//!
//! [`listener`] accepts connections and reads requests, [`guard`] admits them, [`forward`] sends them to the endpoint
//! that [`place`] chose, [`relay`] returns the answer. A [`lease`] is a request in flight at one endpoint.

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods))]

mod abort;
pub mod account;
mod admission;
mod alias;
mod attempt;
pub mod attempt_error;
mod attempt_trace;
pub mod attributes;
pub mod auth;
pub mod body;
pub mod config;
mod cors;
mod count;
mod deadlines;
mod endpoint_wait;
pub mod engine_priority;
mod engine_request;
pub mod error;
pub mod error_format;
pub mod ext_proc;
pub mod failures;
pub mod faults;
mod form;
mod forward;
mod grpc;
pub mod guard;
mod h1;
mod head;
mod hedge;
mod kv_source;
pub mod lease;
pub mod limits;
pub mod listener;
mod lists;
pub mod memory;
mod mirror;
mod model;
pub mod objectives;
mod objects;
pub mod outcomes;
pub mod own_api;
mod passed;
pub mod paths;
pub mod place;
mod placement_headers;
pub mod proxy;
mod read;
mod realtime;
pub mod relay;
mod renamed;
mod resume;
mod route;
mod routed;
pub mod salt;
mod seek;
pub mod service;
pub mod settings;
mod sidecar;
mod socket;
mod split;
mod streamed;
#[cfg(test)]
mod testing;
pub mod timeline;
pub mod traces;
mod whole;

pub use self::proxy::Proxy;
