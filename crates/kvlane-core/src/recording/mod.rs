//! What a scheduler was told, written down so small that it can be done all the time, and lived through again.
//!
//! A [`Recorder`] turns inputs into bytes while the scheduler's lock is held, and hands over a [`Segment`] whenever it has
//! enough of them. Whoever gets it puts it into a file ([`file`]) on a thread of its own. An [`Entries`] reads a segment,
//! a [`Replay`] lives through what it reads. docs/decisions/0013-recordings.md says why it is as it is.
//!
//! Every segment stands for itself: it begins with a [`Checkpoint`] of the scheduler, and its times, ids and keys refer to
//! nothing before it. So a file can be cut at any segment, and whatever is lost costs no more than itself. Behind the
//! synopsis follows entry by entry:
//!
//! ```text
//! byte   kind (5 bits), whether it is about the same request as the entry before (1 bit), how the time is told (2 bits)
//! time   since the entry before: nothing if it is the same, whole microseconds, nanoseconds, nanoseconds back
//! id     how far it is behind the newest request, unless it is the same as before
//! ...    what the kind needs
//! ```
//!
//! Numbers take seven bits to a byte. A key (session, tenant, first block, request) stands in full the first time, then as
//! its place in a table. Endpoints of which the same is predicted stand together, as runs of slots. Inputs that are rare
//! are JSON. There is no prompt text, and no hash of a block but the first, which policies go by that hash prompts.

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

/// One thing that a recording says.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// How the scheduler stood.
    Synopsis(Box<Checkpoint>),
    /// What it was told.
    Input(Input),
    /// What it did upon that: a request was placed.
    Placed {
        /// The request.
        request: RequestId,
        /// Where.
        endpoint: EndpointId,
        /// Why.
        reason: Reason,
    },
    /// What it did upon that: a request was refused.
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
    /// How the scheduler was set up at first: another configuration later is among the inputs.
    pub config: scheduler::Config,
    /// Its inputs with their times, in lock order.
    pub inputs: Vec<(Nanos, Input)>,
}

// === impl Recording ===

impl Recording {
    /// Lives through it again: the outputs, input by input.
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
