//! Parts of a simulation: flags, files, what cannot be merged, and the Job of Kubernetes that runs them.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::program::{FAILURE, USAGE, fails, kvlane, succeeds, text};

/// Six runs that take no time.
const SMALL: [&str; 11] = [
    "simulate",
    "--workload",
    "chat",
    "--preset",
    "llama-3.1-8b@h100",
    "--engines",
    "2",
    "--rate",
    "1x10",
    "--seeds",
    "2",
];

/// Writes the file of a part of `SMALL` with more flags. It prints nothing.
fn part(folder: &Path, part: &str, more: &[&str]) -> String {
    let path = folder.join(format!("{}.jsonl", part.replace('/', "-of-"))).to_string_lossy().into_owned();
    let printed = succeeds(&[&SMALL[..], more, &["--part", part, "--part-file", &path]].concat()).0;
    assert_eq!(printed, "", "results of a part are in its file only");
    path
}

/// Invariant: The parts of an experiment hold each of its runs once, and merged they give the bytes of one machine.
///
/// Also held by `parts_hold_every_unit_once_and_merged_they_are_the_whole` and `parts_of_a_bench_are_the_whole_bench`.
#[test]
fn parts_of_a_simulation_are_the_simulation() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let outputs = |name: &str| {
        ["--json".to_owned(), place(&format!("{name}.json")), "--records".to_owned(), place(name)]
    };
    let whole = outputs("whole");
    succeeds(&[&SMALL[..], &whole.each_ref().map(String::as_str)].concat());
    // With seven, one part has nothing to do.
    for of in [2, 7] {
        let files = tempfile::tempdir().expect("a folder");
        let merged = outputs(&format!("merged-{of}"));
        let merged = merged.each_ref().map(String::as_str);
        for number in (1..=of).rev() {
            part(files.path(), &format!("{number}/{of}"), &merged);
        }
        assert!(!Path::new(merged[1]).exists(), "a part writes nothing but its file");
        succeeds(&[&SMALL[..], &merged, &["--merge", &files.path().to_string_lossy()]].concat());
        let read = |path: &str| std::fs::read_to_string(path).expect("written");
        assert_eq!(read(merged[1]), read(&whole[1]), "{of} parts");
        for entry in std::fs::read_dir(&whole[3]).expect("records") {
            let name = entry.expect("an entry").file_name().to_string_lossy().into_owned();
            assert_eq!(
                read(&format!("{}/{name}", merged[3])),
                read(&format!("{}/{name}", whole[3])),
                "{name}"
            );
        }
    }
}

#[test]
fn what_is_not_all_parts_of_one_simulation_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let [one, two, half] = ["1/3", "2/3", "1/2"].map(|number| part(folder.path(), number, &[]));
    let other = tempfile::tempdir().expect("a folder");
    let slower = part(other.path(), "3/3", &["--slo-ttft-s", "9"]);
    let merge = |files: &[&str], words: &[&str]| {
        fails(&[&SMALL[..], &["--json", "--merge"], files].concat(), FAILURE, words);
    };
    merge(&[&one], &["missing: part 2/3, 3/3"]);
    merge(&[&one, &two, &one], &["part 1/3 occurs twice", &one]);
    merge(&[&one, &half], &[&half, "part 1/2, but", "part 1/3"]);
    merge(&[&one, &two, &slower], &[&slower, "another configuration"]);
    let broken = folder.path().join("broken").to_string_lossy().into_owned();
    let whole = std::fs::read_to_string(&one).expect("written");
    std::fs::write(&broken, whole.lines().next().expect("a line")).expect("written");
    merge(&[&broken], &[&broken, "0 units instead of 3", "run the part again"]);
    std::fs::write(&broken, "").expect("written");
    merge(&[&broken], &[&broken, "its first line"]);
    merge(&["/nowhere.jsonl"], &["/nowhere.jsonl", "No such file"]);
    for bad in ["0/3", "4/3", "1/0", "3", "a/b", "-1/2", "job/2"] {
        fails(&[&SMALL[..], &[&format!("--part={bad}")]].concat(), USAGE, &[bad, "must be I/N"]);
    }
    fails(&[&SMALL[..], &["--part", "1/2", "--merge", &one]].concat(), USAGE, &["cannot be used"]);
    fails(&[&SMALL[..], &["--part-file", &one]].concat(), USAGE, &["--part"]);
    fails(&[&SMALL[..], &["--part", "1/2", "--part-file", "/nowhere/1"]].concat(), FAILURE, &["/nowhere/1"]);
}

/// The Job of Kubernetes is run as Kubernetes would: a process for each index with its variable, then the merge.
#[test]
fn the_pods_of_the_sample_job_make_the_figures_of_one_machine() {
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/samples/simulate.yaml");
    let sample = std::fs::read_to_string(sample).expect("a sample");
    let objects: Vec<Value> = serde_saphyr::from_multiple(&sample).expect("YAML");
    let object = |name: &str| {
        let named = |object: &&Value| object["kind"] == "Job" && object["metadata"]["name"] == name;
        objects.iter().find(named).expect("a Job")
    };
    let folder = tempfile::tempdir().expect("a folder");
    let scenario = folder.path().join("scenario.yaml").to_string_lossy().into_owned();
    std::fs::write(&scenario, objects[0]["data"]["scenario.yaml"].as_str().expect("a scenario"))
        .expect("written");
    let parts = folder.path().join("parts").to_string_lossy().into_owned();
    std::fs::create_dir(&parts).expect("made");
    let run = |job: &Value, variables: &BTreeMap<&str, String>| {
        let container = &job["spec"]["template"]["spec"]["containers"][0];
        let words = container["args"].as_array().expect("arguments").iter().map(|word| {
            let word = word.as_str().expect("a word").replace("/scenario/scenario.yaml", &scenario);
            let word = word.replace("=/parts", &format!("={parts}"));
            variables.iter().fold(word, |word, (name, value)| word.replace(&format!("$({name})"), value))
        });
        let words: Vec<String> = words.collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = kvlane(&words).envs(variables).output().expect("it starts");
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let job = object("simulate-parts");
    assert_eq!(job["spec"]["completionMode"], "Indexed");
    for index in 0..job["spec"]["completions"].as_u64().expect("a number") {
        run(job, &BTreeMap::from([("JOB_COMPLETION_INDEX", index.to_string())]));
    }
    let merged = run(object("simulate-merge"), &BTreeMap::new());
    assert_eq!(merged, succeeds(&["simulate", "--scenario", &scenario, "--json"]).0);
}
