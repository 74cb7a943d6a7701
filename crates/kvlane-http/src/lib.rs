//! HTTP/1.1 to engines, and HTTP/2 to those that speak gRPC: pooled connections, TLS, addresses, and one client for
//! questions.
//!
//! [`upstream::Upstream`] is one server: its address, its key, which networks it may be in. [`connections::Connections`]
//! sends requests there and relays bodies piece by piece. [`client`] asks one question and reads the whole answer.

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods))]

pub mod address;
pub mod client;
pub mod connections;
pub mod download;
pub mod network;
pub mod remedy;
pub mod secret;
pub mod tls;
pub mod upstream;
