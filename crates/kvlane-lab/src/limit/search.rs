//! A search among assignments of requests to engines.

use kvlane_core::rng::Rng;
use kvlane_trace::plan::Plan;
use kvlane_trace::trace::Trace;

/// What is to be placed, and where.
pub struct Problem<'a> {
    /// The requests.
    pub trace: &'a Trace,
    /// Their dependencies.
    pub plan: &'a Plan,
    /// Number of engines, at least one.
    pub engines: u16,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The engine of each request.
    pub engines: Vec<u16>,
    /// The mean of what `evaluate` has said of them.
    pub mean_s: f64,
    /// By kind of move: how often it was tried and how often it led to the best assignment so far.
    pub moves: Moves,
}

/// Tries and successes of each kind of move, in the order of [`Move`].
pub type Moves = [(u32, u32); MOVES.len()];

/// A way to change an assignment.
#[derive(Clone, Copy, Debug)]
enum Move {
    /// One request goes to another engine.
    One,
    /// Two requests that arrive about at the same time are exchanged.
    Exchange,
    /// One goes to another engine, with the later ones of its conversation.
    Conversation,
    /// One goes to another engine, with later ones that have the same beginning and are at the same engine.
    Prefix,
    /// Later ones with two beginnings exchange their engines.
    PrefixExchange,
}

const MOVES: [Move; 5] = [Move::One, Move::Exchange, Move::Conversation, Move::Prefix, Move::PrefixExchange];

/// Requests whose positions differ by at most this arrive about at the same time.
const NEAR: usize = 32;

/// Of so many requests drawn, the one with the longest time is moved: there is most to be gained.
const DRAWN: usize = 3;

/// An assignment is accepted if it is not worse than the current one by more than this share, which falls to zero in the
/// course of the search.
const WORSE_MAX: f64 = 1e-3;

/// The best of so many assignments, from `start` on. `evaluate` gives the time of each request in seconds under an
/// assignment; their mean is made small. A threshold decides what is accepted (Dueck and Scheuer, Journal of
/// Computational Physics 90 (1990), p. 161).
pub fn search(
    problem: &Problem<'_>,
    start: Vec<u16>,
    tries: u32,
    seed: u64,
    evaluate: &mut dyn FnMut(&[u16]) -> Vec<f64>,
) -> Found {
    let mut rng = Rng::new(seed);
    let beginnings = beginnings(problem.trace);
    let mut times = evaluate(&start);
    let (mut current, mut current_s) = (start, mean(&times));
    let mut best = Found { engines: current.clone(), mean_s: current_s, moves: Moves::default() };
    if problem.engines < 2 || current.is_empty() {
        return best;
    }
    let mut next = Vec::new();
    for tried in 0..tries {
        let kind = rng.below(MOVES.len());
        next.clone_from(&current);
        change(MOVES[kind], problem, &beginnings, &times, &mut rng, &mut next);
        best.moves[kind].0 += 1;
        if next == current {
            continue;
        }
        let next_times = evaluate(&next);
        let next_s = mean(&next_times);
        let left = 1.0 - f64::from(tried) / f64::from(tries);
        if next_s < current_s * (1.0 + WORSE_MAX * left) {
            std::mem::swap(&mut current, &mut next);
            (current_s, times) = (next_s, next_times);
        }
        if current_s < best.mean_s {
            best.moves[kind].1 += 1;
            best.mean_s = current_s;
            best.engines.clone_from(&current);
        }
    }
    best
}

/// The mean of the times of requests.
pub(crate) fn mean(times: &[f64]) -> f64 {
    times.iter().sum::<f64>() / times.len().max(1) as f64
}

/// For each request the one that introduced its first block.
fn beginnings(trace: &Trace) -> Vec<u32> {
    let first = |request| trace.runs(request).last().map_or(request, |(owner, ..)| owner);
    (0..trace.requests.len() as u32).map(first).collect()
}

fn change(
    kind: Move,
    problem: &Problem<'_>,
    beginnings: &[u32],
    times: &[f64],
    rng: &mut Rng,
    engines: &mut [u16],
) {
    let count = engines.len();
    let drawn = (0..DRAWN).map(|_| rng.below(count)).max_by(|a, b| times[*a].total_cmp(&times[*b]));
    let at = drawn.unwrap_or(0);
    let from = engines[at];
    let other =
        |rng: &mut Rng| (from + 1 + rng.below(usize::from(problem.engines) - 1) as u16) % problem.engines;
    match kind {
        Move::One => engines[at] = other(rng),
        Move::Exchange => {
            let first = at.saturating_sub(NEAR);
            engines.swap(at, first + rng.below((at + NEAR + 1).min(count) - first));
        }
        Move::Conversation => {
            let (to, root) = (other(rng), problem.plan.root[at]);
            (at..count).filter(|&one| problem.plan.root[one] == root).for_each(|one| engines[one] = to);
        }
        Move::Prefix => {
            let to = other(rng);
            for one in at..count {
                if beginnings[one] == beginnings[at] && engines[one] == from {
                    engines[one] = to;
                }
            }
        }
        Move::PrefixExchange => {
            let partner = rng.below(count);
            let (to, theirs) = (engines[partner], beginnings[partner]);
            for one in at..count {
                if beginnings[one] == beginnings[at] && engines[one] == from {
                    engines[one] = to;
                } else if beginnings[one] == theirs && engines[one] == to {
                    engines[one] = from;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_trace::trace::{Builder, TraceRequest};

    use super::*;

    /// Requests in pairs with the same beginning.
    fn pairs(count: u32) -> Trace {
        let mut builder = Builder::new(1);
        for request in 0..count {
            let block = u64::from(request / 2 + 1);
            let one = TraceRequest { input_tokens: 1, output_tokens: 1, ..TraceRequest::default() };
            builder.push(one, &[block]).expect("room");
        }
        builder.finish()
    }

    fn found(tries: u32, seed: u64, evaluate: &mut dyn FnMut(&[u16]) -> Vec<f64>) -> Found {
        let trace = pairs(16);
        let plan = Plan::new(&trace);
        search(&Problem { trace: &trace, plan: &plan, engines: 4 }, vec![0; 16], tries, seed, evaluate)
    }

    /// Each request takes as long as there are requests of other pairs at its engine.
    fn crowding(engines: &[u16]) -> Vec<f64> {
        let others = |one: usize| {
            (0..engines.len()).filter(|&other| other / 2 != one / 2 && engines[other] == engines[one]).count()
        };
        (0..engines.len()).map(|one| others(one) as f64).collect()
    }

    #[test]
    fn pairs_come_together_and_are_spread_evenly() {
        // Two pairs on each of four engines: each request meets two others.
        let found = found(4000, 1, &mut crowding);
        assert_eq!(found.mean_s, 2.0, "{found:?}");
        assert_eq!(crowding(&found.engines), [2.0; 16]);
    }

    #[test]
    fn what_is_found_is_never_worse_than_the_start_and_the_same_under_the_same_seed() {
        let start_s = mean(&crowding(&[0; 16]));
        assert_eq!(found(0, 1, &mut crowding).mean_s, start_s);
        assert!(found(50, 2, &mut crowding).mean_s <= start_s);
        assert_eq!(found(200, 3, &mut crowding), found(200, 3, &mut crowding));
        // Every change is for the worse.
        let mut tried = 0.0;
        let kept = found(100, 4, &mut |engines| {
            tried += 1.0;
            vec![if engines == [0; 16] { 1.0 } else { 2.0 }; 16]
        });
        assert_eq!((kept.mean_s, kept.engines), (1.0, vec![0; 16]));
        assert!(tried > 50.0);
    }

    #[test]
    fn one_engine_leaves_nothing_to_search() {
        let trace = pairs(4);
        let plan = Plan::new(&trace);
        let problem = Problem { trace: &trace, plan: &plan, engines: 1 };
        let found = search(&problem, vec![0; 4], 100, 1, &mut crowding);
        assert_eq!((found.engines, found.moves), (vec![0; 4], Moves::default()));
    }
}
