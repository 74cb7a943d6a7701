//! Columns: the load of a pool's endpoints with one array per fact, for decisions among thousands.
//!
//! A [`Candidate`](crate::policy::Candidate) is complete and exact, and takes a few cache lines of an endpoint's state to
//! build. Columns hold what a price depends on in single precision, one value per slot, so that all endpoints can be
//! priced in one pass over a few hundred kilobytes. They are for choosing the endpoints that are looked at, never for
//! the decision itself.
//!
//! They hold the endpoints that accept requests without further conditions. Endpoints that accept some requests (in
//! back-off, or recently recovered) are listed by slot.

use crate::cache_accuracy::{Knowledge, Prediction};
use crate::endpoint::{Endpoint, EndpointId};
use crate::load::InFlight;
use crate::rates::{COMPUTED_MAX, Rates};

/// Slots of a chunk.
pub(crate) const CHUNK: usize = 64;

/// One value per slot of a chunk.
pub(crate) type Column = [f32; CHUNK];

/// The facts of [`CHUNK`] slots. A slot without an endpoint that accepts requests has infinite `prefill_tokens`.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    /// Queued prefill: tokens and pairs.
    pub(crate) prefill_tokens: Column,
    pub(crate) prefill_pairs: Column,
    /// Tokens to load from below the GPU for the prompts that wait there.
    pub(crate) queued_lower_tokens: Column,
    /// Since when the first of the prompts is computed ([`Nanos::micros`]), and the largest part of the queue that may be done.
    pub(crate) computing_since: [u32; CHUNK],
    pub(crate) computed_max: Column,
    /// Requests whose prompt is not computed.
    pub(crate) prefilling: Column,
    /// Requests in flight.
    pub(crate) requests: Column,
    /// Tokens of their contexts.
    pub(crate) context_tokens: Column,
    /// Measured factors on the pool's rates.
    pub(crate) prefill_pace: Column,
    pub(crate) decode_pace: Column,
    /// Leading tokens of this prompt that are cached; see [`Columns::hold`].
    pub(crate) cached_tokens: Column,
    /// Of these, the tokens that are only below the GPU.
    pub(crate) lower_tokens: Column,
}

/// How the predictions for an endpoint count: the weights of events and of dispatches.
#[derive(Clone, Copy, Debug)]
struct Source {
    id: EndpointId,
    events: f32,
    dispatches: f32,
}

/// The columns of a pool.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    chunks: Vec<Chunk>,
    sources: Vec<Option<Source>>,
    /// Slots of endpoints that accept some requests, in order.
    conditional: Vec<u16>,
    /// Endpoints in the columns, and their requests.
    endpoints: u64,
    requests: u64,
}

/// How an endpoint takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accepts {
    /// All.
    All,
    /// Some, or none until a time.
    Some,
    /// None until its state changes.
    None,
}

// === impl Chunk ===

impl Chunk {
    const EMPTY: Self = Self {
        prefill_tokens: [f32::INFINITY; CHUNK],
        prefill_pairs: [0.0; CHUNK],
        queued_lower_tokens: [0.0; CHUNK],
        computing_since: [0; CHUNK],
        computed_max: [0.0; CHUNK],
        prefilling: [0.0; CHUNK],
        requests: [0.0; CHUNK],
        context_tokens: [0.0; CHUNK],
        prefill_pace: [1.0; CHUNK],
        decode_pace: [1.0; CHUNK],
        cached_tokens: [0.0; CHUNK],
        lower_tokens: [0.0; CHUNK],
    };
}

// === impl Columns ===

impl Columns {
    /// The chunks, in the order of slots.
    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Slots of endpoints that accept some requests, in order.
    pub(crate) fn conditional(&self) -> &[u16] {
        &self.conditional
    }

    /// The number of endpoints in the columns, and of their requests in flight.
    pub(crate) fn totals(&self) -> (u64, u64) {
        (self.endpoints, self.requests)
    }

    /// Whether the endpoint in this slot is in the columns.
    pub(crate) fn contains(&self, slot: usize) -> bool {
        self.sources.get(slot).is_some_and(Option::is_some)
    }

    /// Replaces the facts of a slot.
    pub(crate) fn set(&mut self, slot: usize, endpoint: Option<(&Endpoint, Accepts)>) {
        while slot >= self.chunks.len() * CHUNK {
            self.chunks.push(Chunk::EMPTY);
        }
        if slot >= self.sources.len() {
            self.sources.resize(slot + 1, None);
        }
        let (chunk, at) = (&mut self.chunks[slot / CHUNK], slot % CHUNK);
        if self.sources[slot].take().is_some() {
            self.endpoints -= 1;
            self.requests -= chunk.requests[at] as u64;
        }
        chunk.prefill_tokens[at] = f32::INFINITY;
        let listed = self.conditional.binary_search(&(slot as u16));
        match (listed, endpoint.map(|(_, accepts)| accepts) == Some(Accepts::Some)) {
            (Err(place), true) => self.conditional.insert(place, slot as u16),
            (Ok(place), false) => _ = self.conditional.remove(place),
            _ => {}
        }
        let Some((endpoint, Accepts::All)) = endpoint else { return };
        let in_flight = endpoint.in_flight();
        let InFlight { requests, prefilling, prefill_tokens, prefill_pairs, context_tokens, .. } = in_flight;
        chunk.prefill_tokens[at] = prefill_tokens as f32;
        chunk.prefill_pairs[at] = prefill_pairs as f32;
        chunk.queued_lower_tokens[at] = in_flight.lower_tokens as f32;
        chunk.computing_since[at] = endpoint.computing_since.micros();
        let is_computing = endpoint.load.in_flight.prefilling > 0;
        chunk.computed_max[at] = if is_computing { COMPUTED_MAX as f32 / prefilling as f32 } else { 0.0 };
        chunk.prefilling[at] = prefilling as f32;
        chunk.requests[at] = requests as f32;
        chunk.context_tokens[at] = context_tokens as f32;
        [chunk.prefill_pace[at], chunk.decode_pace[at]] = endpoint.pace.factors();
        let accuracy = &endpoint.cache_accuracy;
        let (events, dispatches) = match accuracy.knowledge() {
            Knowledge::Exact => (1.0, 0.0),
            Knowledge::Degraded => (accuracy.precision(), 0.0),
            Knowledge::Approximate => (0.0, 1.0),
            Knowledge::LoadOnly => (0.0, 0.0),
        };
        self.sources[slot] = Some(Source { id: endpoint.id, events, dispatches });
        self.endpoints += 1;
        self.requests += chunk.requests[at] as u64;
    }

    /// Fills the columns of cached tokens for a prompt of which these endpoints hold a part. [`Columns::release`] with
    /// the same endpoints empties it. Returns the most tokens that an endpoint in the columns holds or was sent, and its
    /// slot.
    pub(crate) fn hold(
        &mut self,
        overlap: &[(EndpointId, Prediction)],
        prompt_tokens: u32,
    ) -> Option<(u32, u16)> {
        let mut held = None;
        for &(id, prediction) in overlap {
            let Some(&Some(source)) = self.sources.get(id.slot()) else { continue };
            if source.id != id {
                continue;
            }
            let Prediction { exact, approximate, lower } = prediction.within(prompt_tokens);
            let cached = (exact as f32 * source.events + approximate as f32 * source.dispatches) as u32;
            let chunk = &mut self.chunks[id.slot() / CHUNK];
            chunk.cached_tokens[id.slot() % CHUNK] = cached as f32;
            chunk.lower_tokens[id.slot() % CHUNK] = (lower as f32 * source.events).trunc();
            let sent = approximate.max(cached);
            if held.is_none_or(|(most, _)| sent > most) {
                held = Some((sent, id.slot() as u16));
            }
        }
        held
    }

    /// Empties the columns of cached tokens.
    pub(crate) fn release(&mut self, overlap: &[(EndpointId, Prediction)]) {
        for (id, _) in overlap {
            if let Some(chunk) = self.chunks.get_mut(id.slot() / CHUNK) {
                (chunk.cached_tokens[id.slot() % CHUNK], chunk.lower_tokens[id.slot() % CHUNK]) = (0.0, 0.0);
            }
        }
    }
}

/// What a policy may ask to name the endpoints that it wants to look at. See [`crate::policy::Policy::shortlist`].
pub struct Fleet<'a> {
    pub(crate) columns: &'a Columns,
    /// Whether the columns of cached tokens are filled.
    pub(crate) has_cached: bool,
    /// Whether some of the cached tokens have to be loaded.
    pub(crate) has_lower: bool,
    /// Rates of all endpoints together.
    pub(crate) rates: &'a Rates,
    /// Most tokens of the prompt that an endpoint was sent before.
    pub(crate) seen_tokens: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Pool;

    #[test]
    fn columns_follow_what_is_set_and_hold_what_is_known() {
        let mut pool = Pool::default();
        for name in ["a", "b", "c"] {
            pool.join(pool.next_id().expect("room"), name.into());
        }
        let ids: Vec<_> = pool.endpoints().map(|endpoint| endpoint.id).collect();
        pool.in_flight_mut(ids[1]).expect("here").requests = 7;
        let mut columns = Columns::default();
        for (id, accepts) in [(ids[0], Accepts::Some), (ids[1], Accepts::All), (ids[2], Accepts::None)] {
            columns.set(id.slot(), pool.get(id).map(|endpoint| (endpoint, accepts)));
        }
        assert_eq!((columns.totals(), columns.conditional()), ((1, 7), &[0][..]));
        assert_eq!([0, 1, 2].map(|slot| columns.contains(slot)), [false, true, false]);

        let sent = |tokens| Prediction { exact: 9, approximate: tokens, lower: 0 };
        let overlap = [(ids[0], sent(90)), (ids[1], sent(64)), (EndpointId::new(1, 1), sent(80))];
        assert_eq!(
            columns.hold(&overlap, 50),
            Some((50, 1)),
            "of the endpoint in the columns, within the prompt"
        );
        assert_eq!(columns.chunks()[0].cached_tokens[..3], [0.0, 50.0, 0.0]);
        columns.release(&overlap);
        assert_eq!(columns.chunks()[0].cached_tokens[..3], [0.0; 3]);

        columns.set(1, None);
        columns.set(0, None);
        assert_eq!((columns.totals(), columns.conditional()), ((0, 0), &[][..]));
    }
}
