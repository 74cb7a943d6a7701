//! Recordings: a scheduler's inputs in a format compact enough to be always on, and their replay.
//!
//! A [`Recorder`] encodes inputs while the scheduler's lock is held, and passes on a [`Segment`] whenever it is full.
//! The receiver writes it to a file ([`mod@file`]) on a thread of its own. [`Entries`] decodes a segment, and [`Replay`]
//! replays its entries. docs/decisions/0013-recordings.md explains the design.
//!
//! Every segment is self-contained: it starts with a [`Checkpoint`] of the scheduler, and its times, ids and keys refer
//! to nothing before it. So a file can be cut at any segment, and a lost segment affects no other. After the
//! checkpoint, each entry is encoded as:
//!
//! ```text
//! byte   kind (5 bits), whether the request is that of the previous entry (1 bit), time encoding (2 bits)
//! time   since the previous entry: nothing if equal, whole microseconds, nanoseconds, nanoseconds back
//! id     distance to the newest request, unless it is that of the previous entry
//! ...    fields of the kind
//! ```
//!
//! Numbers take seven bits per byte. A key (session, tenant, first block, request, adapter) is written in full the first time,
//! then as its index in a table. Endpoints with equal predictions are grouped, as runs of slots. Rare inputs are JSON.
//! A recording contains no prompt text, and no block hash except the first, which hash-based policies use.

mod bytes;
mod decode;
mod encode;
pub mod file;
mod recorder;
mod replay;
mod sharing;

pub use decode::{Damaged, Entries};
pub use recorder::{Recorder, Segment};
pub use replay::{Replay, Step, Tally};
use serde::{Deserialize, Serialize};
pub use sharing::{Sharing, shared_blocks};

use crate::decision::Rejection;
use crate::endpoint::EndpointId;
use crate::policy::Reason;
use crate::request::RequestId;
pub use crate::scheduler::Checkpoint;
use crate::scheduler::{self, Input, Output};
use crate::time::Nanos;

/// One entry of a recording.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// A checkpoint of the scheduler.
    Synopsis(Box<Checkpoint>),
    /// An input.
    Input(Input),
    /// A result of the input: a request was placed.
    Placed {
        /// The request.
        request: RequestId,
        /// The endpoint.
        endpoint: EndpointId,
        /// Why it was chosen.
        reason: Reason,
        /// Where its prompt is computed, if elsewhere.
        prefill: Option<EndpointId>,
    },
    /// A result of the input: a request was rejected.
    Refused {
        /// The request.
        request: RequestId,
        /// Why.
        why: Rejection,
    },
}

/// A whole recording in memory: for tests and short captures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recording {
    /// The scheduler's initial configuration; later changes are among the inputs.
    pub config: scheduler::Config,
    /// Its inputs with their times, in lock order.
    pub inputs: Vec<(Nanos, Input)>,
}

// === impl Recording ===

impl Recording {
    /// Replays the recording; returns the outputs of each input.
    pub fn replay(&self) -> Vec<Vec<Output>> {
        let mut scheduler = scheduler::Scheduler::new(self.config.clone());
        let step = |(now, input): &(Nanos, Input)| {
            let mut out = Vec::new();
            scheduler.step(*now, input.clone(), &mut out);
            out
        };
        self.inputs.iter().map(step).collect()
    }
}

#[cfg(test)]
mod tests;
