//! KV events: messages of engines, and single events for engines with formats of their own.

use std::sync::{Arc, PoisonError};

use kvlane_core::block::{ChainSeed, ContentHash};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::{EngineHash, KvEvent, StoredBlock, Tier};
use kvlane_wire::kv::{Batch, Linker, decode};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{Applied, Router};
use crate::prompt;

/// Decodes the messages of one endpoint. Its memory is reused.
#[derive(Default)]
pub(super) struct Decoder {
    batch: Batch,
    linker: Linker,
}

/// An engine's name of a block: a 64-bit integer of either sign, or a digest, of which the last eight bytes count.
pub(super) struct Name(EngineHash);

impl<'py> FromPyObject<'_, 'py> for Name {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(name) = value.extract::<u64>() {
            return Ok(Self(EngineHash(name)));
        }
        if let Ok(name) = value.extract::<i64>() {
            return Ok(Self(EngineHash(name as u64)));
        }
        let digest = value.extract::<&[u8]>().ok().and_then(|digest| digest.last_chunk().copied());
        digest.map(|last| Self(EngineHash(u64::from_be_bytes(last)))).ok_or_else(|| {
            PyValueError::new_err("a block's name must be a 64-bit integer or a digest of at least 8 bytes")
        })
    }
}

/// Blocks that an engine has stored.
pub(super) struct Blocks<'a, 'py> {
    pub(super) names: Vec<Name>,
    pub(super) tokens: &'a Bound<'py, PyAny>,
    /// The block before them.
    pub(super) parent: Option<Name>,
    pub(super) seed: ChainSeed,
    pub(super) tier: &'a str,
}

impl Router {
    /// KV events are used only by a router that was made for them.
    pub(super) fn check_events(&self) -> PyResult<()> {
        match self.core.exact() {
            Some(_) => Ok(()),
            None => Err(PyValueError::new_err(
                "this router uses no KV events: make it with Router(kv_events=True)",
            )),
        }
    }

    pub(super) fn apply_payload(&self, py: Python<'_>, endpoint: &str, payload: &[u8]) -> PyResult<Applied> {
        self.check_events()?;
        let id = self.id(endpoint)?;
        let decoder = Arc::clone(self.feeds().entry(id).or_default());
        let applied = py.detach(|| {
            let mut decoder = decoder.lock().unwrap_or_else(PoisonError::into_inner);
            self.decode_and_apply(id, payload, &mut decoder)
        });
        applied.map_err(|error| PyValueError::new_err(format!("endpoint {endpoint}: {error}")))
    }

    pub(super) fn apply_stored(
        &self,
        py: Python<'_>,
        endpoint: &str,
        stored: Blocks<'_, '_>,
    ) -> PyResult<Applied> {
        self.check_events()?;
        let Blocks { names, tokens, parent, seed, tier } = stored;
        let (id, tier) = (self.id(endpoint)?, tier_of(tier)?);
        let (ids, size) = (prompt::ids(tokens)?, self.core.block_tokens() as usize);
        if ids.len() != names.len() * size {
            let (blocks, tokens) = (names.len(), ids.len());
            return Err(PyValueError::new_err(format!(
                "{tokens} tokens for {blocks} blocks of {size} tokens"
            )));
        }
        let parent = parent.map(|Name(name)| name);
        let before = match parent.map(|name| self.core.hash_of(id, name)) {
            Some(None) => {
                let unknown = u32::try_from(names.len()).unwrap_or(u32::MAX);
                return Ok(Applied { unknown, ..Applied::default() });
            }
            known => known.flatten(),
        };
        let blocks = names.iter().zip(ids.chunks_exact(size)).scan(before, |before, (name, tokens)| {
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            let hash = seed.next(*before, ContentHash::of(&bytes));
            *before = Some(hash);
            Some(StoredBlock { name: name.0, hash })
        });
        let event = KvEvent::Stored { parent, blocks: blocks.collect(), tier };
        Ok(self.apply(py, id, &event))
    }

    pub(super) fn apply_removed(
        &self,
        py: Python<'_>,
        endpoint: &str,
        names: Vec<Name>,
        tier: &str,
    ) -> PyResult<Applied> {
        self.check_events()?;
        let (id, tier) = (self.id(endpoint)?, tier_of(tier)?);
        let blocks = names.into_iter().map(|Name(name)| name).collect();
        Ok(self.apply(py, id, &KvEvent::Removed { blocks, tier }))
    }

    pub(super) fn apply(&self, py: Python<'_>, endpoint: EndpointId, event: &KvEvent) -> Applied {
        let mut applied = Applied::default();
        applied.add(py.detach(|| self.core.apply(endpoint, event)));
        applied
    }

    fn decode_and_apply(
        &self,
        endpoint: EndpointId,
        payload: &[u8],
        decoder: &mut Decoder,
    ) -> Result<Applied, String> {
        let Decoder { batch, linker } = decoder;
        decode(payload, batch).map_err(|error| error.to_string())?;
        let (mut applied, size) = (Applied::default(), self.core.block_tokens());
        let linked = linker.link(
            batch,
            size,
            |lora, salt| self.seed_of(lora, salt),
            |name| self.core.hash_of(endpoint, name),
            |event| applied.add(self.core.apply(endpoint, event)),
        );
        let ignored = batch.ignored;
        applied.ignored = [ignored.unknown_events, ignored.other_groups, ignored.lookahead, ignored.not_ids]
            .into_iter()
            .fold(linked.other_groups.saturating_add(linked.other_tiers), u32::saturating_add);
        applied.unknown = applied.unknown.saturating_add(linked.unknown_parent_blocks);
        batch.clear();
        match linked.other_block_size {
            Some(other) => Err(format!(
                "its blocks have {other} tokens, the router's {size}: make it with Router(block_tokens={other})"
            )),
            None => Ok(applied),
        }
    }
}

fn tier_of(tier: &str) -> PyResult<Tier> {
    match tier {
        "gpu" => Ok(Tier::Gpu),
        "cpu" => Ok(Tier::Cpu),
        _ => Err(PyValueError::new_err(format!("tier {tier}: must be gpu or cpu"))),
    }
}
