//! The decode side of a pool: whether a worker decodes what prefill workers compute, and whether its load is known.
//!
//! Neither stops requests: whole ones go to prefill workers where those can serve them, and a decode engine that does not
//! report its load is taken to have room. Both are logged when they begin and end, shown by `/readiness` and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use kvlane_core::disaggregation::{Part, Role};
use serde_json::{Value, json};

/// Most endpoints without a known load that are listed.
const LISTED_MAX: usize = 16;

/// The endpoints of a pool that take requests, by their part in disaggregated serving.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decoders {
    /// Endpoints with the role `prefill`.
    pub prefill: usize,
    /// Endpoints that may decode, and whose engine reports its load.
    pub known: usize,
    /// Endpoints that may decode, and whose engine did not report its load at the last probe.
    pub unknown: Vec<Arc<str>>,
    /// Whether an endpoint with the role `prefill` can serve a whole request.
    pub prefill_serves: bool,
}

/// What an operator has to know of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum DecodeSide {
    /// There is nothing to say.
    #[default]
    Fine,
    /// Prefill workers compute prompts, and none decodes them.
    Missing,
    /// The load of some is not known.
    Unknown,
}

/// The last state that was logged.
#[derive(Debug, Default)]
pub struct LoggedSide(AtomicU8);

// === impl Decoders ===

impl Decoders {
    /// Counts an endpoint that takes requests.
    pub fn add(&mut self, name: &Arc<str>, part: &Part, load_unknown: bool) {
        if part.role == Role::Prefill {
            self.prefill += 1;
            self.prefill_serves |= part.could_serve_alone();
        }
        match (part.may_decode(), load_unknown) {
            (false, _) => {}
            (true, false) => self.known += 1,
            (true, true) => self.unknown.push(Arc::clone(name)),
        }
    }

    /// What an operator has to know.
    pub fn side(&self) -> DecodeSide {
        match (self.prefill, self.known + self.unknown.len()) {
            (0, 0 | 1) => DecodeSide::Fine,
            (_, 0) => DecodeSide::Missing,
            _ if self.unknown.is_empty() => DecodeSide::Fine,
            _ => DecodeSide::Unknown,
        }
    }

    /// What is wrong, in words.
    pub fn problem(&self) -> Option<&'static str> {
        match self.side() {
            DecodeSide::Fine => None,
            DecodeSide::Missing if self.prefill_serves => {
                Some("no worker decodes what prefill workers compute: they serve whole requests")
            }
            DecodeSide::Missing => {
                Some("no worker decodes what prefill workers compute: requests are rejected")
            }
            DecodeSide::Unknown => Some(
                "the load of decode workers is unknown: their /metrics lack it, and they are taken to have room",
            ),
        }
    }

    /// For operators.
    pub fn describe(&self) -> Value {
        json!({
            "prefill": self.prefill, "decode": self.known + self.unknown.len(), "problem": self.problem(),
            "load_unknown": self.unknown.iter().take(LISTED_MAX).map(|name| json!(**name)).collect::<Vec<_>>(),
        })
    }
}

// === impl LoggedSide ===

impl LoggedSide {
    /// Logs a change. Returns whether there was one.
    pub fn log(&self, model: &str, decoders: &Decoders) -> bool {
        let side = decoders.side();
        if self.0.swap(side as u8, Ordering::Relaxed) == side as u8 {
            return false;
        }
        let Decoders { prefill, unknown, .. } = decoders;
        let workers: Vec<&str> = unknown.iter().take(LISTED_MAX).map(|name| &**name).collect();
        match decoders.problem() {
            Some(problem) => tracing::warn!(model, prefill, ?workers, problem, "decode side degraded"),
            None => tracing::info!(model, "decode side is complete"),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoders(prefill: usize, known: usize, unknown: usize) -> Decoders {
        let unknown = vec!["http://d".into(); unknown];
        Decoders { prefill, known, unknown, prefill_serves: false }
    }

    #[test]
    fn the_decode_side_is_missing_or_unknown_where_requests_are_split() {
        use DecodeSide::{Fine, Missing, Unknown};
        for (prefill, known, unknown, side) in [
            (0, 0, 0, Fine),
            (0, 0, 1, Fine),
            (0, 3, 0, Fine),
            (0, 1, 1, Unknown),
            (1, 0, 0, Missing),
            (1, 1, 0, Fine),
            (1, 0, 1, Unknown),
            (2, 5, 1, Unknown),
        ] {
            assert_eq!(decoders(prefill, known, unknown).side(), side, "{prefill} {known} {unknown}");
        }
    }

    #[test]
    fn a_state_is_logged_when_it_changes() {
        let logged = LoggedSide::default();
        let changes = [(1, 1, 0), (1, 0, 0), (1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 1, 0), (1, 1, 0)];
        let told =
            changes.map(|(prefill, known, unknown)| logged.log("m", &decoders(prefill, known, unknown)));
        assert_eq!(told, [false, true, false, true, false, true, false]);
    }
}
