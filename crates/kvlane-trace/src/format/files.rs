//! The files of a directory, one after the other.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Reads files as one, each followed by an end of line.
pub(super) struct Files {
    /// Those to come, the next one last.
    rest: Vec<PathBuf>,
    current: Option<File>,
}

// === impl Files ===

impl Files {
    /// The `.json` and `.kvrec` files of a directory, by name.
    pub(super) fn of(directory: &Path) -> io::Result<Self> {
        let mut rest = Vec::new();
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "json" || extension == "kvrec") {
                rest.push(path);
            }
        }
        rest.sort_unstable_by(|a, b| b.cmp(a));
        Ok(Self { rest, current: None })
    }
}

impl Read for Files {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.current.is_none() {
            let Some(path) = self.rest.pop() else { return Ok(0) };
            let named =
                |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
            self.current = Some(File::open(&path).map_err(named)?);
        }
        let Some(file) = self.current.as_mut().filter(|_| !out.is_empty()) else { return Ok(0) };
        match file.read(out)? {
            0 => {
                self.current = None;
                out[0] = b'\n';
                Ok(1)
            }
            count => Ok(count),
        }
    }
}
