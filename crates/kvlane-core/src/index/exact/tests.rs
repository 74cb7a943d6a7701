use proptest::prelude::*;

use super::*;
use crate::index::oracle::ExactOracle;

const ROOMY: Config = Config { memory_bytes_max: usize::MAX };

fn seed() -> ChainSeed {
    ChainSeed::new("m", None, None)
}

/// A prompt made of pieces of equal blocks: content and count.
fn prompt(pieces: &[(u64, usize)]) -> Vec<BlockHash> {
    let mut hashes = Vec::new();
    for &(block, count) in pieces {
        for _ in 0..count {
            hashes.push(seed().next(hashes.last().copied(), ContentHash(block)));
        }
    }
    hashes
}

/// The `n`-th of an engine's names of a block.
fn name(BlockHash(hash): BlockHash, n: u64) -> EngineHash {
    EngineHash(hash.rotate_left(7) ^ n)
}

fn names(chain: &[BlockHash]) -> Vec<EngineHash> {
    chain.iter().map(|&hash| name(hash, 0)).collect()
}

fn stored(chain: &[BlockHash], from: usize) -> KvEvent {
    let parent = from.checked_sub(1).map(|before| name(chain[before], 0));
    let blocks = chain[from..].iter().map(|&hash| StoredBlock { name: name(hash, 0), hash }).collect();
    KvEvent::Stored { parent, blocks, tier: Tier::Gpu }
}

fn removed(chain: &[BlockHash]) -> KvEvent {
    KvEvent::Removed { blocks: names(chain), tier: Tier::Gpu }
}

fn endpoint(slot: u16) -> EndpointId {
    EndpointId::new(slot, 0)
}

fn looked_up(index: &ExactIndex, chain: &[BlockHash]) -> BTreeMap<EndpointId, u32> {
    let mut overlap = Overlap::default();
    index.lookup(chain, &mut overlap);
    let found: Vec<_> = overlap.iter().collect();
    let sorted: BTreeMap<_, _> = found.iter().copied().collect();
    assert_eq!(found.len(), sorted.len(), "each endpoint once");
    sorted
}

/// Leading blocks that each endpoint holds in any tier, and how many of them only below the GPU.
fn in_tiers(index: &ExactIndex, chain: &[BlockHash]) -> BTreeMap<EndpointId, (u32, u32)> {
    let mut overlap = Overlap::default();
    index.lookup(chain, &mut overlap);
    overlap.iter().map(|(id, blocks)| (id, (blocks, overlap.lower_blocks(id)))).collect()
}

impl ExactIndex {
    /// Recounts everything and returns the number of runs.
    fn audit(&self) -> usize {
        let mut bytes = size_of_val(&*self.slots) + size_of_val(&*self.shards);
        for slots in self.slots.iter().filter_map(OnceLock::get) {
            bytes += size_of_val(&**slots);
            for holder in slots.iter().map(lock) {
                bytes += holder.names.bytes();
                bytes += holder.orphans.len() * ORPHAN_BYTES + holder.more_names.len() * NAME_BYTES;
                assert_eq!(holder.names.iter().count(), holder.names.len());
                assert_eq!(holder.orphans.len(), holder.waiting.len());
            }
        }
        let mut runs = 0;
        for shard in &self.shards {
            let (used, shard_bytes) = shard.read().expect("lock is not poisoned").audit();
            runs += used;
            bytes += shard_bytes;
        }
        assert_eq!(bytes, self.bytes(), "every byte is counted");
        runs
    }
}

#[test]
fn a_prefix_ends_at_the_first_block_that_is_not_held() {
    let index = ExactIndex::new(ROOMY);
    let chain = prompt(&[(1, 3000)]);
    index.apply(endpoint(0), &stored(&chain, 0));
    index.apply(endpoint(1), &stored(&chain[..2000], 0));
    let mut expected = BTreeMap::from([(endpoint(0), 3000), (endpoint(1), 2000)]);
    assert_eq!(looked_up(&index, &chain), expected);
    assert_eq!(looked_up(&index, &chain[..70]).into_values().collect::<Vec<_>>(), [70, 70]);
    for (lost, leading) in [(2500, 2500), (1024, 1024), (63, 63), (0, 0)] {
        index.apply(endpoint(0), &removed(&chain[lost..=lost]));
        expected.insert(endpoint(0), leading);
        expected.retain(|_, blocks| *blocks > 0);
        assert_eq!(looked_up(&index, &chain), expected, "without block {lost}");
    }
    for at in [0, 63, 1024, 2500] {
        index.apply(endpoint(0), &stored(&chain[..=at], at));
    }
    assert_eq!(looked_up(&index, &chain), BTreeMap::from([(endpoint(0), 3000), (endpoint(1), 2000)]));
    assert!(looked_up(&index, &prompt(&[(2, 5)])).is_empty() && looked_up(&index, &[]).is_empty());
}

#[test]
fn each_copy_is_removed_once() {
    let index = ExactIndex::new(ROOMY);
    let chain = prompt(&[(1, 2)]);
    let in_tier = |tier| KvEvent::Removed { blocks: names(&chain), tier };
    index.apply(endpoint(0), &stored(&chain, 0));
    index.apply(endpoint(0), &stored(&chain, 0));
    index.apply(endpoint(0), &KvEvent::Copied { blocks: names(&chain), tier: Tier::Cpu });
    for (tier, left) in [(Tier::Gpu, 2), (Tier::Gpu, 2), (Tier::Cpu, 0)] {
        assert_eq!(looked_up(&index, &chain).len(), 1);
        assert_eq!(index.apply(endpoint(0), &in_tier(tier)), Applied { removed: 2, ..Applied::default() });
        assert_eq!(index.blocks_of(endpoint(0)), left);
    }
    assert_eq!(index.apply(endpoint(0), &in_tier(Tier::Gpu)), Applied { unknown: 2, ..Applied::default() });
    assert_eq!(index.audit(), 0);
}

#[test]
fn a_block_without_a_copy_on_the_gpu_is_to_be_loaded() {
    let index = ExactIndex::new(ROOMY);
    let chain = prompt(&[(1, 200)]);
    let copied = |from: usize, tier| KvEvent::Copied { blocks: names(&chain[from..]), tier };
    let gone = |from: usize, tier| KvEvent::Removed { blocks: names(&chain[from..]), tier };
    let found = |blocks: usize| in_tiers(&index, &chain[..blocks]).remove(&endpoint(0));
    index.apply(endpoint(0), &stored(&chain, 0));
    index.apply(endpoint(1), &stored(&chain, 0));
    index.apply(endpoint(0), &copied(50, Tier::Cpu));
    assert_eq!(found(200), Some((200, 0)), "the copy on the GPU counts");
    index.apply(endpoint(0), &gone(100, Tier::Gpu));
    assert_eq!([found(200), found(120), found(100)], [Some((200, 100)), Some((120, 20)), Some((100, 0))]);
    assert_eq!(in_tiers(&index, &chain)[&endpoint(1)], (200, 0), "each endpoint has its own tiers");
    index.apply(endpoint(0), &stored(&chain[..160], 100));
    assert_eq!(found(200), Some((200, 40)), "loaded again");
    index.apply(endpoint(0), &removed(&chain[60..=60]));
    index.apply(endpoint(0), &KvEvent::Removed { blocks: names(&chain[60..=60]), tier: Tier::Cpu });
    assert_eq!(found(200), Some((60, 0)), "what is after a missing block is neither held nor loaded");
    index.apply(endpoint(0), &gone(0, Tier::Gpu));
    index.apply(endpoint(0), &gone(0, Tier::Cpu));
    assert_eq!(found(200), None);
    index.remove_endpoint(endpoint(1));
    assert_eq!(index.audit(), 0);
}

#[test]
fn contents_are_chained_to_the_parent_that_is_held() {
    let index = ExactIndex::new(ROOMY);
    let chain = prompt(&[(7, 200)]);
    let contents: Vec<_> = chain.iter().map(|&hash| (name(hash, 0), ContentHash(7))).collect();
    for from in (0..200usize).step_by(16) {
        let parent = from.checked_sub(1).map(|before| name(chain[before], 0));
        let blocks = &contents[from..200.min(from + 16)];
        let applied = index.store_contents(endpoint(0), seed(), parent, blocks, Tier::Gpu);
        assert_eq!(applied, Applied { stored: blocks.len() as u32, ..Applied::default() });
        index.apply(endpoint(1), &stored(&chain[..from + blocks.len()], from));
    }
    assert_eq!(looked_up(&index, &chain).into_values().collect::<Vec<_>>(), [200, 200]);
    assert_eq!(index.hash_of(endpoint(0), name(chain[9], 0)), Some(chain[9]));
    let nobody = Some(EngineHash(1));
    let applied = index.store_contents(endpoint(0), seed(), nobody, &contents[..3], Tier::Gpu);
    assert_eq!(applied, Applied { unknown: 3, ..Applied::default() });
    assert_eq!(index.hash_of(endpoint(0), EngineHash(1)), None);
}

#[test]
fn what_an_endpoint_says_that_has_a_successor_is_ignored() {
    let index = ExactIndex::new(ROOMY);
    let (old, new) = (EndpointId::new(3, 65_535), EndpointId::new(3, 0));
    let chain = prompt(&[(1, 10)]);
    index.apply(old, &stored(&chain, 0));
    index.apply(new, &stored(&chain[..4], 0));
    assert_eq!(index.apply(old, &stored(&chain, 0)), Applied::default());
    index.remove_endpoint(old);
    assert_eq!(looked_up(&index, &chain), BTreeMap::from([(new, 4)]));
    assert_eq!(
        (index.blocks_held(), index.blocks_of(old), index.hash_of(old, name(chain[0], 0))),
        (4, 0, None)
    );
    index.remove_endpoint(new);
    assert_eq!(index.audit(), 0);
}

/// Invariant: Short of memory the exact index refuses new blocks and keeps the old ones; wrong parent hashes remove
/// no other engine's blocks.
///
/// Also held by `no_lie_about_parents_makes_it_panic_or_takes_from_others`,
/// `what_an_endpoint_says_that_has_a_successor_is_ignored`.
#[test]
fn short_of_memory_it_refuses_and_keeps_what_it_has() {
    let empty = ExactIndex::new(ROOMY);
    empty.remove_endpoint(endpoint(0));
    let most = 100_000;
    for room in (0..=most).step_by(1000) {
        let memory_bytes_max = empty.bytes() + room;
        let index = ExactIndex::new(Config { memory_bytes_max });
        let (mut taken, mut refused) = (0, 0);
        for end in 0..4 {
            for slot in 0..4 {
                let chain = prompt(&[(1, 70), (end, 100)]);
                let applied = index.apply(endpoint(slot), &stored(&chain, 0));
                assert_eq!(applied.stored + applied.refused, 170);
                refused += applied.refused;
                taken = taken.max(index.bytes());
                let found = looked_up(&index, &chain).get(&endpoint(slot)).copied();
                assert_eq!(found.unwrap_or(0), applied.stored, "refused blocks are at the end");
            }
        }
        assert!(taken <= memory_bytes_max, "{taken} bytes of {memory_bytes_max}");
        assert!(room > 0 || refused > 0);
        assert!(room < most || refused == 0);
        (0..4).for_each(|slot| index.remove_endpoint(endpoint(slot)));
        assert_eq!(index.audit(), 0);
    }
}

#[test]
fn no_lie_about_parents_makes_it_panic_or_takes_from_others() {
    let index = ExactIndex::new(ROOMY);
    let chain = prompt(&[(1, 200)]);
    index.apply(endpoint(0), &stored(&chain, 0));
    let block = |at: usize| StoredBlock { name: name(chain[at], 0), hash: chain[at] };
    let lies = [
        (None, vec![block(100), block(3), block(100)]),
        (Some(name(chain[3], 0)), vec![block(5), block(5), block(4), block(0)]),
        (Some(name(chain[9], 0)), vec![block(9), block(10)]),
        (Some(name(chain[64], 0)), vec![block(63), block(128)]),
    ];
    for (parent, blocks) in lies.clone() {
        index.apply(endpoint(1), &KvEvent::Stored { parent, blocks, tier: Tier::Gpu });
    }
    assert_eq!(looked_up(&index, &chain)[&endpoint(0)], 200);
    let (copy, told) = (ExactIndex::new(ROOMY), index.export(endpoint(1)));
    told.iter().for_each(|event| _ = copy.apply(endpoint(1), event));
    assert_eq!(copy.blocks_of(endpoint(1)), index.blocks_of(endpoint(1)));
    index.remove_endpoint(endpoint(0));
    for (_, blocks) in lies {
        let blocks = blocks.into_iter().map(|block| block.name).collect();
        index.apply(endpoint(1), &KvEvent::Removed { blocks, tier: Tier::Gpu });
    }
    assert_eq!((index.blocks_held(), index.audit()), (0, 0));
}

#[derive(Clone, Debug)]
enum Op {
    Store {
        slot: u16,
        pieces: Vec<(u64, usize)>,
        from: usize,
        tier: Tier,
        name: u64,
    },
    /// Removes the blocks of a prompt from one on, last first or first first.
    Remove {
        slot: u16,
        pieces: Vec<(u64, usize)>,
        from: usize,
        tier: Tier,
        name: u64,
        tail_first: bool,
    },
    Copy {
        slot: u16,
        pieces: Vec<(u64, usize)>,
        from: usize,
        tier: Tier,
    },
    Clear {
        slot: u16,
    },
    /// The endpoint leaves, or its successor joins without that.
    Leave {
        slot: u16,
        told: bool,
    },
    /// An event of an endpoint that has left.
    Late {
        slot: u16,
        pieces: Vec<(u64, usize)>,
    },
    /// The index is replaced by one restored from its export.
    Restore,
}

fn pieces() -> impl Strategy<Value = Vec<(u64, usize)>> {
    let piece = (0u64..3, prop_oneof![4 => 1usize..5, 2 => 30usize..70, 1 => Just(64)]);
    (prop_oneof![6 => Just(0usize), 1 => 1020usize..1030], prop::collection::vec(piece, 1..4))
        .prop_map(|(long, pieces)| std::iter::once((9, long)).chain(pieces).collect())
}

fn op() -> impl Strategy<Value = Op> {
    let tier = || prop_oneof![3 => Just(Tier::Gpu), 1 => Just(Tier::Cpu)];
    let from = || prop_oneof![2 => Just(0usize), 3 => 0usize..1100];
    let name = || prop_oneof![3 => Just(0u64), 1 => Just(1)];
    let slot = || 0u16..4;
    prop_oneof![
        8 => (slot(), pieces(), from(), tier(), name())
            .prop_map(|(slot, pieces, from, tier, name)| Op::Store { slot, pieces, from, tier, name }),
        5 => (slot(), pieces(), from(), tier(), name(), any::<bool>()).prop_map(
            |(slot, pieces, from, tier, name, tail_first)| Op::Remove { slot, pieces, from, tier, name, tail_first }
        ),
        1 => (slot(), pieces(), from(), tier())
            .prop_map(|(slot, pieces, from, tier)| Op::Copy { slot, pieces, from, tier }),
        1 => slot().prop_map(|slot| Op::Clear { slot }),
        1 => (slot(), any::<bool>()).prop_map(|(slot, told)| Op::Leave { slot, told }),
        1 => (slot(), pieces()).prop_map(|(slot, pieces)| Op::Late { slot, pieces }),
        1 => Just(Op::Restore),
    ]
}

/// Index and oracle, side by side.
struct Pair {
    index: ExactIndex,
    oracle: ExactOracle,
    ids: [EndpointId; 4],
    /// Whether blocks have two names, and none is stored without its parent; otherwise blocks have one name.
    two_names: bool,
}

impl Pair {
    fn new(two_names: bool) -> Self {
        let ids = [0, 1, 2, 3].map(endpoint);
        Self { index: ExactIndex::new(ROOMY), oracle: ExactOracle::default(), ids, two_names }
    }

    fn apply(&mut self, slot: u16, event: &KvEvent) -> Result<(), TestCaseError> {
        let id = self.ids[usize::from(slot)];
        prop_assert_eq!(self.index.apply(id, event), self.oracle.apply(id, event));
        Ok(())
    }

    fn name(&self, hash: BlockHash, n: u64) -> EngineHash {
        name(hash, if self.two_names { n } else { 0 })
    }

    /// Returns the chain that the operation affected.
    fn run(&mut self, op: Op) -> Result<Vec<BlockHash>, TestCaseError> {
        match op {
            Op::Store { slot, pieces, from, tier, name } => {
                let chain = prompt(&pieces);
                let from = from % chain.len();
                let held = self.oracle.held.entry(self.ids[usize::from(slot)]).or_default();
                let known =
                    |hash| [0, 1].map(|n| self::name(hash, n)).into_iter().find(|n| held.contains_key(n));
                let parent = match from.checked_sub(1).map(|before| chain[before]) {
                    Some(hash) if self.two_names => match known(hash) {
                        Some(name) => Some(name),
                        None => return Ok(chain),
                    },
                    hash => hash.map(|hash| self::name(hash, 0)),
                };
                let blocks = chain[from..].iter();
                let blocks = blocks.map(|&hash| StoredBlock { name: self.name(hash, name), hash }).collect();
                self.apply(slot, &KvEvent::Stored { parent, blocks, tier })?;
                Ok(chain)
            }
            Op::Remove { slot, pieces, from, tier, name, tail_first } => {
                let chain = prompt(&pieces);
                let mut blocks: Vec<_> = chain.iter().map(|&hash| self.name(hash, name)).collect();
                blocks.drain(..from % chain.len());
                if tail_first {
                    blocks.reverse();
                } else {
                    blocks.truncate(3);
                }
                self.apply(slot, &KvEvent::Removed { blocks, tier })?;
                Ok(chain)
            }
            Op::Copy { slot, pieces, from, tier } => {
                let chain = prompt(&pieces);
                let blocks = names(&chain[from % chain.len()..]);
                self.apply(slot, &KvEvent::Copied { blocks, tier })?;
                Ok(chain)
            }
            Op::Clear { slot } => self.apply(slot, &KvEvent::Cleared).map(|()| Vec::new()),
            Op::Leave { slot, told } => {
                let id = self.ids[usize::from(slot)];
                self.oracle.held.remove(&id);
                if told {
                    self.index.remove_endpoint(id);
                } else {
                    self.ids[usize::from(slot)] = EndpointId::new(slot, id.generation() + 1);
                    self.apply(slot, &stored(&[], 0))?;
                }
                Ok(Vec::new())
            }
            Op::Late { slot, pieces } => {
                let chain = prompt(&pieces);
                if let Some(generation) = self.ids[usize::from(slot)].generation().checked_sub(1) {
                    let old = EndpointId::new(slot, generation);
                    for event in [&stored(&chain, 0), &removed(&chain), &KvEvent::Cleared] {
                        prop_assert_eq!(self.index.apply(old, event), Applied::default());
                    }
                }
                Ok(chain)
            }
            Op::Restore => {
                let restored = ExactIndex::new(ROOMY);
                for id in self.ids {
                    restored.remove_endpoint(id);
                    for event in self.index.export(id) {
                        prop_assert_eq!(restored.apply(id, &event).unknown, 0);
                    }
                }
                self.index = restored;
                Ok(Vec::new())
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Invariant: After any events the exact index holds what the engines hold, and knows what of it is only below the GPU.
    #[test]
    fn after_any_events_it_holds_what_the_engines_hold(
        two_names in any::<bool>(),
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let mut pair = Pair::new(two_names);
        let mut chains = vec![prompt(&[(9, 1030), (0, 70)])];
        for op in ops {
            let chain = pair.run(op)?;
            prop_assert_eq!(in_tiers(&pair.index, &chain), pair.oracle.lookup(&chain));
            for (&id, held) in &pair.oracle.held {
                prop_assert_eq!(pair.index.blocks_of(id), held.len() as u64);
            }
            if !chain.is_empty() {
                chains.push(chain);
            }
        }
        for chain in &chains {
            prop_assert_eq!(in_tiers(&pair.index, chain), pair.oracle.lookup(chain));
        }
        for (&id, held) in &pair.oracle.held {
            for (&name, &(hash, _)) in held {
                prop_assert_eq!(pair.index.hash_of(id, name), Some(hash));
            }
        }
        pair.index.audit();
        pair.ids.into_iter().for_each(|id| pair.index.remove_endpoint(id));
        prop_assert_eq!((pair.index.blocks_held(), pair.index.audit()), (0, 0), "nothing is left");
    }

    /// Whatever an engine says of names, parents and tiers, each of its blocks and copies is counted once.
    #[test]
    fn no_lie_about_names_or_tiers_makes_it_lose_count(
        lies in prop::collection::vec((0u8..3, 0u64..6, prop::collection::vec((0u64..6, 0usize..5), 1..4), any::<bool>()), 0..40),
    ) {
        let index = ExactIndex::new(ROOMY);
        let chain = prompt(&[(1, 5)]);
        for (kind, parent, blocks, is_gpu) in lies {
            let tier = if is_gpu { Tier::Gpu } else { Tier::Cpu };
            let names = blocks.iter().map(|&(name, _)| EngineHash(name)).collect();
            index.apply(endpoint(0), &match kind {
                0 => {
                    let block = |&(name, at): &(u64, usize)| StoredBlock { name: EngineHash(name), hash: chain[at] };
                    let blocks = blocks.iter().map(block).collect();
                    KvEvent::Stored { parent: parent.checked_sub(2).map(EngineHash), blocks, tier }
                }
                1 => KvEvent::Copied { blocks: names, tier },
                _ => KvEvent::Removed { blocks: names, tier },
            });
            index.audit();
        }
        index.remove_endpoint(endpoint(0));
        prop_assert_eq!((index.blocks_held(), index.audit()), (0, 0));
    }

    #[test]
    fn names_are_mixed_without_loss(number in any::<u64>()) {
        prop_assert_eq!(Key::of(EngineHash(number)).name(), EngineHash(number));
    }

    #[test]
    fn a_table_of_names_is_a_map(ops in prop::collection::vec((0u64..40, 0u32..3, any::<bool>()), 0..400)) {
        let budget = Budget { used: AtomicUsize::new(0), max: AtomicUsize::new(usize::MAX) };
        let (mut table, mut map) = (Names::default(), BTreeMap::new());
        for (number, offset, add) in ops {
            // Many keys with the same home line, the first line and the last.
            let name = Key(match number % 3 {
                0 => number + 1,
                1 => u64::MAX - number,
                _ => (number << 58) + 1,
            });
            let place = Place { offset, ..Place::from_bits(0) };
            match (table.find(name), add) {
                (None, true) => {
                    prop_assert!(table.reserve(1, &budget));
                    prop_assert!(matches!(table.insert(name, place, Copies::one(Tier::Cpu), &budget), Ok(None)));
                    map.insert(name.name(), place);
                }
                (Some(at), false) => {
                    table.remove(at);
                    table.shrink(&budget);
                    map.remove(&name.name());
                }
                _ => {}
            }
            prop_assert_eq!(table.iter().map(|(name, place, _)| (name, place)).collect::<BTreeMap<_, _>>(), map.clone());
            prop_assert!(map.keys().all(|&name| table.get(Key::of(name)).is_some()));
            prop_assert_eq!((table.len(), table.bytes()), (map.len(), budget.used.load(Ordering::Relaxed)));
        }
    }
}
