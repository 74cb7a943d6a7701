//! The endpoint picker: chooses the endpoint of a request that Envoy, or another data plane with external processing,
//! sends by itself.
//!
//! The protocol is that of the Gateway API Inference Extension, proposal 004: the data plane sends head and body of a
//! request over a gRPC stream, and gets the address of the endpoint in a header and in dynamic metadata, or the answer
//! that the client gets instead. The request is admitted, counted and placed by the code that serves clients directly.
//!
//! [`connection`] serves gRPC, [`exchange`] is one request, [`pick`] places it. Where the data plane sends answers through
//! the picker, [`observe`] reports their progress; otherwise [`unobserved`] estimates when they end.

pub mod config;
mod connection;
mod destination;
mod exchange;
mod head;
mod health;
mod observe;
mod pick;
pub mod unobserved;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once};

use crate::ext_proc::config::EndpointPicker;
use crate::ext_proc::destination::Names;
use crate::ext_proc::unobserved::Unobserved;
use crate::service::Service;

pub(crate) use self::connection::serve;

/// What picks endpoints on one relay thread.
pub struct Picker {
    /// Admits and reads requests.
    pub service: Arc<Service>,
    /// The requests whose answers are not observed, of all threads.
    pub unobserved: Arc<Unobserved>,
    config: EndpointPicker,
    names: Names,
    /// It answers health checks only.
    health_only: bool,
    /// The data plane has sent an answer.
    sees_answers: AtomicBool,
    told_bodies: Once,
    told_answers: Once,
}

// === impl Picker ===

impl Picker {
    /// A picker on one thread.
    pub fn new(service: Arc<Service>, unobserved: Arc<Unobserved>, config: EndpointPicker) -> Self {
        Self {
            service,
            unobserved,
            config,
            names: Names::default(),
            health_only: false,
            sees_answers: AtomicBool::new(false),
            told_bodies: Once::new(),
            told_answers: Once::new(),
        }
    }

    /// The same picker, which answers health checks only.
    #[must_use]
    pub fn health_only(self) -> Self {
        Self { health_only: true, ..self }
    }
}
