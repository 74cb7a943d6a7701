//! Captured messages of real engines, the prompts that caused them, and a receiver.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

use kvlane_core::block::{BlockHash, ChainSeed};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::KvEvent;
use kvlane_core::index::exact::{Config, ExactIndex};
use kvlane_wire::kv::{Batch, Linked, Linker, decode};
use serde_json::Value;

const ENDPOINT: EndpointId = EndpointId::new(1, 0);

pub(crate) fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

pub(crate) fn data(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/kv-events").join(name)
}

pub(crate) fn capture(name: &str) -> Vec<Value> {
    let file = std::fs::File::open(data(&format!("{name}.jsonl.gz"))).expect("the capture is in the tree");
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).expect("a complete gzip file");
    lines(&text)
}

pub(crate) fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().expect("hexadecimal digits");
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("a byte")).collect()
}

pub(crate) fn payloads(lines: &[Value]) -> impl Iterator<Item = Vec<u8>> {
    lines.iter().filter(|line| line["kind"] == "frame").map(|line| bytes(&line["frames_hex"][2]))
}

pub(crate) fn tokens(value: &Value) -> Vec<u32> {
    let list = value.as_array().into_iter().flatten();
    list.map(|token| token.as_u64().expect("a token id") as u32).collect()
}

pub(crate) fn seed(lora: Option<&str>, salt: Option<&str>) -> ChainSeed {
    ChainSeed::new("tiny", lora, salt)
}

pub(crate) struct Receiver {
    pub(crate) index: ExactIndex,
    pub(crate) linker: Linker,
    pub(crate) batch: Batch,
    /// Every block that was stored at any time.
    pub(crate) told: BTreeSet<BlockHash>,
    pub(crate) unknown: u32,
    pub(crate) held_max: u64,
    pub(crate) linked: Linked,
}

impl Receiver {
    pub(crate) fn new() -> Self {
        Self {
            index: ExactIndex::new(Config { memory_bytes_max: 1 << 30 }),
            linker: Linker::default(),
            batch: Batch::default(),
            told: BTreeSet::new(),
            unknown: 0,
            held_max: 0,
            linked: Linked::default(),
        }
    }

    pub(crate) fn take(&mut self, payload: &[u8], block_tokens: u32) {
        decode(payload, &mut self.batch).expect("a batch");
        let linked = self.linker.link(
            &self.batch,
            block_tokens,
            seed,
            |name| self.index.hash_of(ENDPOINT, name),
            |event| {
                if let KvEvent::Stored { blocks, .. } = event {
                    self.told.extend(blocks.iter().map(|block| block.hash));
                }
                self.unknown += self.index.apply(ENDPOINT, event).unknown;
                self.held_max = self.held_max.max(self.index.blocks_of(ENDPOINT));
            },
        );
        self.linked.unknown_parents += linked.unknown_parents;
        self.linked.other_groups += linked.other_groups;
        self.linked.other_block_size = self.linked.other_block_size.or(linked.other_block_size);
    }
}

pub(crate) fn received(name: &str, block_tokens: u32) -> Receiver {
    let mut receiver = Receiver::new();
    for payload in payloads(&capture(name)) {
        receiver.take(&payload, block_tokens);
    }
    receiver
}

/// The blocks of every prompt and its answer. The KV of the last token is never computed.
pub(crate) fn prompted(name: &str, block_tokens: u32) -> BTreeSet<BlockHash> {
    let mut blocks = BTreeSet::new();
    for line in capture(name).iter().filter(|line| line["kind"] == "response") {
        let mut all = tokens(&line["prompt_token_ids"]);
        let generated = tokens(&line["generated_token_ids"]);
        if generated.is_empty() {
            // The request was rejected: a chat with tools on a server without tool support.
            continue;
        }
        all.extend(&generated[..generated.len() - 1]);
        let lora = line["model"].as_str().filter(|model| *model != "tiny");
        let mut chain = Vec::new();
        seed(lora, line["cache_salt"].as_str()).chain_tokens(&all, block_tokens as usize, &mut chain);
        blocks.extend(chain);
    }
    blocks
}
