//! Any bytes as a worker's answer, head and framing: cut in two anywhere, the same is relayed.
#![no_main]

use kvlane_gateway::testing::parsers::answer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let [head, cut, bytes @ ..] = bytes else { return };
    let (head, cut) = (head & 1 == 1, usize::from(*cut).min(bytes.len()));
    let whole = answer(head, &[bytes]);
    assert_eq!(whole, answer(head, &[&bytes[..cut], &bytes[cut..]]));
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(whole, answer(head, &single));
    if let Some((status, body)) = whole {
        assert!((200..1000).contains(&status) && body.len() <= bytes.len());
    }
});
