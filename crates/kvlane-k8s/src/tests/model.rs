//! Any sequence of what happens to pods gives the workers that a plain reading of the rules gives.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::objects::{Any, Object, Pod};
use crate::state::{Now, State, WatchId};
use crate::watch::Report;

const NAMES: usize = 5;
const ADDRESSES: usize = 3;
const GRACE_S: u64 = 30;
const LEAVES_AFTER_S: u64 = GRACE_S + 10;
const START: u64 = 1_800_000_000;

/// What happens.
#[derive(Clone, Debug)]
enum Event {
    /// A pod is there with this address and state; it is created if there is none of this name.
    Set { name: usize, address: Option<usize>, ready: bool, ended: bool },
    /// A pod is asked to end.
    Delete(usize),
    /// A pod is gone.
    Remove(usize),
    /// A pod is gone, and no event tells of it.
    Lose(usize),
    /// All pods are listed again.
    List,
    /// So many seconds pass.
    Wait(u64),
}

/// A pod as it is.
#[derive(Clone, Debug)]
struct Truth {
    uid: String,
    created: u64,
    address: Option<usize>,
    ready: bool,
    ended: bool,
    deleted: Option<u64>,
}

/// A worker: its URL, its key, whether it takes no new requests.
type Row = (String, String, bool);

fn events() -> impl Strategy<Value = Vec<Event>> {
    let name = 0..NAMES;
    let set = (
        name.clone(),
        proptest::option::weighted(0.9, 0..ADDRESSES),
        any::<bool>(),
        proptest::bool::weighted(0.1),
    );
    let one = prop_oneof![
        8 => set.prop_map(|(name, address, ready, ended)| Event::Set { name, address, ready, ended }),
        2 => name.clone().prop_map(Event::Delete),
        2 => name.clone().prop_map(Event::Remove),
        1 => name.prop_map(Event::Lose),
        1 => Just(Event::List),
        2 => (1..60_u64).prop_map(Event::Wait),
    ];
    proptest::collection::vec(one, 0..60)
}

impl Truth {
    fn seen(&self, name: usize) -> Pod {
        let mut seen =
            pod(&format!("p{name}"), &self.address.map_or(String::new(), |n| format!("10.0.0.{n}")));
        set_ready(&mut seen, self.ready);
        let time = |unix: u64| {
            let at = k8s_openapi::jiff::Timestamp::from_second(i64::try_from(unix).expect("small"))
                .expect("a time");
            Value::from(at.to_string())
        };
        seen["metadata"]["uid"] = self.uid.clone().into();
        seen["metadata"]["creationTimestamp"] = time(self.created);
        if self.ended {
            seen["status"]["phase"] = "Failed".into();
        }
        if let Some(deleted) = self.deleted {
            seen["metadata"]["deletionTimestamp"] = time(deleted + GRACE_S);
            seen["metadata"]["deletionGracePeriodSeconds"] = GRACE_S.into();
        }
        serde_json::from_value(seen).expect("a pod")
    }

    fn is_named(&self, now: u64) -> bool {
        self.address.is_some()
            && !self.ended
            && self.deleted.is_none_or(|deleted| now < deleted + LEAVES_AFTER_S)
    }
}

/// The workers, by the rules. `joined` are the pods that have been ready while they were named.
fn workers(pods: &BTreeMap<usize, Truth>, joined: &mut BTreeSet<String>, now: u64) -> Vec<Row> {
    let named: Vec<&Truth> = pods.values().filter(|pod| pod.is_named(now)).collect();
    joined.retain(|uid| named.iter().any(|pod| pod.uid == *uid));
    joined.extend(named.iter().filter(|pod| pod.ready && pod.deleted.is_none()).map(|pod| pod.uid.clone()));
    let there: Vec<&Truth> = named.into_iter().filter(|pod| joined.contains(&pod.uid)).collect();
    let staying = there.iter().filter(|pod| pod.deleted.is_none()).count();
    let unready = there.iter().filter(|pod| pod.deleted.is_none() && !pod.ready).count();
    let mut rows = Vec::new();
    for address in 0..ADDRESSES {
        let here = there.iter().filter(|pod| pod.address == Some(address));
        if let Some(pod) = here.max_by_key(|pod| (pod.deleted.is_none(), pod.created, pod.uid.clone())) {
            let drains = pod.deleted.is_some() || !pod.ready && unready * 2 <= staying;
            rows.push((format!("http://10.0.0.{address}:8000"), format!("{}:8000", pod.uid), drains));
        }
    }
    rows
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_events_gives_the_workers_that_the_rules_give(events in events()) {
        let mut state = State::new(by_selector(), "serving");
        let id = WatchId { view: 0, kind: &PODS };
        let (began, mut now) = (Instant::now(), START);
        let (mut pods, mut joined, mut created) = (BTreeMap::<usize, Truth>::new(), BTreeSet::new(), 0);
        let at = |now: u64| Now { instant: began + Duration::from_secs(now - START), unix: now as f64 };
        let listed = |pods: &BTreeMap<usize, Truth>| {
            Report::Listed(pods.iter().map(|(name, pod)| pod.seen(*name).into_any()).collect::<Vec<Any>>())
        };
        state.apply(id, listed(&pods), at(now));
        for event in events {
            let report = match event {
                Event::Set { name, address, ready, ended } => {
                    created += 1;
                    let new = Truth { uid: format!("u{created}"), created, address, ready, ended, deleted: None };
                    let known = pods.entry(name).or_insert(new);
                    (known.address, known.ready, known.ended) = (address, ready, ended);
                    Some(Report::Changed(known.seen(name).into_any()))
                }
                Event::Delete(name) => pods.get_mut(&name).map(|known| {
                    known.deleted = known.deleted.or(Some(now));
                    Report::Changed(known.seen(name).into_any())
                }),
                Event::Remove(name) => pods.remove(&name).map(|_| Report::Gone(format!("p{name}"))),
                Event::Lose(name) => pods.remove(&name).map(|_| listed(&pods)),
                Event::List => Some(listed(&pods)),
                Event::Wait(seconds) => {
                    now += seconds;
                    None
                }
            };
            if let Some(report) = report {
                state.apply(id, report, at(now));
            }
            let assembled = state.targets(at(now).instant);
            let rows: Vec<Row> = assembled.targets.workers.into_iter()
                .map(|target| (target.spec.url, target.key, target.terminating))
                .collect();
            prop_assert_eq!(rows, workers(&pods, &mut joined, now));
            prop_assert!(assembled.next.is_none_or(|next| next > at(now).instant), "it would never come to rest");
        }
    }
}
