//! A feed as a reader sees it: `faithful` without faults, `faulty` with them.

mod faithful;
mod faulty;

use std::collections::BTreeMap;

use bytes::Bytes;
use http::StatusCode;
use kvlane_core::block::{BlockHash, ChainSeed};
use kvlane_core::rng::Rng;
use kvlane_wire::kv;
use kvlane_wire::kv::version::VERSIONS;
use kvlane_wire::zmtp::{Connection, Event, Frames, Socket};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::testing::{ask, engine, send, send_to_rank, text};
use crate::{Fault, MockConfig, MockEngine};

/// A feed on the loopback interface.
fn feeding(config: MockConfig) -> MockConfig {
    MockConfig {
        kv_events_config: KvEventsConfig { topic: "kv@mock".into(), ..KvEventsConfig::loopback() },
        ..config
    }
}

/// One connection of a reader.
struct Client {
    stream: TcpStream,
    connection: Connection,
}

impl Client {
    async fn connect(socket: Socket, address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.expect("listening");
        let mut client = Self { stream, connection: Connection::new(socket) };
        assert!(matches!(client.next().await, Event::Ready(_)));
        client
    }

    /// Subscribes, and waits for the answer to a ping: the publisher has read the subscription by then.
    async fn subscribe(address: SocketAddr, topic: &str) -> Self {
        let mut client = Self::connect(Socket::Sub, address).await;
        client.connection.subscribe(topic.as_bytes()).expect("ready");
        client.connection.ping(0).expect("ready");
        client.flush().await;
        assert!(client.stream.read_buf(client.connection.input()).await.expect("open") > 0);
        client
    }

    async fn flush(&mut self) {
        self.stream.write_all(&self.connection.take_output()).await.expect("open");
    }

    async fn next(&mut self) -> Event {
        loop {
            let event = self.connection.poll().expect("a good peer");
            // Before anything is waited for, since an answer may depend on it.
            self.flush().await;
            if let Some(event) = event {
                return event;
            }
            let read = self.stream.read_buf(self.connection.input()).await.expect("open");
            assert!(read > 0, "closed");
        }
    }

    async fn message(&mut self) -> Frames {
        match self.next().await {
            Event::Message(frames) => frames,
            other => panic!("{other:?}"),
        }
    }

    /// The next live batch.
    async fn batch(&mut self) -> (u64, Value) {
        let frames = self.message().await;
        let [topic, seq, payload] = frames.as_slice() else { panic!("{frames:?}") };
        assert_eq!(topic, "kv@mock");
        (number(seq), decode(payload))
    }
}

/// Asks for every batch from a number on, with the frames before the sequence number.
async fn replay(address: SocketAddr, from: u64) -> Vec<(Frames, u64, Value)> {
    let mut client = Client::connect(Socket::Dealer, address).await;
    client.connection.send(&[b"".as_slice(), &from.to_be_bytes()]).expect("ready");
    let mut batches = Vec::new();
    loop {
        let mut frames = client.message().await;
        let payload = frames.pop().expect("a payload");
        let seq = frames.pop().expect("a number");
        if seq.as_ref() == [0xFF; 8] {
            assert!(payload.is_empty());
            return batches;
        }
        batches.push((frames, number(&seq), decode(&payload)));
    }
}

/// Every batch of an engine with one rank.
async fn batches(engine: &MockEngine) -> Vec<Value> {
    let replayed = replay(engine.feeds()[0].replay.expect("configured"), 0).await;
    let numbers: Vec<u64> = replayed.iter().map(|(_, seq, _)| *seq).collect();
    assert_eq!(numbers, (0..replayed.len() as u64).collect::<Vec<_>>());
    replayed.into_iter().map(|(_, _, batch)| batch).collect()
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes.try_into().expect("eight bytes"))
}

/// Reads msgpack, byte strings as arrays of numbers.
fn decode(mut bytes: &[u8]) -> Value {
    let value = decode_one(&mut bytes);
    assert!(bytes.is_empty(), "{} bytes are left", bytes.len());
    value
}

fn decode_one(bytes: &mut &[u8]) -> Value {
    fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
        let (head, rest) = bytes.split_at(count);
        *bytes = rest;
        head
    }
    let big = |bytes: &mut &[u8], count| {
        take(bytes, count).iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let items = |bytes: &mut &[u8], count: u64| (0..count).map(|_| decode_one(bytes)).collect::<Vec<_>>();
    let pairs = |bytes: &mut &[u8], count: u64| {
        let pairs = (0..count).map(|_| {
            let key = decode_one(bytes).as_str().expect("a key").to_owned();
            (key, decode_one(bytes))
        });
        Value::Object(pairs.collect())
    };
    let string = |bytes: &mut &[u8], count: u64| {
        let text = take(bytes, count as usize).to_vec();
        Value::String(String::from_utf8(text).expect("text"))
    };
    match take(bytes, 1)[0] {
        small @ 0..0x80 => small.into(),
        head @ 0x80..0x90 => pairs(bytes, u64::from(head & 0xF)),
        head @ 0x90..0xA0 => Value::Array(items(bytes, u64::from(head & 0xF))),
        head @ 0xA0..0xC0 => string(bytes, u64::from(head & 0x1F)),
        0xC0 => Value::Null,
        0xC4 => {
            let count = big(bytes, 1) as usize;
            take(bytes, count).to_vec().into()
        }
        0xCB => f64::from_bits(big(bytes, 8)).into(),
        head @ 0xCC..=0xCF => big(bytes, 1 << (head - 0xCC)).into(),
        0xD9 => {
            let count = big(bytes, 1);
            string(bytes, count)
        }
        0xDC => {
            let count = big(bytes, 2);
            Value::Array(items(bytes, count))
        }
        0xDD => {
            let count = big(bytes, 4);
            Value::Array(items(bytes, count))
        }
        0xDE => {
            let count = big(bytes, 2);
            pairs(bytes, count)
        }
        other => panic!("{other:#x}"),
    }
}

/// What a reader believes the cache to hold, from batches written as maps: block hashes recomputed from tokens.
#[derive(Default)]
struct Mirror {
    /// By the engine's names: our hash, and how often it was stored.
    blocks: BTreeMap<u64, (BlockHash, u32)>,
}

impl Mirror {
    fn apply(&mut self, batch: &Value) {
        for event in batch[1].as_array().expect("events") {
            let names = || {
                let names = event["block_hashes"].as_array().expect("names").iter();
                names.map(|name| name.as_u64().expect("a number"))
            };
            match event["type"].as_str().expect("a type") {
                "BlockStored" => {
                    let keys = event["extra_keys"].as_array().expect("keys");
                    let lora = event["lora_name"].as_str();
                    let first = keys[0].as_array().into_iter().flatten().filter_map(Value::as_str);
                    let salt = first.skip(usize::from(lora.is_some())).last();
                    assert!(
                        keys[1..]
                            .iter()
                            .all(|keys| keys.as_array().map_or(0, Vec::len) == usize::from(lora.is_some()))
                    );
                    let block_tokens = event["block_size"].as_u64().expect("a number") as usize;
                    let ids: Vec<u32> = event["token_ids"]
                        .as_array()
                        .expect("ids")
                        .iter()
                        .map(|id| id.as_u64().expect("an id") as u32)
                        .collect();
                    assert_eq!(ids.len(), names().count() * block_tokens);
                    let mut parent = event["parent_block_hash"].as_u64().map(|name| self.blocks[&name].0);
                    assert!(parent.is_none() || salt.is_none(), "salt is told with the first block only");
                    let seed = ChainSeed::new("mock", lora, salt);
                    for (name, ids) in names().zip(ids.chunks(block_tokens)) {
                        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                        let hash = seed.next(parent, kvlane_core::block::ContentHash::of(&bytes));
                        let entry = self.blocks.entry(name).or_insert((hash, 0));
                        assert_eq!(entry.0, hash, "one name, one content");
                        entry.1 += 1;
                        parent = Some(hash);
                    }
                }
                "BlockRemoved" => {
                    for name in names() {
                        let copies = &mut self.blocks.get_mut(&name).expect("it was stored").1;
                        *copies -= 1;
                        if *copies == 0 {
                            self.blocks.remove(&name);
                        }
                    }
                }
                "AllBlocksCleared" => self.blocks.clear(),
                other => panic!("{other}"),
            }
        }
    }

    fn of(batches: &[Value]) -> Self {
        let mut mirror = Self::default();
        batches.iter().for_each(|batch| mirror.apply(batch));
        mirror
    }

    /// Tokens of a prompt that the engine would take from its cache, which always computes the last one.
    fn cached_tokens(
        &self,
        prompt: &str,
        lora: Option<&str>,
        salt: Option<&str>,
        block_tokens: usize,
    ) -> u64 {
        let held: std::collections::BTreeSet<BlockHash> =
            self.blocks.values().map(|(hash, _)| *hash).collect();
        let mut chain = Vec::new();
        ChainSeed::new("mock", lora, salt).chain(prompt.as_bytes(), 4 * block_tokens, &mut chain);
        let most = (prompt.len().div_ceil(4) - 1) / block_tokens;
        (chain.iter().take(most).take_while(|hash| held.contains(hash)).count() * block_tokens) as u64
    }
}

/// Answers a completion: its text, and the tokens that came from the cache.
async fn complete(engine: &MockEngine, prompt: &str, more: Value) -> (String, u64) {
    let mut body = json!({"model": "mock", "prompt": prompt, "max_tokens": 1});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    let (status, answer) = ask(engine, "/v1/completions", body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let text = answer["choices"][0]["text"].as_str().expect("text").to_owned();
    (text, answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number"))
}
