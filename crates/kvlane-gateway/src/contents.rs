//! What is in the files that a configuration names: a reload tells which of them have changed.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::path::PathBuf;

/// What was in the files that the configuration names, when it was last read.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    hashing: RandomState,
    /// The hash of each file's content; `None` for one that could not be read.
    files: BTreeMap<PathBuf, Option<u64>>,
}

// === impl Contents ===

impl Contents {
    /// Reads the files.
    pub(crate) fn read(files: Vec<PathBuf>) -> Self {
        Self::default().again(files)
    }

    /// Reads files later.
    pub(crate) fn again(&self, files: Vec<PathBuf>) -> Self {
        let hashing = self.hashing.clone();
        let hash = |file: &PathBuf| Some(hashing.hash_one(std::fs::read(file).ok()?));
        let files =
            files.into_iter().map(|file| (hash(&file), file)).map(|(hash, file)| (file, hash)).collect();
        Self { hashing, files }
    }

    /// The files of both whose content differs.
    pub(crate) fn changed(&self, next: &Self) -> Vec<PathBuf> {
        let differs = |(file, hash): &(&PathBuf, &Option<u64>)| {
            self.files.get(*file).is_some_and(|before| before != *hash)
        };
        next.files.iter().filter(differs).map(|(file, _)| file.clone()).collect()
    }
}
