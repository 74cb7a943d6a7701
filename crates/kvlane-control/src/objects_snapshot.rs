//! Snapshot of the origins of objects, kept in a file over a restart of the gateway, beside that of the index of dispatches.
//!
//! Only objects that are not known to be lost are written. A worker is named by its URL and, where its metrics say so, by the
//! time at which its process started: another start time after the restart means that its objects are lost.
//!
//! ```text
//! header of sealed files
//! workers u32, each: URL, start time f64 or 0
//! objects u32, each: hash of its id 16, worker u32, maker u8, tenant u64
//!   maker: 0 unknown, 1 a client without a tenant, 2 the tenant
//! ```

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvlane_core::request::TenantKey;
use kvlane_fleet::Fleet;
use kvlane_fleet::clock::unix_time;
use kvlane_fleet::objects::{Keeper, Maker, OBJECTS_MAX, ObjectKey, Objects, Origin};

use crate::snapshot_file::{self, Kind, Reader, SnapshotFileError};

/// Engines are asked for objects that are older.
const KIND: Kind = Kind { magic: b"kvlaneOB", version: 1, age_max_s: 7.0 * 24.0 * 3600.0 };
/// Most workers in a file.
const WORKERS_MAX: u32 = 65_536;

/// A worker of the file: its URL and start time.
type OfWorker = (Arc<str>, f64);
/// An object of the file.
type Entry = (ObjectKey, Origin);

/// The file beside the one of the index of dispatches.
pub fn beside(index: &Path) -> PathBuf {
    let mut path = index.as_os_str().to_owned();
    path.push(".objects");
    path.into()
}

/// Reads the file into the fleet's objects, before there are workers. An invalid file only costs its entries.
pub fn restore(fleet: &Fleet, path: &Path) {
    match read(&fleet.objects, path) {
        Ok(objects) => tracing::info!(path = %path.display(), objects, "object snapshot loaded"),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "object snapshot rejected; starting without known objects");
        }
    }
}

fn read(objects: &Objects, path: &Path) -> Result<usize, SnapshotFileError> {
    let Some(bytes) = snapshot_file::read(path)? else { return Ok(0) };
    let (workers, entries) = parse(&bytes, unix_time())?;
    for (url, started_s) in workers.into_iter().filter(|(_, started_s)| *started_s > 0.0) {
        objects.set_started_before(url, started_s);
    }
    let count = entries.len();
    entries.into_iter().for_each(|(key, origin)| objects.hear(key, origin));
    Ok(count)
}

/// Writes the objects that are not known to be lost.
///
/// # Errors
/// The file cannot be written; the previous one stays.
pub fn write(fleet: &Fleet, path: &Path) -> io::Result<()> {
    let (mut workers, mut numbers): (Vec<OfWorker>, _) = (Vec::new(), HashMap::new());
    let mut entries = Vec::new();
    for (key, origin) in fleet.objects.all() {
        let Keeper::There(worker) = origin.keeper(&fleet.workers()) else { continue };
        let number = *numbers.entry(worker.id).or_insert_with(|| {
            let started_s = worker.state().started.map_or(0.0, |started| started.at_s);
            workers.push((Arc::clone(&worker.url), started_s));
            workers.len() as u32 - 1
        });
        entries.push((key, number, origin.maker));
    }
    write_all(path, unix_time(), &workers, &entries)
}

fn write_all(
    path: &Path,
    now_s: f64,
    workers: &[OfWorker],
    entries: &[(ObjectKey, u32, Maker)],
) -> io::Result<()> {
    let mut file = snapshot_file::Writer::create(path, &KIND, now_s)?;
    file.put(&(workers.len() as u32).to_le_bytes())?;
    for (url, started_s) in workers {
        file.text(url)?;
        file.put(&started_s.to_le_bytes())?;
    }
    file.put(&(entries.len() as u32).to_le_bytes())?;
    for (key, worker, maker) in entries {
        let (kind, tenant) = match maker {
            Maker::Unknown => (0, 0),
            Maker::Client(None) => (1, 0),
            Maker::Client(Some(tenant)) => (2, tenant.0),
        };
        file.put(&key.0.to_le_bytes())?;
        file.put(&worker.to_le_bytes())?;
        file.put(&[kind])?;
        file.put(&tenant.to_le_bytes())?;
    }
    file.finish()
}

fn parse(bytes: &[u8], now_s: f64) -> Result<(Vec<OfWorker>, Vec<Entry>), SnapshotFileError> {
    let (mut reader, _) = snapshot_file::open(bytes, &KIND, now_s)?;
    let count = reader.u32()?;
    if count > WORKERS_MAX {
        return Err(SnapshotFileError::Damaged("too many workers"));
    }
    let worker = |reader: &mut Reader<'_>| -> Result<OfWorker, SnapshotFileError> {
        Ok((reader.text()?.into(), f64::from_bits(reader.u64()?)))
    };
    let workers = (0..count).map(|_| worker(&mut reader)).collect::<Result<Vec<_>, _>>()?;
    let count = reader.u32()?;
    if count as usize > OBJECTS_MAX {
        return Err(SnapshotFileError::Damaged("too many objects"));
    }
    let entry = |reader: &mut Reader<'_>| {
        let (key, worker) = (ObjectKey(u128::from_le_bytes(reader.array()?)), reader.u32()? as usize);
        let ([kind], tenant) = (reader.array()?, reader.u64()?);
        let unknown = SnapshotFileError::Damaged("an object of an unknown worker");
        let (url, _) = workers.get(worker).ok_or(unknown)?;
        let maker = match kind {
            0 => Maker::Unknown,
            1 => Maker::Client(None),
            2 => Maker::Client(Some(TenantKey(tenant))),
            _ => return Err(SnapshotFileError::Damaged("an object of an unknown kind of client")),
        };
        Ok((key, Origin::told(Arc::clone(url), maker)))
    };
    let entries = (0..count).map(|_| entry(&mut reader)).collect::<Result<Vec<_>, _>>()?;
    reader.end()?;
    Ok((workers, entries))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written() -> Vec<u8> {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("objects");
        let workers = [("http://a".into(), 0.0), ("http://b".into(), 7.5)];
        let makers = [Maker::Unknown, Maker::Client(None), Maker::Client(Some(TenantKey(9)))];
        let entries: Vec<_> = makers
            .iter()
            .zip(1u32..)
            .map(|(maker, n)| (ObjectKey(u128::from(n) << 90), n % 2, *maker))
            .collect();
        write_all(&path, 1000.0, &workers, &entries).expect("written");
        std::fs::read(&path).expect("a file")
    }

    #[test]
    fn a_written_snapshot_is_read_back() {
        let (workers, entries) = parse(&written(), 1001.0).expect("right");
        assert_eq!(workers, [("http://a".into(), 0.0), ("http://b".into(), 7.5)]);
        let of = |n: u128, url: &str, maker| (ObjectKey(n << 90), Origin::told(url.into(), maker));
        let expected = [
            of(1, "http://b", Maker::Unknown),
            of(2, "http://a", Maker::Client(None)),
            of(3, "http://b", Maker::Client(Some(TenantKey(9)))),
        ];
        assert_eq!(entries, expected);
    }

    proptest! {
        #[test]
        fn a_file_with_a_changed_or_missing_byte_is_rejected(at in any::<prop::sample::Index>(), flip in 1u8.., cut: bool) {
            let mut bytes = written();
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= flip }
            prop_assert!(parse(&bytes, 1000.0).is_err());
        }

        #[test]
        fn no_bytes_with_a_valid_hash_make_the_reader_panic(body in prop::collection::vec(0u8..4, 0..200)) {
            let mut bytes = written();
            bytes.truncate(28);
            bytes.extend(body);
            let hash = xxhash_rust::xxh3::xxh3_64(&bytes);
            bytes.extend(hash.to_le_bytes());
            let _ = parse(&bytes, 1000.0);
        }
    }
}
