//! Relays the events of a stream whole.
//!
//! A partial event cannot be taken back: everything written after it becomes part of it, and the client can parse
//! neither. So that a stream whose engine dies can end with a valid error event, each event is held until it is
//! complete. This delays no client, because a partial event is of no use.

use bytes::{Bytes, BytesMut};
use kvlane_wire::sse::EVENT_BYTES_MAX;

/// Holds the incomplete event at the end of a stream.
#[derive(Debug, Default)]
pub(super) struct WholeEvents {
    held: BytesMut,
    /// Part of an event has been relayed, because the event is too long to be held.
    within: bool,
}

// === impl WholeEvents ===

impl WholeEvents {
    /// The bytes to relay after `piece` has arrived. `pending` is the number of bytes since the last event's end,
    /// including those of the piece.
    pub(super) fn pass(&mut self, mut piece: Bytes, pending: usize) -> Bytes {
        if pending > EVENT_BYTES_MAX {
            self.within = true;
            return self.after_held(piece);
        }
        // The long event has ended.
        self.within = false;
        if pending == 0 {
            return self.after_held(piece);
        }
        if pending > piece.len() {
            self.held.extend_from_slice(&piece);
            return Bytes::new();
        }
        let rest = piece.split_off(piece.len() - pending);
        let whole = self.after_held(piece);
        self.held.extend_from_slice(&rest);
        whole
    }

    /// The stream has ended: returns the bytes held.
    pub(super) fn take(&mut self) -> Bytes {
        self.held.split().freeze()
    }

    /// The stream has broken: whether the client has received complete events only. The bytes held are dropped.
    pub(super) fn is_between(&self) -> bool {
        !self.within
    }

    fn after_held(&mut self, piece: Bytes) -> Bytes {
        if self.held.is_empty() {
            return piece;
        }
        self.held.extend_from_slice(&piece);
        self.take()
    }
}

#[cfg(test)]
mod tests {
    use kvlane_wire::sse::SseScanner;
    use proptest::collection::vec;
    use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

    use super::*;

    fn streams() -> impl Strategy<Value = Vec<u8>> {
        let long = "x".repeat(EVENT_BYTES_MAX / 2);
        let part =
            prop_oneof![Just("data: 1".to_owned()), Just(long), Just("\n".into()), Just("\r\n".into())];
        vec(part, 0..12).prop_map(|parts| parts.concat().into_bytes())
    }

    proptest! {
        /// Invariant: Events reach the client whole.
        #[test]
        fn a_stream_passes_unchanged_and_only_long_events_are_split(
            stream in streams(), cuts in vec(any::<proptest::sample::Index>(), 0..8),
        ) {
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let (mut scanner, mut whole, mut passed) = (SseScanner::new(), WholeEvents::default(), Vec::new());
            for cut in cuts.windows(2) {
                let piece = &stream[cut[0]..cut[1]];
                scanner.push(piece);
                passed.extend_from_slice(&whole.pass(Bytes::copy_from_slice(piece), scanner.pending()));
                let mut client = SseScanner::new();
                client.push(&passed);
                prop_assert_eq!(client.events(), scanner.events(), "no complete event is held");
                prop_assert_eq!(whole.is_between(), client.pending() == 0);
                prop_assert!(whole.held.len() <= EVENT_BYTES_MAX);
            }
            passed.extend_from_slice(&whole.take());
            prop_assert!(passed == stream);
        }
    }
}
