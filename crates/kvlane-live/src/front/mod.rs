//! Where requests come in.

pub mod http;
