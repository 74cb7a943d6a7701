//! Faults of a running engine: slow, silent, broken connections, a feed that stops or floods.
//!
//! Also deaths as recorded from real engines (`deaths.rs`). Killing and stopping the process itself is left to the
//! caller.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::routing::post;
use bytes::Bytes;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use crate::config::ConfigError;
use crate::deaths::{Death, DeathsLike, Dying, Fate, Record};
use crate::driver::Driver;
use crate::error::ApiError;
use crate::transfer::config::KvTransferFaults;

/// Time between two batches of a flood: with their 50 blocks, 10,000 blocks a second.
const FLOOD_PAUSE: Duration = Duration::from_millis(5);

/// A fault of an engine. Lasting faults last until they are undone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "fault", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// Steps take `factor` times as long.
    Slow {
        /// Between 0.001 and 1,000,000.
        factor: f64,
    },
    /// Every open connection is reset, once; later ones are served.
    Reset,
    /// Connections are accepted and stay open, and nothing is read from them or written to them.
    BlackHole,
    /// Ends `Slow`, `BlackHole` and `Transfers`. Held connections continue.
    Heal,
    /// Subscribers of KV events are disconnected, and new ones rejected.
    CutFeed,
    /// The feed reports 10,000 blocks a second that no request has, and their removal.
    FloodFeed,
    /// The feed works normally. Disconnected subscribers may reconnect and request missed batches.
    RestoreFeed,
    /// Transfers of KV blocks to the engine have these faults, until [`Fault::Heal`].
    Transfers {
        /// Instead of the present ones.
        faults: KvTransferFaults,
    },
    /// The engine core is killed, the API server is not. Like the faults below, this replays the recording of the
    /// engine in [`MockConfig::deaths_like`](crate::MockConfig::deaths_like); a dead engine stays dead.
    CoreKilled,
    /// The engine's core stops in the middle of a step, until [`Fault::Heal`].
    CoreStopped,
    /// The API server is killed.
    ServerKilled,
    /// The API server stops, until [`Fault::Heal`].
    ServerStopped,
    /// The API server gets SIGTERM, with requests in flight.
    Terminated,
    /// The process that runs the model is out of memory.
    OutOfMemory,
}

impl Fault {
    /// The death that this is, if it is one.
    fn death(self) -> Option<Death> {
        Some(match self {
            Self::CoreKilled => Death::CoreKilled,
            Self::CoreStopped => Death::CoreStopped,
            Self::ServerKilled => Death::ServerKilled,
            Self::ServerStopped => Death::ServerStopped,
            Self::Terminated => Death::Terminated,
            Self::OutOfMemory => Death::OutOfMemory,
            _ => return None,
        })
    }
}

/// State observed by all connections of an engine.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Line {
    pub(crate) black_hole: bool,
    /// Number of resets of all connections.
    pub(crate) resets: u64,
    /// The port is closed.
    pub(crate) closed: Option<Closed>,
}

/// Fate of open connections when the port closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// Idle ones are closed, the others after their answers.
    Idle,
    /// All are closed.
    All,
}

/// Entry point of faults.
pub(crate) struct Faults {
    line: watch::Sender<Line>,
    drivers: Vec<Arc<Driver>>,
    floods: Mutex<JoinSet<()>>,
    like: DeathsLike,
    /// Faults of transfers as configured.
    transfers: KvTransferFaults,
    fate: Arc<Fate>,
    /// Remaining events of a death.
    dying: Mutex<JoinSet<()>>,
}

// === impl Faults ===

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faults").field("line", &self.line).finish_non_exhaustive()
    }
}

impl Faults {
    pub(crate) fn new(drivers: Vec<Arc<Driver>>, like: DeathsLike, transfers: KvTransferFaults) -> Arc<Self> {
        let line = watch::Sender::default();
        let (floods, dying) = Default::default();
        Arc::new(Self { line, drivers, floods, like, transfers, fate: Arc::default(), dying })
    }

    pub(crate) fn fate(&self) -> Arc<Fate> {
        self.fate.clone()
    }

    pub(crate) fn line(&self) -> watch::Receiver<Line> {
        self.line.subscribe()
    }

    /// Applies it. To be called on a tokio runtime.
    pub(crate) fn cause(&self, fault: Fault) -> Result<(), ConfigError> {
        if let Some(death) = fault.death() {
            let Some(record) = self.like.record(death) else {
                return Err(ConfigError::NoSuchDeath { death, engine: self.like });
            };
            self.die(death, record);
            return Ok(());
        }
        match fault {
            Fault::Slow { factor } => {
                if !(1e-3..=1e6).contains(&factor) {
                    let must_be = "between 0.001 and 1000000";
                    return Err(ConfigError::Value { flag: "factor", value: factor.to_string(), must_be });
                }
                self.drivers.iter().for_each(|driver| driver.slow_down(factor));
            }
            Fault::Reset => self.line.send_modify(|line| line.resets += 1),
            Fault::BlackHole => self.line.send_modify(|line| line.black_hole = true),
            Fault::Heal => {
                self.line.send_modify(|line| line.black_hole = false);
                self.fate.heal();
                for driver in &self.drivers {
                    driver.slow_down(1.0);
                    driver.fault_transfers(self.transfers);
                }
            }
            Fault::Transfers { faults } => {
                faults.check().map_err(|(flag, value, must_be)| ConfigError::Value {
                    flag,
                    value,
                    must_be,
                })?;
                self.drivers.iter().for_each(|driver| driver.fault_transfers(faults));
            }
            Fault::CutFeed => self.drivers.iter().for_each(|driver| driver.cut_feed(true)),
            Fault::FloodFeed => {
                let mut floods = self.floods();
                if floods.is_empty() {
                    for driver in &self.drivers {
                        floods.spawn(flood(driver.clone()));
                    }
                }
            }
            Fault::RestoreFeed => {
                // A task that was stopped may still be at its last batch, after a later task has started: they agree
                // on names under the driver's lock.
                // names under the driver's lock.
                *self.floods() = JoinSet::new();
                for driver in &self.drivers {
                    driver.end_flood();
                    driver.cut_feed(false);
                }
            }
            // Handled above.
            Fault::CoreKilled
            | Fault::CoreStopped
            | Fault::ServerKilled
            | Fault::ServerStopped
            | Fault::Terminated
            | Fault::OutOfMemory => {}
        }
        Ok(())
    }

    /// Dies, or stops, as recorded. A dead engine does not die again.
    fn die(&self, death: Death, record: &'static Record) {
        match death {
            Death::CoreStopped => {
                if self.fate.meet(Dying { record, since: Instant::now(), stopped: true }) {
                    self.drivers.iter().for_each(|driver| driver.stand_still());
                }
            }
            Death::ServerStopped => self.line.send_modify(|line| line.black_hole = true),
            Death::CoreKilled | Death::ServerKilled | Death::Terminated | Death::OutOfMemory => {
                let since = Instant::now();
                if !self.fate.meet(Dying { record, since, stopped: false }) || record.goes_on {
                    return;
                }
                self.drivers.iter().for_each(|driver| driver.die());
                let (line, drivers) = (self.line.clone(), self.drivers.clone());
                let mut dying = self.dying.lock().unwrap_or_else(PoisonError::into_inner);
                dying.spawn(async move {
                    tokio::time::sleep_until(since + record.speaks_after).await;
                    drivers.iter().for_each(|driver| driver.tell_of_death());
                    let Some(closes_after) = record.closes_after else { return };
                    tokio::time::sleep_until(since + closes_after).await;
                    let closed = if record.gone { Closed::All } else { Closed::Idle };
                    line.send_modify(|line| line.closed = Some(closed));
                    drivers.iter().for_each(|driver| driver.cut_feed(true));
                });
            }
        }
    }

    fn floods(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.floods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn flood(driver: Arc<Driver>) {
    let mut ticks = tokio::time::interval(FLOOD_PAUSE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        driver.flood_feed();
    }
}

/// `POST /fault` with a [`Fault`] as JSON.
pub(crate) fn control(faults: Arc<Faults>) -> axum::Router {
    // For any content type: people also use curl.
    let cause = async |State(faults): State<Arc<Faults>>, body: Bytes| {
        let fault: Fault = serde_json::from_slice(&body).map_err(|error| {
            ApiError::bad_request(format!(
                r#"{error}; expected a fault such as {{"fault":"slow","factor":4}}"#
            ))
        })?;
        faults.cause(fault).map_err(ApiError::bad_request)?;
        tracing::info!(?fault, "fault injected");
        Ok::<_, ApiError>(StatusCode::NO_CONTENT)
    };
    axum::Router::new().route("/fault", post(cause)).with_state(faults)
}
