//! Parts of an experiment: every unit is in one of them, and all of them together are the whole.

use std::path::{Path, PathBuf};

use kvlane_lab::part::{Experiment, Part, PartError, Share};
use proptest::prelude::*;

/// The result of a unit.
type Found = Vec<(u32, f64)>;

/// Writes part `number` of `of`, in a file of its own. Returns its path and the units that were run.
fn write(
    folder: &Path,
    experiment: &Experiment,
    number: u32,
    of: u32,
    all: &[Found],
) -> (PathBuf, Vec<usize>) {
    let part = Part::new(number, of).expect("a part");
    let path = folder.join(format!("{number}"));
    let mut run = Vec::new();
    let results = Share::Part(part, path.clone()).results(
        || Ok(experiment.clone()),
        |part| {
            run.extend(part.units(all.len()));
            Ok::<_, PartError>(run.iter().map(|&unit| all[unit].clone()).collect())
        },
    );
    assert_eq!(results.expect("it is written"), None, "results of a part are in its file");
    (path, run)
}

fn merge(experiment: &Experiment, paths: &[PathBuf]) -> Result<Vec<Found>, String> {
    let merged = Share::Merge(paths.to_vec())
        .results(|| Ok(experiment.clone()), |_| -> Result<_, PartError> { panic!("merging runs nothing") });
    merged.map(|found| found.expect("results")).map_err(|why| why.to_string())
}

fn experiment(configuration: &str, units: usize) -> Experiment {
    Experiment::new("test", configuration.to_owned(), units).expect("this program can be read")
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("kvlane-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

#[test]
fn parts_hold_every_unit_once_and_merged_they_are_the_whole() {
    let folder = folder("parts");
    let experiments: Vec<Experiment> = (0..30).map(|units| experiment("a", units)).collect();
    let finite = any::<f64>().prop_filter("JSON has no infinity", |value| value.is_finite());
    let found = prop::collection::vec((any::<u32>(), finite), 0..4);
    let cases = (prop::collection::vec(found, 0..30), 1..35u32, any::<prop::sample::Index>());
    proptest!(ProptestConfig::with_cases(64), |((all, of, turn) in cases)| {
        let experiment = &experiments[all.len()];
        let (mut paths, run): (Vec<_>, Vec<_>) =
            (1..=of).map(|number| write(&folder, experiment, number, of, &all)).unzip();
        let mut run = run.concat();
        run.sort_unstable();
        prop_assert_eq!(run, (0..all.len()).collect::<Vec<_>>());
        // In any order.
        paths.rotate_left(turn.index(of as usize));
        let merged = merge(experiment, &paths).map_err(TestCaseError::fail)?;
        let bytes = |found: &[Found]| serde_json::to_vec(found).expect("JSON");
        prop_assert_eq!(bytes(&merged), bytes(&all));
        // Without any one of them, and with any one twice.
        let one = turn.index(of as usize);
        let twice = merge(experiment, &[&paths[..], &[paths[one].clone()]].concat());
        prop_assert!(twice.is_err_and(|why| why.contains("occurs twice")));
        paths.remove(one);
        prop_assert!(merge(experiment, &paths).is_err_and(|why| why.contains("missing")));
    });
    _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn a_file_that_is_cut_short_anywhere_is_not_a_part() {
    let folder = folder("cut");
    let experiment = experiment("a", 3);
    let all = vec![vec![(1, 0.1)], vec![], vec![(2, 2.0)]];
    let (path, _) = write(&folder, &experiment, 1, 1, &all);
    let whole = std::fs::read(&path).expect("written");
    // Without its last line break it is still whole.
    for length in 0..whole.len() - 1 {
        std::fs::write(&path, &whole[..length]).expect("written");
        assert!(merge(&experiment, std::slice::from_ref(&path)).is_err(), "{length} bytes");
    }
    _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn parts_of_another_command_configuration_or_program_are_told_apart() {
    let folder = folder("other");
    let ours = experiment("a", 2);
    let all = vec![vec![], vec![]];
    let (path, _) = write(&folder, &ours, 1, 1, &all);
    let paths = [path.clone()];
    assert_eq!(merge(&ours, &paths), Ok(all));
    let says = |experiment: &Experiment, words: &str| {
        let why = merge(experiment, &paths).expect_err("another");
        assert!(why.contains(words), "{why}");
    };
    says(&experiment("b", 2), "another configuration");
    says(&experiment("a", 3), "another configuration");
    says(&Experiment::new("bench", "a".to_owned(), 2).expect("read"), "another command");
    let text = std::fs::read_to_string(&path).expect("written");
    std::fs::write(&path, text.replacen("\"program\":\"", "\"program\":\"0", 1)).expect("written");
    says(&ours, "another build of the program");
    std::fs::write(&path, text.replacen("kvlane.part/1", "kvlane.part/2", 1)).expect("written");
    says(&ours, "its format is kvlane.part/2");
    _ = std::fs::remove_dir_all(&folder);
}
