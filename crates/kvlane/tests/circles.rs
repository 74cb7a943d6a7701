//! No circle of modules: a file of the gateway's crates imports no file that imports it, directly or through others.
//!
//! The compiler forbids circles between crates and allows them between the modules of one. This test reads the paths
//! in each crate's files, before their unit tests, and finds the strongly connected components of the graph.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Modules of each crate that are part of a circle. A crate that is not listed has none. Lower a figure when a circle is
/// broken; do not raise one.
const IN_CIRCLES: [(&str, usize); 6] = [
    ("kvlane-core", 12),
    ("kvlane-lab", 8),
    ("kvlane-mock", 12),
    ("kvlane-sim", 6),
    ("kvlane-tokens", 3),
    ("kvlane-wire", 5),
];

/// A module's path within its crate; empty for the root.
type Module = Vec<String>;

fn crates() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let entries =
        fs::read_dir(dir).expect("the crates' directory").map(|entry| entry.expect("an entry").path());
    let mut crates: Vec<PathBuf> = entries.filter(|path| path.join("src/lib.rs").is_file()).collect();
    crates.sort();
    crates
}

/// The modules of a crate, each with the text of its file before its unit tests and without comments.
fn modules(src: &Path) -> BTreeMap<Module, String> {
    let (mut dirs, mut modules) = (vec![src.to_owned()], BTreeMap::new());
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("a directory of sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            let within = path.strip_prefix(src).expect("below src").with_extension("");
            let mut name: Module = within.iter().map(|part| part.to_string_lossy().into_owned()).collect();
            if name.last().is_some_and(|last| last == "mod" || last == "lib") {
                name.pop();
            }
            let text = fs::read_to_string(&path).expect("UTF-8");
            let code = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
            let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
            modules.insert(name, lines.collect::<Vec<_>>().join("\n"));
        }
    }
    modules
}

/// The paths that a `use` tree names: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn paths(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some((prefix, rest)) = tree.split_once('{') else {
        return vec![tree.split(" as ").next().unwrap_or_default().trim().to_owned()];
    };
    let inner = rest.trim_end().strip_suffix('}').unwrap_or(rest);
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, character) in inner.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inner[start..]);
    let parts = parts.into_iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(|part| paths(part).into_iter().map(|path| format!("{}{path}", prefix.trim()))).collect()
}

/// The paths that begin with `crate` or `super`, wherever they stand.
fn inline_paths(text: &str) -> impl Iterator<Item = String> {
    let is_part = |character: char| character.is_alphanumeric() || matches!(character, '_' | ':');
    text.split(move |character| !is_part(character))
        .filter(|path| path.starts_with("crate::") || path.starts_with("super::"))
        .map(|path| path.trim_end_matches(':').to_owned())
}

/// The modules that a module names, itself apart.
fn imports(module: &Module, text: &str, modules: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let declarations = text.split(';').filter_map(|statement| {
        let at = statement.rfind("use ")?;
        let declares = statement[..at].chars().next_back().is_none_or(char::is_whitespace);
        declares.then(|| statement[at + 4..].replace('\n', " "))
    });
    let mut named = BTreeSet::new();
    let declared = declarations.flat_map(|declaration| paths(&declaration));
    for path in declared.chain(inline_paths(text)) {
        let mut parts: Vec<String> = path.split("::").map(|part| part.trim().to_owned()).collect();
        let mut base = match parts[0].as_str() {
            "crate" => Module::new(),
            "self" => module.clone(),
            "super" => {
                let ups = parts.iter().take_while(|part| *part == "super").count();
                parts.drain(1..ups);
                module[..module.len().saturating_sub(ups)].to_vec()
            }
            _ => continue,
        };
        base.extend(parts.drain(1..));
        // The longest prefix that is a module: what follows is an item of it.
        while !base.is_empty() && !modules.contains_key(&base) {
            base.pop();
        }
        if !base.is_empty() && base != *module {
            named.insert(base);
        }
    }
    named
}

/// The modules that reach themselves.
fn in_circles(graph: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<String> {
    let reaches_itself = |module: &Module| {
        let (mut ahead, mut seen): (Vec<&Module>, BTreeSet<&Module>) = (vec![module], BTreeSet::new());
        while let Some(next) = ahead.pop() {
            ahead.extend(graph[next].iter().filter(|&import| seen.insert(import)));
        }
        seen.contains(module)
    };
    graph.keys().filter(|module| reaches_itself(module)).map(|module| module.join("::")).collect()
}

#[test]
fn no_circle_of_modules_is_added() {
    let mut wrong = Vec::new();
    for dir in crates() {
        let name = dir.file_name().expect("a name").to_string_lossy().into_owned();
        let modules = modules(&dir.join("src"));
        assert!(modules.len() > 1, "{name}: the search found no module");
        let graph: BTreeMap<Module, BTreeSet<Module>> =
            modules.iter().map(|(module, text)| (module.clone(), imports(module, text, &modules))).collect();
        let circles = in_circles(&graph);
        let known = IN_CIRCLES.iter().find(|(listed, _)| *listed == name).map_or(0, |(_, count)| *count);
        if circles.len() != known {
            wrong.push(format!("{name}: {} modules instead of {known}: {circles:?}", circles.len()));
        }
    }
    assert!(wrong.is_empty(), "circles differ from IN_CIRCLES:\n{}", wrong.join("\n"));
}

#[test]
fn a_circle_is_found() {
    let modules: BTreeMap<Module, String> = [
        (vec!["a".to_owned()], "use std::fmt;\nuse crate::{b::{B, C}, d};"),
        (vec!["b".to_owned()], "pub(crate) use super::a::A;"),
        (vec!["d".to_owned()], "use self::e::E;"),
        (vec!["d".to_owned(), "e".to_owned()], "use kvlane_core::a;"),
    ]
    .map(|(module, text)| (module, text.to_owned()))
    .into();
    let graph =
        modules.iter().map(|(module, text)| (module.clone(), imports(module, text, &modules))).collect();
    assert_eq!(in_circles(&graph), ["a", "b"]);
}
