//! The recordings given to a command: files, or those of a directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use kvlane_core::recording::file::{Frame, Frames, Head};

/// The files of one model, in order of their start.
pub(super) struct Files {
    pub(super) model: String,
    files: Vec<(Head, PathBuf)>,
}

/// Damage of the files that the replay does not count.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Damage {
    /// Invalid frames, and files that end within one.
    pub(super) parts: u64,
}

// === impl Files ===

impl Files {
    /// Finds the files, and selects those of `model`, or of the only model.
    pub(super) fn find(paths: &[PathBuf], model: Option<&str>) -> Result<Self> {
        let mut files: BTreeMap<String, Vec<(Head, PathBuf)>> = BTreeMap::new();
        for path in paths {
            let here = if path.is_dir() { recordings(path)? } else { vec![path.clone()] };
            ensure!(!here.is_empty(), "{}: contains no recording (.kvrec)", path.display());
            for path in here {
                let bytes = read(&path)?;
                let head = Frames::new(&bytes).into_iter().flatten().find_map(|frame| match frame {
                    Frame::Head(head) => Some(head),
                    _ => None,
                });
                let head = head.with_context(|| {
                    format!("{}: not a recording of kvlane, or one of another version", path.display())
                })?;
                files.entry(head.model.clone()).or_default().push((head, path));
            }
        }
        let names: Vec<&str> = files.keys().map(String::as_str).collect();
        let model = match (model, &names[..]) {
            (Some(model), _) if files.contains_key(model) => model.to_owned(),
            (Some(model), _) => {
                bail!("--model {model}: not found; the recordings are of {}", names.join(", "))
            }
            (None, [only]) => (*only).to_owned(),
            (None, _) => bail!("the recordings are of {}: select one with --model", names.join(", ")),
        };
        let mut files = files.remove(&model).unwrap_or_default();
        let begun_s = |head: &Head| head.origin_unix_s + head.begun.as_secs_f64();
        files.sort_by(|(a, _), (b, _)| begun_s(a).total_cmp(&begun_s(b)));
        Ok(Self { model, files })
    }

    /// Reads them one after the other and passes on every segment, with its file's header, until `each` returns that
    /// it has enough.
    pub(super) fn segments(&self, mut each: impl FnMut(&Head, u64, &[u8]) -> bool) -> Result<Damage> {
        let mut damage = Damage::default();
        for (head, path) in &self.files {
            let bytes = read(path)?;
            for frame in Frames::new(&bytes).into_iter().flatten() {
                match frame {
                    Frame::Segment { number, bytes } => {
                        if !each(head, number, bytes) {
                            return Ok(damage);
                        }
                    }
                    Frame::Damaged(_) | Frame::Torn(_) => damage.parts += 1,
                    Frame::Head(_) | Frame::Prompts(_) => {}
                }
            }
        }
        Ok(damage)
    }

    /// Their paths.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(_, path)| &**path)
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| path.display().to_string())
}

fn recordings(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "kvrec") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}
