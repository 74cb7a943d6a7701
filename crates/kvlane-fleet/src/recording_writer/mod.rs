//! Writes recordings to files: what schedulers are told, as [`kvlane_core::recording`] makes bytes of it.
//!
//! A tape hands a segment over under the lock of its scheduler, so it goes into a bounded channel at once, or is lost and
//! counted. One thread takes them out, finds what prompts share, and appends both to the pool's file. Every segment stands
//! for itself, so a file can end and another begin at any of them. What cannot be written, for a full disk or a directory
//! that has gone, is lost and counted, and tried again with the next one.

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

/// Segments that may wait to be written, of half a megabyte each.
const WAITING_MAX: usize = 32;
/// Hashes of prompts remembered for each pool, to find out what they share: 24 bytes each, for 128 tokens or so.
const HASHES_MAX: usize = 1 << 19;
/// How a recording's file is called at the end.
const EXTENSION: &str = "kvrec";
/// Seconds between two warnings of what cannot be written.
const WARNED_S: f64 = 60.0;

/// What records, if anything does.
#[derive(Default)]
pub struct RecordingWriter {
    running: Mutex<Option<Running>>,
}

/// The thread that writes.
struct Running {
    config: Config,
    metrics: RecorderMetrics,
    send: SyncSender<Handed>,
    thread: JoinHandle<()>,
}

/// What the thread is given.
enum Handed {
    /// By a recorder.
    Segment { model: Arc<str>, segment: Segment },
    /// There is no more.
    End,
}

/// What the thread works with.
struct Writing {
    config: Config,
    origin_unix_s: f64,
    metrics: RecorderMetrics,
    /// By model.
    pools: HashMap<Arc<str>, Pool>,
    /// The files of the directory that are closed, the oldest first, with their lengths.
    closed: Vec<(PathBuf, u64)>,
    warned_s: f64,
    bytes: Vec<u8>,
}

/// One pool's file and what is known of its prompts.
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
    /// Records as the configuration says from here on, or no more. `pools` are all there are.
    ///
    /// # Errors
    /// When the directory cannot be made or read, or there can be no thread.
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

    /// Records what a new pool's router is told, if anything is recorded.
    pub fn attach(&self, router: &Router, model: &str) {
        if let Some(running) = &*self.running() {
            router.record(Some(running.recorder(model)));
        }
    }

    /// Ends, with all that was told so far in the files.
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

/// Whether recordings can be written where the configuration says, as far as that is known without writing there.
///
/// # Errors
/// When a part of the directory's path is something else.
pub fn check(config: &Config) -> io::Result<()> {
    let there = config.dir.ancestors().find(|part| part.exists());
    match there {
        Some(part) if config.enabled && !part.is_dir() => {
            let why = format!("recorder.dir {}: {} is no directory", config.dir.display(), part.display());
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
        tracing::info!(dir = %config.dir.display(), "recording");
        Ok(Self { config: config.clone(), metrics: metrics.clone(), send, thread })
    }

    fn recorder(&self, model: &str) -> Recorder {
        let (send, lost) = (self.send.clone(), self.metrics.lost.clone());
        let model: Arc<str> = model.into();
        Recorder::new(move |segment| {
            // What ended while this was written is nobody's loss.
            let handed = Handed::Segment { model: Arc::clone(&model), segment };
            if let Err(TrySendError::Full(_)) = send.try_send(handed) {
                lost.inc();
            }
        })
    }

    /// Ends when all that was handed over is written.
    fn end(self) {
        // A thread that is gone has nothing left to write.
        let _ = self.send.send(Handed::End);
        let _ = self.thread.join();
    }
}

// === impl Writing ===

impl Writing {
    fn run(mut self, receive: Receiver<Handed>) {
        while let Ok(Handed::Segment { model, segment }) = receive.recv() {
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

    /// Something broke in the middle of a segment: none of the open files is known to end with a whole one, so none is gone
    /// on with.
    fn begin_anew(&mut self) -> io::Result<()> {
        self.pools.clear();
        self.closed = files(&self.config.dir)?;
        Err(io::Error::other("writing a segment broke off"))
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
            // What stands there may be half a frame: a reader stops there, so nothing may follow.
            self.closed.push((open.path, open.len));
            return Err(error);
        }
        open.len += self.bytes.len() as u64;
        self.metrics.bytes.inc_by(self.bytes.len() as u64);
        pool.open = Some(open);
        self.make_room();
        Ok(())
    }

    /// Deletes the oldest files until the rest is as small as it has to be.
    fn make_room(&mut self) {
        let open: u64 = self.pools.values().flat_map(|pool| &pool.open).map(|open| open.len).sum();
        let mut all = open + self.closed.iter().map(|(_, len)| len).sum::<u64>();
        while all > self.config.max_bytes && !self.closed.is_empty() {
            let (path, len) = self.closed.remove(0);
            // One that somebody else has deleted is gone, too.
            let _ = fs::remove_file(&path);
            all -= len;
        }
        if all > self.config.max_bytes
            && let Some(pool) =
                self.pools.values_mut().max_by_key(|pool| pool.open.as_ref().map(|open| open.len))
            && let Some(Open { path, len, .. }) = pool.open.take()
        {
            // There are more pools than files fit in: whose file is longest begins another one.
            self.closed.push((path, len));
        }
    }
}

/// Begins a file, which only the gateway's user may read.
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

    /// What writes to a directory of which not much may be used.
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

    /// The numbers of the segments in the files of a directory, file by file.
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
    fn files_follow_each_other_and_the_oldest_goes_when_there_are_too_many_bytes() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut one = writing(dir.path(), 3_500, 11_000);
        let model: Arc<str> = "org/model".into();
        (0..20).for_each(|number| one.write(&model, &segment(number)).expect("written"));
        let kept: Vec<u64> = numbers(dir.path()).concat();
        assert!(kept.len() >= 8 && kept.len() < 12, "{kept:?}");
        assert_eq!(kept, (20 - kept.len() as u64..20).collect::<Vec<_>>(), "the last ones, none left out");
        drop(one);
        let mut next = writing(dir.path(), 3_500, 11_000);
        assert!(next.closed.len() > 2, "what was there before counts");
        (20..40).for_each(|number| next.write(&model, &segment(number)).expect("written"));
        assert!(numbers(dir.path()).concat().iter().all(|number| *number >= 28));
    }

    #[test]
    fn with_more_pools_than_bytes_the_longest_file_goes_first() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut writing = writing(dir.path(), 50_000, 10_000);
        for number in 0..40 {
            writing.write(&format!("m{}", number % 3).into(), &segment(number)).expect("written");
            let bytes: u64 = files(dir.path()).expect("there").iter().map(|(_, len)| len).sum();
            assert!(bytes < 13_000, "{bytes}");
        }
    }

    #[test]
    fn a_directory_that_goes_costs_what_was_in_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let inner = dir.path().join("inner");
        fs::create_dir(&inner).expect("made");
        let mut writing = writing(&inner, 2_500, 100_000);
        let model: Arc<str> = "m".into();
        writing.write(&model, &segment(0)).expect("written");
        fs::remove_dir_all(&inner).expect("removed");
        fs::write(&inner, "in the way").expect("written");
        // The open file is still there for whoever has it open.
        let lost = (1..5).filter(|&number| writing.write(&model, &segment(number)).is_err()).count();
        assert!(lost >= 3, "{lost}");
        fs::remove_file(&inner).expect("removed");
        writing.write(&model, &segment(9)).expect("written");
        assert_eq!(numbers(&inner), [[9]]);
    }

    #[test]
    fn what_prompts_share_stands_behind_their_segment() {
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
