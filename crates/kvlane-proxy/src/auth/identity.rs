//! Identities and roles.

use std::sync::Arc;

use kvlane_core::setting;
use serde::{Deserialize, Serialize};

/// The longest name of a key, in bytes.
pub(super) const NAME_BYTES_MAX: usize = 64;

/// What the holder of a key may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Send requests to models.
    #[default]
    User,
    /// Read the admin API and the metrics.
    Viewer,
    /// Everything.
    Admin,
}

/// The access that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Requests to models.
    Use,
    /// Reads of the admin API and the metrics.
    Look,
    /// Changes of the gateway.
    Change,
}

/// The highest priority; the lowest is its negative.
pub const PRIORITY_MAX: i8 = 100;

/// A client that has authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its name.
    pub name: Arc<str>,
    /// What it may do.
    pub role: Role,
    /// Whether it may name the tenant of a request.
    pub trusted: bool,
    /// The highest priority that its requests have.
    pub priority_max: i8,
}

// === impl Role ===

setting!(Text: Role);

impl Role {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Viewer => "viewer",
            Self::Admin => "admin",
        }
    }

    /// The role of this name.
    pub fn by_name(name: &str) -> Option<Self> {
        [Self::User, Self::Viewer, Self::Admin].into_iter().find(|role| role.name() == name)
    }

    /// The rank of a role; the highest of several counts.
    pub(super) fn rank(self) -> u8 {
        self as u8
    }

    /// Whether the role allows this access.
    pub fn allows(self, access: Access) -> bool {
        matches!((self, access), (Self::Admin, _) | (Self::User, Access::Use) | (Self::Viewer, Access::Look))
    }
}
