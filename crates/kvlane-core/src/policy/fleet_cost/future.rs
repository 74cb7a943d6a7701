//! The work that a new prefix will meet at each endpoint: the term "new prefix".
//!
//! A prefix that was not sent before brings later requests to its endpoint, and they find there what other prefixes have
//! brought. That is forecast from the last minute or so:
//!
//! ```text
//! a = new + v again + 2 (1 - v) tokens repeated / sent
//! ```
//!
//! | | |
//! |---|---|
//! | `new` | seconds of work of requests with a new prefix that were placed on this endpoint |
//! | `again` | the same of requests whose prefix had been sent before |
//! | `tokens` | prompt tokens of the requests with a new prefix that were placed on this endpoint |
//! | `repeated`, `sent` | the sums of `again` and of `tokens` over all endpoints |
//! | `v` | how much of what endpoints differ by in `again` comes from their prefixes, and not from chance |
//!
//! What a prefix brings is known from few requests, so `again` is noisy: an endpoint whose prefixes happened to be asked for
//! less often is no better place. If all prefixes are equally popular, what counts is how many an endpoint has; if a few have
//! most of the requests, what counts is the work. `v` tells the two apart: requests for prefixes of equal popularity arrive by
//! chance, so the numbers of them per endpoint are Poisson distributed, with an index of dispersion `D` of 1; `v = 1 - 1/D` is
//! the share of the variance that is more than that, and 0 where `D` is less (the empirical Bayes form of James and Stein's
//! estimator; Efron and Morris, Journal of the American Statistical Association 68 (1973), p. 117). Numbers that decay have a smaller
//! `D`, so `v` errs towards equal popularity.
//!
//! Sums decay exponentially with a time constant of [`MEMORY_S`], by forward decay (Cormode et al., ICDE 2009, p. 138): what is
//! added is scaled up by the age of a landmark, so that sums need no update as time passes.

use libm::exp;

use crate::columns::{CHUNK, Column};
use crate::endpoint::EndpointId;
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// Time constant of what was placed.
const MEMORY_S: f64 = 60.0;
/// Longest age of the landmark, in seconds: sums are 2.4e7 times what they stand for by then.
const LANDMARK_AGE_MAX_S: f64 = 1020.0;
/// Weight of a second of repeated work that is forecast from the number of prefixes, relative to one that was seen. With 1.5, 2 and 3,
/// E2E of 150 equally popular groups at and above the knee is 1.1, -0.2 and -0.2 % above that of the best other policy (five cells, five
/// seeds).
const EVEN_WORTH: f64 = 2.0;

/// What was placed, on each endpoint and on all together.
#[derive(Default)]
pub(super) struct Future {
    placed: ByEndpoint<Placed>,
    all: Placed,
    /// `repeats²/prefixes`, summed over endpoints.
    squares: f64,
    /// Endpoints on which something was placed.
    endpoints: usize,
    /// `placed` once more, for [`super::shortlist`].
    columns: Columns,
    landmark: Nanos,
}

/// What was placed on an endpoint, decaying.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Placed {
    /// Seconds of work of requests with a new prefix, and of others.
    new_s: f64,
    again_s: f64,
    /// Prompt tokens of those with a new prefix.
    new_tokens: f64,
    /// How many requests of both kinds.
    prefixes: f64,
    repeats: f64,
}

/// The first three of [`Placed`], by chunk.
#[derive(Default)]
struct Columns(Vec<PlacedChunk>);

/// Those of the endpoints of a chunk.
#[derive(Clone)]
pub(super) struct PlacedChunk {
    pub(super) new_s: Column,
    pub(super) again_s: Column,
    pub(super) new_tokens: Column,
}

/// What these three cost a request, each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Prices {
    pub(super) new: f64,
    pub(super) again: f64,
    pub(super) new_token: f64,
}

/// A request that was placed, for the forecast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Brings {
    /// It has a new prefix, with so many tokens.
    Prefix {
        /// Of the prompt.
        tokens: u32,
    },
    /// Its prefix was sent before.
    Repeat,
    /// It is only work: its other part is elsewhere, or another router has placed it.
    Work,
}

// === impl Placed ===

impl Placed {
    fn square(&self) -> f64 {
        if self.prefixes > 0.0 { self.repeats * self.repeats / self.prefixes } else { 0.0 }
    }

    fn add(&mut self, brings: Brings, work_s: f64, scale: f64) {
        match brings {
            Brings::Prefix { tokens } => {
                self.prefixes += scale;
                self.new_tokens += f64::from(tokens) * scale;
            }
            Brings::Repeat => self.repeats += scale,
            Brings::Work => {}
        }
        let secs = if brings == Brings::Repeat { &mut self.again_s } else { &mut self.new_s };
        *secs += work_s * scale;
    }

    fn plus(self, other: &Self) -> Self {
        Self {
            new_s: self.new_s + other.new_s,
            again_s: self.again_s + other.again_s,
            new_tokens: self.new_tokens + other.new_tokens,
            prefixes: self.prefixes + other.prefixes,
            repeats: self.repeats + other.repeats,
        }
    }

    fn times(self, factor: f64) -> Self {
        Self {
            new_s: self.new_s * factor,
            again_s: self.again_s * factor,
            new_tokens: self.new_tokens * factor,
            prefixes: self.prefixes * factor,
            repeats: self.repeats * factor,
        }
    }
}

// === impl Columns ===

impl Columns {
    fn set(&mut self, id: EndpointId, placed: &Placed) {
        let (chunk, at) = (id.slot() / CHUNK, id.slot() % CHUNK);
        if chunk >= self.0.len() {
            let empty = PlacedChunk { new_s: [0.0; CHUNK], again_s: [0.0; CHUNK], new_tokens: [0.0; CHUNK] };
            self.0.resize(chunk + 1, empty);
        }
        let chunk = &mut self.0[chunk];
        (chunk.new_s[at], chunk.again_s[at]) = (placed.new_s as f32, placed.again_s as f32);
        chunk.new_tokens[at] = placed.new_tokens as f32;
    }
}

// === impl Future ===

impl Future {
    /// A request was placed on an endpoint, which gives it this much work.
    pub(super) fn add(&mut self, id: EndpointId, now: Nanos, brings: Brings, work_s: f64) {
        if self.age_s(now) > LANDMARK_AGE_MAX_S {
            self.rescale(now);
        }
        let scale = exp(self.age_s(now) / MEMORY_S);
        let placed = self.placed.get_or_insert(id, Placed::default);
        self.endpoints += usize::from(*placed == Placed::default());
        let before = placed.square();
        placed.add(brings, work_s, scale);
        self.all.add(brings, work_s, scale);
        self.squares += placed.square() - before;
        self.columns.set(id, placed);
    }

    /// What a new prefix is charged for what it will meet, if it will be used `uses` times.
    pub(super) fn prices(&self, now: Nanos, uses: f64) -> Prices {
        let left = exp(-self.age_s(now) / MEMORY_S);
        let Placed { again_s, new_tokens, prefixes, repeats, .. } = self.all;
        let new = uses * left;
        if prefixes <= 0.0 || repeats <= 0.0 {
            return Prices { new, again: new, new_token: 0.0 };
        }
        let others = self.endpoints.saturating_sub(1).max(1) as f64;
        let dispersion = left * (self.squares * prefixes / repeats - repeats) / others;
        let by_chance = 1.0 / dispersion.max(1.0);
        Prices { new, again: new * (1.0 - by_chance), new_token: new * EVEN_WORTH * by_chance * again_s / new_tokens }
    }

    /// The sum of it at an endpoint, in seconds.
    pub(super) fn secs(&self, id: EndpointId, prices: &Prices) -> f64 {
        self.placed.get(id).map_or(0.0, |placed| {
            prices.new * placed.new_s + prices.again * placed.again_s + prices.new_token * placed.new_tokens
        })
    }

    /// The columns of a chunk, if anything was placed there.
    pub(super) fn chunk(&self, at: usize) -> Option<&PlacedChunk> {
        self.columns.0.get(at)
    }

    fn age_s(&self, now: Nanos) -> f64 {
        (now - self.landmark).as_secs_f64()
    }

    /// Takes `now` as the landmark.
    fn rescale(&mut self, now: Nanos) {
        let left = exp(-self.age_s(now) / MEMORY_S);
        let before = std::mem::replace(self, Self { landmark: now, ..Self::default() });
        for (id, placed) in before.placed.iter() {
            let placed = placed.times(left);
            *self.placed.get_or_insert(id, Placed::default) = placed;
            self.all = self.all.plus(&placed);
            self.squares += placed.square();
            self.endpoints += usize::from(placed != Placed::default());
            self.columns.set(id, &placed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USES: f64 = 3.0;

    fn id(slot: u16) -> EndpointId {
        EndpointId::new(slot, 0)
    }

    fn at(secs: f64) -> Nanos {
        Nanos((secs * 1e9) as u64)
    }

    /// Eight endpoints with so many prefixes and repeats each, all of one second and 1,000 tokens, placed at once.
    fn placed(endpoints: [(usize, usize); 8]) -> Future {
        let mut future = Future::default();
        for (slot, (prefixes, repeats)) in (0..).zip(endpoints) {
            (0..prefixes).for_each(|_| future.add(id(slot), at(0.0), Brings::Prefix { tokens: 1000 }, 1.0));
            (0..repeats).for_each(|_| future.add(id(slot), at(0.0), Brings::Repeat, 1.0));
        }
        future
    }

    fn secs(future: &Future, now: Nanos) -> Vec<f64> {
        let prices = future.prices(now, USES);
        (0..8).map(|slot| future.secs(id(slot), &prices)).collect()
    }

    /// Held to be near, relative to the larger one.
    fn near(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()), "{a} {b}");
    }

    #[test]
    fn prefixes_without_repeats_are_only_their_own_work() {
        let future = placed([(4, 0), (7, 0), (0, 0), (1, 0), (1, 0), (1, 0), (1, 0), (1, 0)]);
        let secs = secs(&future, at(0.0));
        assert_eq!(secs[..3], [USES * 4.0, USES * 7.0, 0.0]);
    }

    #[test]
    fn of_equally_popular_prefixes_the_number_counts() {
        // Ten repeats for each of them, give or take what chance does. The first endpoint has the most prefixes and the fewest repeats.
        let future =
            placed([(11, 94), (10, 96), (10, 104), (10, 110), (10, 99), (10, 101), (10, 97), (10, 107)]);
        let secs = secs(&future, at(0.0));
        assert!(secs[1..].iter().all(|other| *other < secs[0]), "{secs:?}");
        let per_prefix = 808.0 / 81.0;
        near(secs[0], USES * 11.0 * (1.0 + EVEN_WORTH * per_prefix));
        near(secs[3], secs[1]);
    }

    #[test]
    fn where_few_prefixes_have_most_requests_the_work_counts() {
        let future = placed([(1, 300), (10, 20), (10, 20), (10, 20), (10, 20), (10, 20), (10, 20), (10, 20)]);
        let secs = secs(&future, at(0.0));
        assert!(secs[1..].iter().all(|other| *other < secs[0] / 5.0), "{secs:?}");
    }

    #[test]
    fn prefixes_of_which_nothing_is_known_count_by_the_work_that_was_seen() {
        let mut future = Future::default();
        future.add(id(0), at(0.0), Brings::Repeat, 2.0);
        future.add(id(1), at(0.0), Brings::Work, 1.0);
        assert_eq!(secs(&future, at(0.0))[..3], [USES * 2.0, USES, 0.0]);
    }

    #[test]
    fn what_was_placed_is_forgotten_with_time() {
        let before = placed([(11, 94), (10, 96), (10, 104), (10, 110), (10, 99), (10, 101), (10, 97), (10, 107)]);
        let now = secs(&before, at(0.0));
        let later = secs(&before, at(MEMORY_S));
        // A variance that is by chance stays that.
        now.iter().zip(&later).for_each(|(now, later)| near(now * exp(-1.0), *later));
        let soon = secs(&before, at(1.0));
        near(soon[0], now[0] * exp(-1.0 / MEMORY_S));
    }

    /// Invariant: A new landmark changes no forecast.
    #[test]
    fn another_landmark_changes_nothing() {
        let mut future = placed([(1, 30), (10, 20), (10, 20), (3, 20), (10, 2), (10, 20), (10, 0), (0, 20)]);
        let now = at(LANDMARK_AGE_MAX_S - 900.0);
        let before = secs(&future, now);
        let columns = future.columns.0.len();
        future.rescale(now);
        before.iter().zip(secs(&future, now)).for_each(|(before, after)| near(*before, after));
        assert_eq!((future.landmark, future.columns.0.len()), (now, columns));
        // And adding long after does it.
        let late = at(3.0 * LANDMARK_AGE_MAX_S);
        future.add(id(0), late, Brings::Work, 1.0);
        assert_eq!(future.landmark, late);
        near(secs(&future, late)[0], USES);
        // After a night without requests nothing is left, and each endpoint counts once again.
        let morning = at(1e5);
        (0..8).for_each(|slot| future.add(id(slot), morning, Brings::Work, 1.0));
        assert_eq!(future.endpoints, 8);
    }

    #[test]
    fn the_columns_hold_what_was_placed() {
        let future = placed([(4, 9), (7, 1), (0, 3), (1, 0), (1, 0), (1, 0), (1, 0), (1, 0)]);
        let chunk = future.chunk(0).expect("placed");
        assert_eq!((chunk.new_s[0], chunk.again_s[0], chunk.new_tokens[0]), (4.0, 9.0, 4000.0));
        assert_eq!((chunk.new_s[2], chunk.again_s[2], chunk.new_tokens[2]), (0.0, 3.0, 0.0));
        assert!(future.chunk(1).is_none());
    }
}
