//! Where decode engines find the KV blocks of a prefill engine, for connectors whose requests must say so at once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_wire::disaggregation::Source;

/// What a change of a rank's source adds to its doubts, and the doubts from which it is not used. The same source again
/// takes one away, so one restart of an engine is no matter, and several ranks behind one address are.
const CHANGED: u8 = 2;
const DOUBTS_MAX: u8 = 3;

/// The sources of an engine's data-parallel ranks, as far as they are known.
#[derive(Debug, Default)]
pub struct KvSources(Mutex<BTreeMap<u32, Known>>);

#[derive(Debug)]
struct Known {
    source: Arc<Source<'static>>,
    /// No transfer has failed since it was learned.
    is_good: bool,
    doubts: u8,
}

// === impl KvSources ===

impl KvSources {
    /// The source of a rank.
    pub fn get(&self, rank: u32) -> Option<Arc<Source<'static>>> {
        let known = self.known();
        known.get(&rank).filter(|known| known.is_good).map(|known| Arc::clone(&known.source))
    }

    /// The source of a rank, unless it keeps changing: then other ranks answer at its address, too.
    pub fn steady(&self, rank: u32) -> Option<Arc<Source<'static>>> {
        let known = self.known();
        let steady = known.get(&rank).filter(|known| known.is_good && known.doubts < DOUBTS_MAX);
        steady.map(|known| Arc::clone(&known.source))
    }

    /// The ranks whose sources are known.
    pub fn ranks(&self) -> Vec<u32> {
        let known = self.known();
        known.iter().filter(|(_, known)| known.is_good).map(|(&rank, _)| rank).collect()
    }

    /// Notes the source of a rank, as its engine has just said it.
    pub fn learn(&self, rank: u32, source: Source<'static>) {
        let mut all = self.known();
        match all.get_mut(&rank) {
            Some(known) if *known.source == source => {
                (known.is_good, known.doubts) = (true, known.doubts.saturating_sub(1));
            }
            Some(known) => {
                let doubts = (known.doubts + CHANGED).min(2 * DOUBTS_MAX);
                *known = Known { source: Arc::new(source), is_good: true, doubts };
            }
            None => {
                all.insert(rank, Known { source: Arc::new(source), is_good: true, doubts: 0 });
            }
        }
    }

    /// A transfer has failed: the sources are to be learned again.
    pub fn doubt(&self) {
        self.known().values_mut().for_each(|known| known.is_good = false);
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<u32, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_keeps_changing_is_not_used() {
        let sources = KvSources::default();
        let learn = |id: &'static str| {
            sources.learn(0, Source { engine_id: id.into(), ..Source::default() });
            sources.steady(0).map(|source| source.engine_id.to_string())
        };
        assert_eq!(sources.steady(0), None);
        assert_eq!(learn("a").as_deref(), Some("a"));
        assert_eq!(learn("b").as_deref(), Some("b"), "restarted");
        assert_eq!(learn("b").as_deref(), Some("b"));
        assert_eq!(learn("c"), None, "several ranks");
        assert_eq!(sources.get(0).map(|source| source.engine_id.to_string()).as_deref(), Some("c"));
        assert_eq!(learn("c").as_deref(), Some("c"), "restarted");
        sources.doubt();
        assert_eq!((sources.get(0), sources.steady(0), sources.ranks()), (None, None, vec![]));
        assert_eq!(learn("c").as_deref(), Some("c"));
        assert_eq!(sources.ranks(), [0]);
    }
}
