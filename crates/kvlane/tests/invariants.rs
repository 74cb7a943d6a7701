//! Invariants stand above the tests that hold them, as `/// Invariant: …`; `docs/invariants.md` lists them.
//!
//! `KVLANE_WRITE_INVARIANTS=1 cargo test -p kvlane --test invariants` writes the document again.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// One invariant.
struct Invariant {
    /// What always holds.
    text: String,
    /// The tests that fail if it does not, the one it stands above first.
    tests: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is here")
}

/// The Rust files of a crate with their paths below it, in order.
fn sources(krate: &Path) -> Vec<(String, String)> {
    let (mut dirs, mut files) = (vec![krate.to_owned()], Vec::new());
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(krate).expect("below the crate").to_string_lossy().into_owned();
                files.push((name, fs::read_to_string(&path).expect("UTF-8")));
            }
        }
    }
    files.sort();
    files
}

/// The name of the function that a line defines.
fn function(line: &str) -> Option<&str> {
    let line = line.trim_start().trim_start_matches("async ").strip_prefix("fn ")?;
    line.split(['(', '<']).next()
}

/// The invariants that stand in a file.
fn invariants(text: &str) -> Vec<Invariant> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(begin) = line.trim_start().strip_prefix("/// Invariant: ") else { continue };
        let mut paragraphs = vec![begin.to_owned()];
        let test = lines.by_ref().find_map(|line| {
            match line.trim_start().strip_prefix("///").map(str::trim) {
                Some("") => paragraphs.push(String::new()),
                Some(more) => {
                    let last = paragraphs.last_mut().expect("there is a first one");
                    *last += if last.is_empty() { "" } else { " " };
                    *last += more;
                }
                None => {}
            }
            function(line)
        });
        let mut tests = vec![test.expect("a test follows an invariant").to_owned()];
        let also = paragraphs.iter().filter(|paragraph| paragraph.starts_with("Also held by "));
        tests.extend(also.flat_map(|names| names.split('`').skip(1).step_by(2)).map(str::to_owned));
        found.push(Invariant { text: paragraphs.swap_remove(0), tests });
    }
    found
}

#[test]
fn the_document_of_invariants_is_what_stands_above_the_tests() {
    let mut page = String::from(
        "# Invariants\n\n*Written by `KVLANE_WRITE_INVARIANTS=1 cargo test -p kvlane --test invariants` from the comments \
         above the tests; a test fails if the two differ.*\n",
    );
    let (mut functions, mut named, mut count) = (BTreeSet::new(), BTreeSet::new(), 0);
    let mut crates: Vec<PathBuf> = fs::read_dir(root().join("crates"))
        .expect("crates")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    crates.sort();
    for krate in crates {
        let files = sources(&krate);
        functions
            .extend(files.iter().flat_map(|(_, text)| text.lines().filter_map(function).map(str::to_owned)));
        let of_crate: Vec<Invariant> = files.iter().flat_map(|(_, text)| invariants(text)).collect();
        if of_crate.is_empty() {
            continue;
        }
        count += of_crate.len();
        let name = krate.file_name().expect("a name").to_string_lossy();
        let _ = write!(page, "\n## {name}\n\n| Invariant | Tests |\n|---|---|\n");
        for Invariant { text, tests } in of_crate {
            let shown: Vec<String> = tests.iter().map(|test| format!("`{test}`")).collect();
            let _ = writeln!(page, "| {text} | {} |", shown.join(", "));
            named.extend(tests);
        }
    }
    assert!(count > 100, "only {count} invariants were found");
    let missing: Vec<_> = named.difference(&functions).collect();
    assert!(missing.is_empty(), "there are no tests {missing:?}");
    let path = root().join("docs/invariants.md");
    if std::env::var_os("KVLANE_WRITE_INVARIANTS").is_some() {
        fs::write(&path, &page).expect("the document is written");
    }
    let document = fs::read_to_string(&path).unwrap_or_default();
    assert!(document == page, "docs/invariants.md is out of date: see the first line of this test's file");
}
