//! What the admin API shows and changes.

use std::net::SocketAddr;
use std::sync::Arc;

use kvlane_control::Controller;
use kvlane_proxy::Proxy;

use crate::history::History;

/// The gateway's own API.
pub struct Admin {
    /// The proxy, whose fleet, limits and memory are shown.
    pub proxy: Arc<Proxy>,
    /// Adds, drains and removes workers.
    pub controller: Arc<Controller>,
    /// The last quarter of an hour.
    pub history: Arc<History>,
    /// Where clients connect; none behind a data plane that does.
    pub clients: Option<SocketAddr>,
}
