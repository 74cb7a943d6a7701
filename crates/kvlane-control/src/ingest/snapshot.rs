//! Snapshot of the blocks that engines hold, kept in a file over a restart of the gateway.
//!
//! For each live feed with a replay socket: the position of its stream, and all blocks up to there. At start the
//! gateway reads them, but does not trust them: the engine may have restarted meanwhile, or sent more messages than
//! its replay holds. Only when the replay has begun with the message at that position, and has brought everything
//! since, does the endpoint count as known exactly; otherwise the restored blocks are dropped.
//!
//! ```text
//! header of sealed files, entries u32
//! entry: name, model, address, seq u64, payload hash u64, block tokens u32, events u32
//! event: kind u8 (0 stored, 1 stored after a parent, 2 copied, 3 removed), tier u8, parent u64 if any, blocks u32,
//!        then per block its engine hash u64, and its block hash u64 if it is stored
//! ```

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use kvlane_core::block::BlockHash;
use kvlane_core::event::{EngineHash, KvEvent, StoredBlock, Tier};
use kvlane_wire::sequence::Position;

use crate::snapshot_file::{self, BYTES_MAX, Kind, Reader, SnapshotFileError};

/// No engine's replay reaches back further than an hour.
const KIND: Kind = Kind { magic: b"kvlaneKV", version: 1, age_max_s: 3600.0 };
/// Most endpoints in a file.
const ENTRIES_MAX: u32 = 65_536;

/// The blocks of one endpoint.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    /// The endpoint.
    pub(super) key: Key,
    /// The position of its stream.
    pub(super) position: Position,
    /// The block size.
    pub(super) block_tokens: u32,
    /// Events that restore the blocks, in order.
    pub(super) events: Vec<KvEvent>,
}

/// The fields that must be equal for an entry to apply to an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// The endpoint's name.
    pub(super) name: String,
    /// Its model.
    pub(super) model: String,
    /// The address of its feed.
    pub(super) address: String,
}

/// A file being written.
pub(super) struct Writer {
    file: snapshot_file::Writer,
    entries: u32,
    announced: u32,
}

// === impl Writer ===

impl Writer {
    /// Starts a file of at most `entries` entries.
    pub(super) fn create(path: &Path, now_s: f64, entries: u32) -> io::Result<Self> {
        let mut file = snapshot_file::Writer::create(path, &KIND, now_s)?;
        file.put(&entries.to_le_bytes())?;
        Ok(Self { file, entries: 0, announced: entries })
    }

    /// Adds an entry, if there is room for it; returns whether there was.
    pub(super) fn add(&mut self, entry: &Entry) -> io::Result<bool> {
        let blocks: usize = entry.events.iter().map(blocks_of).sum();
        // Sixteen bytes a block, some for each event, and the names.
        let most = 16 * blocks + 32 * entry.events.len() + 16_384;
        if self.file.bytes() + most as u64 > BYTES_MAX || self.entries == self.announced {
            return Ok(false);
        }
        self.entries += 1;
        let Entry { key: Key { name, model, address }, position, block_tokens, events } = entry;
        [name, model, address].into_iter().try_for_each(|text| self.file.text(text))?;
        self.put(&position.seq.to_le_bytes())?;
        self.put(&position.payload_hash.to_le_bytes())?;
        self.put(&block_tokens.to_le_bytes())?;
        self.put(&(events.len() as u32).to_le_bytes())?;
        events.iter().try_for_each(|event| self.event(event))?;
        Ok(true)
    }

    fn event(&mut self, event: &KvEvent) -> io::Result<()> {
        let (kind, tier, parent) = match event {
            KvEvent::Stored { parent: None, tier, .. } => (0, *tier, None),
            KvEvent::Stored { parent: Some(parent), tier, .. } => (1, *tier, Some(parent)),
            KvEvent::Copied { tier, .. } => (2, *tier, None),
            KvEvent::Removed { tier, .. } => (3, *tier, None),
            // Not written: a restored endpoint holds nothing before.
            KvEvent::Cleared => (3, Tier::Gpu, None),
        };
        self.put(&[kind, tier as u8])?;
        if let Some(parent) = parent {
            self.put(&parent.0.to_le_bytes())?;
        }
        self.put(&(blocks_of(event) as u32).to_le_bytes())?;
        match event {
            KvEvent::Stored { blocks, .. } => blocks.iter().try_for_each(|block| {
                self.put(&block.name.0.to_le_bytes())?;
                self.put(&block.hash.0.to_le_bytes())
            }),
            KvEvent::Copied { blocks, .. } | KvEvent::Removed { blocks, .. } => {
                blocks.iter().try_for_each(|name| self.put(&name.0.to_le_bytes()))
            }
            KvEvent::Cleared => Ok(()),
        }
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.put(bytes)
    }

    /// Completes the file and moves it into place.
    pub(super) fn finish(mut self) -> io::Result<()> {
        // Missing entries are written as entries without a name.
        while self.entries < self.announced {
            self.entries += 1;
            self.put(&[0; 4 * 3 + 8 + 8 + 4 + 4])?;
        }
        self.file.finish()
    }
}

fn blocks_of(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { blocks, .. } => blocks.len(),
        KvEvent::Copied { blocks, .. } | KvEvent::Removed { blocks, .. } => blocks.len(),
        KvEvent::Cleared => 0,
    }
}

/// Reads a file; empty if there is none.
pub(super) fn read(path: &Path, now_s: f64) -> Result<BTreeMap<Key, Entry>, SnapshotFileError> {
    snapshot_file::read(path)?.map_or_else(|| Ok(BTreeMap::new()), |bytes| parse(&bytes, now_s))
}

fn parse(bytes: &[u8], now_s: f64) -> Result<BTreeMap<Key, Entry>, SnapshotFileError> {
    let (mut reader, _) = snapshot_file::open(bytes, &KIND, now_s)?;
    let count = reader.u32()?;
    if count > ENTRIES_MAX {
        return Err(SnapshotFileError::Damaged("it has too many entries"));
    }
    let mut entries = BTreeMap::new();
    for _ in 0..count {
        let entry = reader.entry()?;
        if !entry.key.name.is_empty() {
            entries.insert(entry.key.clone(), entry);
        }
    }
    reader.end()?;
    Ok(entries)
}

/// The number of entries in a file that is valid except for `content`.
#[cfg(feature = "testing")]
pub fn entries_in(content: &[u8]) -> Option<usize> {
    parse(&snapshot_file::bytes_of(&KIND, content), 0.0).ok().map(|entries| entries.len())
}

// === impl Reader ===

impl Reader<'_> {
    fn block(&mut self) -> Result<StoredBlock, SnapshotFileError> {
        Ok(StoredBlock { name: EngineHash(self.u64()?), hash: BlockHash(self.u64()?) })
    }

    fn entry(&mut self) -> Result<Entry, SnapshotFileError> {
        let key = Key { name: self.text()?, model: self.text()?, address: self.text()? };
        let position = Position { seq: self.u64()?, payload_hash: self.u64()? };
        let (block_tokens, count) = (self.u32()?, self.u32()?);
        // Capacity for as many as the rest can hold, and no more.
        let mut events = Vec::with_capacity((count as usize).min(self.left() / 6));
        for _ in 0..count {
            events.push(self.event()?);
        }
        Ok(Entry { key, position, block_tokens, events })
    }

    fn event(&mut self) -> Result<KvEvent, SnapshotFileError> {
        let [kind, tier] = self.array()?;
        let tier = match tier {
            0 => Tier::Gpu,
            1 => Tier::Cpu,
            _ => return Err(SnapshotFileError::Damaged("unknown tier")),
        };
        let parent = if kind == 1 { Some(EngineHash(self.u64()?)) } else { None };
        let count = self.u32()? as usize;
        let mut names = |stored: bool| {
            let width = if stored { 16 } else { 8 };
            let length = count.checked_mul(width).ok_or(SnapshotFileError::Damaged("a count is too high"))?;
            self.take(length).map(Reader::new)
        };
        match kind {
            0 | 1 => {
                let mut blocks = names(true)?;
                let blocks = (0..count).map(|_| blocks.block()).collect::<Result<_, SnapshotFileError>>()?;
                Ok(KvEvent::Stored { parent, blocks, tier })
            }
            2 | 3 => {
                let mut blocks = names(false)?;
                let blocks = (0..count).map(|_| blocks.u64().map(EngineHash));
                let blocks = blocks.collect::<Result<_, SnapshotFileError>>()?;
                Ok(match kind {
                    2 => KvEvent::Copied { blocks, tier },
                    _ => KvEvent::Removed { blocks, tier },
                })
            }
            _ => Err(SnapshotFileError::Damaged("unknown event")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn write(path: &Path, now_s: f64, room: u32, entries: &[Entry]) {
        let mut writer = Writer::create(path, now_s, room).expect("a file");
        for entry in entries {
            assert!(writer.add(entry).expect("written"));
        }
        writer.finish().expect("in its place");
    }

    fn entry(name: &str) -> Entry {
        let stored = |n: u64| StoredBlock { name: EngineHash(n), hash: BlockHash(n * 7) };
        let names = vec![EngineHash(1)];
        Entry {
            key: Key { name: name.into(), model: "m".into(), address: "h:1".into() },
            position: Position { seq: 7, payload_hash: u64::MAX },
            block_tokens: 16,
            events: vec![
                KvEvent::Stored { parent: None, blocks: vec![stored(1), stored(2)], tier: Tier::Gpu },
                KvEvent::Stored { parent: Some(EngineHash(2)), blocks: vec![stored(3)], tier: Tier::Cpu },
                KvEvent::Copied { blocks: names.clone(), tier: Tier::Cpu },
                KvEvent::Removed { blocks: names, tier: Tier::Gpu },
            ],
        }
    }

    fn bytes_of(entries: &[Entry]) -> Vec<u8> {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("kv.snapshot");
        write(&path, 1000.0, entries.len() as u32, entries);
        fs::read(path).expect("a file")
    }

    #[test]
    fn a_written_snapshot_is_read_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("kv.snapshot");
        assert_eq!(read(&path, 0.0).expect("a missing file is not an error"), BTreeMap::new());
        let entries = [entry("http://a"), entry("http://b#1")];
        // Announces one entry more than is written.
        write(&path, 1000.0, 3, &entries);
        let expect: BTreeMap<Key, Entry> =
            entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
        assert_eq!(read(&path, 1000.0 + KIND.age_max_s).expect("right"), expect);
        write(&path, 1000.0, 0, &[]);
        assert_eq!(read(&path, 1000.0).expect("right"), BTreeMap::new());
        assert_eq!(fs::read_dir(directory.path()).expect("readable").count(), 1, "no temporary file stays");
    }

    #[test]
    fn an_unusable_snapshot_is_rejected_with_the_reason() {
        let bytes = bytes_of(&[entry("a")]);
        let why = |bytes: &[u8], now_s: f64| parse(bytes, now_s).expect_err("not to be used").to_string();
        assert!(why(&bytes, 1001.0 + KIND.age_max_s).contains("3601 s old"));
        assert_eq!(why(b"", 0.0), "it is not a kvlane snapshot");
        assert_eq!(why(b"something else", 0.0), "it is not a kvlane snapshot");
        let mut other = bytes.clone();
        other[8] += 1;
        assert_eq!(why(&other, 0.0), "it was written by another version of kvlane");
        assert!(why(&bytes[..40], 0.0).contains("damaged"));
    }

    proptest! {
        #[test]
        fn a_file_with_a_changed_or_missing_byte_is_rejected(at in any::<prop::sample::Index>(), flip in 1u8.., cut: bool) {
            let mut bytes = bytes_of(&[entry("a"), entry("b")]);
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= flip }
            prop_assert!(parse(&bytes, 1000.0).is_err());
        }

        #[test]
        fn no_bytes_with_a_valid_hash_make_the_reader_panic(body in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut bytes = bytes_of(&[]);
            bytes.truncate(bytes.len() - 12);
            bytes.extend([1, 0, 0, 0]);
            bytes.extend(body);
            let hash = xxhash_rust::xxh3::xxh3_64(&bytes);
            bytes.extend(hash.to_le_bytes());
            let _ = parse(&bytes, 1000.0);
        }
    }
}
