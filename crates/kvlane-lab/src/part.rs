//! Parts of an experiment, so that several machines share its runs.
//!
//! An experiment is a sequence of units: runs, or groups of runs that belong together. A unit's results depend on
//! nothing but its inputs, so it does not matter which machine runs it. Part `I/N` has every `N`th unit from the `I`th:
//! every unit is in one part, and units that cost more, which are often adjacent, are spread over all parts. Each part
//! writes a file; the files of all `N` parts hold the results of the whole in their order.
//!
//! A file begins with a line about the experiment and the part, followed by a line for each of its units. Numbers are
//! written with as many digits as it takes to read the same ones.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Name and version of the first line.
const SCHEMA: &str = "kvlane.part/1";
/// Missing parts that an error names.
const NAMED_MAX: usize = 8;

/// A part of an experiment, as in `2/8`: from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Part {
    number: u32,
    of: u32,
}

/// What the parts of one experiment have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experiment {
    /// The command that runs it.
    command: String,
    /// Digest of all inputs of its results.
    configuration: String,
    /// Digest of the program.
    program: String,
    /// Number of its units.
    units: usize,
}

/// The runs that a command makes, and what happens to their results.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Share {
    /// All, whose results are shown.
    #[default]
    Whole,
    /// One part, whose results are written to a file; to stdout if it is `-`.
    Part(Part, PathBuf),
    /// None: the results of all parts are read from these files, or from all files of these directories, and shown.
    Merge(Vec<PathBuf>),
}

/// Why a part cannot be run, or parts cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// It is not a part.
    #[error("{0}: must be I/N with I from 1 to N, as in 2/8")]
    Form(String),
    /// A file that cannot be read or written.
    #[error("{path}: {why}", path = path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The cause.
        why: io::Error,
    },
    /// A file that no part has written, or not to its end.
    #[error("{path}: not a whole file of a part: {why}; run the part again", path = path.display())]
    Broken {
        /// Its path.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A part of another experiment.
    #[error("{path}: a part of another {what}; parts and merge need the same program, command line and inputs", path = path.display())]
    Other {
        /// Its path.
        path: PathBuf,
        /// What differs.
        what: &'static str,
    },
    /// Parts of different numbers of parts.
    #[error("{path}: part {part}, but {first_path} is part {first}", path = path.display(), first_path = first_path.display())]
    Divided {
        /// Path of a part.
        path: PathBuf,
        /// The part.
        part: Part,
        /// Path of the first part.
        first_path: PathBuf,
        /// The first part.
        first: Part,
    },
    /// One part in two files.
    #[error("part {part} occurs twice: {first} and {second}", first = first.display(), second = second.display())]
    Twice {
        /// The part.
        part: Part,
        /// Path of its first file.
        first: PathBuf,
        /// Path of its second file.
        second: PathBuf,
    },
    /// Parts without a file.
    #[error("missing: {0}")]
    Missing(String),
}

/// The first line of a part's file.
#[derive(Serialize, Deserialize)]
struct Head {
    schema: String,
    part: Part,
    #[serde(flatten)]
    experiment: Experiment,
}

// === impl Part ===

impl Part {
    /// The only part of one.
    pub const WHOLE: Self = Self { number: 1, of: 1 };

    /// Part `number` of `of`, from 1.
    pub fn new(number: u32, of: u32) -> Option<Self> {
        (1..=of).contains(&number).then_some(Self { number, of })
    }

    /// Its units of an experiment that has `count`, in order.
    pub fn units(self, count: usize) -> impl Iterator<Item = usize> {
        (self.number as usize - 1..count).step_by(self.of as usize)
    }
}

impl FromStr for Part {
    type Err = PartError;

    fn from_str(text: &str) -> Result<Self, PartError> {
        let numbers = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        let part = numbers.and_then(|(number, of)| Self::new(number, of));
        part.ok_or_else(|| PartError::Form(text.to_owned()))
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

impl TryFrom<String> for Part {
    type Error = PartError;

    fn try_from(text: String) -> Result<Self, PartError> {
        text.parse()
    }
}

impl From<Part> for String {
    fn from(part: Part) -> Self {
        part.to_string()
    }
}

// === impl Experiment ===

impl Experiment {
    /// An experiment of the running program. `configuration` is a digest of all inputs of the results of its `units`.
    ///
    /// # Errors
    /// If the program's own file cannot be read.
    pub fn new(command: &str, configuration: String, units: usize) -> Result<Self, PartError> {
        let program = program().map_err(|why| PartError::File { path: "this program".into(), why })?;
        Ok(Self { command: command.to_owned(), configuration, program, units })
    }

    /// What differs from another, if anything.
    fn differs(&self, other: &Self) -> Option<&'static str> {
        if self.command != other.command {
            return Some("command");
        }
        if self.program != other.program {
            return Some("build of the program");
        }
        (self != other).then_some("configuration")
    }

    /// Writes a part's results, one for each of its units.
    fn write<T: Serialize>(&self, part: Part, results: &[T], out: impl Write) -> io::Result<()> {
        let mut out = BufWriter::new(out);
        let head = Head { schema: SCHEMA.to_owned(), part, experiment: self.clone() };
        serde_json::to_writer(&mut out, &head)?;
        writeln!(out)?;
        for result in results {
            serde_json::to_writer(&mut out, result)?;
            writeln!(out)?;
        }
        out.flush()
    }

    /// Reads a part.
    fn read<T: DeserializeOwned>(&self, path: &Path) -> Result<(Part, Vec<T>), PartError> {
        let file = |why| PartError::File { path: path.to_owned(), why };
        let broken = |why: String| PartError::Broken { path: path.to_owned(), why };
        let mut lines = BufReader::new(File::open(path).map_err(file)?).lines();
        let first = lines.next().transpose().map_err(file)?.unwrap_or_default();
        let Head { schema, part, experiment } =
            serde_json::from_str(&first).map_err(|why| broken(format!("its first line: {why}")))?;
        if schema != SCHEMA {
            return Err(broken(format!("its format is {schema}, not {SCHEMA}")));
        }
        if let Some(what) = self.differs(&experiment) {
            return Err(PartError::Other { path: path.to_owned(), what });
        }
        let mut results = Vec::new();
        for line in lines {
            let line = line.map_err(file)?;
            let number = results.len() + 2;
            let result =
                serde_json::from_str(&line).map_err(|why| broken(format!("line {number}: {why}")))?;
            results.push(result);
        }
        let units = part.units(self.units).count();
        if results.len() != units {
            return Err(broken(format!("{} units instead of {units}", results.len())));
        }
        Ok((part, results))
    }

    /// The results of all units in order, from the files of all parts.
    fn merge<T: DeserializeOwned>(&self, paths: &[PathBuf]) -> Result<Vec<T>, PartError> {
        let mut parts: BTreeMap<Part, (PathBuf, Vec<T>)> = BTreeMap::new();
        for path in files(paths)? {
            let (part, results) = self.read(&path)?;
            if let Some((&first, (first_path, _))) = parts.first_key_value() {
                let first_path = first_path.clone();
                if first.of != part.of {
                    return Err(PartError::Divided { path, part, first_path, first });
                }
            }
            if let Some((first, _)) = parts.get(&part) {
                return Err(PartError::Twice { part, first: first.clone(), second: path });
            }
            parts.insert(part, (path, results));
        }
        let Some(of) = parts.keys().next().map(|part| part.of) else {
            return Err(PartError::Missing("no part was given".to_owned()));
        };
        let mut missing = (1..=of)
            .map(|number| Part { number, of })
            .filter(|part| !parts.contains_key(part))
            .map(|part| part.to_string());
        let named: Vec<String> = missing.by_ref().take(NAMED_MAX).collect();
        if !named.is_empty() {
            let more = match missing.count() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            return Err(PartError::Missing(format!("part {}{more}", named.join(", "))));
        }
        let mut parts: Vec<_> = parts.into_values().map(|(_, results)| results.into_iter()).collect();
        Ok((0..self.units).filter_map(|unit| parts[unit % of as usize].next()).collect())
    }
}

/// Digest of the running program, in steps of 16 bytes, because a program is large.
fn program() -> io::Result<String> {
    let mut digest = Digest::default();
    digest.add_wide(&fs::read(std::env::current_exe()?)?);
    Ok(digest.to_string())
}

/// The files, and those in directories in the order of their names.
fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, PartError> {
    let mut files = Vec::new();
    for path in paths {
        let file = |why| PartError::File { path: path.clone(), why };
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let entries = fs::read_dir(path).map_err(file)?.map(|entry| entry.map(|entry| entry.path()));
        let mut inside: Vec<PathBuf> = entries.collect::<Result<_, _>>().map_err(file)?;
        inside.retain(|path| path.is_file());
        inside.sort_unstable();
        files.append(&mut inside);
    }
    Ok(files)
}

// === impl Share ===

impl Share {
    /// The results of all units of an experiment, which `run` makes for the units of a part; none if this share is a
    /// part, whose results are then in its file.
    ///
    /// # Errors
    /// Those of `experiment` and `run`, and if a file cannot be written, or the parts are not one experiment's.
    pub fn results<T: Serialize + DeserializeOwned, E: From<PartError>>(
        &self,
        experiment: impl FnOnce() -> Result<Experiment, PartError>,
        run: impl FnOnce(Part) -> Result<Vec<T>, E>,
    ) -> Result<Option<Vec<T>>, E> {
        match self {
            Self::Whole => run(Part::WHOLE).map(Some),
            Self::Merge(paths) => Ok(Some(experiment()?.merge(paths)?)),
            Self::Part(part, path) => {
                let file = |why| PartError::File { path: path.clone(), why };
                let experiment = experiment()?;
                if path == Path::new("-") {
                    experiment.write(*part, &run(*part)?, io::stdout().lock()).map_err(file)?;
                    return Ok(None);
                }
                // A file that cannot be written is found before the runs; it is replaced after them.
                File::options().create(true).append(true).open(path).map_err(file)?;
                let results = run(*part)?;
                File::create(path).and_then(|out| experiment.write(*part, &results, out)).map_err(file)?;
                Ok(None)
            }
        }
    }
}
