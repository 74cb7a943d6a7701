//! Any bytes as a batch of KV events, decoded, linked and applied; twice with the same memory, to the same end.
#![no_main]

use kvlane_core::block::ChainSeed;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::KvEvent;
use kvlane_core::index::exact::{Config, ExactIndex};
use kvlane_wire::kv::{Batch, Linker, decode};
use kvlane_wire::msgpack::Scanner;
use libfuzzer_sys::fuzz_target;

const ENDPOINT: EndpointId = EndpointId::new(0, 0);

fn linked(payload: &[u8], batch: &mut Batch) -> Vec<KvEvent> {
    let mut events = Vec::new();
    if decode(payload, batch).is_err() {
        assert!(batch.events.is_empty() && batch.blocks.is_empty() && batch.names.is_empty());
        return events;
    }
    let index = ExactIndex::new(Config { memory_bytes_max: 1 << 20 });
    Linker::default().link(
        batch,
        batch.block_tokens().unwrap_or(16),
        |lora, salt| ChainSeed::new("m", lora, salt),
        |name| index.hash_of(ENDPOINT, name),
        |event| {
            index.apply(ENDPOINT, event);
            events.push(event.clone());
        },
    );
    events
}

fuzz_target!(|payload: &[u8]| {
    let mut scanner = Scanner::new(payload);
    while scanner.skip().is_ok() {}
    let mut batch = Batch::default();
    let first = linked(payload, &mut batch);
    assert_eq!(first, linked(payload, &mut batch));
});
