//! What picks endpoints on one relay thread.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once};

use crate::ext_proc::config::EndpointPicker;
use crate::ext_proc::destination::Names;
use crate::ext_proc::unobserved::Unobserved;
use crate::service::Service;

/// What picks endpoints on one relay thread.
pub struct Picker {
    /// Admits and reads requests.
    pub service: Arc<Service>,
    /// The requests whose answers are not observed, of all threads.
    pub unobserved: Arc<Unobserved>,
    pub(super) config: EndpointPicker,
    pub(super) names: Names,
    /// It answers health checks only.
    pub(super) health_only: bool,
    /// The data plane has sent an answer.
    pub(super) sees_answers: AtomicBool,
    pub(super) told_bodies: Once,
    pub(super) told_answers: Once,
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
