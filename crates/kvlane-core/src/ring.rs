//! Consistent-hashing ring (Karger et al., 1997): each endpoint has many points on it, and a key belongs to the first
//! point at or after its hash. An endpoint that joins or leaves moves only the keys of its own points.

use crate::endpoint::EndpointId;
use crate::table::ByEndpoint;

/// Points sorted by hash. An endpoint that has left keeps its points until its slot is reused; a walk skips them. At
/// most `points_each` times the slots of the pool.
pub(crate) struct Ring {
    points: Vec<(u64, EndpointId)>,
    points_each: u32,
    members: ByEndpoint<()>,
    /// Row of each current endpoint, by slot; kept to reuse its memory.
    rows: Vec<Option<(EndpointId, usize)>>,
}

/// Most points per endpoint: more points cost memory and hardly improve balance.
const POINTS_MAX: u32 = 4096;

// === impl Ring ===

impl Ring {
    /// An empty ring with this many points per endpoint, clamped to 1..=[`POINTS_MAX`].
    pub(crate) fn new(points_each: u32) -> Self {
        Self {
            points: Vec::new(),
            points_each: points_each.clamp(1, POINTS_MAX),
            members: ByEndpoint::default(),
            rows: Vec::new(),
        }
    }

    /// The rows of `ids` in the order of their points from a key's position onwards, once around, each as often as it
    /// has points. Adds endpoints that are not on the ring yet.
    pub(crate) fn rows(
        &mut self,
        key: u64,
        ids: impl Iterator<Item = EndpointId> + Clone,
    ) -> impl Iterator<Item = usize> + '_ {
        self.admit(ids.clone());
        self.rows.clear();
        for (row, id) in ids.enumerate() {
            if id.slot() >= self.rows.len() {
                self.rows.resize(id.slot() + 1, None);
            }
            self.rows[id.slot()] = Some((id, row));
        }
        self.walk(key).filter_map(|id| {
            let (holder, row) = (*self.rows.get(id.slot())?)?;
            (holder == id).then_some(row)
        })
    }

    fn admit(&mut self, ids: impl Iterator<Item = EndpointId>) {
        let before = self.points.len();
        for id in ids {
            if self.members.get(id).is_none() {
                self.members.get_or_insert(id, || ());
                let place = |n| mix(mix(u64::from(id.number())) ^ u64::from(n));
                self.points.extend((0..self.points_each).map(|n| (place(n), id)));
            }
        }
        if self.points.len() > before {
            self.points.retain(|(_, id)| self.members.get(*id).is_some());
            // A stable sort exploits the long run that is already sorted.
            self.points.sort();
        }
    }

    /// Owners of the points from a key's position onwards, once around.
    fn walk(&self, key: u64) -> impl Iterator<Item = EndpointId> + '_ {
        let place = mix(key);
        let first = self.points.partition_point(|(point, _)| *point < place);
        self.points[first..].iter().chain(&self.points[..first]).map(|(_, id)| *id)
    }
}

/// Spreads a number over all 64 bits, identically on every platform (SplitMix64's finaliser; Steele et al., 2014).
fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(slots: impl Iterator<Item = u16>) -> Ring {
        let mut ring = Ring::new(64);
        ring.admit(slots.map(|slot| EndpointId::new(slot, 0)));
        ring
    }

    fn owner(ring: &Ring, key: u64) -> usize {
        ring.walk(key).next().expect("a point").slot()
    }

    #[test]
    fn a_new_endpoint_takes_keys_from_all_and_no_other_endpoint_gets_any() {
        let (before, after) = (ring(0..8), ring(0..9));
        let moved: Vec<u64> = (0..9000).filter(|&key| owner(&before, key) != owner(&after, key)).collect();
        assert!(moved.iter().all(|&key| owner(&after, key) == 8));
        assert!((500..1500).contains(&moved.len()), "about a ninth of 9,000: {}", moved.len());
    }

    #[test]
    fn the_order_of_arrival_does_not_matter() {
        let together = ring(0..4);
        let mut apart = ring(2..4);
        apart.admit((0..2).map(|slot| EndpointId::new(slot, 0)));
        assert_eq!(together.points, apart.points);
    }

    #[test]
    fn a_walk_passes_every_point_once() {
        let ring = ring(0..5);
        assert_eq!(ring.walk(42).count(), 5 * 64);
        assert_eq!(Ring::new(3).walk(42).count(), 0);
    }

    #[test]
    fn who_takes_over_a_slot_takes_over_its_points() {
        let mut ring = ring(0..3);
        ring.admit([EndpointId::new(1, 1)].into_iter());
        assert_eq!(ring.points.len(), 3 * 64);
        assert!(ring.points.iter().all(|(_, id)| *id != EndpointId::new(1, 0)));
    }
}
