//! Departure times of requests.
//!
//! A separate thread owns the schedule, since the runtime's timers have only millisecond granularity. Another one,
//! the scribe, writes bodies ahead, so that a long prompt delays no other request. Conversations begin at their
//! times; a turn is passed to the clock when the request it waits for has ended.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::iter::Peekable;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use kvlane_core::time::Nanos;

/// Requests whose bodies are written ahead.
const AHEAD_MAX: usize = 64;
/// Maximum prompt tokens of these, unless there is only one.
const AHEAD_TOKENS_MAX: u64 = 8_000_000;

/// Messages to the clock.
pub(super) enum Word<D> {
    /// The request that this one waits for has ended: its due time.
    Due(u32, Nanos),
    /// The scribe has written this request.
    Written(u32, D),
    /// The rest is not needed.
    Stop,
}

/// The schedule of a replay. `D` is the item that departs.
pub(super) struct Clock<D, R: Iterator<Item = (Nanos, u32)>> {
    start: Instant,
    /// Requests without predecessor, in order.
    roots: Peekable<R>,
    /// Requests whose predecessor has ended, and that are not among the next.
    waiting: BinaryHeap<Reverse<(Nanos, u32)>>,
    /// The next ones: written, or being written by the scribe.
    ahead: BTreeMap<(Nanos, u32), Option<D>>,
    /// Where due requests are sent.
    due_of: BTreeMap<u32, Nanos>,
    ahead_tokens: u64,
    words: Receiver<Word<D>>,
    scribe: Sender<(u32, Nanos)>,
}

/// Parts of a clock.
pub(super) struct Parts<D, R> {
    /// Origin of all times.
    pub(super) start: Instant,
    /// Requests without predecessor, in order.
    pub(super) roots: R,
    /// Messages to the clock.
    pub(super) words: Receiver<Word<D>>,
    /// The scribe.
    pub(super) scribe: Sender<(u32, Nanos)>,
}

// === impl Clock ===

impl<D, R: Iterator<Item = (Nanos, u32)>> Clock<D, R> {
    pub(super) fn new(parts: Parts<D, R>) -> Self {
        let Parts { start, roots, words, scribe } = parts;
        Self {
            start,
            roots: roots.peekable(),
            waiting: BinaryHeap::new(),
            ahead: BTreeMap::new(),
            due_of: BTreeMap::new(),
            ahead_tokens: 0,
            words,
            scribe,
        }
    }

    /// Lets `left` requests depart, each at its time or as soon after it as it is known and written. `tokens` returns
    /// the length of a prompt.
    pub(super) fn run(mut self, mut left: usize, tokens: impl Fn(u32) -> u32, mut depart: impl FnMut(D)) {
        while left > 0 {
            self.ask_ahead(&tokens);
            // A body that is not yet written does not delay requests due after it.
            let next = self.ahead.iter().find(|(_, written)| written.is_some()).map(|(&key, _)| key);
            let word = match next.map(|next| (next, self.until(next.0))) {
                None => self.words.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some((next, Duration::ZERO)) => {
                    left -= 1;
                    self.ahead_tokens -= u64::from(tokens(next.1));
                    self.due_of.remove(&next.1);
                    depart(self.ahead.remove(&next).flatten().expect("it is written"));
                    continue;
                }
                Some((_, until)) => self.words.recv_timeout(until),
            };
            match word {
                Ok(Word::Due(request, due)) => self.due(request, due, &tokens),
                Ok(Word::Written(request, departure)) => {
                    let due = self.due_of[&request];
                    self.ahead.insert((due, request), Some(departure));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Word::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Time until then.
    fn until(&self, due: Nanos) -> Duration {
        (self.start + Duration::from_nanos(due.0)).saturating_duration_since(Instant::now())
    }

    /// A request's predecessor has ended. If it is due before those that are being written, it is written with them.
    fn due(&mut self, request: u32, due: Nanos, tokens: &impl Fn(u32) -> u32) {
        if self.ahead.last_key_value().is_some_and(|(&last, _)| (due, request) < last) {
            self.ask(due, request, tokens);
        } else {
            self.waiting.push(Reverse((due, request)));
        }
    }

    /// Passes the next requests to the scribe as far as there is room.
    fn ask_ahead(&mut self, tokens: &impl Fn(u32) -> u32) {
        while self.ahead.is_empty() || self.ahead.len() < AHEAD_MAX && self.ahead_tokens < AHEAD_TOKENS_MAX {
            let root = self.roots.peek().copied();
            let turn = self.waiting.peek().map(|&Reverse(turn)| turn);
            let Some(next) = root.into_iter().chain(turn).min() else { break };
            if Some(next) == root {
                self.roots.next();
            } else {
                self.waiting.pop();
            }
            self.ask(next.0, next.1, tokens);
        }
    }

    fn ask(&mut self, due: Nanos, request: u32, tokens: &impl Fn(u32) -> u32) {
        self.ahead.insert((due, request), None);
        self.due_of.insert(request, due);
        self.ahead_tokens += u64::from(tokens(request));
        // If the scribe is gone, its messages are lost.
        let _ = self.scribe.send((request, due));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Runs a clock whose times are all in the past, with a scribe that answers at once. `ended` returns the
    /// successors of a departure. Returns the departures, in order.
    fn departures(roots: &[(u64, u32)], left: usize, ended: impl Fn(u32) -> Vec<(u32, u64)>) -> Vec<u32> {
        let (word, words) = mpsc::channel();
        let (scribe, asked) = mpsc::channel();
        let written = word.clone();
        let scribe_thread = std::thread::spawn(move || {
            for (request, _) in asked {
                if written.send(Word::Written(request, request)).is_err() {
                    return;
                }
            }
        });
        let roots = roots.iter().map(|&(due, request)| (Nanos(due), request));
        let mut departed = Vec::new();
        let clock = Clock::new(Parts { start: Instant::now(), roots, words, scribe });
        clock.run(
            left,
            |_| 1,
            |request| {
                departed.push(request);
                for (turn, due) in ended(request) {
                    word.send(Word::Due(turn, Nanos(due))).expect("the clock listens");
                }
            },
        );
        scribe_thread.join().expect("the scribe is done when the clock is");
        departed
    }

    #[test]
    fn every_request_departs_once_and_turns_after_what_they_wait_for() {
        let roots: Vec<(u64, u32)> = (0..200).map(|request| (u64::from(request), request)).collect();
        let mut departed = departures(&roots, 400, |request| {
            if request < 200 { vec![(request + 200, u64::from(request))] } else { Vec::new() }
        });
        let place = |of: u32| departed.iter().position(|&request| request == of).expect("departed");
        for root in 0..200 {
            assert!(place(root) < place(root + 200));
        }
        departed.sort_unstable();
        assert_eq!(departed, (0..400).collect::<Vec<_>>());
    }

    #[test]
    fn a_turn_that_is_due_first_overtakes_what_is_written_already() {
        // The roots after the first are due in an hour; the turn is due at once.
        let hour = 3_600_000_000_000;
        let roots: Vec<(u64, u32)> =
            (0..100).map(|request| (if request == 0 { 0 } else { hour }, request)).collect();
        let follow = |request: u32| if request == 0 { vec![(1000, 1)] } else { Vec::new() };
        assert_eq!(departures(&roots, 2, follow), [0, 1000]);
    }

    #[test]
    fn a_clock_that_is_told_to_stop_stops_before_what_is_due_later() {
        let (word, words) = mpsc::channel::<Word<u32>>();
        let (scribe, asked) = mpsc::channel();
        word.send(Word::Stop).expect("the clock is there");
        let roots = [(Nanos::from_secs(3600), 0)].into_iter();
        Clock::new(Parts { start: Instant::now(), roots, words, scribe }).run(
            1,
            |_| 1,
            |_| panic!("departed"),
        );
        assert_eq!(asked.iter().count(), 1, "it was being written, and the scribe is let go");
    }

    #[test]
    fn bodies_are_written_ahead_within_bounds() {
        let (word, words) = mpsc::channel::<Word<u32>>();
        let (scribe, asked) = mpsc::channel();
        word.send(Word::Stop).expect("the clock is there");
        let roots = (0..1000).map(|request| (Nanos::from_secs(3600), request));
        Clock::new(Parts { start: Instant::now(), roots, words, scribe }).run(1000, |_| 1, |_| ());
        assert_eq!(asked.iter().count(), AHEAD_MAX);
        let (word, words) = mpsc::channel::<Word<u32>>();
        let (scribe, asked) = mpsc::channel();
        word.send(Word::Stop).expect("the clock is there");
        let roots = (0..1000).map(|request| (Nanos::from_secs(3600), request));
        let clock = Clock::new(Parts { start: Instant::now(), roots, words, scribe });
        clock.run(1000, |_| AHEAD_TOKENS_MAX as u32 / 2, |_| ());
        assert_eq!(asked.iter().count(), 2, "long prompts fill the room sooner");
    }
}
