//! Snapshot of the index of dispatches, kept in a file over a restart of the gateway.
//!
//! Written periodically and at shutdown, read at start. An endpoint that is registered with the same name and model
//! gets back its dispatched blocks, until they expire; the time without a gateway counts. If its worker refused a
//! connection in the meantime, the worker has restarted, and its blocks are dropped. Entries of endpoints that do not
//! return stay in the file until they expire.
//!
//! ```text
//! header of sealed files
//! record: kind u8
//!   1 an endpoint, numbered from 0: name, model, block tokens u32, whether engines reported that size u8
//!   2 blocks: endpoint u32, whether they have a parent u8 and its hash u64, nanoseconds since their use u64,
//!     count u32, and each hash u64
//!   0 the end
//! ```

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_core::block::BlockHash;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::index::approx::{Piece, Pieces};
use kvlane_core::time::Nanos;
use kvlane_fleet::Fleet;
use kvlane_fleet::clock::{Clock, unix_time};
use kvlane_fleet::pool::ModelPool;

use crate::snapshot_file::{self, BYTES_MAX, Kind, Reader, SnapshotFileError};

/// Entries older than a week are expired in any index.
const KIND: Kind = Kind { magic: b"kvlaneDP", version: 1, age_max_s: 7.0 * 24.0 * 3600.0 };
/// Most endpoints in a file.
const ENDPOINTS_MAX: usize = 65_536;
/// Kinds of records.
const END: u8 = 0;
const ENDPOINT: u8 = 1;
const PIECE: u8 = 2;

/// Name and model of an endpoint.
type Key = (String, String);

/// Restored blocks of endpoints that are not registered yet.
#[derive(Default)]
pub struct IndexSnapshot {
    kept: Mutex<BTreeMap<Key, Entry>>,
    /// The age of the file when this gateway started.
    since: Nanos,
    started: Nanos,
}

/// The blocks dispatched to one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    block_tokens: u32,
    /// Whether the block size was reported by engines; otherwise it was configured.
    told: bool,
    pieces: Vec<Piece>,
}

// === impl IndexSnapshot ===

impl IndexSnapshot {
    /// The content of the configured file. An invalid file only costs its entries.
    pub fn read(path: Option<&Path>, clock: &Clock) -> Self {
        let Some(path) = path else { return Self::default() };
        let started = clock.now();
        match read(path, unix_time()) {
            Ok((kept, since)) => {
                tracing::info!(path = %path.display(), endpoints = kept.len(), "dispatch index snapshot loaded");
                Self { kept: Mutex::new(kept), since, started }
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "dispatch index snapshot rejected; starting with an empty index");
                Self::default()
            }
        }
    }

    /// Restores the blocks of a new endpoint in the router of `pool`, unless its worker has `started_again` since. It
    /// must finish before the endpoint takes requests; a large index takes a moment.
    pub fn restore(
        &self,
        fleet: &Fleet,
        pool: &Arc<ModelPool>,
        endpoint: EndpointId,
        name: &str,
        started_again: bool,
    ) {
        let Some(Entry { block_tokens, told, pieces }) =
            self.kept().remove(&(name.into(), pool.model.clone()))
        else {
            return;
        };
        // The snapshot's block size is used until the engines report one.
        if told && pool.block_sizes().is_empty() && pool.router.index_size().1 == 0 {
            pool.router.set_block_tokens(block_tokens);
        }
        if started_again || pool.router.block_tokens() != block_tokens {
            return;
        }
        let now = fleet.clock.now();
        pool.router.restore_dispatches(now, self.age(now), endpoint, &Pieces::new(pieces));
        tracing::info!(worker = name, model = pool.model, "dispatch index restored for an endpoint");
    }

    /// Whether there are restored blocks for any endpoint.
    pub fn is_empty(&self) -> bool {
        self.kept().is_empty()
    }

    /// The time since the file was written, to be added to the ages in it.
    fn age(&self, now: Nanos) -> Nanos {
        self.since + (now - self.started)
    }

    fn kept(&self) -> MutexGuard<'_, BTreeMap<Key, Entry>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes the blocks of all endpoints, and those of endpoints that are not registered yet. Requests are served in
/// between.
///
/// # Errors
/// The file cannot be written; the previous one stays.
pub fn write(kept_before: &IndexSnapshot, fleet: &Fleet, path: &Path) -> io::Result<()> {
    let mut file =
        File { file: snapshot_file::Writer::create(path, &KIND, unix_time())?, endpoints: 0, left_out: 0 };
    let now = fleet.clock.now();
    for pool in fleet.pools() {
        let endpoints: Vec<(EndpointId, Arc<str>)> = pool.router.read(|scheduler| {
            scheduler.pool().endpoints().map(|endpoint| (endpoint.id, Arc::clone(&endpoint.name))).collect()
        });
        let (block_tokens, told) = (pool.router.block_tokens(), !pool.block_sizes().is_empty());
        let mut numbers = BTreeMap::new();
        for (id, name) in endpoints {
            if let Some(number) = file.endpoint(&name, &pool.model, block_tokens, told)? {
                numbers.insert(id, number);
            }
        }
        let (mut from, mut slice) = (Some(0), Vec::new());
        while let Some(at) = from {
            from = pool.router.export_dispatches(now, at, &mut slice);
            for (id, piece) in slice.drain(..) {
                if let Some(number) = numbers.get(&id) {
                    file.piece(*number, &piece, Nanos::ZERO)?;
                }
            }
        }
    }
    let age = kept_before.age(now);
    let ttl = Nanos::from(fleet.settings().routing.index_ttl);
    let kept = {
        let mut kept = kept_before.kept();
        kept.retain(|_, entry| entry.pieces.iter().any(|piece| piece.age + age <= ttl));
        kept.clone()
    };
    for ((name, model), Entry { block_tokens, told, pieces }) in &kept {
        let Some(number) = file.endpoint(name, model, *block_tokens, *told)? else { continue };
        pieces.iter().try_for_each(|piece| file.piece(number, piece, age))?;
    }
    if file.left_out > 0 {
        let left_out = file.left_out;
        tracing::warn!(path = %path.display(), left_out, "dispatch index snapshot is full; some blocks are left out");
    }
    file.file.put(&[END])?;
    file.file.finish()
}

/// A file being written.
struct File {
    file: snapshot_file::Writer,
    endpoints: usize,
    left_out: usize,
}

// === impl File ===

impl File {
    /// The number of a further endpoint, if there is room for it.
    fn endpoint(
        &mut self,
        name: &str,
        model: &str,
        block_tokens: u32,
        told: bool,
    ) -> io::Result<Option<u32>> {
        if self.endpoints == ENDPOINTS_MAX || !self.has_room(name.len() + model.len() + 32) {
            self.left_out += 1;
            return Ok(None);
        }
        self.file.put(&[ENDPOINT])?;
        self.file.text(name)?;
        self.file.text(model)?;
        self.file.put(&block_tokens.to_le_bytes())?;
        self.file.put(&[u8::from(told)])?;
        self.endpoints += 1;
        Ok(u32::try_from(self.endpoints - 1).ok())
    }

    /// Blocks of an endpoint, `since` older than stated.
    fn piece(&mut self, endpoint: u32, piece: &Piece, since: Nanos) -> io::Result<()> {
        let Piece { before, blocks, age } = piece;
        if !self.has_room(8 * blocks.len() + 64) {
            self.left_out += 1;
            return Ok(());
        }
        self.file.put(&[PIECE])?;
        self.file.put(&endpoint.to_le_bytes())?;
        self.file.put(&[u8::from(before.is_some())])?;
        self.file.put(&before.map_or(0, |block| block.0).to_le_bytes())?;
        self.file.put(&(*age + since).0.to_le_bytes())?;
        self.file.put(&(blocks.len() as u32).to_le_bytes())?;
        blocks.iter().try_for_each(|block| self.file.put(&block.0.to_le_bytes()))
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.file.bytes() + bytes as u64 <= BYTES_MAX
    }
}

/// The content of a file, and its age; none if it does not exist.
fn read(path: &Path, now_s: f64) -> Result<(BTreeMap<Key, Entry>, Nanos), SnapshotFileError> {
    snapshot_file::read(path)?.map_or_else(|| Ok(Default::default()), |bytes| parse(&bytes, now_s))
}

fn parse(bytes: &[u8], now_s: f64) -> Result<(BTreeMap<Key, Entry>, Nanos), SnapshotFileError> {
    let (mut reader, age_s) = snapshot_file::open(bytes, &KIND, now_s)?;
    let mut entries: Vec<(Key, Entry)> = Vec::new();
    loop {
        match reader.array()? {
            [END] => break,
            [ENDPOINT] if entries.len() < ENDPOINTS_MAX => {
                let key = (reader.text()?, reader.text()?);
                let (block_tokens, [told]) = (reader.u32()?, reader.array()?);
                entries.push((key, Entry { block_tokens, told: told != 0, pieces: Vec::new() }));
            }
            [PIECE] => {
                let number = reader.u32()? as usize;
                let (_, entry) = entries
                    .get_mut(number)
                    .ok_or(SnapshotFileError::Damaged("blocks of an unknown endpoint"))?;
                entry.pieces.push(piece(&mut reader)?);
            }
            _ => return Err(SnapshotFileError::Damaged("unknown record")),
        }
    }
    reader.end()?;
    Ok((entries.into_iter().collect(), Nanos::from_secs_f64(age_s)))
}

fn piece(reader: &mut Reader<'_>) -> Result<Piece, SnapshotFileError> {
    let [follows] = reader.array()?;
    let (before, age, count) = (reader.u64()?, Nanos(reader.u64()?), reader.u32()? as usize);
    let length = count.checked_mul(8).ok_or(SnapshotFileError::Damaged("a count is too high"))?;
    let mut blocks = Reader::new(reader.take(length)?);
    let blocks = (0..count).map(|_| blocks.u64().map(BlockHash)).collect::<Result<_, SnapshotFileError>>()?;
    Ok(Piece { before: (follows != 0).then_some(BlockHash(before)), blocks, age })
}

/// The number of endpoints in a file that is valid except for `content`.
#[cfg(feature = "testing")]
pub fn endpoints_in(content: &[u8]) -> Option<usize> {
    parse(&snapshot_file::bytes_of(&KIND, content), 0.0).ok().map(|(endpoints, _)| endpoints.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(endpoints: &[(Key, Entry)], since: Nanos) -> Vec<u8> {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("dispatches");
        let file = snapshot_file::Writer::create(&path, &KIND, 1000.0).expect("a file");
        let mut file = File { file, endpoints: 0, left_out: 0 };
        for ((name, model), Entry { block_tokens, told, pieces }) in endpoints {
            let number = file.endpoint(name, model, *block_tokens, *told).expect("written").expect("room");
            pieces.iter().try_for_each(|piece| file.piece(number, piece, since)).expect("written");
        }
        file.file.put(&[END]).expect("written");
        file.file.finish().expect("in its place");
        std::fs::read(&path).expect("a file")
    }

    fn entry(name: &str) -> (Key, Entry) {
        let blocks = |n: u64| (n..n + 3).map(BlockHash).collect();
        let pieces = vec![
            Piece { before: None, blocks: blocks(1), age: Nanos(7) },
            Piece { before: Some(BlockHash(3)), blocks: blocks(11), age: Nanos(9) },
        ];
        ((name.into(), "m".into()), Entry { block_tokens: 16, told: name == "a", pieces })
    }

    #[test]
    fn a_written_snapshot_is_read_back() {
        let entries = [entry("a"), entry("b#1")];
        let (kept, age) = parse(&written(&entries, Nanos::ZERO), 1002.5).expect("right");
        assert_eq!((kept, age), (entries.clone().into_iter().collect(), Nanos::from_millis(2500)));
        let (kept, _) = parse(&written(&entries, Nanos(100)), 900.0).expect("a clock that was set back");
        assert_eq!(
            kept[&entry("a").0].pieces.iter().map(|piece| piece.age.0).collect::<Vec<_>>(),
            [107, 109]
        );
        let week_s = KIND.age_max_s + 1001.0;
        assert!(matches!(parse(&written(&entries, Nanos::ZERO), week_s), Err(SnapshotFileError::Old { .. })));
    }

    proptest! {
        #[test]
        fn a_file_with_a_changed_or_missing_byte_is_rejected(at in any::<prop::sample::Index>(), flip in 1u8.., cut: bool) {
            let mut bytes = written(&[entry("a"), entry("b")], Nanos::ZERO);
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= flip }
            prop_assert!(parse(&bytes, 1000.0).is_err());
        }

        #[test]
        fn no_bytes_with_a_valid_hash_make_the_reader_panic(body in prop::collection::vec(0u8..4, 0..200)) {
            let mut bytes = written(&[], Nanos::ZERO);
            bytes.truncate(bytes.len() - 9);
            bytes.extend(body);
            let hash = xxhash_rust::xxh3::xxh3_64(&bytes);
            bytes.extend(hash.to_le_bytes());
            let _ = parse(&bytes, 1000.0);
        }
    }
}
