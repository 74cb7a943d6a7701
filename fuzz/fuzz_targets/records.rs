//! Any bytes as the records of a replay, and as prompts to be sent: records that are read are written and read back.
#![no_main]

use kvlane_lab::prompt::given;
use kvlane_lab::statistics::summary::Summary;
use kvlane_trace::record::{read, write};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(mut prompts) = given::read(bytes) {
        let _ = given::trace(&mut prompts, Some(1.0), 0);
    }
    let Ok(records) = read(bytes) else { return };
    let _ = Summary::of(&records, 1.0);
    let mut out = Vec::new();
    write(&records, &mut out).expect("memory takes it");
    let again = read(&out[..]).expect("what was written is read");
    let mut twice = Vec::new();
    write(&again, &mut twice).expect("memory takes it");
    assert_eq!(out, twice);
});
