//! What a scheduler has learned from its own answers, for the routers of other replicas, and what they have learned.

use super::Scheduler;
use crate::endpoint::EndpointId;
use crate::forecast::KINDS;
use crate::rates::Part;
use crate::replica::{Estimate, Estimates, ReplicaId, Subject};
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// An estimate that has not changed is told again once in so many times, in case that it was lost.
const REPEATED_EVERY: usize = 8;

/// How often the estimates of others are weighed anew by their age.
const AGED_EVERY: Nanos = Nanos::from_secs(10);

/// What was told, and what was heard.
#[derive(Debug, Default)]
pub(super) struct Learned {
    times_told: usize,
    /// A router was heard for the first time: it has heard nothing.
    tells_anew: bool,
    endpoints: ByEndpoint<[Estimate; 2]>,
    pool: [Estimate; 2],
    answers: Vec<Estimate>,
    others: Estimates,
    age_at: Nanos,
}

// === impl Learned ===

impl Learned {
    /// When the estimates of others are to be weighed anew.
    pub(super) fn is_due(&self, now: Nanos) -> bool {
        !self.others.is_empty() && self.age_at <= now
    }

    pub(super) fn tell_anew(&mut self) {
        self.tells_anew = true;
    }

    pub(super) fn forget(&mut self, endpoint: EndpointId) {
        self.others.forget(endpoint);
    }
}

impl Scheduler {
    /// What has been learned, where others should hear of it.
    pub(super) fn tell_learned(&mut self) -> Vec<(Subject, Estimate)> {
        let Self { learned, learning, pool, .. } = self;
        learned.times_told += 1;
        let anew = std::mem::take(&mut learned.tells_anew);
        let (mut news, mut nth) = (Vec::new(), learned.times_told);
        let mut tell = |told: &mut Estimate, subject, value, observations| {
            let own = Estimate { value, observations };
            nth += 1;
            let is_due = observations > 0 && (anew || nth % REPEATED_EVERY == 0);
            if is_due || own.is_news(told) {
                *told = own;
                news.push((subject, own));
            }
        };
        let base = learning.base();
        let mut tell_rates = |told: &mut [Estimate; 2], endpoint, of: &dyn Fn(Part) -> (f64, u32)| {
            let [prefill, step] = told;
            for (told, part, subject) in [
                (prefill, Part::Prefill, Subject::Prefill(endpoint)),
                (step, Part::Decode, Subject::Step(endpoint)),
            ] {
                let (seconds, observations) = of(part);
                tell(told, subject, seconds, observations);
            }
        };
        let fit = learning.fit();
        tell_rates(&mut learned.pool, None, &|part| fit.told(base, part));
        for endpoint in pool.endpoints() {
            let told = learned.endpoints.get_or_insert(endpoint.id, Default::default);
            tell_rates(told, Some(endpoint.id), &|part| endpoint.pace.told(fit, base, part));
        }
        learned.answers.resize(1 + usize::from(KINDS), Estimate::default());
        for (told, (kind, tokens, answers)) in learned.answers.iter_mut().zip(learning.forecast.told()) {
            tell(told, Subject::Answer(kind), tokens, answers);
        }
        news
    }

    /// Takes over what another router has learned.
    pub(super) fn hear_learned(
        &mut self,
        now: Nanos,
        (replica, number): (ReplicaId, u64),
        told: &[(Subject, Estimate)],
    ) {
        for &(subject, estimate) in told {
            let is_known = match subject {
                Subject::Answer(kind) => kind.is_none_or(|kind| kind < KINDS),
                _ => subject.endpoint().is_none_or(|endpoint| self.pool.get(*endpoint).is_some()),
            };
            let is_sane = estimate.value.is_finite() && estimate.value >= 0.0;
            if is_known && is_sane && self.learned.others.hear(now, (replica, number), subject, estimate) {
                self.merge_learned(now, subject);
            }
        }
    }

    /// Weighs the estimates of others anew: they have aged, or what they are compared with has changed.
    pub(super) fn review_learned(&mut self, now: Nanos) {
        self.learned.age_at = now + AGED_EVERY;
        for subject in self.learned.others.age(now) {
            self.merge_learned(now, subject);
        }
    }

    fn merge_learned(&mut self, now: Nanos, subject: Subject) {
        let heard = self.learned.others.merged(now, subject);
        let (part, endpoint) = match subject {
            Subject::Answer(kind) => return self.learning.forecast.hear(kind, heard),
            Subject::Prefill(endpoint) => (Part::Prefill, endpoint),
            Subject::Step(endpoint) => (Part::Decode, endpoint),
        };
        match endpoint {
            None => self.learning.hear(part, heard.per(self.learning.base().seconds(part))),
            Some(endpoint) => {
                if let Some(endpoint) = self.pool.get_mut(endpoint) {
                    endpoint.pace.hear(part, heard.per(self.learning.pool_rates().seconds(part)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Input;
    use super::super::tests::{World, config, endpoint, placed};
    use super::*;
    use crate::replica::News;
    use crate::request::RequestId;

    const ANSWER_TOKENS: u32 = 700;

    fn world() -> World {
        World::new(config("round_robin"), 2)
    }

    /// So many answers, to prompts that take so many milliseconds at each of two endpoints.
    fn answers(world: &mut World, ids: std::ops::Range<u64>, prefill_ms: [u64; 2]) {
        for id in ids {
            let at = placed(&world.arrive(id, 4096, &[])).expect("placed");
            world.now += Nanos::from_millis(prefill_ms[at.slot()]);
            let request = RequestId(id);
            world.step(Input::FirstToken { request });
            world.step(Input::Wrote { request, output_tokens: ANSWER_TOKENS });
            world.step(Input::Finished { request });
        }
    }

    fn told(world: &mut World) -> Vec<(Subject, Estimate)> {
        let mut news = News::default();
        world.scheduler.tell(true, &mut news);
        news.learned
    }

    fn hear(world: &mut World, replica: u64, number: u64, learned: Vec<(Subject, Estimate)>) {
        let (replica, shares, services) = (ReplicaId(replica), Vec::new(), Vec::new());
        world.step(Input::Heard { replica, number, shares, services, learned, turns: Vec::new() });
    }

    fn prefill_s(world: &World, slot: u16) -> f64 {
        let endpoint = world.scheduler.pool().get(endpoint(slot)).expect("here");
        world.scheduler.rates(endpoint).prefill_s(4096, 0)
    }

    /// Invariant: A router without answers of its own reckons with the rates and answer lengths that others have learned, and
    /// tells none of them on.
    #[test]
    fn a_router_without_answers_reckons_with_what_others_have_learned_and_does_not_tell_it_on() {
        let (mut old, mut new) = (world(), world());
        answers(&mut old, 0..100, [400, 100]);
        let before = prefill_s(&new, 0);
        hear(&mut new, 1, 1, told(&mut old));
        for slot in 0..2 {
            let ratio = prefill_s(&new, slot) / prefill_s(&old, slot);
            assert!((0.99..1.01).contains(&ratio), "{ratio} at {slot}");
        }
        assert!(prefill_s(&new, 0) > 3.0 * prefill_s(&new, 1) && prefill_s(&new, 0) != before);
        let usual = [&new, &old].map(|world| world.scheduler.usual_output_tokens());
        assert!(usual[0] > 0.95 * usual[1] && usual[0] > 600.0, "{usual:?}");
        assert!(new.scheduler.learning.is_learned());
        assert_eq!(told(&mut new), []);
    }

    #[test]
    fn own_answers_count_more_the_more_there_are_and_alone_when_those_of_others_are_old() {
        let (mut old, mut own) = (world(), world());
        answers(&mut old, 0..400, [400, 400]);
        hear(&mut own, 1, 1, told(&mut old));
        let heard_s = prefill_s(&own, 0);
        answers(&mut own, 0..20, [100, 100]);
        let few_s = prefill_s(&own, 0);
        answers(&mut own, 20..500, [100, 100]);
        let many_s = prefill_s(&own, 0);
        assert!(heard_s > few_s && few_s > 1.2 * many_s, "{heard_s} {few_s} {many_s}");
        own.now += Nanos::from_secs(1000);
        own.step(Input::Tick);
        let mut alone = world();
        answers(&mut alone, 0..500, [100, 100]);
        let (left_s, alone_s) = (prefill_s(&own, 0), prefill_s(&alone, 0));
        assert!(left_s < 1.05 * alone_s && own.scheduler.learned.others.is_empty(), "{left_s} {alone_s}");
    }

    #[test]
    fn what_has_not_changed_is_told_seldom_and_everything_to_a_router_that_was_not_heard_before() {
        let mut world = world();
        assert_eq!(told(&mut world), [], "nothing is learned yet");
        answers(&mut world, 0..100, [400, 100]);
        let all = told(&mut world);
        // The pool, two endpoints, all answers and those of this kind; no steps were timed.
        assert_eq!(all.len(), 5, "{all:?}");
        let again: Vec<_> = (0..REPEATED_EVERY).flat_map(|_| told(&mut world)).collect();
        assert_eq!(again.len(), all.len(), "each once");
        hear(&mut world, 7, 1, Vec::new());
        assert_eq!(told(&mut world), all);
        hear(&mut world, 7, 2, Vec::new());
        assert!(told(&mut world).len() < all.len());
        let mut news = News::default();
        world.scheduler.tell(false, &mut news);
        assert_eq!(news.learned, [], "only with all news");
    }

    #[test]
    fn what_is_told_of_an_unknown_endpoint_or_kind_or_is_no_number_is_ignored() {
        let mut world = world();
        let estimate = |value| Estimate { value, observations: 100 };
        let gone = Some(endpoint(9));
        let odd = [
            (Subject::Prefill(gone), estimate(1.0)),
            (Subject::Step(gone), estimate(1.0)),
            (Subject::Answer(Some(KINDS)), estimate(1.0)),
            (Subject::Answer(None), estimate(f64::NAN)),
            (Subject::Step(None), estimate(-1.0)),
        ];
        hear(&mut world, 1, 1, odd.to_vec());
        assert!(world.scheduler.learned.others.is_empty());
        hear(&mut world, 1, 2, vec![(Subject::Step(Some(endpoint(1))), estimate(1.0))]);
        world.step(Input::Left { endpoint: endpoint(1) });
        assert!(world.scheduler.learned.others.is_empty());
    }
}
