//! What the product is built from: every crate comes from crates.io under a licence that `deny.toml` allows, and none is
//! there that it bans. The part of `cargo deny check` that needs neither a network nor a tool. Licences are those of what
//! this machine builds from; the rest need not be here.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What a program of the toolchain says.
fn said(program: &str, args: &[&str]) -> String {
    let program = std::env::var_os(program.to_uppercase()).unwrap_or_else(|| program.into());
    let output = Command::new(program).args(args).current_dir(root()).output().expect("it runs");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Every package that is built here, as its manifest describes it.
fn packages() -> Vec<Value> {
    let version = said("rustc", &["-vV"]);
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("a host");
    let flags = ["--format-version", "1", "--offline", "--locked", "--filter-platform", host];
    let metadata: Value =
        serde_json::from_str(&said("cargo", &[&["metadata"], &flags[..]].concat())).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages").clone();
    assert!(packages.len() > 100, "{} packages", packages.len());
    packages
}

/// Every package of Cargo.lock, whatever it is built for: its name and where it comes from, if that is not here.
fn locked() -> Vec<(String, Option<String>)> {
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).expect("Cargo.lock");
    let value = |package: &str, key: &str| {
        let line = package.lines().find_map(|line| line.strip_prefix(&format!("{key} = ")))?;
        Some(line.trim_matches('"').to_owned())
    };
    let packages = lock.split("\n[[package]]\n").skip(1);
    let packages: Vec<_> =
        packages.map(|package| (value(package, "name").expect("a name"), value(package, "source"))).collect();
    assert!(packages.len() > 100, "{} packages", packages.len());
    packages
}

/// A list of texts of `deny.toml`, by its key at the start of a line.
fn listed(key: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml");
    let lists: Vec<&str> =
        text.split(&format!("\n{key} = [")).skip(1).filter_map(|rest| rest.split(']').next()).collect();
    assert_eq!(lists.len(), 1, "{key} in deny.toml");
    lists[0].split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Whether a licence expression (SPDX, or the slash that crates wrote before it) leaves a choice that is allowed.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words: Vec<&str> = spaced.split_whitespace().rev().collect();
    let fits = alternatives(&mut words, allowed);
    assert!(words.is_empty(), "{expression} is no licence expression");
    fits
}

fn alternatives(words: &mut Vec<&str>, allowed: &BTreeSet<String>) -> bool {
    let mut fits = all_of(words, allowed);
    while words.last() == Some(&"OR") {
        words.pop();
        fits |= all_of(words, allowed);
    }
    fits
}

fn all_of(words: &mut Vec<&str>, allowed: &BTreeSet<String>) -> bool {
    let mut fits = one(words, allowed);
    while words.last() == Some(&"AND") {
        words.pop();
        fits &= one(words, allowed);
    }
    fits
}

fn one(words: &mut Vec<&str>, allowed: &BTreeSet<String>) -> bool {
    match words.pop() {
        Some("(") => {
            let fits = alternatives(words, allowed);
            assert_eq!(words.pop(), Some(")"));
            fits
        }
        Some(name) if words.last() == Some(&"WITH") => {
            words.pop();
            let exception = words.pop().expect("an exception");
            allowed.contains(&format!("{name} WITH {exception}"))
        }
        name => allowed.contains(name.expect("a licence")),
    }
}

#[test]
fn an_expression_is_read_as_spdx_means_it() {
    let allowed = BTreeSet::from(["MIT".to_owned(), "Zlib".to_owned(), "A WITH e".to_owned()]);
    for (expression, fits) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0/MIT", true),
        ("GPL-3.0 AND MIT", false),
        ("(GPL-3.0 OR MIT) AND Zlib", true),
        ("MIT AND (GPL-3.0 OR X)", false),
        ("GPL-3.0 OR MIT AND X", false),
        ("A WITH e OR X", true),
        ("A WITH f", false),
        ("A", false),
    ] {
        assert_eq!(is_allowed(expression, &allowed), fits, "{expression}");
    }
}

#[test]
fn every_dependency_has_a_licence_that_is_allowed() {
    let allowed = listed("allow");
    for package in packages() {
        let name = &package["name"];
        let expression = package["license"].as_str().unwrap_or_else(|| panic!("{name} names no licence"));
        assert!(is_allowed(expression, &allowed), "{name} is under {expression}: see deny.toml");
    }
}

/// Invariant: Dependencies come from crates.io under allowed licences; unsafe code has a written argument.
///
/// Also held by `every_dependency_has_a_licence_that_is_allowed`, `nothing_is_there_that_is_banned`,
/// `nothing_is_unsafe_without_an_argument`.
#[test]
fn every_dependency_is_of_the_registry_or_of_this_repository() {
    for (name, source) in locked() {
        assert!(source.as_deref().is_none_or(|source| source == REGISTRY), "{name} comes from {source:?}");
    }
    let root = root().canonicalize().expect("the repository");
    for package in packages().iter().filter(|package| package["source"].is_null()) {
        let manifest = Path::new(package["manifest_path"].as_str().expect("a path"));
        assert!(manifest.starts_with(&root), "{} is at {}", package["name"], manifest.display());
    }
}

#[test]
fn nothing_is_there_that_is_banned() {
    let banned = listed("deny");
    assert!(!banned.is_empty());
    for (name, _) in locked() {
        assert!(!banned.contains(&name), "{name} is banned by deny.toml: `cargo tree --invert {name}`");
    }
}

#[test]
fn no_dependency_of_ours_takes_any_version() {
    for package in packages().iter().filter(|package| package["source"].is_null()) {
        for needed in package["dependencies"].as_array().expect("dependencies") {
            let by_path = needed["path"].is_string();
            assert!(by_path || needed["req"] != "*", "{} takes any {}", package["name"], needed["name"]);
        }
    }
}

/// It looks at what is not built here, too. Where it is missing, the tests above are what there is.
#[test]
fn cargo_deny_agrees_where_it_is_installed() {
    let cargo = |args: &[&str]| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        Command::new(cargo).args(args).current_dir(root()).output().expect("it runs")
    };
    if cargo(&["deny", "--version"]).status.success() {
        let checked = cargo(&["deny", "--offline", "--locked", "check", "bans", "licenses", "sources"]);
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    }
}
