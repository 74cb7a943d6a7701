//! What a process is: a gateway or an endpoint picker.

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It is in the path of requests: clients send them to it.
    Gateway,
    /// It picks endpoints for a data plane, which sends the requests.
    Picker,
}

// === impl Mode ===

impl Mode {
    /// The names of its listeners, by which a service manager passes their sockets. The first is that of its clients.
    pub(crate) fn listeners(self) -> &'static [&'static str] {
        match self {
            Self::Gateway => &["clients", "metrics"],
            Self::Picker => &["grpc", "health", "metrics"],
        }
    }
}
