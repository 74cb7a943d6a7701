//! Listening sockets that a service manager passes to the process: socket activation of systemd, `sd_listen_fds(3)`.
//!
//! The manager's variables say how many there are (`LISTEN_FDS`), for which process (`LISTEN_PID`), and their names
//! (`LISTEN_FDNAMES`; `FileDescriptorName=` of a socket unit). A name says which listener a socket is for.

use std::io;
use std::net::TcpListener;

use listenfd::ListenFd;
use socket2::SockRef;

/// Most sockets that are taken.
const SOCKETS_MAX: usize = 16;

/// Sockets that were passed, each with its name.
#[derive(Debug, Default)]
pub struct Inherited {
    sockets: Vec<(String, TcpListener)>,
}

/// What the environment says of them.
#[derive(Clone, Copy, Debug, Default)]
struct Variables<'a> {
    /// `LISTEN_FDS`.
    count: Option<&'a str>,
    /// `LISTEN_PID`.
    process: Option<&'a str>,
    /// `LISTEN_FDNAMES`.
    names: Option<&'a str>,
}

// === impl Inherited ===

impl Inherited {
    /// Takes the sockets that were passed to this process, if any. The environment is changed: no other thread may run
    /// yet.
    ///
    /// # Errors
    /// Variables that contradict each other, or a descriptor that is no listening TCP socket.
    pub fn take() -> io::Result<Self> {
        let variable = |name| std::env::var(name).ok();
        let (count, process) = (variable("LISTEN_FDS"), variable("LISTEN_PID"));
        let names = variable("LISTEN_FDNAMES");
        let variables =
            Variables { count: count.as_deref(), process: process.as_deref(), names: names.as_deref() };
        let names = variables.names(std::process::id()).map_err(invalid)?;
        if names.is_empty() {
            return Ok(Self::default());
        }
        let mut passed = ListenFd::from_env();
        let mut sockets = Vec::new();
        for (n, name) in names.into_iter().enumerate() {
            let wrong = |why: &str| {
                let of = if is_name(&name) { format!(" ('{name}')") } else { String::new() };
                invalid(format!("socket {} of LISTEN_FDS{of}: {why}", n + 1))
            };
            let socket = passed.take_tcp_listener(n).map_err(|error| wrong(&error.to_string()))?;
            let socket = socket.ok_or_else(|| wrong("it is missing"))?;
            if !SockRef::from(&socket).is_listener()? {
                return Err(wrong("it does not listen; a socket unit needs ListenStream= and Accept=no"));
            }
            sockets.push((name, socket));
        }
        Ok(Self { sockets })
    }

    /// Gives a socket without a name, which must be the only one, the first of these names, and checks all others.
    ///
    /// # Errors
    /// A name that no listener has, a name twice, or several sockets of which one has none.
    pub(crate) fn named(mut self, known: &[&str]) -> io::Result<Self> {
        let expected = known.join("', '");
        let nameless = self.sockets.iter().filter(|(name, _)| !is_name(name)).count();
        match &mut self.sockets[..] {
            [(name, _)] if nameless == 1 => *name = known[0].to_owned(),
            sockets if nameless > 0 => {
                return Err(invalid(format!(
                    "{nameless} of {} inherited sockets have no name: set FileDescriptorName= of the socket units to '{expected}'",
                    sockets.len()
                )));
            }
            _ => {}
        }
        for (n, (name, _)) in self.sockets.iter().enumerate() {
            if !known.contains(&name.as_str()) {
                return Err(invalid(format!(
                    "inherited socket '{name}' is for no listener: FileDescriptorName= must be one of '{expected}'"
                )));
            }
            if self.sockets[..n].iter().any(|(before, _)| before == name) {
                return Err(invalid(format!(
                    "two inherited sockets are named '{name}': a listener has one address; `[::]:PORT` with BindIPv6Only=both is IPv4, too"
                )));
            }
        }
        Ok(self)
    }

    /// The socket of this name.
    pub(crate) fn claim(&mut self, name: &str) -> Option<TcpListener> {
        let place = self.sockets.iter().position(|(other, _)| other == name)?;
        Some(self.sockets.swap_remove(place).1)
    }
}

// === impl Variables ===

impl Variables<'_> {
    /// The names of the sockets that are passed to the process with this id.
    fn names(self, id: u32) -> Result<Vec<String>, String> {
        let Some(count) = self.count else { return Ok(Vec::new()) };
        match self.process.filter(|process| !process.is_empty()) {
            Some(process) if process.parse() != Ok(id) => {
                tracing::warn!(
                    process,
                    "inherited sockets ignored: LISTEN_PID names another process; start kvlane directly, or by exec"
                );
                return Ok(Vec::new());
            }
            _ => {}
        }
        let count: usize = count.parse().map_err(|_| format!("LISTEN_FDS={count} is not a number"))?;
        if count > SOCKETS_MAX {
            return Err(format!("LISTEN_FDS={count}: at most {SOCKETS_MAX} sockets are taken"));
        }
        let Some(names) = self.names.filter(|names| !names.is_empty()) else {
            return Ok(vec![String::new(); count]);
        };
        let names: Vec<String> = names.split(':').map(str::to_owned).collect();
        if names.len() != count {
            let named = names.len();
            return Err(format!("LISTEN_FDS={count}, but LISTEN_FDNAMES has {named} names"));
        }
        Ok(names)
    }
}

/// Whether it is a name, and not what systemd takes for one where none is set: the name of the socket unit.
fn is_name(name: &str) -> bool {
    !(name.is_empty() || name == "unknown" || name.ends_with(".socket"))
}

fn invalid(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mode::Mode;

    fn names(count: &str, process: &str, names: Option<&str>) -> Result<Vec<String>, String> {
        Variables { count: Some(count), process: Some(process), names }.names(7)
    }

    fn passed(names: &[&str]) -> Inherited {
        let socket = || TcpListener::bind("127.0.0.1:0").expect("a port");
        Inherited { sockets: names.iter().map(|name| ((*name).to_owned(), socket())).collect() }
    }

    #[test]
    fn sockets_for_another_process_are_not_taken() {
        assert_eq!(Variables::default().names(7), Ok(vec![]));
        assert_eq!(names("2", "8", None), Ok(vec![]));
        assert_eq!(names("1", "7", None), Ok(vec![String::new()]));
        assert_eq!(names("1", "", None), Ok(vec![String::new()]), "a parent that cannot know the id");
    }

    #[test]
    fn variables_that_contradict_each_other_are_named() {
        assert_eq!(names("2", "7", Some("clients:metrics")), Ok(vec!["clients".into(), "metrics".into()]));
        let error = names("2", "7", Some("clients")).expect_err("a name is missing");
        assert_eq!(error, "LISTEN_FDS=2, but LISTEN_FDNAMES has 1 names");
        assert!(names("two", "7", None).expect_err("no number").contains("LISTEN_FDS=two"));
        assert!(names("4000000000", "7", None).expect_err("too many").contains("at most 16"));
    }

    #[test]
    fn a_single_socket_needs_no_name() {
        for name in ["", "unknown", "kvlane.socket"] {
            let mut sockets = passed(&[name]).named(Mode::Gateway.listeners()).expect("clients");
            assert!(sockets.claim("metrics").is_none() && sockets.claim("clients").is_some(), "{name}");
        }
        let error =
            passed(&["clients", "kvlane.socket"]).named(Mode::Gateway.listeners()).expect_err("which is it?");
        assert!(error.to_string().contains("1 of 2 inherited sockets have no name"), "{error}");
    }

    #[test]
    fn a_name_is_that_of_one_listener() {
        let mut sockets = passed(&["metrics", "clients"]).named(Mode::Gateway.listeners()).expect("both");
        assert!(sockets.claim("clients").is_some() && sockets.claim("clients").is_none());
        let error = passed(&["grpc"]).named(Mode::Gateway.listeners()).expect_err("a picker's");
        assert!(error.to_string().contains("'grpc'") && error.to_string().contains("'clients', 'metrics'"));
        let error = passed(&["clients", "clients"]).named(Mode::Gateway.listeners()).expect_err("two");
        assert!(error.to_string().contains("two inherited sockets are named 'clients'"), "{error}");
    }
}
