//! The endpoint picker: chooses the endpoint of a request that Envoy, or another data plane with external processing,
//! sends by itself.
//!
//! The protocol is that of the Gateway API Inference Extension, proposal 004: the data plane sends head and body of a
//! request over a gRPC stream, and gets the address of the endpoint in a header and in dynamic metadata, or the answer
//! that the client gets instead. The request is admitted, counted and placed by the code that serves clients directly.
//!
//! [`connection`] serves gRPC, [`exchange`] is one request, [`pick`] places it. Where the data plane sends answers through
//! the picker, [`observe`] reports their progress; otherwise [`unobserved`] estimates when they end.

mod call;
pub mod config;
mod connection;
mod destination;
mod exchange;
mod head;
mod health;
mod observe;
mod pick;
mod picker;
pub mod unobserved;

pub(crate) use self::connection::serve;
pub use self::picker::Picker;
