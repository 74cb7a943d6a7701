//! Faults between a batch and its subscribers.

use kvlane_core::rng::Rng;

use super::config::KvEventsFaults;

/// Decides for each batch whether and when it is published.
#[derive(Debug)]
pub(super) struct Distortion<T> {
    faults: KvEventsFaults,
    rng: Rng,
    /// A separate generator, since requests and batches arrive in no fixed order.
    lies: Rng,
    /// A batch that is published after the next one, once or twice.
    held: Vec<T>,
    /// Number of batches.
    batches: u64,
}

/// Fate of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fate {
    pub(super) dropped: bool,
    pub(super) duplicated: bool,
    pub(super) reordered: bool,
    /// Not available, not even by replay.
    pub(super) silenced: bool,
}

// === impl Distortion ===

impl<T: Clone> Distortion<T> {
    pub(super) fn new(faults: KvEventsFaults, seed: u64) -> Self {
        Self { faults, rng: Rng::new(seed), lies: Rng::new(!seed), held: Vec::new(), batches: 0 }
    }

    /// Whether the feed reports false blocks for the next request: if so, the mask that hides its blocks.
    pub(super) fn lie(&mut self) -> Option<u64> {
        let lies = self.lies.unit() < self.faults.lie;
        // Odd, and so never zero.
        lies.then(|| self.lies.next_u64() | 1)
    }

    /// Appends to `out` the batches published instead of `batch`. Every batch uses the same number of draws, so that
    /// one fault's share does not change which batches another one affects.
    pub(super) fn pass(&mut self, batch: T, out: &mut Vec<T>) -> Fate {
        let mut drawn = |share: f64| self.rng.unit() < share;
        let (drop, duplicate, reorder) =
            (drawn(self.faults.drop), drawn(self.faults.duplicate), drawn(self.faults.reorder));
        let silenced = self.faults.silent.is_some_and(|batches| self.batches >= batches);
        self.batches += 1;
        if silenced {
            return Fate { silenced, ..Fate::default() };
        }
        if drop {
            return Fate { dropped: true, ..Fate::default() };
        }
        let reordered = reorder && self.held.is_empty();
        let fate = Fate { duplicated: duplicate, reordered, ..Fate::default() };
        let copies = std::iter::repeat_n(batch, 1 + usize::from(duplicate));
        if reordered {
            self.held.extend(copies);
        } else {
            out.extend(copies);
            out.append(&mut self.held);
        }
        fate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(faults: &str, batches: u32) -> (Vec<u32>, Vec<Fate>) {
        let mut distortion = Distortion::new(faults.parse().expect("known faults"), 7);
        let mut out = Vec::new();
        let fates = (0..batches).map(|batch| distortion.pass(batch, &mut out)).collect();
        (out, fates)
    }

    #[test]
    fn without_faults_every_batch_goes_out_once_and_in_order() {
        assert_eq!(passed("", 50).0, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn each_fault_does_what_it_says_at_about_its_share() {
        let (out, fates) = passed("drop=0.2", 1000);
        let dropped = fates.iter().filter(|fate| fate.dropped).count();
        assert_eq!(out.len(), 1000 - dropped);
        assert!((150..250).contains(&dropped) && out.is_sorted());

        let (out, fates) = passed("duplicate=0.2", 1000);
        let duplicated = fates.iter().filter(|fate| fate.duplicated).count();
        assert_eq!(out.len(), 1000 + duplicated);
        assert!((150..250).contains(&duplicated) && out.is_sorted());

        let (out, fates) = passed("reorder=0.2", 1000);
        let late = out.windows(2).filter(|pair| pair[0] > pair[1]).count();
        assert_eq!(late, fates.iter().take(999).filter(|fate| fate.reordered).count());
        assert!((130..250).contains(&late) && out.len() >= 999);
    }

    #[test]
    fn shares_of_one_and_nothing_are_exact() {
        assert_eq!(passed("drop=1", 9).0, [0; 0]);
        assert_eq!(passed("duplicate=1", 2).0, [0, 0, 1, 1]);
        assert_eq!(passed("reorder=1", 4).0, [1, 0, 3, 2]);
        assert_eq!(passed("reorder=1,duplicate=1", 2).0, [1, 1, 0, 0]);
    }

    #[test]
    fn a_silent_feed_says_nothing_after_its_last_batch() {
        let (out, fates) = passed("silent=3", 6);
        assert_eq!(out, [0, 1, 2]);
        assert!(fates[3..].iter().all(|fate| fate.silenced));
        assert_eq!(passed("silent=0", 6).0, [0; 0]);
    }

    #[test]
    fn the_same_seed_has_the_same_faults_and_one_share_does_not_move_another() {
        let faults = "drop=0.1,duplicate=0.1,reorder=0.1";
        assert_eq!(passed(faults, 300), passed(faults, 300));
        let dropped = |faults| passed(faults, 300).1.iter().map(|fate| fate.dropped).collect::<Vec<_>>();
        assert_eq!(dropped(faults), dropped("drop=0.1"));
    }

    #[test]
    fn lies_are_a_share_of_requests_and_hide_them() {
        let lies = |share: &str| {
            let mut distortion: Distortion<u32> = Distortion::new(share.parse().expect("known"), 7);
            (0..1000).filter_map(|_| distortion.lie()).filter(|mask| *mask != 0).count()
        };
        assert_eq!((lies("lie=0"), lies("lie=1")), (0, 1000));
        assert!((150..250).contains(&lies("lie=0.2")));
    }
}
