//! Any bytes as what is kept over a restart, in files that are right but for them: what engines hold, and what they were given.
#![no_main]

use kvlane_gateway::testing::parsers::{dispatches, snapshot};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, content)) = bytes.split_first() else { return };
    let read = if which & 1 == 0 { snapshot(content) } else { dispatches(content) };
    assert!(read.is_none_or(|read| read <= content.len()));
});
