//! Rules that the compiler does not check: dependencies between crates, lengths of files, leftovers, and documents that
//! list everything the code has.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvlane_core::policy::{PolicyConfig, Reason};
use kvlane_fleet::metrics::table;
use kvlane_proxy::error::ApiError;
use kvlane_wire::engine::ENGINES;

/// The crates each crate may reach, whether directly or through another.
const MAY_REACH: [(&str, &[&str]); 16] = [
    ("kvlane-core", &[]),
    ("kvlane-wire", &["kvlane-core"]),
    ("kvlane-tokens", &["kvlane-core", "kvlane-wire"]),
    ("kvlane-http", &["kvlane-core"]),
    ("kvlane-fleet", &["kvlane-core", "kvlane-http", "kvlane-wire", "kvlane-tokens"]),
    ("kvlane-proxy", &["kvlane-core", "kvlane-http", "kvlane-wire", "kvlane-tokens", "kvlane-fleet"]),
    ("kvlane-control", &["kvlane-core", "kvlane-http", "kvlane-wire", "kvlane-tokens", "kvlane-fleet"]),
    ("kvlane-k8s", &["kvlane-core", "kvlane-http", "kvlane-wire", "kvlane-tokens", "kvlane-fleet"]),
    (
        "kvlane-admin",
        &[
            "kvlane-core",
            "kvlane-http",
            "kvlane-wire",
            "kvlane-tokens",
            "kvlane-fleet",
            "kvlane-proxy",
            "kvlane-control",
        ],
    ),
    (
        "kvlane-gateway",
        &[
            "kvlane-core",
            "kvlane-http",
            "kvlane-wire",
            "kvlane-tokens",
            "kvlane-fleet",
            "kvlane-proxy",
            "kvlane-control",
            "kvlane-admin",
            "kvlane-k8s",
        ],
    ),
    ("kvlane-trace", &["kvlane-core"]),
    ("kvlane-sim", &["kvlane-core", "kvlane-trace"]),
    ("kvlane-mock", &["kvlane-core", "kvlane-sim", "kvlane-trace", "kvlane-wire"]),
    ("kvlane-lab", &["kvlane-core", "kvlane-trace", "kvlane-sim", "kvlane-wire"]),
    ("kvlane-py", &["kvlane-core", "kvlane-trace", "kvlane-sim", "kvlane-wire", "kvlane-lab"]),
    (
        "kvlane",
        &[
            "kvlane-core",
            "kvlane-wire",
            "kvlane-tokens",
            "kvlane-trace",
            "kvlane-sim",
            "kvlane-mock",
            "kvlane-http",
            "kvlane-fleet",
            "kvlane-proxy",
            "kvlane-control",
            "kvlane-admin",
            "kvlane-k8s",
            "kvlane-gateway",
            "kvlane-lab",
        ],
    ),
];

/// Crates that do nothing but compute, and what they would need to do anything else.
const PURE: [&str; 5] = ["kvlane-core", "kvlane-wire", "kvlane-tokens", "kvlane-trace", "kvlane-sim"];
const IMPURE: [&str; 9] =
    ["tokio", "hyper", "http", "axum", "tonic", "kube", "mio", "tracing", "futures-util"];

/// Lines a file may have before its tests.
const LINES_MAX: usize = 600;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is here")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn document(name: &str) -> String {
    read(&root().join(name))
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let listed = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut paths: Vec<PathBuf> = listed.map(|entry| entry.expect("readable").path()).collect();
    paths.sort();
    paths
}

fn crates() -> Vec<PathBuf> {
    entries(&root().join("crates")).into_iter().filter(|path| path.join("Cargo.toml").is_file()).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().expect("a name").to_string_lossy().into_owned()
}

/// Every Rust file of the workspace with its text.
fn sources() -> Vec<(PathBuf, String)> {
    let (mut dirs, mut files) = (crates(), Vec::new());
    while let Some(dir) = dirs.pop() {
        for path in entries(&dir) {
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = read(&path);
                files.push((path, text));
            }
        }
    }
    assert!(files.len() > 50, "the search found only {} files", files.len());
    files
}

/// Whether a file is a test as a whole. Where the workspace lies does not count.
fn is_test(path: &Path) -> bool {
    let within = path.strip_prefix(root()).expect("a file of the workspace");
    within.components().any(|part| part.as_os_str() == "tests")
}

/// Where a file's tests begin: at its test module, or at once if it is a test itself.
fn tests_begin(path: &Path, text: &str) -> usize {
    let module = text.lines().position(|line| line == "#[cfg(test)]").unwrap_or(text.lines().count());
    if is_test(path) { 0 } else { module }
}

/// The packages that `krate` is built from with these flags, itself included.
fn reached_by(krate: &str, flags: &[&str]) -> BTreeSet<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["tree", "--offline", "--locked", "--edges", "normal", "--prefix", "none", "--package", krate])
        .args(flags)
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

/// The text between the first `open` and the next `close` after it, as often as there are any.
fn between<'a>(text: &'a str, open: &str, close: &str) -> Vec<&'a str> {
    text.split(open).skip(1).filter_map(|rest| rest.split_once(close)).map(|(inner, _)| inner).collect()
}

/// Invariant: Dependencies between crates point one way; crates that only compute reach no runtime, HTTP or logging.
///
/// Also held by `what_only_computes_reaches_nothing_that_can_wait_or_log`.
#[test]
fn dependencies_point_one_way() {
    let names: BTreeSet<String> = crates().iter().map(|path| name_of(path)).collect();
    let listed: BTreeSet<String> = MAY_REACH.iter().map(|(krate, _)| (*krate).to_owned()).collect();
    assert_eq!(names, listed, "every crate needs a row in MAY_REACH");
    for (krate, allowed) in MAY_REACH {
        let reached = reached_by(krate, &[]);
        assert!(reached.contains(krate), "cargo tree does not list {krate} itself");
        let ours = reached.iter().filter(|name| names.contains(*name) && *name != krate);
        for name in ours {
            assert!(allowed.contains(&name.as_str()), "{krate} must not reach {name}");
        }
    }
}

#[test]
fn what_only_computes_reaches_nothing_that_can_wait_or_log() {
    for krate in PURE {
        let reached = reached_by(krate, &[]);
        for name in IMPURE {
            assert!(!reached.contains(name), "{krate} must not reach {name}");
        }
    }
    assert!(reached_by("kvlane-gateway", &[]).contains("tokio"), "the search would not find tokio");
}

#[test]
fn the_gateway_alone_is_built_without_the_laboratory() {
    let laboratory = ["kvlane-lab", "kvlane-mock", "kvlane-sim", "kvlane-trace", "indicatif"];
    let (alone, whole) = (reached_by("kvlane", &["--no-default-features"]), reached_by("kvlane", &[]));
    assert!(alone.contains("kvlane-gateway"), "the gateway is not in it");
    for name in laboratory {
        assert!(whole.contains(name), "the search would not find {name}");
        assert!(!alone.contains(name), "kvlane --no-default-features must not reach {name}");
    }
}

#[test]
fn no_file_is_longer_than_a_story() {
    for (path, text) in sources() {
        let lines = match is_test(&path) {
            true => text.lines().count(),
            false => tests_begin(&path, &text),
        };
        assert!(
            lines <= LINES_MAX,
            "{} has {lines} lines, {LINES_MAX} is the most: split it",
            path.display()
        );
    }
}

/// Invariant: What a crate includes is in its package: `cargo package` takes the crate's own folder, and what links lead to.
#[test]
fn every_crate_includes_its_own_files_only() {
    for (path, text) in sources().into_iter().filter(|(path, _)| !is_test(path)) {
        let (folder, krate) =
            (path.parent().expect("a folder"), path.ancestors().find(|dir| dir.join("Cargo.toml").exists()));
        let krate = krate.expect("a crate");
        for call in ["include_str!(", "include_bytes!("] {
            for included in text.split(call).skip(1).filter_map(|rest| rest.trim_start().strip_prefix('"')) {
                let file = included.split('"').next().expect("a name");
                let mut at = folder.to_path_buf();
                for part in Path::new(file).components() {
                    match part {
                        std::path::Component::ParentDir => _ = at.pop(),
                        part => at.push(part),
                    }
                }
                assert!(at.starts_with(krate), "{}: {file} is not in {}", path.display(), krate.display());
            }
        }
    }
}

/// Sources that know engines only through the table of `wire::engine`.
const KNOW_NO_ENGINE: [&str; 10] = [
    "crates/kvlane-http/src",
    "crates/kvlane-fleet/src",
    "crates/kvlane-proxy/src",
    "crates/kvlane-control/src",
    "crates/kvlane-admin/src",
    "crates/kvlane-gateway/src",
    "crates/kvlane-tokens/src",
    "crates/kvlane-wire/src",
    "crates/kvlane-lab/src/calibrate",
    "crates/kvlane/src/commands/doctor",
];
/// Except the table itself, the table of paths with the engines that serve each, the connectors that are called like an engine, and the engines that tests start.
const KNOW_ENGINES: [&str; 4] = [
    "crates/kvlane-wire/src/engine",
    "crates/kvlane-wire/src/api",
    "crates/kvlane-wire/src/disaggregation",
    "crates/kvlane-gateway/src/testing",
];

#[test]
fn an_engine_is_named_in_its_own_file_only() {
    let mut words: BTreeSet<String> = BTreeSet::new();
    for kind in ENGINES {
        words.extend([kind.name, kind.title, kind.owner].map(str::to_lowercase));
        let feeds = kind.feeds.iter().map(|query| query.path);
        let resets = kind.cache_reset.iter().map(|reset| reset.path);
        let versions = kind.versions.iter().map(|(path, _)| *path);
        let paths = feeds.chain(resets).chain(versions).chain(kind.settings.path);
        words.extend(paths.map(|path| format!("\"{path}\"")));
    }
    assert!(words.contains("vllm") && words.contains("\"/flush_cache\""), "{words:?}");
    let mut checked = 0;
    for (path, text) in sources() {
        let below = |dirs: &[&str]| dirs.iter().any(|dir| path.starts_with(root().join(dir)));
        if !below(&KNOW_NO_ENGINE) || below(&KNOW_ENGINES) {
            continue;
        }
        checked += 1;
        for (n, line) in text.lines().take(tests_begin(&path, &text)).enumerate() {
            let code = if line.trim_start().starts_with("//") { "" } else { line };
            let code = code.split(" // ").next().unwrap_or_default().to_lowercase();
            let word = words.iter().find(|word| code.contains(word.as_str()));
            assert!(word.is_none(), "{}:{} names {word:?}", path.display(), n + 1);
        }
    }
    assert!(checked > 100, "{checked} files");
}

#[test]
fn every_crate_takes_lints_version_and_licence_from_the_workspace() {
    for path in crates() {
        let manifest = read(&path.join("Cargo.toml"));
        for line in [
            "[lints]\nworkspace = true\n",
            "version.workspace = true\n",
            "edition.workspace = true\n",
            "rust-version.workspace = true\n",
            "license.workspace = true\n",
        ] {
            assert!(manifest.contains(line), "{} lacks {line:?}", path.display());
        }
    }
}

#[test]
fn no_merge_is_half_done() {
    let markers = [concat!("<<<<", "<<< "), concat!(">>>>", ">>> ")];
    let texts = ["", "docs", "docs/decisions", "docs/migrate", "docs/tutorials", "e2e"]
        .map(|dir| entries(&root().join(dir)));
    let is_text =
        |path: &PathBuf| path.extension().is_some_and(|extension| extension == "md" || extension == "yaml");
    let texts: Vec<_> = texts.concat().into_iter().filter(is_text).map(|path| (read(&path), path)).collect();
    assert!(texts.iter().any(|(_, path)| path.ends_with("CHANGELOG.md")));
    for (text, path) in texts.into_iter().chain(sources().into_iter().map(|(path, text)| (text, path))) {
        let half = text.lines().find(|line| markers.iter().any(|marker| line.starts_with(marker)));
        assert_eq!(half, None, "{}", path.display());
    }
}

#[test]
fn nothing_is_left_for_later() {
    // Put together from pieces, so that this file does not contain them.
    let left_behind = [
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
        concat!("#[ig", "nore"),
        concat!("allow(dead", "_code"),
        concat!("expect(dead", "_code"),
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
    ];
    for (path, text) in sources() {
        for word in left_behind {
            assert!(!text.contains(word), "{} contains {word}", path.display());
        }
    }
}

/// The lints that hold it, of which `make lint` makes errors.
#[test]
fn nothing_is_unsafe_without_an_argument() {
    let manifest = document("Cargo.toml");
    for lint in [
        "\nunsafe_code = \"deny\"\n",
        "\nundocumented_unsafe_blocks = \"deny\"\n",
        "\nallow_attributes_without_reason = \"warn\"\n",
    ] {
        assert!(manifest.contains(lint), "Cargo.toml lacks {lint:?}");
    }
}

/// Tests always unwind, so none would notice.
#[test]
fn a_panic_unwinds_in_every_profile() {
    for path in crates().into_iter().chain([root()]) {
        let manifest = read(&path.join("Cargo.toml"));
        let sets = |line: &&str| line.split('=').next().is_some_and(|key| key.trim() == "panic");
        let set: Vec<&str> = manifest.lines().filter(sets).collect();
        assert!(set.is_empty(), "{} sets {set:?}: see docs/decisions/0014-panics.md", path.display());
    }
}

#[test]
fn no_test_sleeps() {
    let (call, until) = (concat!("sle", "ep("), concat!("sle", "ep_until("));
    for (path, text) in sources() {
        for (n, line) in text.lines().enumerate().skip(tests_begin(&path, &text)) {
            assert!(!line.contains(call) && !line.contains(until), "{}:{} sleeps", path.display(), n + 1);
        }
    }
}

/// Invariant: Every policy, reason, metric, error code and flag is in the guide or in the document it refers to.
///
/// Also held by `every_reason_and_error_code_is_in_the_guide`, `every_flag_is_in_the_guide`.
#[test]
fn every_policy_is_in_the_guide() {
    let guide = document("docs/guide.md");
    let others = between(&guide, "\n### Policies of other routers\n", "\n## ");
    let dir = root().join("crates/kvlane-core/src/policy");
    let names = |dir: &Path| -> Vec<String> {
        let files = entries(dir).into_iter().filter(|path| path.is_file());
        let names = files.map(|path| name_of(&path).trim_end_matches(".rs").to_owned());
        names.filter(|name| name != "mod").collect()
    };
    let (own, published) = (names(&dir), names(&dir.join("published")));
    for name in &own {
        assert!(guide.contains(&format!("\n### `{name}`\n")), "docs/guide.md has no section on {name}");
    }
    for name in &published {
        let told = others[0].contains(&format!("\n| `{name}` |"));
        assert!(told, "docs/guide.md has no row on {name} among the policies of other routers");
    }
    let (count, sets) = (own.len() + published.len(), PolicyConfig::SETS);
    assert_eq!(count + sets.len(), PolicyConfig::NAMES.len(), "one file per policy");
    for set in sets {
        assert!(guide.contains(&format!("\n| `{set}` |")), "docs/guide.md has no row on the set {set}");
    }
}

#[test]
fn a_policys_section_names_its_reason_where_it_says_so() {
    let guide = document("docs/guide.md");
    let policies = guide.split("\n## Policies").nth(1).and_then(|rest| rest.split("\n## ").next());
    let after = policies.expect("a chapter").split("Reason:").skip(1);
    for text in after {
        let word = text.split_whitespace().next().unwrap_or_default();
        assert!(
            Reason::ALL.iter().any(|reason| word.contains(reason.name())),
            "docs/guide.md: Reason: {word}"
        );
    }
}

#[test]
fn every_reason_and_error_code_is_in_the_guide() {
    let guide = document("docs/guide.md");
    let listed =
        |name: &str| assert!(guide.contains(&format!("`{name}`")), "docs/guide.md does not list {name}");
    for reason in Reason::ALL {
        listed(reason.name());
    }
    ApiError::CODES.iter().copied().for_each(listed);
}

#[test]
fn the_document_of_metrics_is_what_the_table_says() {
    let written = table::markdown();
    assert!(
        document("docs/metrics.md") == written,
        "docs/metrics.md is stale: cargo run -p kvlane-fleet --example metrics > docs/metrics.md"
    );
    assert!(written.contains("| `kvlane_ttft_seconds` | histogram | seconds | `model` |"), "{written}");
}

#[test]
fn every_metric_that_a_document_names_is_there() {
    let names: BTreeSet<String> = table::rows().map(table::Row::full_name).collect();
    let mut found = 0;
    for path in entries(&root().join("docs")).into_iter().filter(|path| name_of(path).ends_with(".md")) {
        let text = read(&path);
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for word in words.filter(|word| word.starts_with("kvlane_") && !word.ends_with('_')) {
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end));
            let is_crate = MAY_REACH.iter().any(|(name, _)| name.replace('-', "_") == word);
            let is_known = names.contains(word) || base.is_some_and(|base| names.contains(base));
            assert!(is_crate || is_known, "{}: there is no {word}", path.display());
            found += usize::from(is_known);
        }
    }
    assert!(found > 60, "{found}");
}

#[test]
fn every_key_that_needs_a_restart_is_named() {
    let operations = document("docs/operations.md");
    for key in kvlane_gateway::reload::NEEDS_RESTART {
        assert!(operations.contains(&format!("`{key}`")), "docs/operations.md does not name {key}");
    }
}

#[test]
fn every_limit_tells_in_which_metric_it_is_seen() {
    let (operations, metrics) = (document("docs/operations.md"), document("docs/metrics.md"));
    let sections = between(&operations, "\n## Limits\n", "\n### ");
    let table = sections.first().expect("docs/operations.md has a section on limits");
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| **"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert!(rows.len() > 40, "{} rows", rows.len());
    let mut seen = 0;
    for row in &rows {
        assert_eq!(row.len(), 5, "{row:?}");
        for named in row[4].split('`').skip(1).step_by(2) {
            let name = named.split('{').next().unwrap_or_default();
            assert!(
                metrics.contains(&format!("| `kvlane_{name}` |")),
                "docs/metrics.md does not list kvlane_{name}: {row:?}"
            );
            seen += 1;
        }
    }
    assert!(seen > 30, "{seen} metrics");
}

/// The keys of `value`, whatever they are in, but for those of workloads, policies and figures.
fn keys(value: &serde_json::Value, found: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, inner) in map {
                found.insert(key.clone());
                if !["generate", "policy", "published"].contains(&key.as_str()) {
                    keys(inner, found);
                }
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(|inner| keys(inner, found)),
        _ => {}
    }
}

#[test]
fn every_key_of_a_scenario_is_explained() {
    let simulator = document("docs/simulator.md");
    let written = between(&simulator, "```yaml\n", "```");
    assert_eq!(written.len(), 2, "one to copy, one with every key");
    let shipped: Vec<String> = entries(&root().join("scenarios")).iter().map(|path| read(path)).collect();
    assert!(shipped.len() > 5, "{}", shipped.len());
    let mut found = BTreeSet::new();
    for text in shipped.iter().map(String::as_str).chain(written.iter().copied()) {
        let scenario: kvlane_lab::scenario::Scenario = serde_saphyr::from_str(text).expect("a scenario");
        keys(&serde_json::to_value(&scenario).expect("JSON"), &mut found);
    }
    assert!(found.contains("kv_event_jitter_s") && found.contains("per_client"), "{found:?}");
    for key in found {
        assert!(written[1].contains(&format!("{key}:")), "docs/simulator.md does not explain {key}");
    }
}

#[test]
fn every_scenario_and_figure_is_explained() {
    let simulator = document("docs/simulator.md");
    let kvlane = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvlane")).args(args).output().expect("it starts");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let listed = kvlane(&["simulate", "--list"]);
    for path in entries(&root().join("scenarios")) {
        let name = name_of(&path).trim_end_matches(".yaml").to_owned();
        assert!(listed.lines().any(|line| line.split(' ').next() == Some(&name)), "{name} is not in --list");
        assert!(simulator.contains(&format!("`{name}`")), "docs/simulator.md does not explain {name}");
    }
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("support-chats.yaml");
    let example = between(&simulator, "```yaml\n", "```");
    fs::write(&file, example.first().expect("a scenario to copy")).expect("written");
    let report = kvlane(&["simulate", "--scenario", file.to_str().expect("UTF-8"), "--json", "-"]);
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 6, "three policies at two rates");
    let known: BTreeSet<&String> =
        rows.iter().flat_map(|row| row["simulated"].as_object().expect("figures").keys()).collect();
    assert!(known.len() > 30, "{known:?}");
    for figure in known {
        assert!(simulator.contains(&format!("`{figure}`")), "docs/simulator.md does not explain {figure}");
    }
}

#[test]
fn every_threat_names_tests_that_exist() {
    let security = document("SECURITY.md");
    let threats = between(&security, "## Threats", "\n## ");
    let rows: Vec<&str> =
        threats[0].lines().filter(|line| line.starts_with("| ") && line.contains('`')).collect();
    assert!(rows.len() > 10, "{} rows", rows.len());
    let sources = sources();
    for row in rows {
        let held_by = row.trim_end_matches(['|', ' ']).rsplit('|').next().expect("a last column");
        for test in held_by.split('`').skip(1).step_by(2) {
            let definition = format!("fn {test}(");
            assert!(sources.iter().any(|(_, text)| text.contains(&definition)), "there is no test {test}");
        }
    }
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut documents: Vec<PathBuf> =
        entries(&root()).into_iter().chain(entries(&root().join("docs"))).collect();
    documents.extend(entries(&root().join("docs/decisions")));
    documents.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    assert!(documents.len() > 8, "{documents:?}");
    for path in documents {
        for link in between(&read(&path), "](", ")") {
            let file = link.split('#').next().unwrap_or_default();
            if !file.is_empty() && !link.contains("://") {
                assert!(path.with_file_name(file).exists(), "{}: {link} leads nowhere", path.display());
            }
        }
    }
}

#[test]
fn the_readme_the_makefile_and_ci_run_the_same_tests() {
    assert!(document("README.md").contains("make test"));
    assert!(document(".ci/run").lines().any(|line| line == "make test"));
    let makefile = document("Makefile");
    assert!(makefile.contains("\n\tcargo test --workspace --locked\n"));
    assert!(makefile.contains("\nci:\n\t./.ci/run\n"));
}
