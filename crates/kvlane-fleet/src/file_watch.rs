//! Files that are read again when they change: the configuration and what it names, a list of workers.
//!
//! Files are compared at intervals, because a file may be replaced, linked to another one or mounted anew, and no
//! notification of the kernel covers all of these.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::sleep;

/// Files watched for changes: each by modification time, file identity and length.
#[derive(Debug)]
pub struct Watch {
    paths: Vec<PathBuf>,
    seen: Vec<Stamp>,
}

/// Identifies a version of a file; none if the file does not exist.
type Stamp = Option<(SystemTime, u64, u64)>;

fn stamp(path: &Path) -> Stamp {
    let file = fs::metadata(path).ok()?;
    Some((file.modified().ok()?, file.ino(), file.len()))
}

fn stamps(paths: &[PathBuf]) -> Vec<Stamp> {
    paths.iter().map(|path| stamp(path)).collect()
}

// === impl Watch ===

impl Watch {
    /// Watches these files.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self { seen: stamps(&paths), paths }
    }

    /// Watches these files from now on. The current version of a file that was not watched before is not a change.
    pub fn look_at(&mut self, paths: Vec<PathBuf>) {
        let before: BTreeMap<_, _> = self.paths.drain(..).zip(self.seen.drain(..)).collect();
        self.seen =
            paths.iter().map(|path| before.get(path).copied().unwrap_or_else(|| stamp(path))).collect();
        self.paths = paths;
    }

    /// The files are about to be read: only later changes count.
    pub fn reads(&mut self) {
        self.seen = stamps(&self.paths);
    }

    /// Waits until one of the files has changed and is the same at two checks in a row, because it may still be being
    /// written. Checks every `interval`; never, if that is 0.
    pub async fn changed(&mut self, interval: Duration) {
        if interval.is_zero() || self.paths.is_empty() {
            return std::future::pending().await;
        }
        let mut before = None;
        loop {
            sleep(interval).await;
            let seen = stamps(&self.paths);
            if seen != self.seen && before.as_ref() == Some(&seen) {
                self.seen = seen;
                return;
            }
            before = Some(seen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a hundred times in paused time; returns whether a change was seen.
    async fn sees(watch: &mut Watch) -> bool {
        let second = Duration::from_secs(1);
        tokio::time::timeout(100 * second, watch.changed(second)).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_changes_appears_or_disappears_is_reported_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let (file, other) = (directory.path().join("a.yaml"), directory.path().join("b.yaml"));
        let mut watch = Watch::new(vec![file.clone()]);
        assert!(!sees(&mut watch).await, "there is no file");
        for text in ["one", "another", ""] {
            fs::write(&file, text).expect("written");
            assert!(sees(&mut watch).await, "{text}");
            assert!(!sees(&mut watch).await, "once");
        }
        fs::write(&other, "").expect("written");
        fs::rename(&other, &file).expect("renamed");
        assert!(sees(&mut watch).await, "another file with the same name");
        watch.look_at(vec![file.clone(), other.clone()]);
        assert!(!sees(&mut watch).await, "its current version is not a change");
        fs::write(&other, "x").expect("written");
        assert!(sees(&mut watch).await);
        fs::write(&file, "seen").expect("written");
        watch.look_at(vec![file.clone()]);
        assert!(sees(&mut watch).await, "it was watched before");
        fs::write(&file, "read meanwhile").expect("written");
        watch.reads();
        assert!(!sees(&mut watch).await, "it has been read already");
        fs::remove_file(&file).expect("removed");
        assert!(sees(&mut watch).await, "it has gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_link_to_another_file_is_a_change() {
        let directory = tempfile::tempdir().expect("a directory");
        let [one, other, link, next] =
            ["one", "other", "link", "next"].map(|name| directory.path().join(name));
        fs::write(&one, "same").expect("written");
        fs::write(&other, "same").expect("written");
        std::os::unix::fs::symlink(&one, &link).expect("linked");
        let mut watch = Watch::new(vec![link.clone()]);
        std::os::unix::fs::symlink(&other, &next).expect("linked");
        fs::rename(&next, &link).expect("renamed");
        assert!(sees(&mut watch).await, "as Kubernetes replaces what it mounts");
    }

    #[tokio::test(start_paused = true)]
    async fn without_an_interval_no_file_is_checked() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let mut watch = Watch::new(vec![file.path().into()]);
        fs::write(file.path(), "changed").expect("written");
        let looked = tokio::time::timeout(Duration::from_secs(1000), watch.changed(Duration::ZERO)).await;
        assert!(looked.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_is_not_read_while_it_is_being_written() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let mut watch = Watch::new(vec![file.path().into()]);
        let (second, mut written) = (Duration::from_secs(1), 0);
        let mut writing = tokio::time::interval_at(tokio::time::Instant::now() + second / 2, second);
        let mut changed = std::pin::pin!(watch.changed(second));
        while written < 20 {
            tokio::select! {
                () = &mut changed => panic!("reported while it is being written, after {written}"),
                _ = writing.tick() => {
                    written += 1;
                    fs::write(file.path(), "x".repeat(written)).expect("written");
                }
            }
        }
        changed.await;
    }
}
