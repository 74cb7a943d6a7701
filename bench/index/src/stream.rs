//! The streams: what engines tell, and the prompts that are looked up.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result};
use dynamo_kv_router::LocalBlockHash;
use dynamo_kv_router::protocols::compute_seq_hash_for_block;
use kvlane_core::block::ContentHash;
use kvlane_core::event::EngineHash;
use kvlane_trace::format::{self, Options};

/// Blocks that an engine tells of at a time.
pub const BATCH: usize = 16;

/// One event: of these blocks.
pub struct Change {
    pub endpoint: u16,
    pub what: What,
    pub from: usize,
    pub to: usize,
}

pub enum What {
    Stored { parent: Option<EngineHash>, position: u32 },
    Removed,
}

#[derive(Default)]
pub struct Stream {
    pub changes: Vec<Change>,
    /// The engine's names and the contents of all events' blocks.
    pub blocks: Vec<(EngineHash, ContentHash)>,
    /// Contents of the prompts to look up.
    pub prompts: Vec<Vec<ContentHash>>,
    /// Pairs of block and holder at the end.
    pub held: usize,
}

/// One round of SplitMix64.
pub fn mix(n: u64) -> u64 {
    let z = n.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn content(id: u64) -> ContentHash {
    ContentHash(mix(id))
}

/// The engine's names of a prompt's blocks. One of Dynamo's indexes finds nothing unless they are chained as it would
/// chain them itself; to all others they mean nothing.
fn names(ids: &[u64]) -> Vec<EngineHash> {
    let local: Vec<LocalBlockHash> = ids.iter().map(|&id| LocalBlockHash(content(id).0)).collect();
    compute_seq_hash_for_block(&local).into_iter().map(EngineHash).collect()
}

// === impl Stream ===

impl Stream {
    /// 256 prompts of 8,192 blocks, groups of 16 that share the first 512, each stored by 2 of 256 endpoints, in events of
    /// `batch` blocks. Endpoint by endpoint, or, `in_turn`, an event of each at a time.
    pub fn plain(batch: usize, in_turn: bool) -> Self {
        const PROMPTS: u64 = 256;
        const BLOCKS: u64 = 8192;
        let mut stream = Self::default();
        let id = |prompt: u64, position: u64| match position {
            0..512 => (1 << 60) + (prompt / 16) * BLOCKS + position,
            _ => prompt * BLOCKS + position,
        };
        let prompts: Vec<Vec<(EngineHash, ContentHash)>> = (0..PROMPTS)
            .map(|prompt| {
                let ids: Vec<u64> = (0..BLOCKS).map(|position| id(prompt, position)).collect();
                names(&ids).into_iter().zip(ids.iter().map(|&id| content(id))).collect()
            })
            .collect();
        stream.prompts.extend(prompts.iter().map(|prompt| prompt.iter().map(|block| block.1).collect()));
        let endpoint = |prompt: usize, copy: usize| ((prompt + 101 * copy) % 256) as u16;
        let stores: Vec<(usize, u16)> = (0..prompts.len())
            .flat_map(|prompt| [0, 1].map(|copy| (prompt, endpoint(prompt, copy))))
            .collect();
        let mut tell = |(prompt, endpoint): (usize, u16), from: usize| {
            let prompt = &prompts[prompt];
            let parent = from.checked_sub(1).map(|before| prompt[before].0);
            stream.store(endpoint, parent, from as u32, &prompt[from..prompt.len().min(from + batch)]);
        };
        if in_turn {
            for from in (0..BLOCKS as usize).step_by(batch) {
                stores.iter().for_each(|&store| tell(store, from));
            }
        } else {
            for store in stores {
                (0..BLOCKS as usize).step_by(batch).for_each(|from| tell(store, from));
            }
        }
        stream
    }

    /// A trace's prompts on `endpoints` engines that keep `capacity` blocks each and lose the longest unused one first,
    /// of those that were used together the last. A session stays with its engine. `blocks_max` bounds the prompts.
    pub fn of_trace(path: &Path, endpoints: u16, capacity: usize, blocks_max: usize) -> Result<Self> {
        let trace = format::open(path, &Options::default()).with_context(|| path.display().to_string())?;
        let mut stream = Self::default();
        let mut engines: Vec<Engine> = (0..endpoints).map(|_| Engine::default()).collect();
        let (mut total, mut ids) = (0, Vec::new());
        for (at, request) in trace.requests.iter().enumerate() {
            trace.blocks(at as u32, &mut ids);
            ids.truncate((request.input_tokens / trace.block_tokens) as usize);
            ids.truncate(capacity);
            total += ids.len();
            if total > blocks_max {
                break;
            }
            let endpoint = (mix(u64::from(request.session)) % u64::from(endpoints)) as u16;
            engines[usize::from(endpoint)].serve(endpoint, at, &ids, capacity, &mut stream);
            stream.prompts.push(ids.iter().map(|&id| content(id)).collect());
        }
        stream.prompts.drain(..stream.prompts.len().saturating_sub(4000));
        stream.prompts.retain(|prompt| !prompt.is_empty());
        Ok(stream)
    }

    fn store(
        &mut self,
        endpoint: u16,
        parent: Option<EngineHash>,
        position: u32,
        blocks: &[(EngineHash, ContentHash)],
    ) {
        let from = self.blocks.len();
        self.blocks.extend_from_slice(blocks);
        let what = What::Stored { parent, position };
        self.changes.push(Change { endpoint, what, from, to: self.blocks.len() });
        self.held += blocks.len();
    }

    fn remove(&mut self, endpoint: u16, name: EngineHash) {
        self.blocks.push((name, ContentHash(0)));
        let to = self.blocks.len();
        self.changes.push(Change { endpoint, what: What::Removed, from: to - 1, to });
        self.held -= 1;
    }
}

/// What one engine holds.
#[derive(Default)]
struct Engine {
    used: HashMap<EngineHash, (usize, Reverse<usize>)>,
    order: BTreeMap<(usize, Reverse<usize>), EngineHash>,
}

// === impl Engine ===

impl Engine {
    fn serve(&mut self, endpoint: u16, now: usize, ids: &[u64], capacity: usize, stream: &mut Stream) {
        let names = names(ids);
        let blocks: Vec<_> = names.iter().copied().zip(ids.iter().map(|&id| content(id))).collect();
        let found = names.iter().take_while(|name| self.used.contains_key(name)).count();
        names[..found].iter().enumerate().for_each(|(position, &name)| self.touch(now, position, name));
        for from in (found..names.len()).step_by(BATCH) {
            let to = names.len().min(from + BATCH);
            while self.used.len() + (to - from) > capacity {
                let Some((_, name)) = self.order.pop_first() else { break };
                self.used.remove(&name);
                stream.remove(endpoint, name);
            }
            let parent = from.checked_sub(1).map(|before| names[before]);
            stream.store(endpoint, parent, from as u32, &blocks[from..to]);
            (from..to).for_each(|position| self.touch(now, position, names[position]));
        }
    }

    fn touch(&mut self, now: usize, position: usize, name: EngineHash) {
        let key = (now, Reverse(position));
        if let Some(before) = self.used.insert(name, key) {
            self.order.remove(&before);
        }
        self.order.insert(key, name);
    }
}
