//! The result of the last configuration reload, and a signal for each reload.

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tokio::sync::watch;

/// The result of the last configuration reload.
pub struct Reloads {
    last: Mutex<Last>,
    signal: watch::Sender<()>,
}

#[derive(Clone, Default)]
struct Last {
    problem: Option<String>,
    needs_restart: Vec<&'static str>,
}

// === impl Reloads ===

impl Default for Reloads {
    fn default() -> Self {
        Self { last: Mutex::default(), signal: watch::Sender::new(()) }
    }
}

impl Reloads {
    /// Changes each time the configuration is replaced.
    pub fn watch(&self) -> watch::Receiver<()> {
        self.signal.subscribe()
    }

    /// The configuration was replaced: wakes all watchers.
    pub fn replaced(&self) {
        self.signal.send_replace(());
    }

    /// The last reload succeeded; these keys take effect after a restart.
    pub fn succeeded(&self, needs_restart: Vec<&'static str>) {
        *self.last() = Last { problem: None, needs_restart };
    }

    /// The last reload failed.
    pub fn failed(&self, problem: &str) {
        self.last().problem = Some(problem.to_owned());
    }

    /// The last result, as operators see it.
    pub fn describe(&self) -> Value {
        let Last { problem, needs_restart } = self.last().clone();
        json!({"problem": problem, "needs_restart": needs_restart})
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
