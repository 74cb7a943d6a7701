//! No circle of modules: a file of the gateway's crates imports no file that imports it, directly or through others.
//!
//! The compiler forbids circles between crates and allows them between the modules of one. This test reads the paths
//! in each crate's files, before their unit tests, and finds the strongly connected components of the graph.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::visit::{self, Visit};
use syn::{Attribute, ItemMod, ItemUse, Macro, UseTree, Visibility};

/// Modules of each crate that are part of a circle. A crate that is not listed has none. Lower a figure when a circle is
/// broken; do not raise one.
const IN_CIRCLES: [(&str, usize); 6] = [
    ("kvlane-core", 12),
    ("kvlane-lab", 7),
    ("kvlane-mock", 12),
    ("kvlane-sim", 7),
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

/// The modules of a crate, each with the paths that its file names.
fn modules(src: &Path) -> BTreeMap<Module, Vec<Module>> {
    let (mut dirs, mut modules) = (vec![src.to_owned()], BTreeMap::new());
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("a directory of sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            if path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let within = path.strip_prefix(src).expect("below src").with_extension("");
            let mut name: Module = within.iter().map(|part| part.to_string_lossy().into_owned()).collect();
            if name.last().is_some_and(|last| last == "mod" || last == "lib") {
                name.pop();
            }
            let text = fs::read_to_string(&path).expect("UTF-8");
            let file = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            modules.insert(name, paths(&file));
        }
    }
    modules
}

fn paths(file: &syn::File) -> Vec<Module> {
    let mut paths = Paths::default();
    paths.visit_file(file);
    paths.0
}

/// All paths in a file, but for its unit tests.
#[derive(Default)]
struct Paths(Vec<Module>);

// === impl Paths ===

impl Paths {
    fn add_tree(&mut self, before: &Module, tree: &UseTree) {
        let with = |name: &syn::Ident| [before.as_slice(), &[name.unraw().to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.add_tree(&with(&path.ident), &path.tree),
            UseTree::Name(name) => self.0.push(with(&name.ident)),
            UseTree::Rename(name) => self.0.push(with(&name.ident)),
            UseTree::Glob(_) => self.0.push(before.clone()),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_tree(before, tree)),
        }
    }

    /// The paths in a macro's arguments, which are not parsed. A single word names no module: it may be a visibility.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path = Module::new();
        for token in tokens {
            match token {
                TokenTree::Ident(name) => path.push(name.to_string()),
                TokenTree::Punct(punct) if punct.as_char() == ':' => {}
                other => {
                    self.add_path(std::mem::take(&mut path));
                    if let TokenTree::Group(group) = other {
                        self.add_tokens(group.stream());
                    }
                }
            }
        }
        self.add_path(path);
    }

    fn add_path(&mut self, path: Module) {
        if path.len() > 1 {
            self.0.push(path);
        }
    }
}

impl Visit<'_> for Paths {
    fn visit_item_mod(&mut self, module: &ItemMod) {
        if !is_for_tests(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_use(&mut self, item: &ItemUse) {
        if !is_for_tests(&item.attrs) {
            self.add_tree(&Module::new(), &item.tree);
        }
    }

    fn visit_path(&mut self, path: &syn::Path) {
        self.0.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &Macro) {
        self.visit_path(&called.path);
        self.add_tokens(called.tokens.clone());
    }

    /// Who may see an item is not what it names.
    fn visit_visibility(&mut self, _: &Visibility) {}
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    let is_test = |named: syn::Ident| named == "test";
    attributes.iter().any(|each| each.path().is_ident("cfg") && each.parse_args().is_ok_and(is_test))
}

/// The modules that a module names, itself apart.
fn imports<T>(module: &Module, paths: &[Module], modules: &BTreeMap<Module, T>) -> BTreeSet<Module> {
    let mut named = BTreeSet::new();
    for path in paths {
        let (mut base, rest) = match path.first().map(String::as_str) {
            Some("crate") => (Module::new(), &path[1..]),
            Some("self") => (module.clone(), &path[1..]),
            Some("super") => {
                let ups = path.iter().take_while(|part| *part == "super").count();
                (module[..module.len().saturating_sub(ups)].to_vec(), &path[ups..])
            }
            _ => continue,
        };
        base.extend_from_slice(rest);
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
        let graph: BTreeMap<Module, BTreeSet<Module>> = modules
            .iter()
            .map(|(module, paths)| (module.clone(), imports(module, paths, &modules)))
            .collect();
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
    let modules: BTreeMap<Module, Vec<Module>> = [
        (vec!["a".to_owned()], "use std::fmt;\nuse crate::{b::{B, C}, d};"),
        (vec!["b".to_owned()], "fn b() { log!(\"use crate::d\", of = super::a::A) }"),
        (vec!["d".to_owned()], "pub(super) use self::e::E;\n#[cfg(test)]\nmod tests { use crate::a; }"),
        (vec!["d".to_owned(), "e".to_owned()], "use kvlane_core::a;"),
    ]
    .map(|(module, text)| (module, paths(&syn::parse_str(text).expect("Rust"))))
    .into();
    let graph =
        modules.iter().map(|(module, paths)| (module.clone(), imports(module, paths, &modules))).collect();
    assert_eq!(in_circles(&graph), ["a", "b"]);
}
