//! Any bytes as the records of a replay: what is read is written and read back.
#![no_main]

use kvlane_trace::Summary;
use kvlane_trace::record::{read, write};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(records) = read(bytes) else { return };
    let _ = Summary::of(&records, 1.0);
    let mut out = Vec::new();
    write(&records, &mut out).expect("memory takes it");
    let again = read(&out[..]).expect("what was written is read");
    let mut twice = Vec::new();
    write(&again, &mut twice).expect("memory takes it");
    assert_eq!(out, twice);
});
