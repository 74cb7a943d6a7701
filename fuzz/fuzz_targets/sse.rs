//! Any bytes as a stream of server-sent events, whole and cut in two, and as an answer that tells usage.
#![no_main]

use kvlane_wire::sse::{SseScanner, usage_in_json};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&cut, bytes)) = bytes.split_first() else { return };
    let (head, tail) = bytes.split_at(usize::from(cut).min(bytes.len()));
    let seen = |pieces: &[&[u8]]| {
        let mut scanner = SseScanner::new();
        pieces.iter().for_each(|piece| {
            scanner.push(piece);
        });
        scanner.finish();
        (scanner.tokens(), scanner.usage(), scanner.is_done())
    };
    assert_eq!(seen(&[bytes]), seen(&[head, tail]));
    let _ = usage_in_json(bytes);
});
