//! Tables of figures in the documents are written from the files in `docs/results`, one for each table: what was measured,
//! with which command, when, and of which code. A table says so if that code has changed since.
//!
//! `KVLANE_WRITE_RESULTS=1 cargo test -p kvlane --test results` writes the tables again, and the code that was measured into
//! files without it. `make results RESULTS=NAME` measures a table whose command prints it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use flate2::Crc;
use serde::Deserialize;

/// Documents with such tables.
const DOCUMENTS: [&str; 2] = ["README.md", "docs/results.md"];

/// One table.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    /// The command that measures it; capitals stand for files of the reader's.
    command: String,
    /// The day.
    measured: String,
    /// The files and directories that it measures.
    of: Vec<PathBuf>,
    /// Their contents then: see [`code`]. Empty right after a measurement, until the tables are written.
    code: String,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn tables() -> BTreeMap<String, Table> {
    let files = fs::read_dir(root().join("docs/results")).expect("docs/results");
    let paths = files.map(|file| file.expect("an entry").path());
    let read = |path: PathBuf| {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let table: Table = serde_json::from_slice(&fs::read(&path).expect("readable"))
            .unwrap_or_else(|error| panic!("docs/results/{name}.json: {error}"));
        (name, table)
    };
    paths.filter(|path| path.extension().is_some_and(|kind| kind == "json")).map(read).collect()
}

/// A checksum of the contents of files and of all files in directories, but for tests.
fn code(of: &[PathBuf]) -> String {
    let mut files: Vec<(String, PathBuf)> = Vec::new();
    for path in of {
        collect(&root().join(path), &path.to_string_lossy(), &mut files);
    }
    files.sort();
    let mut crc = Crc::new();
    for (name, path) in files {
        crc.update(name.as_bytes());
        crc.update(&[0]);
        crc.update(&fs::read(path).expect("readable"));
    }
    format!("{:08x}", crc.sum())
}

fn collect(path: &Path, name: &str, files: &mut Vec<(String, PathBuf)>) {
    if !path.is_dir() {
        assert!(path.is_file(), "a file in docs/results measures {name}, which is not there");
        return files.push((name.to_owned(), path.to_owned()));
    }
    for entry in fs::read_dir(path).expect("a directory") {
        let entry = entry.expect("an entry");
        let within = entry.file_name().to_string_lossy().into_owned();
        if !matches!(within.as_str(), "tests" | "tests.rs" | "__pycache__") {
            collect(&entry.path(), &format!("{name}/{within}"), files);
        }
    }
}

impl Table {
    /// The table, and below it how old it is.
    fn render(&self) -> String {
        let cell = |cell: &String| if cell.is_empty() { "| ".into() } else { format!("| {cell} ") };
        let row = |cells: &[String]| cells.iter().map(cell).collect::<String>() + "|\n";
        let mut text = row(&self.columns) + &"|---".repeat(self.columns.len()) + "|\n";
        text.extend(self.rows.iter().map(|cells| row(cells)));
        let since = if code(&self.of) == self.code { "" } else { ", on an earlier build" };
        let _ = write!(text, "\n*Measured {}{since}.*\n", self.measured);
        text
    }
}

/// A document with its tables written anew. Names of tables that were found are added.
fn rendered(document: &str, tables: &BTreeMap<String, Table>, found: &mut Vec<String>) -> String {
    let mut out = String::new();
    let mut rest = document;
    while let Some(at) = rest.find("<!-- results: ") {
        let (before, from) = rest.split_at(at);
        let (begin, after) = from.split_once('\n').expect("a table below its mark");
        let name = begin.trim_start_matches("<!-- results: ").trim_end_matches(" -->");
        let table = tables.get(name).unwrap_or_else(|| panic!("docs/results/{name}.json is not there"));
        let end = after.find("<!-- end -->").unwrap_or_else(|| panic!("the table {name} has no end"));
        out += &format!("{before}{begin}\n{}", table.render());
        found.push(name.to_owned());
        rest = &after[end..];
    }
    out + rest
}

/// Invariant: A table of figures in README.md and docs/results.md comes from a data file, and says so when the code that it measures has changed
/// since.
#[test]
fn tables_of_figures_are_written_from_their_data() {
    let writes = std::env::var_os("KVLANE_WRITE_RESULTS").is_some();
    let mut tables = tables();
    for (name, table) in tables.iter_mut().filter(|(_, table)| table.code.is_empty() && writes) {
        let path = root().join(format!("docs/results/{name}.json"));
        table.code = code(&table.of);
        let text = fs::read_to_string(&path).expect("readable");
        fs::write(path, text.replace("\"code\": \"\"", &format!("\"code\": \"{}\"", table.code)))
            .expect("writable");
    }
    let unknown: Vec<_> = tables.iter().filter(|(_, table)| table.code.is_empty()).collect();
    assert!(
        unknown.is_empty(),
        "files in docs/results without code: write the tables with KVLANE_WRITE_RESULTS=1"
    );
    let mut found = Vec::new();
    for document in DOCUMENTS {
        let path = root().join(document);
        let is = fs::read_to_string(&path).expect("a document");
        let should_be = rendered(&is, &tables, &mut found);
        if is == should_be {
            continue;
        }
        assert!(
            writes,
            "{document} has other tables than docs/results, or does not say that some are of an earlier build: run \
             KVLANE_WRITE_RESULTS=1 cargo test -p kvlane --test results"
        );
        fs::write(path, should_be).expect("writable");
    }
    found.sort();
    assert_eq!(found, tables.keys().cloned().collect::<Vec<_>>(), "each table is in one place");
}

#[test]
fn every_row_has_a_cell_for_each_column() {
    for (name, table) in tables() {
        assert!(!table.rows.is_empty(), "{name} has no rows");
        assert!(table.rows.iter().all(|row| row.len() == table.columns.len()), "{name}");
        assert!(!table.of.is_empty(), "{name} measures nothing");
        assert!(table.measured.len() == 10, "{name}: the day as 2026-11-26");
        assert!(!table.command.contains('\n'), "{name}");
    }
}

/// Tables of figures elsewhere in these documents have no data: each table of results has a mark.
#[test]
fn every_table_of_results_has_data() {
    let text = fs::read_to_string(root().join("docs/results.md")).expect("a document");
    let mut marked = false;
    for line in text.lines() {
        match line {
            _ if line.starts_with("<!-- results: ") => marked = true,
            "<!-- end -->" => marked = false,
            _ => assert!(
                marked || !line.starts_with("|--"),
                "a table of docs/results.md has no file in docs/results"
            ),
        }
    }
}

#[test]
fn a_table_says_that_its_code_has_changed_since() {
    let of = vec![PathBuf::from("Makefile")];
    let table = |code: String| Table {
        command: "make".into(),
        measured: "2026-11-26".into(),
        of: of.clone(),
        code,
        columns: vec!["".into(), "a".into()],
        rows: vec![vec!["b".into(), "1".into()]],
    };
    let now = table(code(&of)).render();
    assert_eq!(now, "| | a |\n|---|---|\n| b | 1 |\n\n*Measured 2026-11-26.*\n");
    assert!(table("0".into()).render().ends_with("*Measured 2026-11-26, on an earlier build.*\n"));
}
