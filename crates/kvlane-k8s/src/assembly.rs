//! From engines that pods or EndpointSlices name to workers: which of them join, drain and leave, and which of two with
//! one address it is.

use std::collections::{BTreeMap, HashMap, HashSet};

use kvlane_core::disaggregation::Role;
use kvlane_fleet::discovery::{Target, Targets};
use kvlane_fleet::worker::config::WorkerSpec;
use tokio::time::Instant;

/// The most problems that are told; the rest are counted.
const PROBLEMS_MAX: usize = 50;

/// An engine that is named.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Engine {
    /// Identifies it: its pod's UID and its port.
    pub(crate) key: String,
    /// How it is called in problems, as in `pod serving/vllm-0`.
    pub(crate) said: String,
    /// The worker that it would be.
    pub(crate) spec: WorkerSpec,
    /// Whether it takes requests.
    pub(crate) stage: Stage,
    /// When its pod was created, in seconds since 1970.
    pub(crate) created: i64,
    /// When it has ended, whether the cluster says so or not.
    pub(crate) leaves: Option<Instant>,
}

/// Where an engine is in its life, as the cluster sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It takes requests.
    Ready,
    /// It does not, and it is not being deleted.
    NotReady,
    /// It is being deleted.
    Terminating,
}

/// What follows from the engines that are named.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Assembled {
    /// All workers.
    pub(crate) targets: Targets,
    /// When the next of them leaves though nothing is reported.
    pub(crate) next: Option<Instant>,
}

/// Makes workers of engines. `joined` holds the keys of those that have been ready, which is kept from one time to the
/// next.
///
/// An engine joins when it is ready, and not before: only the cluster knows when a model is loaded or a gate is open. One
/// that has joined and is not ready any more keeps its place and takes no new requests until it is ready again: a
/// readiness probe or gate that fails may be meant, and what is known about its cache is not thrown away for a flap. The
/// gateway's own probes cannot overrule that, only add to it. But where more than half of those that joined are not ready
/// at once, it is rather the cluster that has a problem: nodes that lost touch with the API server, or readiness probes
/// that time out under load, where taking out one engine after the other would end in none. Then readiness counts for
/// nothing, and the gateway's own probes decide.
pub(crate) fn assemble(
    mut engines: Vec<Engine>,
    mut problems: Vec<String>,
    joined: &mut HashSet<String>,
    now: Instant,
) -> Assembled {
    engines.retain(|engine| engine.leaves.is_none_or(|leaves| leaves > now));
    let next = engines.iter().filter_map(|engine| engine.leaves).min();
    let mut engines = each_once(engines, &mut problems);
    joined.extend(
        engines.iter().filter(|engine| engine.stage == Stage::Ready).map(|engine| engine.key.clone()),
    );
    engines.retain(|engine| joined.contains(&engine.key));
    let keys: HashSet<&str> = engines.iter().map(|engine| engine.key.as_str()).collect();
    joined.retain(|key| keys.contains(key.as_str()));
    let trusts = is_readiness_trusted(&engines, &mut problems);
    let engines = each_address_once(engines, &mut problems);
    let mut workers: Vec<Target> = engines
        .into_iter()
        .map(|engine| Target {
            terminating: match engine.stage {
                Stage::Ready => false,
                Stage::NotReady => trusts,
                Stage::Terminating => true,
            },
            key: engine.key,
            spec: engine.spec,
        })
        .collect();
    workers.sort_by(|a, b| a.spec.url.cmp(&b.spec.url));
    bound(&mut problems);
    Assembled { targets: Targets { workers, problems }, next }
}

/// Engines that several selectors or slices name count once.
fn each_once(engines: Vec<Engine>, problems: &mut Vec<String>) -> Vec<Engine> {
    let mut places: HashMap<String, usize> = HashMap::with_capacity(engines.len());
    let mut once: Vec<Engine> = Vec::with_capacity(engines.len());
    for engine in engines {
        let Some(place) = places.get(&engine.key) else {
            places.insert(engine.key.clone(), once.len());
            once.push(engine);
            continue;
        };
        let before = &mut once[*place];
        if before.spec.role != engine.spec.role {
            problems.push(format!(
                "{}: both selectors of roles name it; it is taken for prefill and decode: make the selectors differ",
                engine.said
            ));
            before.spec.role = Role::Both;
        }
        // A slice that is late has it in an earlier stage; and of two address families, the first is as good.
        if before.stage == Stage::NotReady && engine.stage == Stage::Ready {
            let role = before.spec.role;
            *before = engine;
            before.spec.role = role;
        }
    }
    once
}

fn is_readiness_trusted(engines: &[Engine], problems: &mut Vec<String>) -> bool {
    let staying = engines.iter().filter(|engine| engine.stage != Stage::Terminating);
    let (all, not_ready) = staying
        .fold((0, 0), |(all, not), engine| (all + 1, not + usize::from(engine.stage == Stage::NotReady)));
    let trusts = not_ready * 2 <= all;
    if !trusts {
        problems.push(format!(
            "{not_ready} of {all} workers are not ready any more, which is more than half: readiness is disregarded, and \
             the gateway's own probes decide; look at the nodes and at the pods' readiness probes"
        ));
    }
    trusts
}

/// Of engines with one address, which occurs when a pod's address is used again, the newest that is not about to end is
/// the one that answers.
fn each_address_once(engines: Vec<Engine>, problems: &mut Vec<String>) -> Vec<Engine> {
    let mut by_address: BTreeMap<String, Engine> = BTreeMap::new();
    for engine in engines {
        let rank = |engine: &Engine| (engine.stage != Stage::Terminating, engine.created, engine.key.clone());
        let Some(before) = by_address.remove(&engine.spec.url) else {
            by_address.insert(engine.spec.url.clone(), engine);
            continue;
        };
        let (winner, other) = if rank(&engine) > rank(&before) { (engine, before) } else { (before, engine) };
        problems.push(format!(
            "{}: {} has the same address {} and is newer or not about to end; if both run, give them different ports or \
             nodes",
            other.said, winner.said, winner.spec.url
        ));
        by_address.insert(winner.spec.url.clone(), winner);
    }
    by_address.into_values().collect()
}

fn bound(problems: &mut Vec<String>) {
    problems.sort_unstable();
    problems.dedup();
    if problems.len() > PROBLEMS_MAX {
        let more = problems.len() - PROBLEMS_MAX;
        problems.truncate(PROBLEMS_MAX);
        problems.push(format!("and {more} more problems like these"));
    }
}
