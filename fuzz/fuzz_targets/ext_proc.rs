//! Any bytes as a data plane's call: cut in two anywhere, they are the same messages, and what is read of each lies in it.
#![no_main]

use bytes::Bytes;
use kvlane_wire::ext_proc::{Part, Received};
use kvlane_wire::grpc::{Frames, health_service};
use libfuzzer_sys::fuzz_target;

const BYTES_MAX: usize = 2048;

/// The messages in these pieces, and whether they end with a valid one.
fn messages(pieces: &[&[u8]]) -> (Vec<Bytes>, bool) {
    let (mut frames, mut found) = (Frames::default(), Vec::new());
    for piece in pieces {
        frames.push(Bytes::copy_from_slice(piece));
        loop {
            match frames.next(BYTES_MAX) {
                Ok(Some(message)) => found.push(message),
                Ok(None) => break,
                Err(_) => return (found, false),
            }
        }
    }
    (found, true)
}

fuzz_target!(|bytes: &[u8]| {
    let [cut, bytes @ ..] = bytes else { return };
    let cut = usize::from(*cut).min(bytes.len());
    let whole = messages(&[bytes]);
    assert_eq!(whole, messages(&[&bytes[..cut], &bytes[cut..]]));
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(whole, messages(&single));
    for message in whole.0.iter().chain([&Bytes::copy_from_slice(bytes)]) {
        assert!(health_service(message).len() <= message.len());
        let Some(received) = Received::read(message) else { continue };
        let _ = received.body_modes();
        let _ = received.attribute("upstream.address");
        let _ = received.metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset");
        match received.part {
            Part::RequestHead(head) | Part::ResponseHead(head) => {
                let read: usize = head.fields().map(|(name, value)| name.len() + value.len()).sum();
                assert!(read <= message.len());
            }
            Part::RequestBody(piece) | Part::ResponseBody(piece) => {
                assert_eq!(message.slice_ref(piece.bytes), piece.bytes);
            }
            Part::RequestTrailers | Part::ResponseTrailers => {}
        }
    }
});
