//! Any bytes as a request, the stream that answers it, and the stream that continues it: a first stream passes as it
//! is, the request for the rest is JSON, and what is passed of a second stream is whole events.
#![no_main]

use bytes::Bytes;
use kvlane_wire::api::Api;
use kvlane_wire::resume::{EngineCapabilities, Next, Transcript};
use libfuzzer_sys::fuzz_target;

/// What a transcript keeps.
const BYTES_MAX: usize = 1 << 12;

const BODIES: [&str; 4] = [
    r#"{"stream":true,"max_tokens":9,"prompt":"a","stop":"x"}"#,
    r#"{"stream":true,"max_tokens":9,"prompt":[1,2]}"#,
    r#"{"stream":true,"messages":[{"role":"user","content":"a"}],"tools":[]}"#,
    r#"{"stream":true,"messages":[{"role":"assistant","content":"a"}],"continue_final_message":true}"#,
];

fuzz_target!(|bytes: &[u8]| {
    let Some((&choice, bytes)) = bytes.split_first() else { return };
    // The parts are divided by zero bytes, which none of the formats holds.
    let mut parts = bytes.split(|byte| *byte == 0);
    let mut next = || Bytes::copy_from_slice(parts.next().unwrap_or_default());
    let api = if choice & 2 == 0 { Api::Completions } else { Api::ChatCompletions };
    let body = match choice & 4 {
        0 => Bytes::from_static(BODIES[usize::from(choice & 3)].as_bytes()),
        _ => next(),
    };
    let again = Transcript::begin(api, body.clone(), BYTES_MAX);
    let Ok(mut transcript) = Transcript::begin(api, body, BYTES_MAX) else { return };
    let piece = usize::from(choice >> 3) + 1;
    let first = next();
    let mut passed = Vec::new();
    for piece in first.chunks(piece) {
        passed.extend(transcript.pass(first.slice_ref(piece)).expect("a first stream always passes"));
    }
    assert!(first.starts_with(&passed));
    // Of a longer one it depends on the pieces whether an event is too long to be held.
    if first.len() <= BYTES_MAX {
        let mut whole = again.expect("begun before");
        assert!(first.starts_with(&whole.pass(first.clone()).expect("a first stream always passes")));
        assert_eq!((whole.text(), whole.unfit()), (transcript.text(), transcript.unfit()));
    }
    let means = EngineCapabilities { continues_messages: choice & 1 == 0, context_tokens: Some(100) };
    for stream in [next(), next()] {
        match transcript.resume(means) {
            Ok(Next::Ask { body, .. }) => {
                drop(serde_json::from_slice::<serde_json::Value>(&body).expect("JSON"))
            }
            Ok(Next::Close(end)) => return assert!(end.is_empty() || end.ends_with(b"\n\n")),
            Err(_) => return,
        }
        for piece in stream.chunks(piece) {
            if transcript.pass(stream.slice_ref(piece)).is_err() {
                return;
            }
        }
    }
    let _ = transcript.end();
});
