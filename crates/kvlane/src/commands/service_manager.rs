//! Reports the state of the process to the service manager that started it: `sd_notify(3)` of systemd.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The service manager, if there is one.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServiceManager {
    /// Where it listens (`NOTIFY_SOCKET`): a path, or an abstract name after `@`.
    address: Option<OsString>,
    /// The longest time between two `WATCHDOG=1`, if it expects them (`WATCHDOG_USEC`).
    pub(crate) watchdog: Option<Duration>,
}

// === impl ServiceManager ===

impl ServiceManager {
    /// As the environment says.
    pub(crate) fn of_environment() -> Self {
        let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        let is_ours = number("WATCHDOG_PID").is_none_or(|id| id == u64::from(std::process::id()));
        let interval = number("WATCHDOG_USEC").filter(|interval| is_ours && *interval > 0);
        let address = std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty());
        Self { address, watchdog: interval.map(Duration::from_micros) }
    }

    /// Sends it a state, such as `READY=1`. It does not wait.
    pub(crate) fn notify(&self, state: &str) {
        if let Some(address) = &self.address
            && let Err(error) = send(address, state)
        {
            tracing::warn!(state, address = %address.display(), %error, "service manager not notified");
        }
    }
}

fn send(address: &OsStr, state: &str) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    use std::os::linux::net::SocketAddrExt as _;
    let address = match address.as_bytes() {
        #[cfg(target_os = "linux")]
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(address)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut state = [0; 64];
        let length = socket.recv(&mut state).expect("a state");
        String::from_utf8(state[..length].to_vec()).expect("text")
    }

    #[test]
    fn a_state_reaches_a_path_and_an_abstract_name() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("bound");
        send(path.as_os_str(), "READY=1").expect("sent");
        assert_eq!(received(&socket), "READY=1");
        #[cfg(target_os = "linux")]
        {
            use std::os::linux::net::SocketAddrExt as _;

            let name = format!("kvlane-test-{}", std::process::id());
            let address = SocketAddr::from_abstract_name(&name).expect("a name");
            let socket = UnixDatagram::bind_addr(&address).expect("bound");
            send(format!("@{name}").as_ref(), "STOPPING=1").expect("sent");
            assert_eq!(received(&socket), "STOPPING=1");
        }
    }

    #[test]
    fn without_a_service_manager_nothing_is_sent() {
        ServiceManager::default().notify("READY=1");
        let gone = ServiceManager { address: Some("/nowhere/notify".into()), watchdog: None };
        gone.notify("READY=1");
    }
}
