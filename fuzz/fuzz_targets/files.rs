//! Any text as one of the files that operators write: the configuration, a scenario, a matrix of either kind, a timing
//! file, a model's `config.json`. A configuration that is right is the same after it was printed.
#![no_main]

use kvlane_core::timing::{ModelShape, TimingFile};
use kvlane_gateway::config::Config;
use kvlane_http::secret::revealed;
use kvlane_lab::matrix::policies::Matrix;
use kvlane_lab::scenario::Scenario;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, text)) = bytes.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    match which % 6 {
        0 => {
            let Ok(config) = serde_saphyr::from_str::<Config>(text) else { return };
            if config.validate().is_ok() {
                let printed = revealed(|| serde_json::to_value(&config)).expect("JSON");
                assert_eq!(serde_json::from_value::<Config>(printed).expect("a configuration"), config);
            }
        }
        1 => {
            let _ = serde_saphyr::from_str::<Scenario>(text);
        }
        2 => {
            let _ = serde_saphyr::from_str::<Matrix>(text);
        }
        5 => {
            let Ok(matrix) = serde_saphyr::from_str::<kvlane_lab::matrix::routers::Matrix>(text) else {
                return;
            };
            if matrix.check().is_ok() {
                let _ = matrix.order();
            }
        }
        3 => {
            let Ok(file) = TimingFile::from_json(text) else { return };
            assert_eq!(TimingFile::from_json(&file.to_json()).expect("what was written is read"), file);
        }
        _ => {
            let _ = ModelShape::from_config_json("m", text);
        }
    }
});
