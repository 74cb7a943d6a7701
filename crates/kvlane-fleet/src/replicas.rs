//! The other replicas of the gateway, as this one knows them: which were heard when, and how warm it started.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_core::limit;
use kvlane_core::replica::{LEASE, ReplicaId};
use kvlane_core::time::Nanos;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::Fleet;

/// Time without news after which a replica is no longer listed.
const LISTED_FOR: Nanos = Nanos::from_secs(60);
/// Most replicas that are listed.
const LISTED_MAX: usize = 256;

/// The limits of clients, as far as replicas exchange what is used of them: see [`kvlane_core::limit`].
pub trait Limits: Send + Sync {
    /// Takes the usage under each entry where it has changed since the last time, or all. `others` are the replicas that
    /// were heard lately.
    fn tell(&self, now: Nanos, own: ReplicaId, others: &[ReplicaId], all: bool) -> Vec<limit::News>;

    /// Takes over what another replica has told.
    fn hear(&self, now: Nanos, replica: ReplicaId, news: &limit::News);
}

/// The other replicas.
#[derive(Debug, Default)]
pub struct Replicas {
    state: Mutex<State>,
    /// Notified when a request is placed, which the others should hear of soon.
    pub placed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    /// This replica; none if it exchanges nothing.
    own: Option<ReplicaId>,
    heard: BTreeMap<ReplicaId, Heard>,
    snapshot: Snapshot,
    /// Connections to older replicas, which can send a snapshot.
    older: usize,
    /// Why a peer or a broker cannot be told anything, by its address.
    problems: BTreeMap<String, String>,
}

/// Another replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// From where it connected; none if it is heard through a broker.
    pub address: Option<IpAddr>,
    /// Since when it has been heard.
    pub since: Nanos,
    /// When it was last heard.
    pub at: Nanos,
}

/// What this replica has of another one's knowledge of the time before its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Snapshot {
    /// None arrives, and none has arrived.
    #[default]
    None,
    /// It arrives.
    Arriving,
    /// It has arrived.
    Arrived {
        /// From which replica.
        from: ReplicaId,
        /// Marks of prompts.
        marks: u64,
    },
}

// === impl Replicas ===

impl Replicas {
    /// This gateway exchanges news of all pools that are opened from now on.
    pub fn begin(&self, own: ReplicaId) {
        self.state().own = Some(own);
    }

    /// This replica, if it exchanges news.
    pub fn own(&self) -> Option<ReplicaId> {
        self.state().own
    }

    /// A replica was heard.
    pub fn hear(&self, now: Nanos, replica: ReplicaId, address: Option<IpAddr>) {
        let mut state = self.state();
        if state.heard.len() < LISTED_MAX || state.heard.contains_key(&replica) {
            let heard = state.heard.entry(replica).or_insert(Heard { address, since: now, at: now });
            (heard.address, heard.at) = (address, now);
        }
    }

    /// Those that were heard lately.
    pub fn heard(&self, now: Nanos) -> BTreeMap<ReplicaId, Heard> {
        let mut state = self.state();
        state.heard.retain(|_, heard| now < heard.at + LISTED_FOR);
        state.heard.clone()
    }

    /// Those whose load counts.
    pub fn live(&self, now: Nanos) -> Vec<ReplicaId> {
        let counts = |(_, heard): &(ReplicaId, Heard)| now < heard.at + LEASE;
        self.heard(now).into_iter().filter(counts).map(|(replica, _)| replica).collect()
    }

    /// Sets why the peer at this address cannot be told anything. Returns whether that is another reason than before.
    pub fn set_problem(&self, address: &str, problem: Option<String>) -> bool {
        let mut state = self.state();
        match problem {
            Some(problem) if state.problems.get(address) == Some(&problem) => false,
            Some(problem) => {
                state.problems.insert(address.into(), problem);
                true
            }
            None => state.problems.remove(address).is_some(),
        }
    }

    /// Why peers cannot be told anything, by address, or by name if that cannot be resolved.
    pub fn problems(&self) -> BTreeMap<String, String> {
        self.state().problems.clone()
    }

    /// An older replica was reached; it can send a snapshot until this is dropped.
    pub fn reach_older(&self) -> Older<'_> {
        self.state().older += 1;
        Older(self)
    }

    /// Whether an older replica can be reached whose snapshot has not arrived.
    pub fn await_snapshot(&self) -> bool {
        let state = self.state();
        state.older > 0 && !matches!(state.snapshot, Snapshot::Arrived { .. })
    }

    /// Begins to receive a snapshot, unless there is one or it arrives.
    pub fn begin_snapshot(&self) -> bool {
        let mut state = self.state();
        let begins = state.snapshot == Snapshot::None;
        if begins {
            state.snapshot = Snapshot::Arriving;
        }
        begins
    }

    /// Ends what [`Replicas::begin_snapshot`] has begun.
    pub fn end_snapshot(&self, snapshot: Snapshot) {
        self.state().snapshot = snapshot;
    }

    /// What there is of the time before the start.
    pub fn snapshot(&self) -> Snapshot {
        self.state().snapshot.clone()
    }

    fn describe(&self, now: Nanos, requests: &BTreeMap<ReplicaId, u64>) -> Value {
        let heard = self.heard(now);
        let state = self.state();
        let Some(own) = state.own else { return Value::Null };
        let peers = heard.into_iter().map(|(replica, heard)| {
            let age = now - heard.at;
            json!({
                "replica": shown(replica), "address": heard.address, "heard_for_s": (now - heard.since).as_secs_f64(),
                "age_s": age.as_secs_f64(), "counts": age < LEASE,
                "requests": requests.get(&replica).copied().unwrap_or(0),
            })
        });
        let (arrived, from, marks) = match &state.snapshot {
            Snapshot::None if state.older > 0 => ("awaited", None, 0),
            Snapshot::None => ("none", None, 0),
            Snapshot::Arriving => ("arriving", None, 0),
            Snapshot::Arrived { from, marks } => ("arrived", Some(shown(*from)), *marks),
        };
        json!({
            "replica": shown(own), "peers": peers.collect::<Vec<_>>(),
            "snapshot": {"state": arrived, "from": from, "marks": marks},
            "problems": state.problems,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Fleet ===

impl Fleet {
    /// The other replicas, for operators; null if nothing is exchanged.
    pub fn describe_replicas(&self) -> Value {
        let mut requests: BTreeMap<ReplicaId, u64> = BTreeMap::new();
        for pool in self.pools() {
            for peer in pool.router.peers() {
                *requests.entry(peer.replica).or_default() += u64::from(peer.requests);
            }
        }
        self.replicas.describe(self.clock.now(), &requests)
    }
}

/// A connection to an older replica.
pub struct Older<'a>(&'a Replicas);

impl Drop for Older<'_> {
    fn drop(&mut self) {
        self.0.state().older -= 1;
    }
}

/// A replica's id as in logs and labels.
pub fn shown(replica: ReplicaId) -> String {
    format!("{:016x}", replica.0)
}
