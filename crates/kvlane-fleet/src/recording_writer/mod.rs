//! Writes recordings to files: the schedulers' inputs, as encoded by [`kvlane_core::recording`].
//!
//! A tape hands over a segment under the lock of its scheduler, so the segment enters a bounded channel at once, or
//! is dropped and counted. One thread takes the segments, finds the prefixes that prompts share, and appends both to
//! the pool's file. Every segment can be decoded on its own, so a file can end and another begin between any two. A
//! segment that cannot be written, because the disk is full or the directory is gone, is dropped and counted, and the
//! next one is tried.

pub mod config;

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kvlane_core::recording::file::{self, Head};
use kvlane_core::recording::{Recorder, Segment, Sharing};
use kvlane_core::router::Router;
use kvlane_core::time::Nanos;

use crate::clock::unix_time;
use crate::metrics::RecorderMetrics;
use crate::pool::ModelPool;
use crate::recording_writer::config::Recorder as Config;

/// Most segments waiting to be written, of half a megabyte each.
const WAITING_MAX: usize = 32;
/// Hashes of prompts kept for each pool, to find shared prefixes: 24 bytes each, for about 128 tokens.
const HASHES_MAX: usize = 1 << 19;
/// Suffix of the names of recording files.
const EXTENSION: &str = "kvrec";
/// Seconds between two warnings about write errors.
const WARNED_S: f64 = 60.0;

/// The recorder, if recording is on.
#[derive(Default)]
pub struct RecordingWriter {
    running: Mutex<Option<Running>>,
}

/// The writing thread.
struct Running {
    config: Config,
    metrics: RecorderMetrics,
    send: SyncSender<Message>,
    thread: JoinHandle<()>,
}

/// A message to the thread.
enum Message {
    /// A segment of a tape.
    Segment { model: Arc<str>, segment: Segment },
    /// The end.
    End,
}

/// The thread's state.
struct Writing {
    config: Config,
    origin_unix_s: f64,
    metrics: RecorderMetrics,
    /// By model.
    pools: HashMap<Arc<str>, Pool>,
    /// The closed files of the directory, the oldest first, with their lengths.
    closed: Vec<(PathBuf, u64)>,
    warned_s: f64,
    bytes: Vec<u8>,
}

/// One pool's file and the known hashes of its prompts.
struct Pool {
    open: Option<Open>,
    sharing: Sharing,
}

struct Open {
    path: PathBuf,
    file: File,
    len: u64,
}

// === impl RecordingWriter ===

impl RecordingWriter {
    /// Starts, changes or stops recording, as the configuration says. `pools` are all pools.
    ///
    /// # Errors
    /// The directory cannot be created or read, or the thread cannot be started.
    pub fn configure(
        &self,
        config: &Config,
        metrics: &RecorderMetrics,
        now: Nanos,
        pools: &[Arc<ModelPool>],
    ) -> io::Result<()> {
        let mut running = self.running();
        let wanted = Some(config).filter(|config| config.enabled);
        if running.as_ref().map(|running| &running.config) == wanted {
            return Ok(());
        }
        let next = match wanted {
            Some(config) => Some(Running::start(config, metrics, now)?),
            None => None,
        };
        for pool in pools {
            pool.router.record(next.as_ref().map(|next| next.recorder(&pool.model)));
        }
        if let Some(before) = std::mem::replace(&mut *running, next) {
            before.end();
        }
        Ok(())
    }

    /// Records the inputs of a new pool's router, if recording is on.
    pub fn attach(&self, router: &Router, model: &str) {
        if let Some(running) = &*self.running() {
            router.record(Some(running.recorder(model)));
        }
    }

    /// Stops recording, after all inputs so far are written.
    pub fn end(&self, pools: &[Arc<ModelPool>]) {
        let running = self.running().take();
        pools.iter().for_each(|pool| pool.router.record(None));
        if let Some(running) = running {
            running.end();
        }
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether recordings can be written to the configured directory, as far as can be known without writing.
///
/// # Errors
/// A part of the directory's path is not a directory.
pub fn check(config: &Config) -> io::Result<()> {
    let there = config.dir.ancestors().find(|part| part.exists());
    match there {
        Some(part) if config.enabled && !part.is_dir() => {
            let why = format!("recorder.dir {}: {} is not a directory", config.dir.display(), part.display());
            Err(io::Error::new(io::ErrorKind::NotADirectory, why))
        }
        _ => Ok(()),
    }
}

// === impl Running ===

impl Running {
    fn start(config: &Config, metrics: &RecorderMetrics, now: Nanos) -> io::Result<Self> {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("recorder.dir {}: {error}", config.dir.display()))
        };
        fs::create_dir_all(&config.dir).map_err(named)?;
        let closed = files(&config.dir).map_err(named)?;
        let origin_unix_s = unix_time() - now.as_secs_f64();
        let (send, receive) = sync_channel(WAITING_MAX);
        let writing = Writing {
            config: config.clone(),
            origin_unix_s,
            metrics: metrics.clone(),
            pools: HashMap::new(),
            closed,
            warned_s: f64::NEG_INFINITY,
            bytes: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(|| writing.run(receive))?;
        tracing::info!(dir = %config.dir.display(), "recording started");
        Ok(Self { config: config.clone(), metrics: metrics.clone(), send, thread })
    }

    fn recorder(&self, model: &str) -> Recorder {
        let (send, lost) = (self.send.clone(), self.metrics.lost.clone());
        let model: Arc<str> = model.into();
        Recorder::new(move |segment| {
            // A segment after the end of the recording does not count as lost.
            let handed = Message::Segment { model: Arc::clone(&model), segment };
            if let Err(TrySendError::Full(_)) = send.try_send(handed) {
                lost.inc();
            }
        })
    }

    /// Ends when all segments that were handed over are written.
    fn end(self) {
        // A thread that has ended has nothing left to write.
        let _ = self.send.send(Message::End);
        let _ = self.thread.join();
    }
}

// === impl Writing ===

impl Writing {
    fn run(mut self, receive: Receiver<Message>) {
        while let Ok(Message::Segment { model, segment }) = receive.recv() {
            let written = catch_unwind(AssertUnwindSafe(|| self.write(&model, &segment)));
            if let Err(error) = written.unwrap_or_else(|_| self.begin_anew()) {
                self.metrics.lost.inc();
                let now_s = unix_time();
                if now_s - self.warned_s >= WARNED_S {
                    self.warned_s = now_s;
                    tracing::warn!(dir = %self.config.dir.display(), %error, "recording segment lost");
                }
            }
        }
    }

    /// A panic interrupted a segment: the open files may end with a partial one, so all are closed.
    fn begin_anew(&mut self) -> io::Result<()> {
        self.pools.clear();
        self.closed = files(&self.config.dir)?;
        Err(io::Error::other("writing a segment was interrupted"))
    }

    fn write(&mut self, model: &Arc<str>, segment: &Segment) -> io::Result<()> {
        let pool = self
            .pools
            .entry(Arc::clone(model))
            .or_insert_with(|| Pool { open: None, sharing: Sharing::new(HASHES_MAX) });
        self.bytes.clear();
        file::add(&mut self.bytes, segment, &pool.sharing.of_segment(segment));
        let full = |open: &Open| open.len + self.bytes.len() as u64 > self.config.file_bytes;
        if pool.open.as_ref().is_some_and(full)
            && let Some(Open { path, len, .. }) = pool.open.take()
        {
            self.closed.push((path, len));
        }
        let mut open = match pool.open.take() {
            Some(open) => open,
            None => begin(&self.config.dir, model, self.origin_unix_s)?,
        };
        if let Err(error) = open.file.write_all(&self.bytes) {
            // The file may end with a partial frame: a reader stops there, so nothing may be appended.
            self.closed.push((open.path, open.len));
            return Err(error);
        }
        open.len += self.bytes.len() as u64;
        self.metrics.bytes.inc_by(self.bytes.len() as u64);
        pool.open = Some(open);
        self.make_room();
        Ok(())
    }

    /// Deletes the oldest files until the rest is within the limit.
    fn make_room(&mut self) {
        let open: u64 = self.pools.values().flat_map(|pool| &pool.open).map(|open| open.len).sum();
        let mut all = open + self.closed.iter().map(|(_, len)| len).sum::<u64>();
        while all > self.config.max_bytes && !self.closed.is_empty() {
            let (path, len) = self.closed.remove(0);
            // A file that is already deleted is gone, too.
            let _ = fs::remove_file(&path);
            all -= len;
        }
        if all > self.config.max_bytes
            && let Some(pool) =
                self.pools.values_mut().max_by_key(|pool| pool.open.as_ref().map(|open| open.len))
            && let Some(Open { path, len, .. }) = pool.open.take()
        {
            // There are more pools than files within the limit: the pool with the longest file begins a new one.
            self.closed.push((path, len));
        }
    }
}

/// Begins a file that only the gateway's user may read.
fn begin(dir: &Path, model: &str, origin_unix_s: f64) -> io::Result<Open> {
    let begun_s = unix_time();
    let head = Head {
        schema: "kvlane.recording/1".into(),
        model: model.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        origin_unix_s,
        begun: Nanos::from_secs_f64((begun_s - origin_unix_s).max(0.0)),
    };
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '_' };
    let called: String = model.chars().map(plain).take(100).collect();
    fs::create_dir_all(dir)?;
    let mut millis = (begun_s * 1e3) as u64;
    loop {
        let path = dir.join(format!("{called}.{millis}.{EXTENSION}"));
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(mut file) => {
                let bytes = file::begin(&head);
                file.write_all(&bytes)?;
                return Ok(Open { path, file, len: bytes.len() as u64 });
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => millis += 1,
            Err(error) => return Err(error),
        }
    }
}

/// The recordings in a directory, the oldest first, with their lengths.
fn files(dir: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == EXTENSION) {
            let about = fs::metadata(&path)?;
            found.push((about.modified()?, path, about.len()));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path, len)| (path, len)).collect())
}

#[cfg(test)]
mod tests {
    use kvlane_core::recording::file::Shared;
    use kvlane_core::request::RequestId;

    use super::*;

    /// A writer for a directory with these limits.
    fn writing(dir: &Path, file_bytes: u64, max_bytes: u64) -> Writing {
        let config = Config { enabled: true, dir: dir.into(), file_bytes, max_bytes };
        Writing {
            closed: files(dir).expect("there"),
            config,
            origin_unix_s: unix_time(),
            metrics: RecorderMetrics::default(),
            pools: HashMap::new(),
            warned_s: 0.0,
            bytes: Vec::new(),
        }
    }

    fn segment(number: u64) -> Segment {
        Segment { number, bytes: vec![7; 1000], ..Segment::default() }
    }

    /// The numbers of the segments in each file of a directory.
    fn numbers(dir: &Path) -> Vec<Vec<u64>> {
        let of = |bytes: Vec<u8>| {
            let frames = file::Frames::new(&bytes).expect("a recording");
            frames
                .filter_map(|frame| match frame {
                    file::Frame::Segment { number, .. } => Some(number),
                    _ => None,
                })
                .collect()
        };
        let files = files(dir).expect("there");
        files.into_iter().map(|(path, _)| of(fs::read(path).expect("readable"))).collect()
    }

    /// Invariant: Recordings stay within their disk limit.
    #[test]
    fn files_follow_each_other_and_the_oldest_is_deleted_at_the_limit() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut one = writing(dir.path(), 3_500, 11_000);
        let model: Arc<str> = "org/model".into();
        (0..20).for_each(|number| one.write(&model, &segment(number)).expect("written"));
        let kept: Vec<u64> = numbers(dir.path()).concat();
        assert!(kept.len() >= 8 && kept.len() < 12, "{kept:?}");
        assert_eq!(kept, (20 - kept.len() as u64..20).collect::<Vec<_>>(), "the last segments, without gaps");
        drop(one);
        let mut next = writing(dir.path(), 3_500, 11_000);
        assert!(next.closed.len() > 2, "files of an earlier process count");
        (20..40).for_each(|number| next.write(&model, &segment(number)).expect("written"));
        assert!(numbers(dir.path()).concat().iter().all(|number| *number >= 28));
    }

    #[test]
    fn with_more_pools_than_bytes_the_longest_file_is_closed_first() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut writing = writing(dir.path(), 50_000, 10_000);
        for number in 0..40 {
            writing.write(&format!("m{}", number % 3).into(), &segment(number)).expect("written");
            let bytes: u64 = files(dir.path()).expect("there").iter().map(|(_, len)| len).sum();
            assert!(bytes < 13_000, "{bytes}");
        }
    }

    #[test]
    fn a_directory_that_disappears_costs_only_its_own_recordings() {
        let dir = tempfile::tempdir().expect("a directory");
        let inner = dir.path().join("inner");
        fs::create_dir(&inner).expect("made");
        let mut writing = writing(&inner, 2_500, 100_000);
        let model: Arc<str> = "m".into();
        writing.write(&model, &segment(0)).expect("written");
        fs::remove_dir_all(&inner).expect("removed");
        fs::write(&inner, "in the way").expect("written");
        // The open file still exists for the process that has it open.
        let lost = (1..5).filter(|&number| writing.write(&model, &segment(number)).is_err()).count();
        assert!(lost >= 3, "{lost}");
        fs::remove_file(&inner).expect("removed");
        writing.write(&model, &segment(9)).expect("written");
        assert_eq!(numbers(&inner), [[9]]);
    }

    #[test]
    fn shared_prefixes_are_written_after_their_segment() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut writing = writing(dir.path(), 1 << 20, 1 << 30);
        let hash = |n| kvlane_core::block::BlockHash(n);
        let segment = Segment {
            prompts: vec![(RequestId(1), 2), (RequestId(2), 0), (RequestId(3), 3)],
            hashes: [10, 11, 10, 11, 12].map(hash).into(),
            ..segment(0)
        };
        writing.write(&"m".into(), &segment).expect("written");
        let bytes = fs::read(&files(dir.path()).expect("there")[0].0).expect("readable");
        let shared = file::Frames::new(&bytes).expect("a recording").find_map(|frame| match frame {
            file::Frame::Prompts(shared) => Some(shared),
            _ => None,
        });
        let wanted = Shared { request: RequestId(3), base: Some((RequestId(1), 2)) };
        assert_eq!(shared, Some(vec![wanted]));
    }
}
