//! `docs/simulator-constants.md` is as its example writes it, and its constants are what it says.

#[path = "../examples/constants/offline.rs"]
mod offline;
#[path = "../examples/constants/steps.rs"]
mod steps;
#[path = "../examples/constants/table.rs"]
mod table;

use kvlane_core::timing::TimingModel;
use kvlane_lab::measured::{MEMORY_SHARE, Measured};
use offline::offline_tables;
use steps::steps_tables;
use table::{CONSTANTS, RESERVED_GIB, change, fit_of, table};

/// The page.
const PAGE: &str = include_str!("../../../docs/simulator-constants.md");

#[test]
fn the_page_of_constants_is_as_rendered() {
    for (name, rendered) in [("constants", table()), ("steps", steps_tables()), ("offline", offline_tables())]
    {
        let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
        let from = PAGE.find(&begin).expect("the mark") + begin.len();
        let to = PAGE.find(&end).expect("the mark");
        let rewrite = "cargo run --release -p kvlane-lab --example constants";
        assert_eq!(&PAGE[from..to], rendered, "write it again: {rewrite}");
    }
}

#[test]
fn every_constant_matters_to_a_published_figure_and_every_set_says_what_is_fitted_to_it() {
    let measured = Measured::table();
    for set in &measured.sets {
        assert!(!fit_of(&set.name).0.name().is_empty());
    }
    for constant in CONSTANTS {
        let matters = measured.sets.iter().any(|set| change(&measured, set, constant).is_some());
        // Only a fleet's sequences have common prefixes.
        assert!(matters || constant.name == "traffic.shared_read_saved", "{}", constant.name);
    }
}

#[test]
fn memory_without_activations_holds_more() {
    let of = |engine: &str| TimingModel::preset(engine).expect("a preset");
    let remove = CONSTANTS.iter().find(|constant| constant.name.starts_with("activations")).expect("it");
    for engine in ["qwen3-32b@h100x2", "deepseek-v3@h200x8"] {
        let (with, mut without) = (of(engine), of(engine));
        (remove.remove)(&mut without);
        let share = MEMORY_SHARE;
        let reserved = RESERVED_GIB[usize::from(with.model.experts.is_some())] * 1_073_741_824.0;
        let copies = with.model.kv_split(with.gpus);
        let tokens = reserved * f64::from(copies) / with.kv_bytes_per_token() as f64;
        let more = without.kv_capacity_tokens(share) as f64 - with.kv_capacity_tokens(share) as f64;
        assert!((more - tokens).abs() <= 2.0, "{engine}: {more} {tokens}");
    }
}
