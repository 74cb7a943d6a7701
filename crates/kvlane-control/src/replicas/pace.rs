//! Whether a connection carries what is sent on it, as the answers to pings show: they wait behind news.
//!
//! A link that is slower than the news would otherwise fill buffers on the way, and everything in them would be old when
//! it arrives. While the answer to a ping is late, nothing is sent; the latest loads go when it has come. The number of
//! marks between two answers grows while answers come soon, and shrinks when one is late.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// An answer is late if it takes longer than this and twice the shortest time of the connection.
const QUEUE_MAX: Duration = Duration::from_millis(100);

/// Fewest, first and most marks between two answers. The most is beyond what any bandwidth allows.
const MARKS_MIN: usize = 64;
const MARKS_FIRST: usize = 512;
const MARKS_MAX: usize = 1 << 20;

/// What pings of one connection have shown.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// When the ping was sent that is not answered yet.
    asked: Option<Instant>,
    /// The time until the last answer, and the shortest one.
    last: Option<Duration>,
    shortest: Option<Duration>,
    /// Marks that may be sent between two answers, and those that may be before the next one.
    window: usize,
    room: usize,
}

// === impl Pace ===

impl Default for Pace {
    fn default() -> Self {
        Self { asked: None, last: None, shortest: None, window: MARKS_FIRST, room: MARKS_FIRST }
    }
}

impl Pace {
    /// A ping is sent.
    pub(super) fn ask(&mut self, now: Instant) {
        self.asked = Some(now);
    }

    /// It was answered.
    pub(super) fn answer(&mut self, now: Instant) {
        self.last = self.asked.take().map(|asked| now.saturating_duration_since(asked));
        self.shortest = match (self.shortest, self.last) {
            (Some(shortest), Some(last)) => Some(shortest.min(last)),
            (shortest, last) => shortest.or(last),
        };
        self.window = match self.last.is_some_and(|last| last <= self.late_after()) {
            true => (2 * self.window).min(MARKS_MAX),
            false => (self.window / 4).max(MARKS_MIN),
        };
        self.room = self.window;
    }

    /// Marks that may be sent before the next answer.
    pub(super) fn room(&self) -> usize {
        self.room
    }

    /// Marks were sent.
    pub(super) fn send(&mut self, marks: usize) {
        self.room = self.room.saturating_sub(marks);
    }

    /// Whether the link has carried all there was for a while.
    pub(super) fn is_free(&self) -> bool {
        self.window == MARKS_MAX
    }

    /// When the answer that is waited for is late.
    fn late_at(&self) -> Option<Instant> {
        self.asked.map(|asked| asked + self.late_after())
    }

    fn late_after(&self) -> Duration {
        QUEUE_MAX + 2 * self.shortest.unwrap_or_default()
    }
}

/// Waits while an answer is late.
pub(super) async fn flows(pace: &mut watch::Receiver<Pace>) {
    loop {
        let is_late = pace.borrow_and_update().late_at().is_some_and(|late| Instant::now() >= late);
        if !is_late || pace.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Windows after answers that took so long.
    fn windows(answers_ms: &[u32]) -> Vec<usize> {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let after = |ms: &u32| {
            pace.ask(start);
            pace.answer(start + *ms * MS);
            pace.window
        };
        answers_ms.iter().map(after).collect()
    }

    #[test]
    fn marks_grow_while_answers_come_within_twice_the_shortest_time_and_a_little() {
        assert_eq!(windows(&[400, 900, 901, 901, 901]), [1024, 2048, 512, 128, 64], "it is far away");
        assert_eq!(windows(&[1, 102, 103, 1]), [1024, 2048, 512, 1024]);
        assert_eq!(windows(&[1; 12])[10..], [MARKS_MAX; 2]);
    }

    #[test]
    fn marks_that_were_sent_leave_room_to_fewer_until_the_next_answer() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        pace.send(500);
        assert_eq!((pace.room(), pace.is_free()), (12, false));
        pace.ask(start);
        pace.answer(start + MS);
        assert_eq!(pace.room(), 1024);
    }

    #[tokio::test(start_paused = true)]
    async fn news_waits_for_an_answer_that_is_late() {
        let (sender, mut receiver) = watch::channel(Pace::default());
        flows(&mut receiver).await;
        sender.send_modify(|pace| pace.ask(Instant::now()));
        flows(&mut receiver).await;
        tokio::time::advance(QUEUE_MAX).await;
        tokio::select! {
            biased;
            () = flows(&mut receiver) => panic!("it is late"),
            () = std::future::ready(()) => {}
        }
        sender.send_modify(|pace| pace.answer(Instant::now()));
        flows(&mut receiver).await;
    }
}
