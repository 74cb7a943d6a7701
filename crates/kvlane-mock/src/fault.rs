//! What is done to a running engine: it gets slow, falls silent, breaks its connections, stops or floods its feed.
//!
//! What only the machine can do to a process, killing it and stopping it, is left to who runs it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::routing::post;
use bytes::Bytes;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::config::ConfigError;
use crate::driver::Driver;
use crate::error::ApiError;

/// Time between two batches of a flood: with their 50 blocks, 10,000 blocks a second.
const FLOOD_PAUSE: Duration = Duration::from_millis(5);

/// Something that is done to an engine. What lasts, lasts until it is undone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "fault", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// Steps take `factor` times as long as they should.
    Slow {
        /// Between 0.001 and 1,000,000.
        factor: f64,
    },
    /// Every connection is broken, once: those that come later are served.
    Reset,
    /// Connections are accepted and stay open, and nothing is read from them or written to them.
    BlackHole,
    /// Neither slow nor silent any more. Connections that were held go on.
    Heal,
    /// Subscribers of KV events are cut off, and nobody gets in.
    CutFeed,
    /// The feed tells of 10,000 blocks a second that no request has, and drops them again.
    FloodFeed,
    /// The feed is as it should be. Who was cut off may come back and ask for what was missed.
    RestoreFeed,
}

/// What all connections of an engine look at.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Line {
    pub(crate) black_hole: bool,
    /// Times that connections were broken.
    pub(crate) resets: u64,
}

/// Where faults arrive.
pub(crate) struct Faults {
    line: watch::Sender<Line>,
    drivers: Vec<Arc<Driver>>,
    floods: Mutex<JoinSet<()>>,
}

// === impl Faults ===

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faults").field("line", &self.line).finish_non_exhaustive()
    }
}

impl Faults {
    pub(crate) fn new(drivers: Vec<Arc<Driver>>) -> Arc<Self> {
        Arc::new(Self { line: watch::Sender::default(), drivers, floods: Mutex::default() })
    }

    pub(crate) fn line(&self) -> watch::Receiver<Line> {
        self.line.subscribe()
    }

    /// Does it. To be called on a tokio runtime.
    pub(crate) fn cause(&self, fault: Fault) -> Result<(), ConfigError> {
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
                self.drivers.iter().for_each(|driver| driver.slow_down(1.0));
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
                // A task that was told to end may yet be at its last batch, which a later one outlives: they agree on
                // names under the driver's lock.
                *self.floods() = JoinSet::new();
                for driver in &self.drivers {
                    driver.end_flood();
                    driver.cut_feed(false);
                }
            }
        }
        Ok(())
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
    // Whatever it is said to be: it comes from people with curl, too.
    let cause = async |State(faults): State<Arc<Faults>>, body: Bytes| {
        let fault: Fault = serde_json::from_slice(&body).map_err(|error| {
            ApiError::bad_request(format!(r#"{error}; a fault is such as {{"fault":"slow","factor":4}}"#))
        })?;
        faults.cause(fault).map_err(ApiError::bad_request)?;
        tracing::info!(?fault, "told");
        Ok::<_, ApiError>(StatusCode::NO_CONTENT)
    };
    axum::Router::new().route("/fault", post(cause)).with_state(faults)
}
