//! The processes: a gateway, its engines, and faults applied to them.

use std::fs::File;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client;

/// The model of most engines.
pub(crate) const MODEL: &str = "m";

/// Engines whose recorded deaths are used, in turns: those with a separate core process.
const DEATHS_LIKE: [&str; 2] = ["vllm-0.32", "sglang-0.5"];

/// Ports below the kernel's range for outgoing connections: an engine restarts on its own port.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

/// Timeout for a fleet to become ready.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// Configuration of engines and gateway.
#[derive(Clone, Debug)]
pub(crate) struct FleetConfig {
    /// The program.
    pub(crate) kvlane: PathBuf,
    /// The program used for mock engines.
    pub(crate) engine: PathBuf,
    /// Directory of logs and the configuration.
    pub(crate) dir: PathBuf,
    /// The model of each engine.
    pub(crate) engines: Vec<&'static str>,
    /// Further flags of each engine.
    pub(crate) engine_flags: Vec<String>,
    /// Whether engines publish KV events.
    pub(crate) feeds: bool,
    /// Whether engines have a control port for faults, besides signals.
    pub(crate) faults: bool,
    /// The gateway's configuration, without addresses and workers.
    pub(crate) gateway: Value,
    /// Log level of the gateway.
    pub(crate) log_level: String,
}

/// One engine, which may be dead.
#[derive(Debug)]
pub(crate) struct Engine {
    /// Address of its API.
    pub(crate) address: SocketAddr,
    /// Address of its control port.
    pub(crate) control: SocketAddr,
    flags: Vec<String>,
    process: Option<Child>,
}

/// A gateway in front of engines. All processes end with it.
#[derive(Debug)]
pub(crate) struct Fleet {
    /// The clients' port.
    pub(crate) address: SocketAddr,
    /// The operators' port.
    pub(crate) admin: SocketAddr,
    pub(crate) engines: Vec<Engine>,
    config: FleetConfig,
    file: PathBuf,
    gateway: Child,
}

/// Resource use of the gateway's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Resident memory.
    pub(crate) rss_kib: u64,
    /// Open files.
    pub(crate) fds: u64,
    /// Threads.
    pub(crate) threads: u64,
    /// CPU time, in milliseconds.
    pub(crate) cpu_ms: u64,
}

// === impl Fleet ===

impl Fleet {
    /// Starts everything and waits until the gateway would place a request on each engine.
    pub(crate) async fn start(config: FleetConfig) -> io::Result<Self> {
        std::fs::create_dir_all(&config.dir)?;
        let mut free = PORTS.filter(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
        let mut port = || free.next().ok_or_else(|| io::Error::other("no free port below 32000"));
        let mut engines = Vec::new();
        for (n, model) in config.engines.iter().enumerate() {
            let (serving, control, publisher, replay) = (port()?, port()?, port()?, port()?);
            let mut flags: Vec<String> =
                ["mock-engine", "--model", model, "--seed", "7", "--port"].map(String::from).into();
            flags.push(serving.to_string());
            flags.extend(["--deaths-like".into(), DEATHS_LIKE[n % DEATHS_LIKE.len()].into()]);
            if config.faults {
                flags.extend(["--control-port".into(), control.to_string()]);
            }
            flags.extend(config.engine_flags.iter().cloned());
            if config.feeds {
                let events = json!({
                    "enable_kv_cache_events": true, "publisher": "zmq", "buffer_steps": 2000,
                    "endpoint": format!("tcp://127.0.0.1:{publisher}"),
                    "replay_endpoint": format!("tcp://127.0.0.1:{replay}"),
                });
                flags.extend(["--kv-events-config".into(), events.to_string()]);
            }
            let [address, control] =
                [serving, control].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
            let mut engine = Engine { address, control, flags, process: None };
            engine.spawn(&config, n)?;
            engines.push(engine);
        }
        let [address, admin] = [port()?, port()?].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let file = config.dir.join("gateway.yaml");
        configure(&file, &config.gateway, address, admin, &engines)?;
        let log = File::create(config.dir.join("gateway.log"))?;
        let gateway = Command::new(&config.kvlane)
            .args(["serve", "--log-level", &config.log_level, "--config"])
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(|error| io::Error::other(format!("{}: {error}", config.kvlane.display())))?;
        let fleet = Self { address, admin, engines, config, file, gateway };
        let until = Instant::now() + READY_WITHIN;
        while fleet.healthy().await != fleet.engines.len() {
            if Instant::now() > until {
                return Err(io::Error::other(format!(
                    "the gateway's engines are not ready: see {}",
                    fleet.config.dir.display()
                )));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(fleet)
    }

    /// Engines that are healthy in the gateway.
    async fn healthy(&self) -> usize {
        let workers = client::get(self.admin, "/workers").await.unwrap_or_default();
        let workers: Value = serde_json::from_str(&workers).unwrap_or_default();
        let workers = workers["workers"].as_array().cloned().unwrap_or_default();
        workers.iter().filter(|worker| worker["healthy"] == true && worker["pools"] != json!([])).count()
    }

    /// Writes another configuration and sends the reload signal.
    pub(crate) fn reload(&self, gateway: &Value) -> io::Result<()> {
        configure(&self.file, gateway, self.address, self.admin, &self.engines)?;
        signal(self.gateway.id(), "HUP")
    }

    /// The configuration at its start, without addresses and workers.
    pub(crate) fn settings(&self) -> &Value {
        &self.config.gateway
    }

    /// Kills an engine.
    pub(crate) fn kill(&mut self, n: usize) -> io::Result<()> {
        if let Some(mut process) = self.engines[n].process.take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }

    /// Starts an engine that was killed.
    pub(crate) fn restart(&mut self, n: usize) -> io::Result<()> {
        match self.engines[n].process {
            Some(_) => Ok(()),
            None => self.engines[n].spawn(&self.config, n),
        }
    }

    /// Sends a signal to an engine, as `kill -NAME`.
    pub(crate) fn signal(&self, n: usize, name: &str) -> io::Result<()> {
        match &self.engines[n].process {
            Some(process) => signal(process.id(), name),
            None => Ok(()),
        }
    }

    /// What the gateway uses, from `/proc`.
    pub(crate) fn usage(&self) -> io::Result<Usage> {
        let process = PathBuf::from(format!("/proc/{}", self.gateway.id()));
        let status = std::fs::read_to_string(process.join("status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        let stat = std::fs::read_to_string(process.join("stat"))?;
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        // User and system time, in hundredths of a second.
        let ticks: u64 = fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        let fds = std::fs::read_dir(process.join("fd"))?.count() as u64;
        Ok(Usage { rss_kib: field("VmRSS:"), fds, threads: field("Threads:"), cpu_ms: ticks * 10 })
    }

    /// Whether the gateway has exited, and how.
    pub(crate) fn died(&mut self) -> io::Result<Option<String>> {
        Ok(self.gateway.try_wait()?.map(|status| status.to_string()))
    }

    /// The gateway's log.
    pub(crate) fn log(&self) -> io::Result<String> {
        std::fs::read_to_string(self.config.dir.join("gateway.log"))
    }

    /// Stops the gateway, and waits for it: its exit code.
    pub(crate) async fn stop(&mut self, within: Duration) -> io::Result<Option<i32>> {
        signal(self.gateway.id(), "TERM")?;
        let until = Instant::now() + within;
        while Instant::now() < until {
            if let Some(status) = self.gateway.try_wait()? {
                return Ok(status.code());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(None)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        // A process that has exited cannot be killed.
        let _ = self.gateway.kill();
        let _ = self.gateway.wait();
        for engine in &mut self.engines {
            if let Some(process) = &mut engine.process {
                let _ = process.kill();
                let _ = process.wait();
            }
        }
    }
}

// === impl Engine ===

impl Engine {
    fn spawn(&mut self, config: &FleetConfig, n: usize) -> io::Result<()> {
        let log =
            File::options().create(true).append(true).open(config.dir.join(format!("engine-{n}.log")))?;
        let process =
            Command::new(&config.engine).args(&self.flags).stdout(Stdio::null()).stderr(log).spawn()?;
        self.process = Some(process);
        Ok(())
    }

    /// Its URL, as named by the gateway.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// Writes the gateway's configuration; JSON is YAML.
fn configure(
    file: &Path,
    gateway: &Value,
    address: SocketAddr,
    admin: SocketAddr,
    engines: &[Engine],
) -> io::Result<()> {
    let mut settings = gateway.clone();
    settings["server"]["port"] = address.port().into();
    settings["metrics"]["port"] = admin.port().into();
    settings["workers"] = engines.iter().map(|engine| json!({"url": engine.url()})).collect();
    // Atomically, because it may be read at any time.
    let written = file.with_extension("new");
    writeln!(File::create(&written)?, "{settings:#}")?;
    std::fs::rename(written, file)
}

fn signal(pid: u32, name: &str) -> io::Result<()> {
    let status = Command::new("sh").arg("-c").arg(format!("kill -{name} {pid}")).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("kill -{name} {pid}: {status}"))) }
}
