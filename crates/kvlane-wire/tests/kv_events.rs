//! KV events of real engines, decoded and chained, compared with the prompts that caused them.

mod captures;

use std::collections::BTreeMap;

use kvlane_core::block::ContentHash;
use kvlane_core::event::{EngineHash, KvEvent, Tier};
use kvlane_wire::kv::version::{REMOVED, STORED, VERSIONS, Version};
use kvlane_wire::kv::{Batch, DecodeError, Event, Linked, Linker, Stored, decode};
use proptest::prelude::*;
use serde_json::{Value, json};

use self::captures::{bytes, capture, data, lines, payloads, prompted, received, seed};

/// Every engine capture, with its block size.
const CAPTURES: [(&str, u32); 11] = [
    ("default-sha256-int", 32),
    ("dp2-port5557", 32),
    ("dp2-port5558", 32),
    ("evict-40blocks", 32),
    ("hybrid-sliding-window", 32),
    ("lora-chat", 32),
    ("pub-alone", 32),
    ("restart-kill9", 32),
    ("sglang-evict-1280tok", 16),
    ("sglang-page16", 16),
    ("sha256cbor-seed0-bytes", 32),
];

#[test]
fn every_capture_is_read_whole() {
    for (name, block_tokens) in CAPTURES {
        let receiver = received(name, block_tokens);
        assert_eq!(receiver.linked.other_block_size, None, "{name}");
        assert_eq!(receiver.linked.unknown_parents, 0, "{name}");
        assert!(!receiver.told.is_empty(), "{name}");
    }
}

/// Invariant: Block hashes from KV events equal those of the prompts' tokens, for every engine version.
///
/// Also held by `maps_in_any_order_say_what_arrays_say`.
#[test]
fn chains_made_of_events_are_those_of_the_prompts_tokens() {
    let captures = ["default-sha256-int", "evict-40blocks", "lora-chat", "sha256cbor-seed0-bytes"];
    for name in captures.into_iter().chain(["sglang-page16", "sglang-evict-1280tok", "hybrid-sliding-window"])
    {
        let block_tokens = if name.starts_with("sglang") { 16 } else { 32 };
        let (told, prompted) = (received(name, block_tokens).told, prompted(name, block_tokens));
        let missing = prompted.difference(&told).count();
        let invented = told.difference(&prompted).count();
        assert_eq!((missing, invented), (0, 0), "{name}: of {} blocks", prompted.len());
    }
}

/// Invariant: An engine sends one removal event per copy of a block, and the index counts copies accordingly.
#[test]
fn with_copies_counted_an_engine_of_40_blocks_never_holds_more() {
    let receiver = received("evict-40blocks", 32);
    assert_eq!(receiver.held_max, 39, "one block is never used");
    assert_eq!(receiver.unknown, 0, "every removal names a held block");
}

#[test]
fn sglang_removes_only_what_it_has_stored() {
    let receiver = received("sglang-evict-1280tok", 16);
    assert_eq!(receiver.unknown, 0);
    assert!((70..=80).contains(&receiver.held_max), "{} of 80 blocks", receiver.held_max);
}

#[test]
fn of_a_hybrid_model_only_the_group_of_full_attention_counts() {
    let receiver = received("hybrid-sliding-window", 32);
    assert_eq!(receiver.unknown, 0, "removals of the other group are ignored");
    assert_eq!(receiver.linked.other_groups, 21);
}

#[test]
fn ranks_are_told_apart() {
    for (name, rank) in [("dp2-port5557", 0), ("dp2-port5558", 1)] {
        for payload in payloads(&capture(name)) {
            let mut batch = Batch::default();
            decode(&payload, &mut batch).expect("a batch");
            assert_eq!(batch.rank, Some(rank));
        }
    }
}

// === versions ===

/// The content of an event, independent of its memory.
#[derive(Debug, PartialEq)]
enum Said {
    Stored { parent: Option<u64>, names: Vec<u64>, contents: Vec<u64>, tokens: u32, chain: Chain, tier: Tier },
    Copied(Vec<u64>, Tier),
    Removed(Vec<u64>, Tier),
    Cleared,
}

/// Adapter and salt.
type Chain = (Option<String>, Option<String>);

fn said(batch: &Batch) -> Vec<Said> {
    let names = |range: &std::ops::Range<u32>| {
        batch.names[range.start as usize..range.end as usize].iter().map(|name| name.0).collect()
    };
    let one = |event: &Event| match event {
        Event::Stored(stored) => {
            let blocks = &batch.blocks[stored.blocks.start as usize..stored.blocks.end as usize];
            let Stored { parent, block_tokens, tier, .. } = stored;
            Said::Stored {
                parent: parent.map(|parent| parent.0),
                names: blocks.iter().map(|(name, _)| name.0).collect(),
                contents: blocks.iter().map(|(_, content)| content.0).collect(),
                tokens: *block_tokens,
                chain: (batch.lora(stored).map(str::to_owned), batch.salt(stored).map(str::to_owned)),
                tier: *tier,
            }
        }
        Event::Copied { names: range, tier } => Said::Copied(names(range), *tier),
        Event::Removed { names: range, tier, .. } => Said::Removed(names(range), *tier),
        Event::Cleared => Said::Cleared,
    };
    batch.events.iter().map(one).collect()
}

fn content(tokens: &[u32]) -> u64 {
    ContentHash::of(&tokens.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<_>>()).0
}

#[test]
fn every_version_says_the_same_as_far_as_it_has_the_fields() {
    for version in VERSIONS {
        let text = std::fs::read_to_string(data(&format!("versions/{version}.jsonl"))).expect("a capture");
        let lines = lines(&text);
        let has = |name: &str| version.fields(&STORED).any(|field| field.name == name);
        for (kind, fields) in [("stored_fields", &STORED[..]), ("removed_fields", &REMOVED[..])] {
            let told: Vec<&str> =
                lines[0][kind].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            let listed: Vec<&str> = version.fields(fields).map(|field| field.name).collect();
            assert_eq!(told, listed, "{version}: {kind}");
        }
        let stored = |parent, names: &[u64], tokens: &[u32], chain| Said::Stored {
            parent,
            names: names.to_vec(),
            contents: tokens.chunks(4).map(content).collect(),
            tokens: 4,
            chain,
            tier: Tier::Gpu,
        };
        let adapter = if has("lora_name") { "ad" } else { "\0lora_id 3" };
        let below = if has("medium") { Tier::Cpu } else { Tier::Gpu };
        let salt = has("extra_keys").then(|| "salt".to_owned());
        let digest = stored(None, &[0x1111_1111_1111_1111], &[1, 2, 3, 4], (None, salt));
        let expected = [
            vec![stored(None, &[u64::MAX, 7], &[0, 1, 2, 3, 4, 5, 6, 7], (None, None))],
            vec![stored(Some(7), &[9], &[300, 70_000, 0, 1], (Some(adapter.to_owned()), None))],
            // A sliding-window group, where the event says so.
            if has("group_idx") { vec![] } else { vec![digest] },
            vec![Said::Copied(vec![5], below), Said::Removed(vec![5], below)],
            vec![Said::Removed(vec![7, 9], Tier::Gpu), Said::Cleared],
            vec![Said::Removed(vec![1], Tier::Gpu)],
        ];
        let mut batch = Batch::default();
        for (payload, expected) in payloads(&lines).zip(&expected) {
            decode(&payload, &mut batch).unwrap_or_else(|error| panic!("{version}: {error}"));
            assert_eq!(&said(&batch), expected, "{version}");
        }
        assert_eq!((batch.ts, batch.rank), (5.0, Some(3)));
        for line in lines.iter().filter(|line| line["kind"] == "replay") {
            let frames = line["frames_hex"].as_array().map_or(0, Vec::len);
            assert_eq!(frames == 4, version.replays_topic(), "{version}: {frames} frames");
        }
    }
}

#[test]
fn a_version_is_read_from_its_text() {
    assert_eq!(Version::parse("0.24.0"), Some(Version(0, 24, 0)));
    assert_eq!(Version::parse("0.33.1rc2+cpu"), Some(Version(0, 33, 1)));
    assert_eq!(Version::parse("1.2"), Some(Version(1, 2, 0)));
    assert_eq!(Version::parse("latest"), None);
}

// === made by hand ===

/// A key whose bytes are hex digits in JSON.
const HEX: &str = "$hex";

fn pack(value: &Value, out: &mut Vec<u8>) {
    let head = |out: &mut Vec<u8>, code: u8, length: usize| {
        out.push(code);
        out.extend((length as u32).to_be_bytes());
    };
    match value {
        Value::Null => out.push(0xc0),
        Value::Bool(value) => out.push(0xc2 + u8::from(*value)),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(whole), _) if whole < 128 => out.push(whole as u8),
            (Some(whole), _) if whole < 1 << 16 => {
                out.push(0xcd);
                out.extend((whole as u16).to_be_bytes());
            }
            (Some(whole), _) => {
                out.push(0xcf);
                out.extend(whole.to_be_bytes());
            }
            (None, Some(negative)) => {
                out.push(0xd3);
                out.extend(negative.to_be_bytes());
            }
            _ => {
                out.push(0xcb);
                out.extend(number.as_f64().expect("a number").to_be_bytes());
            }
        },
        Value::String(text) => {
            head(out, 0xdb, text.len());
            out.extend(text.bytes());
        }
        Value::Array(items) => {
            head(out, 0xdd, items.len());
            items.iter().for_each(|item| pack(item, out));
        }
        Value::Object(members) if members.contains_key(HEX) => {
            let bytes = bytes(&members[HEX]);
            head(out, 0xc6, bytes.len());
            out.extend(bytes);
        }
        Value::Object(members) => {
            head(out, 0xdf, members.len());
            for (key, value) in members {
                pack(&json!(key), out);
                pack(value, out);
            }
        }
    }
}

/// A map with keys in this order.
fn pack_map(pairs: &[(String, Value)], out: &mut Vec<u8>) {
    out.push(0xdf);
    out.extend((pairs.len() as u32).to_be_bytes());
    for (key, value) in pairs {
        pack(&json!(key), out);
        pack(value, out);
    }
}

fn message(events: Value) -> Vec<u8> {
    let mut out = Vec::new();
    pack(&json!([1.5, events, 0]), &mut out);
    out
}

fn read(events: Value) -> Result<Batch, DecodeError> {
    let mut batch = Batch::default();
    decode(&message(events), &mut batch).map(|()| batch)
}

/// A store of one block of two tokens, with these additional fields.
fn store(fields: Value) -> Value {
    let mut event = json!({
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [10, 11], "block_size": 2,
    });
    let members = event.as_object_mut().expect("an object");
    members.extend(fields.as_object().expect("an object").clone());
    event
}

fn one(fields: Value) -> (Chain, u64) {
    let batch = read(json!([store(fields)])).expect("a batch");
    match said(&batch).pop() {
        Some(Said::Stored { chain, contents, .. }) => (chain, contents[0]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_name_is_the_same_as_a_number_of_either_sign_and_as_a_digest() {
    let digest = "00112233445566778899aabbccddeeffffffffffffffffff".to_owned();
    let names = json!([u64::MAX, -1, {HEX: digest}, {HEX: "ffffffffffffffff"}]);
    let batch = read(json!([["BlockRemoved", names]])).expect("a batch");
    assert_eq!(batch.names, [EngineHash(u64::MAX); 4]);
    let short = read(json!([["BlockRemoved", [{HEX: "ffffffff"}]]]));
    assert_eq!(short.unwrap_err(), DecodeError::HashLength(4));
}

#[test]
fn an_adapters_name_among_the_extra_keys_is_no_salt() {
    let plain = content(&[10, 11]);
    let adapter = || Some("ad".to_owned());
    assert_eq!(one(json!({"lora_name": "ad", "extra_keys": [["ad"]]})), ((adapter(), None), plain));
    let both = one(json!({"lora_name": "ad", "extra_keys": [["ad", "tenant"]]}));
    assert_eq!(both, ((adapter(), Some("tenant".to_owned())), plain));
    let same = one(json!({"lora_name": "ad", "extra_keys": [["ad", "ad"]]}));
    assert_eq!(same, ((adapter(), adapter()), plain), "a salt may equal the adapter's name");
    assert_eq!(
        one(json!({"cache_salt": "t"})),
        ((None, Some("t".to_owned())), plain),
        "SGLang has a field for it"
    );
}

#[test]
fn what_is_neither_adapter_nor_salt_is_part_of_a_blocks_content() {
    let plain = content(&[10, 11]);
    let image = one(json!({"extra_keys": [[["image", 0]]]}));
    assert_ne!(image.1, plain);
    assert_eq!(image.0, (None, None));
    assert_ne!(one(json!({"extra_keys": [[["image", 1]]]})).1, image.1, "the image's position counts");
    let salted = one(json!({"extra_keys": [[["image", 0], "tenant"]]}));
    assert_eq!(salted, ((None, Some("tenant".to_owned())), image.1), "the salt beside it is one");
    let later = one(json!({"parent_block_hash": 7, "extra_keys": [["x"]]}));
    assert_eq!(later.0, (None, None), "only a chain's first block has a salt");
    assert_ne!(later.1, plain);
    assert_eq!(one(json!({"extra_keys": [null]})).1, plain);
    assert_eq!(one(json!({"extra_keys": [[]]})).1, plain);
    assert_eq!(one(json!({"extra_keys": []})).1, plain);
}

#[test]
fn what_contradicts_itself_is_refused_and_leaves_nothing() {
    let refused = |event: Value| {
        let mut batch = Batch::default();
        let error = decode(&message(json!([["AllBlocksCleared"], event])), &mut batch).unwrap_err();
        assert!(batch.events.is_empty() && batch.blocks.is_empty() && batch.names.is_empty());
        error.to_string()
    };
    let counts = "event with 3 tokens for 2 blocks of 2 tokens";
    assert_eq!(refused(store(json!({"block_hashes": [1, 2], "token_ids": [1, 2, 3]}))), counts);
    assert_eq!(refused(store(json!({"block_size": 1}))), "event with 2 tokens for 1 blocks of 1 tokens");
    assert_eq!(refused(store(json!({"block_hashes": []}))), "event with 2 tokens for 0 blocks of 2 tokens");
    assert_eq!(
        refused(store(json!({"extra_keys": [null, null]}))),
        "event with extra keys for 2 blocks but 1 stored blocks"
    );
    let huge: Vec<u32> = vec![1; (1 << 16) + 1];
    assert_eq!(refused(store(json!({"token_ids": huge}))), "invalid block size of 65537 tokens");
    assert!(refused(store(json!({"token_ids": [1, -2]}))).contains("a token id from 0"));
    assert!(refused(store(json!({"token_ids": [1, "x"]}))).contains("a whole number expected"));
    assert!(refused(store(json!({"block_size": -2}))).contains("block_size is out of range"));
    assert!(refused(json!(7)).contains("an array expected"));
}

#[test]
fn a_message_that_is_no_batch_is_refused() {
    let mut batch = Batch::default();
    for payload in [&b""[..], b"\x01", b"\x90", b"\x91\x01", b"\x92\x01\xdd\xff\xff\xff\xff", b"\xc1"] {
        assert!(decode(payload, &mut batch).is_err(), "{payload:x?}");
    }
    let long = [message(json!([])), vec![0xc0]].concat();
    assert!(matches!(decode(&long, &mut batch), Err(DecodeError::Trailing { .. })));
}

#[test]
fn what_is_not_understood_is_passed_over_and_counted() {
    let batch = read(json!([
        ["BlockMigrated", [1, 2], {"x": []}],
        {"type": "BlockMigrated", "block_hashes": 7},
        {"no": "type"},
        [],
        store(json!({"kv_cache_spec_kind": "mamba", "group_idx": 3, "token_ids": [1, 2, 3]})),
        store(json!({"lookahead_token_ids": [5]})),
        store(json!({"token_ids": [[10, 11], [11, 12]]})),
        store(json!({"lookahead_token_ids": [], "from_the_future": {"a": [1]}, "session_id": "s"})),
        ["BlockRemoved", [9], "GPU", 0, null, null, "more", ["yet"]],
    ]))
    .expect("a batch");
    assert_eq!((batch.ignored.unknown_events, batch.ignored.other_groups), (4, 1));
    assert_eq!((batch.ignored.lookahead, batch.ignored.not_ids), (1, 1));
    let plain = read(json!([store(json!({})), ["BlockRemoved", [9]]])).expect("a batch");
    assert_eq!(said(&batch), said(&plain));
}

#[test]
fn groups_whose_blocks_stand_for_a_prefix_are_those_of_full_attention() {
    for (kind, counts) in [
        ("full_attention", true),
        ("mla_attention", true),
        ("sink_full_attention", true),
        ("sliding_window", false),
        ("sliding_window_mla", false),
        ("mamba", false),
        ("chunked_local_attention", false),
        ("cross_attention", false),
        ("unknown", false),
    ] {
        let batch = read(json!([store(json!({"kv_cache_spec_kind": kind}))])).expect("a batch");
        assert_eq!(batch.events.len() == 1, counts, "{kind}");
    }
}

#[test]
fn a_removal_from_a_group_that_does_not_count_removes_nothing() {
    let mut linker = Linker::default();
    let mut link = |events: Value| {
        let mut seen = Vec::new();
        let batch = read(events).expect("a batch");
        let linked = linker.link(&batch, 2, seed, |_| None, |event| seen.push(event.clone()));
        (linked.other_groups, seen.len())
    };
    assert_eq!(link(json!([["BlockRemoved", [1], "GPU", 1]])), (0, 1), "the group is unknown");
    link(json!([store(json!({"kv_cache_spec_kind": "sliding_window", "group_idx": 1}))]));
    assert_eq!(link(json!([["BlockRemoved", [1], "GPU", 1], ["BlockRemoved", [1], "GPU", 0]])), (1, 1));
}

#[test]
fn stores_that_cannot_be_linked_are_counted() {
    let batch = read(json!([
        store(json!({"parent_block_hash": 77})),
        store(json!({"block_size": 1, "block_hashes": [3, 4]})),
        store(json!({})),
        store(json!({"block_hashes": [2], "parent_block_hash": 1})),
    ]))
    .expect("a batch");
    assert_eq!(batch.block_tokens(), Some(2));
    let mut names = BTreeMap::new();
    let names = std::cell::RefCell::new(&mut names);
    let linked = Linker::default().link(
        &batch,
        2,
        seed,
        |name| names.borrow().get(&name).copied(),
        |event| {
            if let KvEvent::Stored { blocks, .. } = event {
                names.borrow_mut().extend(blocks.iter().map(|block| (block.name, block.hash)));
            }
        },
    );
    let expected = Linked {
        events: 2,
        blocks: 2,
        unknown_parents: 1,
        unknown_parent_blocks: 1,
        other_block_size: Some(1),
        other_size_blocks: 2,
        ..Linked::default()
    };
    assert_eq!(linked, expected);
    let mut chain = Vec::new();
    seed(None, None).chain_tokens(&[10, 11, 10, 11], 2, &mut chain);
    let found = names.borrow().values().copied().collect::<Vec<_>>();
    assert_eq!(found, chain);
}

/// LMCache publishes its chunks, of 256 tokens by default, among the events of the engine.
#[test]
fn blocks_of_another_size_below_the_gpu_are_passed_over_and_so_are_their_removals() {
    let chunk =
        store(json!({"block_hashes": [7], "token_ids": [10, 11, 12, 13], "block_size": 4, "medium": "CPU"}));
    let batch = read(json!([
        chunk,
        store(json!({})),
        store(json!({"medium": "CPU"})),
        ["BlockRemoved", [7], "CPU"],
        ["BlockRemoved", [7, 1], "CPU"],
        ["BlockRemoved", [9], "GPU"],
    ]))
    .expect("a batch");
    assert_eq!(batch.block_tokens(), Some(2), "that of blocks on the GPU");
    let mut events = Vec::new();
    let held = seed(None, None).next(None, ContentHash::of(b"held"));
    let known = |name| (name == EngineHash(1)).then_some(held);
    let linked = Linker::default().link(&batch, 2, seed, known, |event| events.push(event.clone()));
    assert_eq!((linked.other_tiers, linked.other_block_size, linked.blocks), (2, None, 2));
    let removed = |name, tier| KvEvent::Removed { blocks: vec![EngineHash(name)], tier };
    assert_eq!(events[2..], [removed(1, Tier::Cpu), removed(9, Tier::Gpu)]);
}

// === laws ===

prop_compose! {
    /// The fields of a store, including those with default values.
    fn stores()(
        names in prop::collection::vec(any::<u64>(), 1..5),
        tokens in prop::collection::vec(any::<u32>(), 4),
        parent in prop::option::of(any::<u64>()),
        lora in prop::option::of("[a-z]{1,3}"),
        salt in prop::option::of("[a-z]{1,3}"),
        medium in prop::option::of(prop_oneof![Just("GPU"), Just("CPU"), Just("DISK")]),
    ) -> Vec<(String, Value)> {
        let all: Vec<u32> = names.iter().flat_map(|_| tokens.clone()).collect();
        let keys: Vec<Value> = (0..names.len())
            .map(|block| json!(lora.iter().chain(salt.iter().filter(|_| block == 0)).collect::<Vec<_>>()))
            .collect();
        let values = [
            json!(names), json!(parent), json!(all), json!(4), json!(lora.as_ref().map(|_| 1)), json!(medium), json!(lora),
            json!(keys),
        ];
        STORED.iter().map(|field| field.name.to_owned()).zip(values).collect()
    }
}

proptest! {
    #[test]
    fn maps_in_any_order_say_what_arrays_say(
        fields in stores().prop_flat_map(|fields| (Just(fields.clone()), Just(fields).prop_shuffle())),
        type_at in any::<prop::sample::Index>(),
    ) {
        let (ordered, mut shuffled) = fields;
        let mut positions = vec![json!("BlockStored")];
        positions.extend(ordered.into_iter().map(|(_, value)| value));
        let arrays = read(json!([positions])).expect("a batch");
        shuffled.retain(|(_, value)| !value.is_null());
        shuffled.insert(type_at.index(shuffled.len() + 1), ("type".to_owned(), json!("BlockStored")));
        let mut payload = vec![0x93, 0x01, 0x91];
        pack_map(&shuffled, &mut payload);
        payload.push(0x00);
        let mut maps = Batch::default();
        decode(&payload, &mut maps).expect("a batch");
        prop_assert_eq!(said(&maps), said(&arrays));
    }

    #[test]
    fn any_bytes_are_read_or_refused(
        payload in prop::collection::vec(any::<u8>(), 0..300),
        head in prop::option::of(Just([0x92, 0x01, 0x91])),
    ) {
        let payload = [head.map_or(vec![], |head| head.to_vec()), payload].concat();
        let mut batch = Batch::default();
        let _ = decode(&payload, &mut batch);
        prop_assert!(batch.events.len() <= payload.len());
    }
}

#[test]
fn any_truncation_of_a_message_is_refused() {
    let mut batch = Batch::default();
    for name in ["lora-chat", "sglang-page16", "restart-kill9"] {
        for payload in payloads(&capture(name)).filter(|payload| payload.len() < 3_000) {
            for end in 0..payload.len() {
                assert!(decode(&payload[..end], &mut batch).is_err(), "{name} cut at {end}");
            }
        }
    }
}

#[test]
fn any_flipped_bits_are_read_or_refused() {
    let mut batch = Batch::default();
    let (mut refused, mut read) = (0, 0);
    for (name, block_tokens) in CAPTURES {
        let mut linker = Linker::default();
        let lines = capture(name);
        for mut payload in payloads(&lines).filter(|payload| payload.len() < 1_500).take(6) {
            for bit in 0..8 * payload.len() {
                payload[bit / 8] ^= 1 << (bit % 8);
                if decode(&payload, &mut batch).is_ok() {
                    linker.link(&batch, block_tokens, seed, |_| None, |_| ());
                    read += 1;
                } else {
                    refused += 1;
                }
                payload[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }
    assert!(refused > 1_000 && read > 1_000, "{refused} refused, {read} read");
}
