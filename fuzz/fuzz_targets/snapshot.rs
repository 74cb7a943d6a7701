//! Any bytes as the entries of a snapshot, in a file that is right but for them.
#![no_main]

use kvlane_live::testing::parsers::snapshot;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&count, entries)) = bytes.split_first() else { return };
    let read = snapshot(u32::from(count), entries);
    assert!(read.is_none_or(|read| read <= usize::from(count)));
});
