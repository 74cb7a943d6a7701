//! Reducing a trace to the load of a small fleet.
//!
//! No method suits all traces. If prompts share prefixes with earlier turns of their own session, whole sessions must
//! be kept; if they share with other sessions, requests that arrive together must be kept together. Thinning single
//! requests breaks both, and is not offered.
//!
//! A sample is a selection: requests keep their lengths, their distance in time and their shared prefixes.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::trace::{Trace, TraceRequest};

/// Sampling methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Whole sessions, drawn at random. Keeps prefixes shared within sessions and thins the rate; loses those shared
    /// between sessions.
    Sessions,
    /// All requests of a period, at a random position. Keeps the rate and prefixes shared within the period; cuts
    /// sessions at both ends.
    Window,
    /// A period of the square root of the share, and in it the same share of the sessions: between the two.
    #[serde(rename = "window+thin")]
    WindowThin,
    /// All sessions that start in a period, with all their later turns: a window that cuts no session, but whose rate
    /// declines at the end.
    SessionClosedWindow,
}

// === impl Trace ===

impl Trace {
    /// The requests that arrive in `window` (seconds; its start becomes 0), of about `share` of the sessions. Whether a
    /// session stays depends on `seed` and the session alone, so a larger share keeps all that a smaller one keeps.
    pub fn slice(&self, window: Range<f64>, share: f64, seed: u64) -> Self {
        let kept = |request: &u32| {
            let request = &self.requests[*request as usize];
            window.contains(&request.arrival_s) && unit(seed, u64::from(request.session)) < share
        };
        let mut slice = self.select((0..self.requests.len() as u32).filter(kept));
        slice.requests.iter_mut().for_each(|request| request.arrival_s -= window.start);
        slice.notes.push(format!(
            "kept {} of {} requests: those from {} s to {} s of {:.1} % of the sessions (seed {seed})",
            slice.requests.len(),
            self.requests.len(),
            window.start,
            window.end,
            share * 100.0
        ));
        slice
    }
}

// === impl Method ===

impl Method {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Sessions, Self::Window, Self::WindowThin, Self::SessionClosedWindow];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sessions => "sessions",
            Self::Window => "window",
            Self::WindowThin => "window+thin",
            Self::SessionClosedWindow => "session-closed-window",
        }
    }

    /// The method of a name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.name() == name)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A sample of about `share` of a trace's requests (above 0, at most 1). The same trace, method and seed give the same
/// sample, which starts at zero.
pub fn sample(trace: &Trace, method: Method, share: f64, seed: u64) -> Trace {
    let count = trace.requests.len();
    let target = wanted(count, share);
    let all = 0..count;
    let order: Vec<u32> = match method {
        Method::Sessions => thin(trace, all, target, seed),
        Method::Window => window(count, target, seed).map(|index| index as u32).collect(),
        Method::WindowThin => thin(trace, window(count, wanted(count, share.sqrt()), seed), target, seed),
        Method::SessionClosedWindow => closed_window(trace, target, seed),
    };
    let mut sample = trace.select(order);
    let start_s = sample.requests.first().map_or(0.0, |first| first.arrival_s);
    sample.requests.iter_mut().for_each(|request| request.arrival_s -= start_s);
    sample.notes.push(format!(
        "kept {} of {count} requests: {method}, requested share {:.4}, seed {seed}, from {start_s:.3} s on",
        sample.requests.len(),
        share
    ));
    sample
}

/// `share` of `count`, at least one.
fn wanted(count: usize, share: f64) -> usize {
    ((count as f64 * share).round() as usize).clamp(count.min(1), count)
}

/// A range of consecutive requests.
fn window(count: usize, wanted: usize, seed: u64) -> Range<usize> {
    let start = (unit(seed, u64::MAX - 1) * (count - wanted + 1) as f64) as usize;
    start..start + wanted
}

/// The requests in `range` of sessions in a random order, as many as needed for `target` of them. A larger target
/// keeps all that a smaller one keeps.
fn thin(trace: &Trace, range: Range<usize>, target: usize, seed: u64) -> Vec<u32> {
    let requests = &trace.requests[range.clone()];
    let turns = turns(requests);
    let mut sessions: Vec<u32> =
        (0..turns.len() as u32).filter(|&session| turns[session as usize] > 0).collect();
    // Equal draws are ordered by the session's number.
    sessions.sort_by_cached_key(|&session| {
        ((unit(seed, u64::from(session)) * (1u64 << 53) as f64) as u64, session)
    });
    let mut kept = vec![false; turns.len()];
    let mut total = 0;
    for session in sessions.into_iter().map(|session| session as usize) {
        if total >= target {
            break;
        }
        kept[session] = true;
        total += turns[session];
    }
    let stays = |index: &u32| kept[trace.requests[*index as usize].session as usize];
    range.map(|index| index as u32).filter(stays).collect()
}

/// All requests of consecutive sessions, as many as needed for `target` of them.
fn closed_window(trace: &Trace, target: usize, seed: u64) -> Vec<u32> {
    // Sessions are numbered by their first request. The last ones together may be too few.
    let turns = turns(&trace.requests);
    let mut late = 0;
    let starts = turns.iter().rposition(|turns| {
        late += turns;
        late >= target
    });
    let first = (unit(seed, u64::MAX - 2) * (starts.unwrap_or(0) + 1) as f64) as usize;
    let mut total = 0;
    let enough = |turns: &usize| {
        total += turns;
        total >= target
    };
    let last = turns[first..].iter().position(enough).map_or(turns.len(), |more| first + more);
    let starts_inside =
        |index: &u32| (first..=last).contains(&(trace.requests[*index as usize].session as usize));
    (0..trace.requests.len() as u32).filter(starts_inside).collect()
}

/// Requests of each session.
fn turns(requests: &[TraceRequest]) -> Vec<usize> {
    let mut turns = Vec::new();
    for request in requests {
        let session = request.session as usize;
        if session >= turns.len() {
            turns.resize(session + 1, 0);
        }
        turns[session] += 1;
    }
    turns
}

/// A number in `[0, 1)` for each index, the same for the same seed: SplitMix64's output function of the two.
pub(crate) fn unit(seed: u64, index: u64) -> f64 {
    let mut z = seed ^ index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for _ in 0..2 {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
    }
    (z >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::session;
    use crate::trace::Builder;

    fn trace(rows: impl IntoIterator<Item = (f64, Vec<u64>)>) -> Trace {
        let mut builder = Builder::new(512);
        for (arrival_s, ids) in rows {
            let input_tokens = ids.len() as u32 * 512;
            builder.push(TraceRequest { arrival_s, input_tokens, ..TraceRequest::default() }, &ids);
        }
        let mut trace = builder.finish();
        session::infer(&mut trace);
        trace
    }

    #[test]
    fn a_slice_starts_at_zero_and_leaves_the_window_s_end_out() {
        let whole = trace([(0.0, vec![0, 1]), (10.0, vec![0, 2]), (15.0, vec![0, 3]), (20.0, vec![0, 4])]);
        let slice = whole.slice(10.0..20.0, 1.0, 1);
        let arrivals: Vec<f64> = slice.requests.iter().map(|request| request.arrival_s).collect();
        assert_eq!(arrivals, [0.0, 5.0]);
        assert!(slice.notes[0].starts_with("kept 2 of 4 requests"), "{:?}", slice.notes);
    }

    /// `sessions` conversations of three turns each, interleaved.
    fn conversations(sessions: u64) -> Trace {
        let turn = |turn: u64, session: u64| {
            let ids = std::iter::once(0).chain((0..=turn).map(|block| 1 + session * 8 + block)).collect();
            ((turn * sessions + session) as f64, ids)
        };
        trace((0..3).flat_map(|n| (0..sessions).map(move |session| turn(n, session))))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn sessions_are_kept_or_left_out_whole(share in 0.0..1.0, seed: u64) {
            let slice = conversations(200).slice(0.0..1e9, share, seed);
            let count = slice.requests.iter().map(|request| request.session + 1).max().unwrap_or(0);
            prop_assert_eq!(slice.requests.len() as u32, 3 * count);
            let mut inferred = slice.clone();
            session::infer(&mut inferred);
            prop_assert_eq!(&slice, &inferred);
            prop_assert!((f64::from(count) - 200.0 * share).abs() < 50.0, "{} of 200 at {}", count, share);
        }

        #[test]
        fn a_larger_share_keeps_all_that_a_smaller_one_keeps(low in 0.0..1.0, more in 0.0..1.0, seed: u64) {
            let whole = conversations(50);
            let (few, many) = (whole.slice(0.0..1e9, low, seed), whole.slice(0.0..1e9, low + more, seed));
            let arrivals = |trace: &Trace| trace.requests.iter().map(|request| request.arrival_s).collect::<Vec<_>>();
            let many = arrivals(&many);
            prop_assert!(arrivals(&few).iter().all(|arrival| many.contains(arrival)));
            prop_assert_eq!(whole.slice(0.0..1e9, 1.0, seed).requests.len(), 150);
        }

        #[test]
        fn a_sample_has_about_as_many_requests_as_asked_for(share in 0.01..1.0, seed: u64) {
            let whole = conversations(60);
            for method in Method::ALL {
                let sample = sample(&whole, method, share, seed);
                let (got, asked) = (sample.requests.len(), wanted(180, share));
                prop_assert!(got >= asked && got < asked + 3, "{method}: {got} of {asked}");
                prop_assert_eq!(sample.requests[0].arrival_s, 0.0);
                prop_assert!(sample.requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s));
            }
        }

        #[test]
        fn whole_sessions_stay_whole_and_a_window_leaves_nothing_out(share in 0.01..1.0, seed: u64) {
            let whole = conversations(60);
            for method in [Method::Sessions, Method::SessionClosedWindow] {
                let turns = turns(&sample(&whole, method, share, seed).requests);
                prop_assert!(turns.iter().all(|&turns| turns == 3), "{method}: {turns:?}");
            }
            let window = sample(&whole, Method::Window, share, seed);
            prop_assert!(window.requests.windows(2).all(|pair| pair[1].arrival_s - pair[0].arrival_s == 1.0));
        }
    }

    #[test]
    fn methods_are_known_by_their_names_in_json_too() {
        for method in Method::ALL {
            assert_eq!(Method::by_name(method.name()), Some(method));
            assert_eq!(serde_json::to_value(method).unwrap(), method.name());
        }
        assert_eq!(Method::by_name("random"), None);
    }

    #[test]
    fn nothing_can_be_cut_from_nothing() {
        for method in Method::ALL {
            assert!(
                sample(&Trace { block_tokens: 16, ..Trace::default() }, method, 0.5, 1).requests.is_empty()
            );
        }
    }
}
