//! What the other routers of a pool have learned from their own answers.
//!
//! Each router tells its own estimate of a thing and the number of observations behind it. The one that reads keeps the
//! latest of each router, and merges them when it needs them: a mean, weighted with observations, which fills up its own
//! ([`Evidence::filled_by`]). An estimate ages from the moment at which its observations were last heard to have grown,
//! and counts for half as many each [`HALF_LIFE`], whether its router has died, cannot be reached or has only had no
//! answers from there.

use std::collections::BTreeMap;

use super::{Estimate, ReplicaId, Subject};
use crate::endpoint::EndpointId;
use crate::evidence::Evidence;
use crate::rates::SAMPLES_MAX;
use crate::time::Nanos;

/// Most routers whose estimates of one thing are kept; those of others are ignored.
const ROUTERS_MAX: usize = 64;

/// Time without further observations after which an estimate counts for half as many.
const HALF_LIFE: Nanos = Nanos::from_secs(60);

/// Most observations that one router's estimate, and all together, count as.
const WEIGHT_MAX: f64 = SAMPLES_MAX as f64;

/// Weight below which an estimate is forgotten.
const WEIGHT_MIN: f64 = 0.5;

/// The estimates of other routers.
#[derive(Debug, Default)]
pub(crate) struct Estimates {
    of: BTreeMap<Subject, Vec<Heard>>,
}

/// The latest estimate of one router.
#[derive(Clone, Copy, Debug)]
struct Heard {
    replica: ReplicaId,
    number: u64,
    estimate: Estimate,
    /// When its observations were last heard to have changed.
    since: Nanos,
}

// === impl Estimates ===

impl Estimates {
    pub(crate) fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Takes over an estimate. Returns whether it was newer than what was heard.
    pub(crate) fn hear(
        &mut self,
        now: Nanos,
        (replica, number): (ReplicaId, u64),
        subject: Subject,
        estimate: Estimate,
    ) -> bool {
        let all = self.of.entry(subject).or_default();
        match all.binary_search_by_key(&replica, |heard| heard.replica) {
            Ok(at) if number > all[at].number => {
                let has_grown = all[at].estimate.observations != estimate.observations;
                let since = if has_grown { now } else { all[at].since };
                all[at] = Heard { replica, number, estimate, since };
                true
            }
            Err(at) if all.len() < ROUTERS_MAX => {
                all.insert(at, Heard { replica, number, estimate, since: now });
                true
            }
            _ => false,
        }
    }

    /// What the other routers together know of a thing.
    pub(crate) fn merged(&self, now: Nanos, subject: Subject) -> Evidence {
        let all = self.of.get(&subject).into_iter().flatten();
        let Evidence { mean, weight } =
            all.map(|heard| heard.evidence(now)).fold(Evidence::default(), Evidence::and);
        Evidence { mean, weight: weight.min(WEIGHT_MAX) }
    }

    /// Forgets estimates that hardly count any more. Returns what there were estimates of before.
    pub(crate) fn age(&mut self, now: Nanos) -> Vec<Subject> {
        let before = self.of.keys().copied().collect();
        self.of.retain(|_, all| {
            all.retain(|heard| heard.age_share(now) * WEIGHT_MAX >= WEIGHT_MIN);
            !all.is_empty()
        });
        before
    }

    /// Forgets an endpoint that has left.
    pub(crate) fn forget(&mut self, endpoint: EndpointId) {
        self.of.remove(&Subject::Prefill(Some(endpoint)));
        self.of.remove(&Subject::Step(Some(endpoint)));
    }
}

// === impl Heard ===

impl Heard {
    /// The part of its observations that still counts.
    fn age_share(&self, now: Nanos) -> f64 {
        (-(now - self.since).as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2()
    }

    fn evidence(&self, now: Nanos) -> Evidence {
        let observations = f64::from(self.estimate.observations.min(SAMPLES_MAX));
        Evidence { mean: self.estimate.value, weight: observations * self.age_share(now) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Nanos = Nanos::from_secs(1);

    fn estimate(value: f64, observations: u32) -> Estimate {
        Estimate { value, observations }
    }

    proptest! {
        /// Invariant: Routers that have heard the latest of what each other has learned reckon with the same rates and answer lengths,
        /// in whatever order news came, how often it was repeated, and which older news was lost.
        #[test]
        fn any_order_repetition_and_loss_of_older_news_give_the_same_estimates(
            told in prop::collection::vec((0u64..4, 0u16..3, 0.1f64..100.0, 0u32..500), 1..40),
            order in prop::collection::vec(any::<prop::sample::Index>(), 0..80),
        ) {
            let hear = |which: &mut dyn Iterator<Item = usize>| {
                let mut estimates = Estimates::default();
                for n in which {
                    let (replica, kind, value, observations) = told[n];
                    let from = (ReplicaId(replica), n as u64 + 1);
                    estimates.hear(SECOND, from, Subject::Answer(Some(kind)), estimate(value, observations));
                }
                estimates
            };
            let straight = hear(&mut (0..told.len()));
            // The latest of each arrives in the end, with all that came before; the order is odd.
            let crooked = hear(&mut order.iter().map(|n| n.index(told.len())).chain((0..told.len()).rev()));
            for kind in 0..3 {
                let merged = |estimates: &Estimates| estimates.merged(SECOND, Subject::Answer(Some(kind)));
                prop_assert_eq!(merged(&straight), merged(&crooked));
            }
        }
    }

    #[test]
    fn routers_count_by_their_observations_up_to_a_limit() {
        let (mut estimates, subject) = (Estimates::default(), Subject::Step(None));
        estimates.hear(SECOND, (ReplicaId(1), 1), subject, estimate(1.0, 10));
        estimates.hear(SECOND, (ReplicaId(2), 1), subject, estimate(5.0, 30));
        assert_eq!(estimates.merged(SECOND, subject), Evidence { mean: 4.0, weight: 40.0 });
        for replica in 3..1000 {
            estimates.hear(SECOND, (ReplicaId(replica), 1), subject, estimate(7.0, u32::MAX));
        }
        let all = estimates.merged(SECOND, subject);
        assert!(all.weight == WEIGHT_MAX && (6.9..7.0).contains(&all.mean), "{all:?}");
        assert_eq!(estimates.of[&subject].len(), ROUTERS_MAX);
        assert_eq!(estimates.merged(SECOND, Subject::Prefill(None)).weight, 0.0);
    }

    /// Invariant: What another router has learned counts less the longer it has observed nothing, and is forgotten.
    #[test]
    fn an_estimate_ages_from_its_last_observation_and_is_forgotten() {
        let (mut estimates, subject) = (Estimates::default(), Subject::Answer(None));
        let weight = |estimates: &Estimates, secs| {
            estimates.merged(SECOND + Nanos::from_secs(secs), subject).weight.round()
        };
        estimates.hear(SECOND, (ReplicaId(1), 1), subject, estimate(300.0, 100));
        assert_eq!([0, 60, 120].map(|secs| weight(&estimates, secs)), [100.0, 50.0, 25.0]);
        let later = SECOND + HALF_LIFE;
        estimates.hear(later, (ReplicaId(1), 2), subject, estimate(300.0, 100));
        assert_eq!(weight(&estimates, 60), 50.0, "told again, but nothing was observed");
        estimates.hear(later, (ReplicaId(1), 3), subject, estimate(300.0, 104));
        assert_eq!(weight(&estimates, 60), 104.0);
        assert_eq!(estimates.age(later + Nanos::from_secs(500)), [subject]);
        assert!(!estimates.is_empty());
        estimates.age(later + Nanos::from_secs(600));
        assert!(estimates.is_empty());
    }

    #[test]
    fn a_successor_in_the_same_slot_begins_without_estimates() {
        let mut estimates = Estimates::default();
        let [gone, next] = [0, 1].map(|generation| EndpointId::new(3, generation));
        for part in [Subject::Prefill, Subject::Step] {
            estimates.hear(SECOND, (ReplicaId(1), 1), part(Some(gone)), estimate(2.0, 9));
        }
        assert_eq!(estimates.merged(SECOND, Subject::Step(Some(next))).weight, 0.0);
        estimates.forget(gone);
        assert!(estimates.is_empty());
    }
}
