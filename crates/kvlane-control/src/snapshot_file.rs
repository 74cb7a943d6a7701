//! Snapshot files that are either complete or absent, kept over a restart.
//!
//! A file is written completely under another name and then renamed, so there is always an old or a new one. It ends
//! with the hash of everything before. A file that is damaged, of another version or too old is not used.
//!
//! ```text
//! magic 8, version u32, probe u64, unix time f64
//! content
//! XXH3-64 of all bytes before u64; all numbers little-endian; a text is its length u32 and its UTF-8
//! ```

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use kvlane_core::block::{ChainSeed, ContentHash};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Most bytes of a file: 64 engines with a million blocks each.
pub(crate) const BYTES_MAX: u64 = 1 << 30;
/// Most bytes of a text.
const TEXT_BYTES_MAX: u32 = 4096;

/// A kind of snapshot.
pub(crate) struct Kind {
    pub magic: &'static [u8; 8],
    pub version: u32,
    /// Age in seconds beyond which a file is not used.
    pub age_max_s: f64,
}

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotFileError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it has {0} bytes, more than {BYTES_MAX}")]
    TooLarge(u64),
    #[error("it is not a kvlane snapshot")]
    Foreign,
    #[error("it was written by another version of kvlane")]
    OtherVersion,
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    #[error("it is {age_s:.0} s old, more than {max_s} s")]
    Old { age_s: f64, max_s: f64 },
}

/// A file being written.
pub(crate) struct Writer {
    path: PathBuf,
    unfinished: PathBuf,
    file: BufWriter<File>,
    hash: Xxh3,
    bytes: u64,
}

/// The unread rest of a file.
pub(crate) struct Reader<'a>(&'a [u8]);

/// A hash that depends on how blocks are hashed: entries of a version with another hash would match nothing.
fn probe() -> u64 {
    let seed = ChainSeed::new("kvlane", Some("probe"), Some("salt"));
    let first = seed.next(None, ContentHash::of(b"probe"));
    seed.next(Some(first), ContentHash::of(b"probe").with(b"key")).0
}

// === impl Writer ===

impl Writer {
    /// Begins a file.
    pub(crate) fn create(path: &Path, kind: &Kind, now_s: f64) -> io::Result<Self> {
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".unfinished");
        let unfinished = PathBuf::from(unfinished);
        let file = BufWriter::with_capacity(1 << 16, File::create(&unfinished)?);
        let mut writer = Self { path: path.into(), unfinished, file, hash: Xxh3::new(), bytes: 0 };
        writer.put(kind.magic)?;
        writer.put(&kind.version.to_le_bytes())?;
        writer.put(&probe().to_le_bytes())?;
        writer.put(&now_s.to_le_bytes())?;
        Ok(writer)
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    pub(crate) fn text(&mut self, text: &str) -> io::Result<()> {
        self.put(&(text.len() as u32).to_le_bytes())?;
        self.put(text.as_bytes())
    }

    /// Bytes written so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Completes the file and moves it into place.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        let hash = self.hash.digest();
        self.file.write_all(&hash.to_le_bytes())?;
        let file = self.file.into_inner()?;
        file.sync_all()?;
        drop(file);
        fs::rename(&self.unfinished, &self.path)
    }
}

/// Reads a file; none if it does not exist.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>, SnapshotFileError> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
        Ok(file) if file.len() > BYTES_MAX + 8 => Err(SnapshotFileError::TooLarge(file.len())),
        Ok(_) => Ok(Some(fs::read(path)?)),
    }
}

/// The content of a file of this kind, and its age in seconds.
pub(crate) fn open<'a>(
    bytes: &'a [u8],
    kind: &Kind,
    now_s: f64,
) -> Result<(Reader<'a>, f64), SnapshotFileError> {
    let mut reader = Reader(bytes);
    if reader.take(kind.magic.len()).ok() != Some(kind.magic) {
        return Err(SnapshotFileError::Foreign);
    }
    let same = reader.u32()? == kind.version && reader.u64()? == probe();
    if !same {
        return Err(SnapshotFileError::OtherVersion);
    }
    let Some((content, hash)) = bytes.split_last_chunk::<8>() else {
        return Err(SnapshotFileError::Damaged("it is truncated"));
    };
    if xxh3_64(content) != u64::from_le_bytes(*hash) {
        return Err(SnapshotFileError::Damaged("its hash does not match"));
    }
    let age_s = now_s - f64::from_bits(reader.u64()?);
    // If the clock was set back, the age is negative: no file is too old then.
    if age_s > kind.age_max_s || !age_s.is_finite() {
        return Err(SnapshotFileError::Old { age_s, max_s: kind.age_max_s });
    }
    Ok((reader, age_s.max(0.0)))
}

/// A file with this `content`, for fuzzing, which would not find the hash.
#[cfg(feature = "testing")]
pub(crate) fn bytes_of(kind: &Kind, content: &[u8]) -> Vec<u8> {
    let head = [&kind.magic[..], &kind.version.to_le_bytes(), &probe().to_le_bytes(), &0_f64.to_le_bytes()];
    let mut file = [&head.concat(), content].concat();
    let hash = xxh3_64(&file);
    file.extend_from_slice(&hash.to_le_bytes());
    file
}

// === impl Reader ===

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Bytes left, including the hash at the end.
    pub(crate) fn left(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn take(&mut self, bytes: usize) -> Result<&'a [u8], SnapshotFileError> {
        let (taken, rest) =
            self.0.split_at_checked(bytes).ok_or(SnapshotFileError::Damaged("it is truncated"))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], SnapshotFileError> {
        self.take(N)?.try_into().map_err(|_| SnapshotFileError::Damaged("it is truncated"))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, SnapshotFileError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, SnapshotFileError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn text(&mut self) -> Result<String, SnapshotFileError> {
        let length = self.u32()?;
        if length > TEXT_BYTES_MAX {
            return Err(SnapshotFileError::Damaged("a name is too long"));
        }
        let text = String::from_utf8(self.take(length as usize)?.to_vec());
        text.map_err(|_| SnapshotFileError::Damaged("a name is not UTF-8"))
    }

    /// Whether only the hash is left.
    pub(crate) fn end(&self) -> Result<(), SnapshotFileError> {
        match self.0.len() {
            8 => Ok(()),
            _ => Err(SnapshotFileError::Damaged("it is longer than its content")),
        }
    }
}
