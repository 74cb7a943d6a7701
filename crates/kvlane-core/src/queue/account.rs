//! Which counter a request is charged to.

use std::cmp::Reverse;

use crate::replica::Service;
use crate::request::{SchedulingRequest, TenantKey};

/// Whether a request needs session admission. The order is the dequeue order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Lane {
    /// A turn of an active conversation, or a request without a session.
    Active,
    /// A turn of a conversation that has become inactive.
    Returning,
    /// The first turn of a conversation.
    New,
}

/// The tenant counter that a request is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Account {
    pub(super) priority: i8,
    pub(super) lane: Lane,
    pub(super) tenant: Option<TenantKey>,
}

// === impl Lane ===

impl Lane {
    pub(crate) fn is_gated(self) -> bool {
        self != Self::Active
    }
}

// === impl Account ===

impl Account {
    pub(crate) fn of(request: &SchedulingRequest, lane: Lane) -> Self {
        Self { priority: request.priority, lane, tenant: request.tenant }
    }

    pub(super) fn band(self) -> (Reverse<i8>, Lane) {
        (Reverse(self.priority), self.lane)
    }

    /// What a router tells of it.
    pub(super) fn service(self, since: u32, tokens: i64) -> Service {
        Service { priority: self.priority, lane: self.lane as u8, tenant: self.tenant, since, tokens }
    }

    /// That of what a router told; none for a lane of a later version.
    pub(super) fn of_service(service: &Service) -> Option<Self> {
        let lanes = [Lane::Active, Lane::Returning, Lane::New];
        let lane = lanes.into_iter().find(|lane| *lane as u8 == service.lane)?;
        Some(Self { priority: service.priority, lane, tenant: service.tenant })
    }
}
