//! The requests of a load and a seed.
//!
//! Load changes the start times of conversations, or their number, and nothing else: the same seed has the same
//! conversations in the same order at every load, each with the trace's pace.

use std::path::Path;

use kvlane_core::rng::Rng;
use kvlane_trace::format::TraceError;
use kvlane_trace::generate::{self, Arrivals, WorkloadError};
use kvlane_trace::plan::Plan;
use kvlane_trace::trace::Trace;

use super::{Loads, Workload};

/// Distance in trace seconds of conversations that begin together, so that their order is deterministic.
const RAMP_S: f64 = 0.05;

/// Source of requests.
#[derive(Debug)]
pub enum Source {
    /// A trace, and its dependencies.
    Trace(Box<(Trace, Plan)>),
    /// A generated workload.
    Generated(Box<generate::Workload>),
}

/// Errors of the source.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The trace cannot be read.
    #[error("workload.trace {path}: {why}")]
    Trace {
        /// Its path.
        path: String,
        /// The cause.
        why: TraceError,
    },
    /// The workload cannot be generated.
    #[error("workload.generate: {0}")]
    Generate(#[from] WorkloadError),
    /// The trace is too short.
    #[error("workload: {0}")]
    Short(String),
}

// === impl Source ===

impl Source {
    /// The source of a matrix: `open` reads its trace, if it has one.
    ///
    /// # Errors
    /// If a trace cannot be read, or has no request.
    pub fn read(
        workload: &Workload,
        open: impl FnOnce(&Path) -> Result<Trace, TraceError>,
    ) -> Result<Self, SourceError> {
        if let Some(generate) = &workload.generate {
            return Ok(Self::Generated(Box::new(generate.clone())));
        }
        let path = workload.trace.as_deref().unwrap_or(Path::new(""));
        let trace = open(path).map_err(|why| SourceError::Trace { path: path.display().to_string(), why })?;
        if trace.requests.is_empty() {
            return Err(SourceError::Short(format!("{} has no request", path.display())));
        }
        let plan = Plan::new(&trace);
        Ok(Self::Trace(Box::new((trace, plan))))
    }

    /// Whether it is generated.
    pub fn is_generated(&self) -> bool {
        matches!(self, Self::Generated(_))
    }

    /// The requests of a load under a seed, with times in wall-clock seconds: the trace's divided by the speed.
    ///
    /// # Errors
    /// If the trace has too few conversations, the window is beyond its end, or settings are invalid.
    pub fn requests(
        &self,
        workload: &Workload,
        loads: &Loads,
        load: f64,
        seed: u32,
    ) -> Result<Trace, SourceError> {
        let mut trace = match (self, loads) {
            (Self::Trace(read), Loads::Rate(_)) => window(&read.0, &read.1, workload, load, seed)?,
            (Self::Trace(read), Loads::Sessions(_)) => {
                let (trace, plan) = &**read;
                let mut roots = plan.roots.clone();
                let count = load as usize;
                if roots.len() < count {
                    let why = format!("the trace has only {} conversations, {count} are needed", roots.len());
                    return Err(SourceError::Short(why));
                }
                let mut rng = Rng::new(seed.into());
                for place in 0..count {
                    let other = place + rng.below(roots.len() - place);
                    roots.swap(place, other);
                }
                together(trace, plan, &roots[..count])
            }
            (Self::Generated(made), _) => {
                let arrivals = match loads {
                    Loads::Rate(_) => {
                        Arrivals::Poisson { rate: load, count: None, seconds: workload.window_s }
                    }
                    Loads::Sessions(_) => Arrivals::Closed { count: load as u32 },
                };
                let mut made = (**made).clone();
                made.set_arrivals(arrivals);
                let trace = generate::generate(&made, seed.into())?;
                match loads {
                    Loads::Rate(_) => trace,
                    Loads::Sessions(_) => {
                        let plan = Plan::new(&trace);
                        together(&trace, &plan, &plan.roots)
                    }
                }
            }
        };
        if trace.requests.is_empty() {
            return Err(SourceError::Short(format!("no request at load {load} under seed {seed}")));
        }
        for request in &mut trace.requests {
            request.arrival_s /= workload.speed;
            request.think_s = request.think_s.map(|think_s| (f64::from(think_s) / workload.speed) as f32);
        }
        Ok(trace)
    }
}

/// The requests of a trace's window, from a position that is given or drawn from the seed. A conversation that
/// started before continues as one that starts there; requests after the window are left out.
fn window(
    trace: &Trace,
    plan: &Plan,
    workload: &Workload,
    load: f64,
    seed: u32,
) -> Result<Trace, SourceError> {
    let (window_s, start_s) = match (workload.window_s, workload.start_s) {
        (Some(window_s), Some(start_s)) => (window_s, start_s),
        (Some(window_s), None) => {
            let room_s = trace.span_s() - window_s * load;
            if room_s < 0.0 {
                return Err(SourceError::Short(format!(
                    "a window of {window_s} s at {load} times the trace's rate needs {:.0} s of it; it has {:.0} s",
                    window_s * load,
                    trace.span_s()
                )));
            }
            (window_s, Rng::new(seed.into()).unit() * room_s)
        }
        (None, _) => (f64::INFINITY, 0.0),
    };
    // The end of the whole trace is part of it.
    let end_s = start_s + window_s * load;
    let within = |arrival_s: f64| start_s <= arrival_s && arrival_s < end_s;
    let mut first = vec![None; trace.requests.len()];
    let mut due_s = vec![0.0; trace.requests.len()];
    let mut kept = Vec::new();
    for (index, request) in trace.requests.iter().enumerate() {
        if !within(request.arrival_s) {
            continue;
        }
        let began_s = *first[plan.root[index] as usize].get_or_insert(request.arrival_s);
        due_s[index] = (began_s - start_s) / load + (request.arrival_s - began_s);
        if due_s[index] < window_s {
            kept.push(index as u32);
        }
    }
    Ok(sent_at(trace, kept, &due_s))
}

/// Conversations that begin together, in this order.
fn together(trace: &Trace, plan: &Plan, roots: &[u32]) -> Trace {
    let mut begin_s = vec![None; trace.requests.len()];
    for (place, &root) in roots.iter().enumerate() {
        begin_s[root as usize] = Some(place as f64 * RAMP_S);
    }
    let mut due_s = vec![0.0; trace.requests.len()];
    let mut kept = Vec::new();
    for (index, request) in trace.requests.iter().enumerate() {
        let root = plan.root[index] as usize;
        if let Some(begin_s) = begin_s[root] {
            due_s[index] = begin_s + (request.arrival_s - trace.requests[root].arrival_s);
            kept.push(index as u32);
        }
    }
    sent_at(trace, kept, &due_s)
}

/// The requests of `kept`, at other times, in their order.
fn sent_at(trace: &Trace, mut kept: Vec<u32>, due_s: &[f64]) -> Trace {
    kept.sort_by(|&a, &b| due_s[a as usize].total_cmp(&due_s[b as usize]));
    let mut selected = trace.select(kept.iter().copied());
    for (request, &index) in selected.requests.iter_mut().zip(&kept) {
        request.arrival_s = due_s[index as usize];
    }
    selected
}

#[cfg(test)]
mod tests {
    use kvlane_trace::trace::{Builder, TraceRequest};

    use super::*;

    /// Three conversations of two turns, 10 s apart; their second turns 4 s after the first.
    fn source() -> Source {
        let mut builder = Builder::new(16);
        let mut requests = Vec::new();
        for session in 0..3u32 {
            let arrival_s = f64::from(session) * 10.0;
            requests.push((arrival_s, session, None));
            requests.push((arrival_s + 4.0, session, Some(session * 2)));
        }
        for (arrival_s, session, after) in requests {
            let think_s = after.map(|_| 2.0);
            let request = TraceRequest {
                arrival_s,
                session,
                after,
                think_s,
                input_tokens: 20 + session,
                output_tokens: 1,
                ..TraceRequest::default()
            };
            builder.push(request, &[]).expect("room");
        }
        let trace = builder.finish();
        let plan = Plan::new(&trace);
        Source::Trace(Box::new((trace, plan)))
    }

    fn workload(window_s: Option<f64>, start_s: Option<f64>, speed: f64) -> Workload {
        Workload { trace: None, generate: None, window_s, start_s, speed }
    }

    fn times(trace: &Trace) -> Vec<(f64, u32)> {
        trace.requests.iter().map(|request| (request.arrival_s, request.input_tokens - 20)).collect()
    }

    const RATE: fn() -> Loads = || Loads::Rate(vec![]);
    const SESSIONS: fn() -> Loads = || Loads::Sessions(vec![]);

    #[test]
    fn load_brings_conversations_nearer_and_leaves_their_pace() {
        let trace = source().requests(&workload(None, None, 1.0), &RATE(), 2.0, 1).unwrap();
        assert_eq!(times(&trace), [(0.0, 0), (4.0, 0), (5.0, 1), (9.0, 1), (10.0, 2), (14.0, 2)]);
        assert_eq!(trace.requests[3].after, Some(2));
    }

    #[test]
    fn speed_divides_every_time() {
        let trace = source().requests(&workload(None, None, 10.0), &RATE(), 1.0, 1).unwrap();
        assert_eq!(trace.requests[3].arrival_s, 1.4);
        assert_eq!(trace.requests[3].think_s, Some(0.2));
    }

    #[test]
    fn a_window_begins_where_it_is_said_or_where_the_seed_draws() {
        let at = |start_s, load| source().requests(&workload(Some(8.0), start_s, 1.0), &RATE(), load, 1);
        // The first conversation goes on at once; the second begins after 8 s of the trace.
        assert_eq!(times(&at(Some(2.0), 1.0).unwrap()), [(2.0, 0)]);
        assert_eq!(
            times(&at(Some(2.0), 2.0).unwrap()),
            [(1.0, 0), (4.0, 1)],
            "its second turn comes after the end"
        );
        let drawn = |seed| source().requests(&workload(Some(9.9), None, 1.0), &RATE(), 1.0, seed).unwrap();
        assert_eq!(times(&drawn(1)), times(&drawn(1)));
        assert!((2..20).any(|seed| times(&drawn(seed)) != times(&drawn(1))));
        let said = at(None, 4.0).unwrap_err().to_string();
        assert!(said.contains("needs 32 s of it; it has 24 s"), "{said}");
    }

    #[test]
    fn conversations_at_a_time_begin_together() {
        let trace = source().requests(&workload(None, None, 1.0), &SESSIONS(), 2.0, 3).unwrap();
        assert_eq!(trace.requests.len(), 4);
        assert_eq!((trace.requests[0].arrival_s, trace.requests[1].arrival_s), (0.0, RAMP_S));
        assert_eq!((trace.requests[2].after, trace.requests[3].after), (Some(0), Some(1)));
        assert!(source().requests(&workload(None, None, 1.0), &SESSIONS(), 4.0, 3).is_err());
        let all = source().requests(&workload(None, None, 1.0), &SESSIONS(), 3.0, 3).unwrap();
        assert_eq!(&times(&all)[..2], &times(&trace)[..2], "more conversations begin with those of fewer");
    }

    #[test]
    fn what_is_made_has_the_rate_or_the_number_that_the_load_says() {
        let made = Source::Generated(Box::new(generate::Workload::by_kind("chat").unwrap()));
        let requests =
            |loads: &Loads, load| made.requests(&workload(Some(100.0), None, 1.0), loads, load, 1).unwrap();
        let first = |trace: &Trace| trace.requests.iter().filter(|request| request.after.is_none()).count();
        assert!((30..80).contains(&first(&requests(&RATE(), 0.5))));
        assert_eq!(first(&requests(&SESSIONS(), 7.0)), 7);
    }
}
