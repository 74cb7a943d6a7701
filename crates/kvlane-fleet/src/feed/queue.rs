//! The queue between the sockets of a feed and the task that applies its messages: bounded in messages and in bytes.
//!
//! Reading must not wait, because an engine drops messages for a subscriber that does not read. So when the queue is
//! full, messages of the subscription are dropped here and a marker takes their place. A replay can wait: the engine
//! sends it as fast as it is read.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kvlane_wire::sequence::Round;
use tokio::sync::Notify;

/// An event at the sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// The subscription was established.
    Connected,
    /// The subscription ended, and why.
    Disconnected(String),
    /// A message of the subscription.
    Live {
        /// Its sequence number.
        seq: u64,
        /// Its content.
        payload: Bytes,
    },
    /// A message of the subscription that is not a valid KV event message.
    Malformed(&'static str),
    /// Messages were dropped here.
    Overflowed,
    /// A message of a replay.
    Replayed {
        /// Which replay.
        round: Round,
        /// Its sequence number.
        seq: u64,
        /// Its content.
        payload: Bytes,
    },
    /// A replay is complete.
    ReplayEnded(Round),
    /// A replay is incomplete, and why.
    ReplayFailed(Round, String),
    /// The engine has restarted: messages after this come from another process.
    StartOver,
}

/// The queue of one feed.
#[derive(Debug)]
pub struct Queue {
    messages_max: usize,
    bytes_max: usize,
    waiting: Mutex<Waiting>,
    filled: Notify,
    drained: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    items: VecDeque<Item>,
    messages: usize,
    bytes: usize,
    /// Messages dropped since the feed was opened.
    dropped: u64,
}

// === impl Item ===

impl Item {
    fn payload_bytes(&self) -> Option<usize> {
        match self {
            Self::Live { payload, .. } | Self::Replayed { payload, .. } => Some(payload.len()),
            _ => None,
        }
    }
}

// === impl Queue ===

impl Queue {
    /// An empty queue with these bounds.
    pub fn new(messages_max: usize, bytes_max: usize) -> Self {
        let waiting = Mutex::default();
        Self { messages_max, bytes_max, waiting, filled: Notify::new(), drained: Notify::new() }
    }

    /// Adds an item that is not a message. Each connection has only a few of these.
    pub fn tell(&self, item: Item) {
        debug_assert!(item.payload_bytes().is_none(), "messages are added by live() or replayed()");
        self.waiting().items.push_back(item);
        self.filled.notify_one();
    }

    /// Adds a message of the subscription, or drops it if the queue is full.
    pub fn live(&self, seq: u64, payload: Bytes) {
        let mut waiting = self.waiting();
        if self.has_room(&waiting, payload.len()) {
            waiting.push(Item::Live { seq, payload });
        } else {
            waiting.dropped += 1;
            if waiting.items.back() != Some(&Item::Overflowed) {
                waiting.items.push_back(Item::Overflowed);
            }
        }
        drop(waiting);
        self.filled.notify_one();
    }

    /// Adds a message of a replay, once there is room.
    pub async fn replayed(&self, round: Round, seq: u64, payload: Bytes) {
        loop {
            // Registered before the check, so that no room made in between is missed.
            let drained = self.drained.notified();
            {
                let mut waiting = self.waiting();
                if self.has_room(&waiting, payload.len()) {
                    waiting.push(Item::Replayed { round, seq, payload });
                    break;
                }
            }
            drained.await;
        }
        self.filled.notify_one();
    }

    /// Discards the queue, because the process that sent its messages is gone.
    pub fn start_over(&self) {
        let mut waiting = self.waiting();
        waiting.items.clear();
        (waiting.messages, waiting.bytes) = (0, 0);
        waiting.items.push_back(Item::StartOver);
        drop(waiting);
        self.filled.notify_one();
        self.drained.notify_one();
    }

    /// The next item, if there is one.
    pub fn pop(&self) -> Option<Item> {
        let mut waiting = self.waiting();
        let item = waiting.items.pop_front()?;
        if let Some(bytes) = item.payload_bytes() {
            waiting.messages -= 1;
            waiting.bytes -= bytes;
            drop(waiting);
            self.drained.notify_one();
        }
        Some(item)
    }

    /// Waits until there may be an item.
    pub async fn changed(&self) {
        self.filled.notified().await;
    }

    /// Wakes the task that waits for items.
    pub fn wake(&self) {
        self.filled.notify_one();
    }

    /// Messages queued, and messages dropped so far.
    pub fn figures(&self) -> (usize, u64) {
        let waiting = self.waiting();
        (waiting.messages, waiting.dropped)
    }

    /// Whether there is room for a message. One that is larger than the queue is accepted when the queue is empty.
    fn has_room(&self, waiting: &Waiting, bytes: usize) -> bool {
        let fits = waiting.messages < self.messages_max && waiting.bytes + bytes <= self.bytes_max;
        fits || waiting.messages == 0
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Waiting ===

impl Waiting {
    fn push(&mut self, item: Item) {
        self.messages += 1;
        self.bytes += item.payload_bytes().unwrap_or(0);
        self.items.push_back(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(queue: &Queue) -> Vec<Item> {
        std::iter::from_fn(|| queue.pop()).collect()
    }

    fn live(seq: u64) -> Item {
        Item::Live { seq, payload: Bytes::from_static(b"12345678") }
    }

    fn push(queue: &Queue, seqs: std::ops::Range<u64>) {
        seqs.for_each(|seq| queue.live(seq, Bytes::from_static(b"12345678")));
    }

    #[test]
    fn messages_beyond_the_bound_are_dropped_and_marked_once() {
        for queue in [Queue::new(2, 1000), Queue::new(1000, 16)] {
            push(&queue, 0..5);
            assert_eq!(queue.figures(), (2, 3));
            assert_eq!(drain(&queue), [live(0), live(1), Item::Overflowed]);
            push(&queue, 5..6);
            assert_eq!(drain(&queue), [live(5)], "there is room again");
        }
    }

    #[test]
    fn a_message_larger_than_the_queue_is_accepted_when_it_is_empty() {
        let queue = Queue::new(10, 4);
        push(&queue, 0..2);
        assert_eq!(drain(&queue), [live(0), Item::Overflowed]);
    }

    #[test]
    fn starting_over_discards_all_queued_messages() {
        let queue = Queue::new(2, 1000);
        push(&queue, 0..3);
        queue.start_over();
        push(&queue, 0..1);
        assert_eq!(drain(&queue), [Item::StartOver, live(0)]);
        assert_eq!(queue.figures(), (0, 1));
    }

    #[tokio::test]
    async fn a_replay_waits_for_room_and_loses_no_message() {
        let queue = std::sync::Arc::new(Queue::new(2, 1000));
        let feeder = {
            let queue = std::sync::Arc::clone(&queue);
            tokio::spawn(async move {
                for seq in 0..20 {
                    queue.replayed(Round(1), seq, Bytes::from_static(b"12345678")).await;
                }
            })
        };
        let mut seen = Vec::new();
        while seen.len() < 20 {
            queue.changed().await;
            while let Some(item) = queue.pop() {
                let Item::Replayed { seq, .. } = item else { panic!("{item:?}") };
                seen.push(seq);
            }
            assert!(queue.figures().0 <= 2);
        }
        feeder.await.expect("it ended");
        assert_eq!(seen, (0..20).collect::<Vec<_>>());
    }
}
