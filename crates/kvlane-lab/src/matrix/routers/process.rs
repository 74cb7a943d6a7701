//! Processes started by a run: engines and routers, with their child processes.
//!
//! A process gets its own process group, so that its children end with it. Its output goes to a file, whose end is
//! shown on failure.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time for a process to end by itself.
const STOP_MAX: Duration = Duration::from_secs(5);
/// Interval of checks whether it has ended.
const POLL: Duration = Duration::from_millis(20);
/// Maximum bytes of a log that are shown.
const LOG_SHOWN_BYTES: u64 = 1500;
/// Ticks of the kernel's CPU accounts in a second: `USER_HZ`, 100 on every architecture of Linux that has a port of Rust's
/// standard library.
const TICKS_PER_S: f64 = 100.0;

/// If supported, the kernel ends a process when the thread that started it is gone for any reason.
const TETHER: [&str; 3] = ["/usr/bin/setpriv", "--pdeathsig", "TERM"];

/// A process in its own group. Dropping it ends the group.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

/// Resource use of a group of processes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// User and system time of all of them, and of those that have ended, in seconds.
    pub cpu_s: f64,
    /// Their resident memory; shared pages count once for each.
    pub rss_bytes: u64,
}

// === impl Process ===

impl Process {
    /// Starts `words`, its output in `log`.
    ///
    /// # Errors
    /// If the program does not exist or cannot be run.
    pub fn start(name: &str, words: &[String], directory: &Path, log: PathBuf) -> io::Result<Self> {
        let Some(program) = words.first() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "an empty command"));
        };
        let out = File::create(&log)?;
        let tether: &[&str] = if Path::new(TETHER[0]).exists() && is_there(program) { &TETHER } else { &[] };
        let mut words = tether.iter().copied().chain(words.iter().map(String::as_str));
        let child = Command::new(words.next().unwrap_or_default())
            .args(words)
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            // A proxy for the internet must not be used between a router and its engines.
            .env("NO_PROXY", "127.0.0.1,localhost")
            .env("no_proxy", "127.0.0.1,localhost")
            .process_group(0)
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("{program}: {error}")))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Why it has ended, if it has.
    pub fn ended(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok()??;
        Some(format!("{} ended with {status}: {}", self.name, self.end_of_log()))
    }

    /// How it has ended, if it has.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn status(&mut self) -> io::Result<Option<std::process::ExitStatus>> {
        self.child.try_wait()
    }

    /// The last lines of its output.
    pub fn end_of_log(&self) -> String {
        let read = || -> io::Result<String> {
            let mut file = File::open(&self.log)?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(LOG_SHOWN_BYTES)))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).trim().replace('\n', " | "))
        };
        match read() {
            Ok(text) if text.is_empty() => "it printed nothing".to_owned(),
            Ok(text) => text,
            Err(error) => format!("{}: {error}", self.log.display()),
        }
    }

    /// Resource use of its group; `None` if the system does not report it.
    pub fn usage(&self) -> Option<Usage> {
        usage(Path::new("/proc"), self.child.id())
    }

    fn signal(&self, signal: &str) {
        // The shell's own kill: the standard library has no safe call, and not every system has the program.
        let group = format!("kill -{signal} -{} 2>/dev/null", self.child.id());
        let _ = Command::new("sh").arg("-c").arg(group).stdin(Stdio::null()).status();
    }
}

impl Drop for Process {
    /// Asks the group to end, and ends it if it does not.
    fn drop(&mut self) {
        self.signal("TERM");
        let deadline = Instant::now() + STOP_MAX;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        // Also what the first process has left behind.
        self.signal("KILL");
        let _ = self.child.wait();
    }
}

/// Whether the program exists; wrappers would not report that.
fn is_there(program: &str) -> bool {
    if program.contains('/') {
        return Path::new(program).exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).exists())
}

/// The sum over a group, from Linux's accounts under `proc`.
fn usage(proc: &Path, group: u32) -> Option<Usage> {
    let mut sum = Usage::default();
    let mut found = false;
    for entry in std::fs::read_dir(proc).ok()?.flatten() {
        let is_process = entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit());
        // The file of a process that has ended meanwhile is gone.
        let Some(stat) =
            is_process.then(|| std::fs::read_to_string(entry.path().join("stat")).ok()).flatten()
        else {
            continue;
        };
        let Some((of, usage)) = of_process(&stat) else { continue };
        if of == group {
            found = true;
            sum.cpu_s += usage.cpu_s;
            sum.rss_bytes += usage.rss_bytes;
        }
    }
    found.then_some(sum)
}

/// The group and the resource use of a process, by its `stat` (proc(5)).
fn of_process(stat: &str) -> Option<(u32, Usage)> {
    // The name before the last parenthesis may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |place: usize| fields.get(place)?.parse::<u64>().ok();
    // utime, stime, cutime, cstime.
    let ticks = number(11)? + number(12)? + number(13)? + number(14)?;
    // Pages of 4 KiB: machines with larger pages are rare.
    Some((number(2)? as u32, Usage { cpu_s: ticks as f64 / TICKS_PER_S, rss_bytes: number(21)? * 4096 }))
}

/// Free ports of loopback, all different. Another program may take one before it is used; the user of the port
/// detects that.
///
/// # Errors
/// If there are none.
pub fn free_ports(count: usize) -> io::Result<Vec<u16>> {
    let probes: Vec<std::net::TcpListener> =
        (0..count).map(|_| std::net::TcpListener::bind(("127.0.0.1", 0))).collect::<io::Result<_>>()?;
    probes.iter().map(|probe| Ok(probe.local_addr()?.port())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str, log: &str) -> Process {
        let log = std::env::temp_dir().join(format!("kvlane-process-{}-{log}", std::process::id()));
        let words: Vec<String> = ["sh", "-c", script].map(str::to_owned).to_vec();
        Process::start("it", &words, &std::env::temp_dir(), log).expect("a shell")
    }

    fn wait(process: &mut Process) -> String {
        process.child.wait().expect("it ends");
        process.ended().expect("it has ended")
    }

    #[test]
    fn what_ended_says_how_and_what_it_said_last() {
        let mut process = start("echo first; echo last >&2; exit 3", "said");
        let said = wait(&mut process);
        assert!(said.contains("it ended") && said.contains('3') && said.contains("first | last"), "{said}");
        std::fs::remove_file(&process.log).expect("a log");
    }

    #[test]
    fn what_a_process_has_started_ends_with_it() {
        // Were it left alone, it would say so in the end.
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let mut command = Command::new("sh");
        command.args(["-c", "(sleep 60; echo alive) & wait"]).process_group(0).stdout(writer);
        let child = command.spawn().expect("a shell");
        drop(command);
        drop(Process { name: "it".into(), child, log: PathBuf::from("/dev/null") });
        let mut said = String::new();
        reader.read_to_string(&mut said).expect("the last writer has ended");
        assert_eq!(said, "");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let log = std::env::temp_dir().join(format!("kvlane-process-{}-none", std::process::id()));
        let error =
            Process::start("it", &["no-such-router".to_owned()], Path::new("/"), log.clone()).unwrap_err();
        assert!(error.to_string().contains("no-such-router"), "{error}");
        std::fs::remove_file(log).expect("a log");
    }

    #[test]
    fn accounts_are_read_behind_whatever_a_program_is_called() {
        let stat = "42 (a ) b) S 1 7 7 0 -1 4194560 1 0 0 0 150 50 25 25 20 0 3 0 100 1000000 2048 184467";
        let expect = Usage { cpu_s: 2.5, rss_bytes: 2048 * 4096 };
        assert_eq!(of_process(stat), Some((7, expect)));
        assert_eq!(of_process("42 (a"), None);
    }

    #[test]
    fn ports_are_free_and_different() {
        let mut ports = free_ports(8).expect("ports");
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 8);
    }
}
