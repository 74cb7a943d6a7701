//! Admission queue of one pool. Bounded, first come first served, with a deadline each.
//!
//! A request leaves in exactly one of three ways: dispatched, expired, cancelled.

use std::collections::VecDeque;

use foldhash::fast::FixedState;
use hashbrown::HashSet;

use crate::endpoint::EndpointId;
use crate::request::{RequestId, SchedulingRequest};
use crate::time::Nanos;
use crate::truth::Prediction;

/// A request that waits, with what was known of its prefix when it came.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) request: SchedulingRequest,
    pub(crate) overlap: Vec<(EndpointId, Prediction)>,
    /// Prompt tokens that one block stands for.
    pub(crate) block_tokens: u32,
    pub(crate) deadline: Nanos,
}

/// The queue. All deadlines are the same span after arrival, so the front always expires first.
#[derive(Debug)]
pub(crate) struct Queue {
    waiting: VecDeque<Waiting>,
    /// Who waits, to be asked on every arrival.
    ids: HashSet<RequestId, FixedState>,
    len_max: usize,
}

// === impl Queue ===

impl Queue {
    pub(crate) fn new(len_max: usize) -> Self {
        Self { waiting: VecDeque::new(), ids: HashSet::default(), len_max }
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Takes a request in, or gives it back when the queue is full.
    pub(crate) fn push(&mut self, waiting: Waiting) -> Result<(), Waiting> {
        if self.waiting.len() >= self.len_max {
            return Err(waiting);
        }
        self.ids.insert(waiting.request.id);
        self.waiting.push_back(waiting);
        Ok(())
    }

    pub(crate) fn contains(&self, id: RequestId) -> bool {
        self.ids.contains(&id)
    }

    pub(crate) fn pop(&mut self) -> Option<Waiting> {
        let front = self.waiting.pop_front()?;
        self.ids.remove(&front.request.id);
        Some(front)
    }

    /// Takes out the front if its deadline has come.
    pub(crate) fn pop_expired(&mut self, now: Nanos) -> Option<Waiting> {
        if self.waiting.front()?.deadline > now {
            return None;
        }
        self.pop()
    }

    /// Takes out a request whose client has gone.
    pub(crate) fn remove(&mut self, id: RequestId) -> Option<Waiting> {
        if !self.ids.remove(&id) {
            return None;
        }
        let at = self.waiting.iter().position(|waiting| waiting.request.id == id)?;
        self.waiting.remove(at)
    }

    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.waiting.front().map(|waiting| waiting.deadline)
    }
}
