//! What engines hold, kept in a file over a restart of the gateway.
//!
//! For each live feed with a replay socket: where its stream stood, and all the blocks it had told of until then. A
//! gateway that starts reads them back, but believes none: the engine may have restarted meanwhile, or said more than
//! its replay still knows. Only when the replay has begun with the very message at which the stream stood, and has
//! brought everything since, does the endpoint count as known; otherwise what was read is forgotten like anything else.
//!
//! The file is written whole under another name and then renamed, so there is always an old or a new one. It ends with
//! the hash of everything before. One that is damaged, of another version or too old is passed over with a warning.
//!
//! ```text
//! magic 8, version u32, probe u64, unix time f64, entries u32
//! entry: name, model, address (each u32 length and UTF-8), seq u64, payload hash u64, block tokens u32, events u32
//! event: kind u8 (0 stored, 1 stored after a parent, 2 copied, 3 removed), tier u8, parent u64 if any, blocks u32,
//!        then per block its name u64, and its hash u64 if it is stored
//! XXH3-64 of all of it u64; all numbers little-endian
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use kvlane_core::block::{BlockHash, ChainSeed, ContentHash};
use kvlane_core::event::{EngineHash, KvEvent, StoredBlock, Tier};
use kvlane_wire::sequence::Position;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const MAGIC: &[u8; 8] = b"kvlaneKV";
const VERSION: u32 = 1;
/// Most bytes of a file: 64 engines with a million blocks each.
const BYTES_MAX: u64 = 1 << 30;
/// Age in seconds beyond which a file is not worth reading: no engine's replay reaches back so far.
const AGE_MAX_S: f64 = 3600.0;
/// Most endpoints in a file, and most bytes of a name.
const ENTRIES_MAX: u32 = 65_536;
const NAME_BYTES_MAX: u32 = 4096;

/// What one endpoint held.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    /// Whose.
    pub(super) key: Key,
    /// Where its stream stood.
    pub(super) position: Position,
    /// The block size.
    pub(super) block_tokens: u32,
    /// Events that bring it back, in order.
    pub(super) events: Vec<KvEvent>,
}

/// What must be the same for an entry to be an endpoint's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// What the endpoint is called.
    pub(super) name: String,
    /// Its model.
    pub(super) model: String,
    /// Where it publishes.
    pub(super) address: String,
}

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub(super) enum SnapshotError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it has {0} bytes, more than {BYTES_MAX}")]
    TooLarge(u64),
    #[error("it is no snapshot of kvlane")]
    Foreign,
    #[error("it was written by another version of kvlane")]
    OtherVersion,
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    #[error("it is {0:.0} s old, more than {AGE_MAX_S} s")]
    Old(f64),
}

/// A file that is being written.
pub(super) struct Writer {
    path: PathBuf,
    unfinished: PathBuf,
    file: BufWriter<File>,
    hash: Xxh3,
    bytes: u64,
    entries: u32,
    announced: u32,
}

/// A hash that depends on how blocks are hashed: entries of a version that did so in another way match nothing.
fn probe() -> u64 {
    let seed = ChainSeed::new("kvlane", Some("probe"), Some("salt"));
    let first = seed.next(None, ContentHash::of(b"probe"));
    seed.next(Some(first), ContentHash::of(b"probe").with(b"key")).0
}

// === impl Writer ===

impl Writer {
    /// Begins a file of `entries` entries at most.
    pub(super) fn create(path: &Path, now_s: f64, entries: u32) -> io::Result<Self> {
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".unfinished");
        let unfinished = PathBuf::from(unfinished);
        let file = BufWriter::with_capacity(1 << 16, File::create(&unfinished)?);
        let mut writer = Self {
            path: path.into(),
            unfinished,
            file,
            hash: Xxh3::new(),
            bytes: 0,
            entries: 0,
            announced: entries,
        };
        writer.put(MAGIC)?;
        writer.put(&VERSION.to_le_bytes())?;
        writer.put(&probe().to_le_bytes())?;
        writer.put(&now_s.to_le_bytes())?;
        writer.put(&entries.to_le_bytes())?;
        Ok(writer)
    }

    /// Adds an entry, if there is room for it; whether there was.
    pub(super) fn add(&mut self, entry: &Entry) -> io::Result<bool> {
        let blocks: usize = entry.events.iter().map(blocks_of).sum();
        // Sixteen bytes a block, some for each event, and the names.
        let most = 16 * blocks + 32 * entry.events.len() + 16_384;
        if self.bytes + most as u64 > BYTES_MAX || self.entries == self.announced {
            return Ok(false);
        }
        self.entries += 1;
        let Entry { key: Key { name, model, address }, position, block_tokens, events } = entry;
        for text in [name, model, address] {
            self.put(&(text.len() as u32).to_le_bytes())?;
            self.put(text.as_bytes())?;
        }
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
            // Whoever is read back holds nothing before.
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
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// Ends the file and puts it in its place.
    pub(super) fn finish(mut self) -> io::Result<()> {
        // Fewer than announced is told by entries without a name.
        while self.entries < self.announced {
            self.entries += 1;
            self.put(&[0; 4 * 3 + 8 + 8 + 4 + 4])?;
        }
        let hash = self.hash.digest();
        self.file.write_all(&hash.to_le_bytes())?;
        let file = self.file.into_inner()?;
        file.sync_all()?;
        drop(file);
        fs::rename(&self.unfinished, &self.path)
    }
}

fn blocks_of(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { blocks, .. } => blocks.len(),
        KvEvent::Copied { blocks, .. } | KvEvent::Removed { blocks, .. } => blocks.len(),
        KvEvent::Cleared => 0,
    }
}

/// Reads a file back; empty if there is none.
pub(super) fn read(path: &Path, now_s: f64) -> Result<BTreeMap<Key, Entry>, SnapshotError> {
    let bytes = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error.into()),
        Ok(file) if file.len() > BYTES_MAX + 8 => return Err(SnapshotError::TooLarge(file.len())),
        Ok(_) => fs::read(path)?,
    };
    parse(&bytes, now_s)
}

fn parse(bytes: &[u8], now_s: f64) -> Result<BTreeMap<Key, Entry>, SnapshotError> {
    let mut reader = Reader(bytes);
    if reader.take(MAGIC.len()).ok() != Some(MAGIC) {
        return Err(SnapshotError::Foreign);
    }
    let same = reader.u32()? == VERSION && reader.u64()? == probe();
    if !same {
        return Err(SnapshotError::OtherVersion);
    }
    let Some((content, hash)) = bytes.split_last_chunk::<8>() else {
        return Err(SnapshotError::Damaged("it is cut off"));
    };
    if xxh3_64(content) != u64::from_le_bytes(*hash) {
        return Err(SnapshotError::Damaged("its hash does not match"));
    }
    let made_s = f64::from_bits(reader.u64()?);
    // A clock that was set back makes no file too old.
    if now_s - made_s > AGE_MAX_S || !made_s.is_finite() {
        return Err(SnapshotError::Old(now_s - made_s));
    }
    let count = reader.u32()?;
    if count > ENTRIES_MAX {
        return Err(SnapshotError::Damaged("it has too many entries"));
    }
    let mut entries = BTreeMap::new();
    for _ in 0..count {
        let entry = reader.entry()?;
        if !entry.key.name.is_empty() {
            entries.insert(entry.key.clone(), entry);
        }
    }
    match reader.0.len() {
        8 => Ok(entries),
        _ => Err(SnapshotError::Damaged("it does not end where it should")),
    }
}

/// What is left to read.
struct Reader<'a>(&'a [u8]);

// === impl Reader ===

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], SnapshotError> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(SnapshotError::Damaged("it is cut off"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        self.take(N)?.try_into().map_err(|_| SnapshotError::Damaged("it is cut off"))
    }

    fn u32(&mut self) -> Result<u32, SnapshotError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, SnapshotError> {
        self.array().map(u64::from_le_bytes)
    }

    fn block(&mut self) -> Result<StoredBlock, SnapshotError> {
        Ok(StoredBlock { name: EngineHash(self.u64()?), hash: BlockHash(self.u64()?) })
    }

    fn text(&mut self) -> Result<String, SnapshotError> {
        let length = self.u32()?;
        if length > NAME_BYTES_MAX {
            return Err(SnapshotError::Damaged("a name is too long"));
        }
        let text = String::from_utf8(self.take(length as usize)?.to_vec());
        text.map_err(|_| SnapshotError::Damaged("a name is no text"))
    }

    fn entry(&mut self) -> Result<Entry, SnapshotError> {
        let key = Key { name: self.text()?, model: self.text()?, address: self.text()? };
        let position = Position { seq: self.u64()?, payload_hash: self.u64()? };
        let (block_tokens, count) = (self.u32()?, self.u32()?);
        // Room for as many as there can be in what is left, and no more.
        let mut events = Vec::with_capacity((count as usize).min(self.0.len() / 6));
        for _ in 0..count {
            events.push(self.event()?);
        }
        Ok(Entry { key, position, block_tokens, events })
    }

    fn event(&mut self) -> Result<KvEvent, SnapshotError> {
        let [kind, tier] = self.array()?;
        let tier = match tier {
            0 => Tier::Gpu,
            1 => Tier::Cpu,
            _ => return Err(SnapshotError::Damaged("a tier that there is not")),
        };
        let parent = if kind == 1 { Some(EngineHash(self.u64()?)) } else { None };
        let count = self.u32()? as usize;
        let mut names = |stored: bool| {
            let width = if stored { 16 } else { 8 };
            let length = count.checked_mul(width).ok_or(SnapshotError::Damaged("a count is too high"))?;
            self.take(length).map(Reader)
        };
        match kind {
            0 | 1 => {
                let mut blocks = names(true)?;
                let blocks = (0..count).map(|_| blocks.block()).collect::<Result<_, SnapshotError>>()?;
                Ok(KvEvent::Stored { parent, blocks, tier })
            }
            2 | 3 => {
                let mut blocks = names(false)?;
                let blocks = (0..count).map(|_| blocks.u64().map(EngineHash));
                let blocks = blocks.collect::<Result<_, SnapshotError>>()?;
                Ok(match kind {
                    2 => KvEvent::Copied { blocks, tier },
                    _ => KvEvent::Removed { blocks, tier },
                })
            }
            _ => Err(SnapshotError::Damaged("an event that there is not")),
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn what_was_written_is_read_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("kv.snapshot");
        assert_eq!(read(&path, 0.0).expect("no file is no error"), BTreeMap::new());
        let entries = [entry("http://a"), entry("http://b#1")];
        // Room for one more than came.
        write(&path, 1000.0, 3, &entries);
        let expect: BTreeMap<Key, Entry> =
            entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
        assert_eq!(read(&path, 1000.0 + AGE_MAX_S).expect("right"), expect);
        write(&path, 1000.0, 0, &[]);
        assert_eq!(read(&path, 1000.0).expect("right"), BTreeMap::new());
        assert_eq!(fs::read_dir(directory.path()).expect("readable").count(), 1, "nothing unfinished stays");
    }

    #[test]
    fn what_cannot_be_used_says_why() {
        let bytes = bytes_of(&[entry("a")]);
        let why = |bytes: &[u8], now_s: f64| parse(bytes, now_s).expect_err("not to be used").to_string();
        assert!(why(&bytes, 1001.0 + AGE_MAX_S).contains("3601 s old"));
        assert_eq!(why(b"", 0.0), "it is no snapshot of kvlane");
        assert_eq!(why(b"something else", 0.0), "it is no snapshot of kvlane");
        let mut other = bytes.clone();
        other[8] += 1;
        assert_eq!(why(&other, 0.0), "it was written by another version of kvlane");
        assert!(why(&bytes[..40], 0.0).contains("damaged"));
    }

    proptest! {
        #[test]
        fn a_file_with_any_byte_changed_or_missing_is_refused(at in any::<prop::sample::Index>(), flip in 1u8.., cut: bool) {
            let mut bytes = bytes_of(&[entry("a"), entry("b")]);
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= flip }
            prop_assert!(parse(&bytes, 1000.0).is_err());
        }

        #[test]
        fn no_bytes_with_a_right_hash_break_the_reader(body in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut bytes = MAGIC.to_vec();
            bytes.extend(VERSION.to_le_bytes());
            bytes.extend(probe().to_le_bytes());
            bytes.extend(1000.0_f64.to_le_bytes());
            bytes.extend([1, 0, 0, 0]);
            bytes.extend(body);
            let hash = xxh3_64(&bytes);
            bytes.extend(hash.to_le_bytes());
            let _ = parse(&bytes, 1000.0);
        }
    }
}
