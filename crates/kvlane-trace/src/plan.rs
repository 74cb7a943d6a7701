//! Dependencies between the requests of a trace, and their due times.
//!
//! Requests without a predecessor are roots; all requests that depend on a root form one conversation. A root is due
//! at the trace's time; a request that depends on another always waits for its answer. The simulator and the replay
//! both use this plan.

use kvlane_core::time::Nanos;

use crate::trace::{Trace, TraceRequest};

/// Dependencies between the requests of a trace.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The root of each request's conversation.
    pub root: Vec<u32>,
    /// For each root, the requests of its conversation; 0 for others.
    pub size: Vec<u32>,
    /// Requests without a predecessor, in order of arrival.
    pub roots: Vec<u32>,
    first_child: Vec<u32>,
    next_sibling: Vec<u32>,
}

/// No request.
const NONE: u32 = u32::MAX;

// === impl Plan ===

impl Plan {
    /// The plan of a trace. A request whose predecessor is not before it has none.
    pub fn new(trace: &Trace) -> Self {
        let count = trace.requests.len();
        let mut plan = Self {
            root: (0..count as u32).collect(),
            size: vec![0; count],
            roots: Vec::new(),
            first_child: vec![NONE; count],
            next_sibling: vec![NONE; count],
        };
        let mut last_child = vec![NONE; count];
        for (index, request) in (0u32..).zip(&trace.requests) {
            match request.after.filter(|&after| after < index) {
                Some(after) => {
                    plan.root[index as usize] = plan.root[after as usize];
                    match last_child[after as usize] {
                        NONE => plan.first_child[after as usize] = index,
                        sibling => plan.next_sibling[sibling as usize] = index,
                    }
                    last_child[after as usize] = index;
                }
                None => plan.roots.push(index),
            }
            plan.size[plan.root[index as usize] as usize] += 1;
        }
        plan
    }

    /// The requests that wait for `request`, in order.
    pub fn children(&self, request: u32) -> impl Iterator<Item = u32> + '_ {
        let some = |request: u32| (request != NONE).then_some(request);
        std::iter::successors(some(self.first_child[request as usize]), move |&child| {
            some(self.next_sibling[child as usize])
        })
    }

    /// Due time of `request` if its predecessor ended at `ended`, in a conversation whose root was due at `began`:
    /// after its think time, or, if the trace has none, at its time relative to the root, or at `ended` if that is
    /// later.
    pub fn due(&self, trace: &Trace, request: u32, began: Nanos, ended: Nanos) -> Nanos {
        let TraceRequest { arrival_s, think_s, .. } = trace.requests[request as usize];
        match think_s {
            Some(think_s) => ended + Nanos::from_secs_f64(f64::from(think_s)),
            None => {
                let root = self.root[request as usize];
                let after_root_s = arrival_s - trace.requests[root as usize].arrival_s;
                ended.max(began + Nanos::from_secs_f64(after_root_s))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trace::Builder;

    fn request(input_tokens: u32) -> TraceRequest {
        TraceRequest { input_tokens, output_tokens: 1, ..TraceRequest::default() }
    }

    #[test]
    fn a_conversation_hangs_on_its_root() {
        let mut builder = Builder::new(1);
        for after in [None, Some(0), None, Some(0), Some(1), Some(9)] {
            builder.push(TraceRequest { after, ..request(1) }, &[]).expect("room");
        }
        let plan = Plan::new(&builder.finish());
        assert_eq!(plan.root, [0, 0, 2, 0, 0, 5]);
        assert_eq!(plan.roots, [0, 2, 5]);
        assert_eq!(plan.children(0).collect::<Vec<_>>(), [1, 3]);
        assert_eq!((plan.size[0], plan.size[2]), (4, 1));
    }

    #[test]
    fn a_turn_is_due_after_its_think_time_or_as_long_after_the_root_as_in_the_trace() {
        let mut builder = Builder::new(1);
        for (after, arrival_s, think_s) in
            [(None, 100.0, None), (Some(0), 110.0, Some(2.5)), (Some(0), 110.0, None)]
        {
            builder.push(TraceRequest { after, arrival_s, think_s, ..request(1) }, &[]).expect("room");
        }
        let trace = builder.finish();
        let plan = Plan::new(&trace);
        let due = |request, ended_s| {
            plan.due(&trace, request, Nanos::from_secs_f64(7.0), Nanos::from_secs_f64(ended_s)).as_secs_f64()
        };
        assert_eq!(due(1, 9.0), 11.5);
        assert_eq!(due(2, 9.0), 17.0);
        assert_eq!(due(2, 30.0), 30.0, "the answer before it came late");
    }

    proptest! {
        /// Every request depends on exactly one root, through its predecessor.
        #[test]
        fn a_plan_divides_a_trace_into_its_conversations(
            waits in prop::collection::vec(prop::option::of(0u32..60), 0..50),
        ) {
            let mut builder = Builder::new(1);
            for &after in &waits {
                builder.push(TraceRequest { after, ..request(1) }, &[]).expect("room");
            }
            let trace = builder.finish();
            let plan = Plan::new(&trace);
            let count = trace.requests.len() as u32;
            let mut reached = vec![0; count as usize];
            for &root in &plan.roots {
                let (mut found, mut at) = (vec![root], 0);
                while let Some(&request) = found.get(at) {
                    prop_assert!(plan.children(request).is_sorted());
                    found.extend(plan.children(request));
                    at += 1;
                }
                prop_assert_eq!(plan.size[root as usize] as usize, found.len());
                for request in found {
                    reached[request as usize] += 1;
                    prop_assert_eq!(plan.root[request as usize], root);
                }
            }
            prop_assert!(reached.iter().all(|&times| times == 1));
            prop_assert!(plan.roots.is_sorted());
            prop_assert_eq!(plan.size.iter().sum::<u32>(), count);
            for (index, &after) in (0..).zip(&waits) {
                match after.filter(|&after| after < index) {
                    Some(after) => prop_assert!(plan.children(after).any(|child| child == index)),
                    None => prop_assert!(plan.roots.contains(&index)),
                }
            }
        }
    }
}
