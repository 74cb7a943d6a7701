//! Decoder of KV event messages: bytes to a [`Batch`].
//!
//! Fields may come in any order, and any of them may be missing or nil; unknown fields are skipped. Engines write the
//! block names before the tokens, so tokens are hashed block by block while they are read; in any other order they are
//! read twice.

use std::ops::Range;

use kvlane_core::block::ContentHash;
use kvlane_core::event::{EngineHash, Tier};

use super::batch::{Batch, Event, Stored};
use super::version::{FieldOrder, REMOVED, STORED};
use crate::msgpack::{Kind, MsgpackError, Scanner};

/// Most tokens per block. Engines use 1 to 2,048.
pub const BLOCK_TOKENS_MAX: u32 = 1 << 16;

/// Most events per message. An engine sends one message per step, which changes at most a few thousand blocks.
pub const EVENTS_MAX: usize = 1 << 17;

/// Most block names per message: as many as a prompt of a million tokens has with blocks of one token.
pub const NAMES_MAX: usize = 1 << 20;

/// Most bytes per message, far beyond what an engine sends. Offsets fit into 32 bits.
pub const PAYLOAD_MAX: usize = 1 << 30;

/// Why a message cannot be decoded. The batch is then empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes are not a msgpack batch of events.
    #[error("not a batch of KV events: {0}")]
    Msgpack(#[from] MsgpackError),
    /// A field's value is out of range.
    #[error("not a batch of KV events: byte {at}: {field} is out of range")]
    Range {
        /// Offset of the value's end.
        at: usize,
        /// The field.
        field: &'static str,
    },
    /// A field occurs twice in one event.
    #[error("not a batch of KV events: field {0} occurs twice in an event")]
    Twice(&'static str),
    /// Bytes follow the batch.
    #[error("not a batch of KV events: bytes follow the batch's end at byte {at}")]
    Trailing {
        /// Offset of the batch's end.
        at: usize,
    },
    /// More than [`PAYLOAD_MAX`] bytes.
    #[error("message of {0} bytes exceeds the limit of {PAYLOAD_MAX}")]
    TooLong(usize),
    /// More than [`EVENTS_MAX`] events.
    #[error("batch of {0} KV events exceeds the limit of {EVENTS_MAX}")]
    TooManyEvents(u32),
    /// More than [`NAMES_MAX`] block names.
    #[error("batch with at least {0} block names exceeds the limit of {NAMES_MAX}")]
    TooManyNames(usize),
    /// A block size of 0 or above [`BLOCK_TOKENS_MAX`].
    #[error("invalid block size of {0} tokens")]
    BlockTokens(u64),
    /// The number of tokens does not match the number of blocks.
    #[error("event with {tokens} tokens for {blocks} blocks of {block_tokens} tokens")]
    TokenCount {
        /// Tokens in the event.
        tokens: u32,
        /// Blocks in the event.
        blocks: u32,
        /// The event's block size, 0 if missing.
        block_tokens: u32,
    },
    /// The number of extra keys does not match the number of blocks.
    #[error("event with extra keys for {keys} blocks but {blocks} stored blocks")]
    ExtraKeys {
        /// Blocks with extra keys.
        keys: u32,
        /// Blocks in the event.
        blocks: u32,
    },
    /// A block name too short for a hash.
    #[error("block hash of {0} bytes is too short")]
    HashLength(usize),
}

type Result<T> = std::result::Result<T, DecodeError>;

/// Decodes one message into `batch`, reusing its memory.
///
/// # Errors
///
/// [`DecodeError`] if the message is not a batch of events, or an event is inconsistent.
pub fn decode(payload: &[u8], batch: &mut Batch) -> Result<()> {
    batch.clear();
    if payload.len() > PAYLOAD_MAX {
        return Err(DecodeError::TooLong(payload.len()));
    }
    let decoded = batch_of(&mut Scanner::new(payload), batch);
    if decoded.is_err() {
        batch.clear();
    }
    decoded
}

/// `[ts, [event, ...], rank, ...]`
fn batch_of(scanner: &mut Scanner<'_>, batch: &mut Batch) -> Result<()> {
    let at = scanner.at();
    let fields = scanner.array()?;
    if fields < 2 {
        return Err(MsgpackError { at, expected: "an array of a time and events" }.into());
    }
    batch.ts = scanner.number()?;
    let count = scanner.array()?;
    if count as usize > EVENTS_MAX {
        return Err(DecodeError::TooManyEvents(count));
    }
    for _ in 0..count {
        event(scanner, batch)?;
    }
    if fields > 2 && !scanner.nil() {
        batch.rank = Some(whole(scanner, "data_parallel_rank")?);
    }
    scanner.skip_values(u64::from(fields.saturating_sub(3)))?;
    match scanner.remaining() {
        0 => Ok(()),
        _ => Err(DecodeError::Trailing { at: scanner.at() }),
    }
}

/// An event as an array, `["BlockStored", field, ...]`, or as a map, `{"type": "BlockStored", name: field, ...}`.
fn event(scanner: &mut Scanner<'_>, batch: &mut Batch) -> Result<()> {
    match scanner.peek()? {
        Kind::Map => {
            let pairs = scanner.map()?;
            let kind = type_of(scanner.clone(), pairs)?;
            let mut reader = Reader::new(kind, batch);
            for _ in 0..pairs {
                let field = Field::named(scanner.text()?);
                reader.field(field, scanner)?;
            }
            reader.finish()
        }
        _ => {
            let length = scanner.array()?;
            if length == 0 {
                batch.ignored.unknown_events += 1;
                return Ok(());
            }
            let kind = Type::named(scanner.text()?);
            let order = match kind {
                Type::Stored => &STORED_ORDER[..],
                Type::Removed => &REMOVED_ORDER[..],
                Type::Cleared | Type::Unknown => &[],
            };
            let fields = (length - 1) as usize;
            let mut reader = Reader::new(kind, batch);
            for field in order.iter().take(fields) {
                reader.field(*field, scanner)?;
            }
            scanner.skip_values(fields.saturating_sub(order.len()) as u64)?;
            reader.finish()
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Stored,
    Removed,
    Cleared,
    Unknown,
}

impl Type {
    fn named(name: &[u8]) -> Self {
        match name {
            b"BlockStored" => Self::Stored,
            b"BlockRemoved" => Self::Removed,
            b"AllBlocksCleared" => Self::Cleared,
            _ => Self::Unknown,
        }
    }
}

/// The type of an event in map form. Engines write it as the first field.
fn type_of(mut scanner: Scanner<'_>, pairs: u32) -> Result<Type> {
    for _ in 0..pairs {
        if scanner.text()? == b"type" {
            return Ok(Type::named(scanner.text()?));
        }
        scanner.skip()?;
    }
    Ok(Type::Unknown)
}

/// A field that the decoder uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockTokens,
    LoraId,
    LoraName,
    Salt,
    Medium,
    ExtraKeys,
    Group,
    GroupKind,
    Lookahead,
    Other,
}

/// The field at each position of an array.
const STORED_ORDER: [Field; STORED.len()] = order(STORED);
const REMOVED_ORDER: [Field; REMOVED.len()] = order(REMOVED);

const fn order<const N: usize>(fields: [FieldOrder; N]) -> [Field; N] {
    let mut order = [Field::Other; N];
    let mut place = 0;
    while place < N {
        order[place] = Field::named(fields[place].name.as_bytes());
        place += 1;
    }
    order
}

impl Field {
    const fn named(name: &[u8]) -> Self {
        match name {
            b"block_hashes" => Self::Hashes,
            b"parent_block_hash" => Self::Parent,
            b"token_ids" => Self::Tokens,
            b"block_size" => Self::BlockTokens,
            b"lora_id" => Self::LoraId,
            b"lora_name" => Self::LoraName,
            b"cache_salt" => Self::Salt,
            b"medium" => Self::Medium,
            b"extra_keys" => Self::ExtraKeys,
            b"group_idx" => Self::Group,
            b"kv_cache_spec_kind" => Self::GroupKind,
            b"lookahead_token_ids" => Self::Lookahead,
            _ => Self::Other,
        }
    }
}

/// State of reading the fields of one event.
struct Reader<'a, 'b> {
    batch: &'b mut Batch,
    kind: Type,
    /// Ends of the batch's lists before this event, to which they are reset if it is ignored.
    blocks_start: usize,
    names_start: usize,
    /// Number of block names, once read.
    names: Option<u32>,
    parent: Option<EngineHash>,
    tokens: Tokens<'a>,
    block_tokens: Option<u32>,
    lora_name: Option<&'a str>,
    lora_id: Option<LoraId<'a>>,
    salt: Option<&'a str>,
    tier: Tier,
    /// Positioned before the list of extra keys.
    extra_keys: Option<Scanner<'a>>,
    group: Option<u32>,
    /// Whether the layer group is one whose blocks stand for a prefix.
    prefix_group: bool,
    lookahead: bool,
}

#[derive(Clone, Copy)]
enum LoraId<'a> {
    Number(i128),
    Text(&'a str),
}

/// The tokens of a store.
enum Tokens<'a> {
    /// Not read yet, or nil.
    Absent,
    /// Read before the block names: their position.
    Waiting(Scanner<'a>),
    /// Hashed, with this many per block.
    Hashed { count: u32, per_block: u32 },
    /// Not divisible among the blocks.
    Uneven { count: u32 },
    /// Not plain ids.
    NotIds,
}

impl<'a, 'b> Reader<'a, 'b> {
    fn new(kind: Type, batch: &'b mut Batch) -> Self {
        Self {
            kind,
            blocks_start: batch.blocks.len(),
            names_start: batch.names.len(),
            batch,
            names: None,
            parent: None,
            tokens: Tokens::Absent,
            block_tokens: None,
            lora_name: None,
            lora_id: None,
            salt: None,
            tier: Tier::Gpu,
            extra_keys: None,
            group: None,
            prefix_group: true,
            lookahead: false,
        }
    }

    fn field(&mut self, field: Field, scanner: &mut Scanner<'a>) -> Result<()> {
        if scanner.nil() {
            return Ok(());
        }
        match (self.kind, field) {
            (Type::Stored | Type::Removed, Field::Hashes) => self.hashes(scanner)?,
            (Type::Stored | Type::Removed, Field::Medium) => self.tier = tier(scanner.text()?),
            (Type::Stored | Type::Removed, Field::Group) => self.group = Some(whole(scanner, "group_idx")?),
            (Type::Stored, Field::Parent) => self.parent = Some(hash(scanner)?),
            (Type::Stored, Field::Tokens) => match self.tokens {
                Tokens::Absent if self.names.is_some() => self.hash_tokens(scanner)?,
                Tokens::Absent => {
                    self.tokens = Tokens::Waiting(scanner.clone());
                    scanner.skip()?;
                }
                _ => return Err(DecodeError::Twice("token_ids")),
            },
            (Type::Stored, Field::BlockTokens) => self.block_tokens = Some(whole(scanner, "block_size")?),
            (Type::Stored, Field::LoraId) => {
                self.lora_id = Some(match scanner.peek()? {
                    Kind::Str => LoraId::Text(scanner.str()?),
                    _ => LoraId::Number(scanner.int()?),
                });
            }
            (Type::Stored, Field::LoraName) => self.lora_name = Some(scanner.str()?),
            (Type::Stored, Field::Salt) => self.salt = Some(scanner.str()?),
            (Type::Stored, Field::ExtraKeys) => {
                self.extra_keys = Some(scanner.clone());
                scanner.skip()?;
            }
            (Type::Stored, Field::GroupKind) => self.prefix_group = is_prefix_group(scanner.text()?),
            (Type::Stored, Field::Lookahead) => {
                self.lookahead = scanner.peek()? != Kind::Array || scanner.clone().array()? > 0;
                scanner.skip()?;
            }
            _ => scanner.skip()?,
        }
        Ok(())
    }

    fn hashes(&mut self, scanner: &mut Scanner<'a>) -> Result<()> {
        if self.names.is_some() {
            return Err(DecodeError::Twice("block_hashes"));
        }
        let count = scanner.array()?;
        let named = self.batch.named.saturating_add(count as usize);
        if named > NAMES_MAX {
            return Err(DecodeError::TooManyNames(named));
        }
        self.batch.named = named;
        self.batch.names.reserve(scanner.remaining().min(count as usize));
        for _ in 0..count {
            self.batch.names.push(hash(scanner)?);
        }
        self.names = Some(count);
        Ok(())
    }

    /// Reads the list of tokens and hashes each block.
    fn hash_tokens(&mut self, scanner: &mut Scanner<'a>) -> Result<()> {
        let start = scanner.clone();
        let count = scanner.array()?;
        let blocks = self.names.unwrap_or(0);
        if count == 0 {
            self.tokens = Tokens::Absent;
            return Ok(());
        }
        if scanner.peek()? != Kind::Int {
            self.tokens = Tokens::NotIds;
            *scanner = start;
            return Ok(scanner.skip()?);
        }
        if blocks == 0 || count % blocks != 0 {
            self.tokens = Tokens::Uneven { count };
            return Ok(scanner.skip_values(u64::from(count))?);
        }
        let per_block = count / blocks;
        if per_block > BLOCK_TOKENS_MAX {
            return Err(DecodeError::BlockTokens(u64::from(per_block)));
        }
        let Batch { blocks: out, names, tokens: buffer, .. } = &mut *self.batch;
        buffer.resize(4 * per_block as usize, 0);
        out.reserve(names.len() - self.names_start);
        for &name in &names[self.names_start..] {
            scanner.u32s(buffer)?;
            out.push((name, ContentHash::of(buffer)));
        }
        self.tokens = Tokens::Hashed { count, per_block };
        Ok(())
    }

    /// Adds the event to the batch, or counts it as ignored.
    fn finish(mut self) -> Result<()> {
        match self.kind {
            Type::Stored => self.stored(),
            Type::Removed => {
                let (names, tier) = (self.named(), self.tier);
                self.batch.events.push(Event::Removed { names, tier, group: self.group });
                Ok(())
            }
            Type::Cleared => {
                self.batch.events.push(Event::Cleared);
                Ok(())
            }
            Type::Unknown => {
                self.batch.ignored.unknown_events += 1;
                Ok(())
            }
        }
    }

    fn stored(&mut self) -> Result<()> {
        if let Tokens::Waiting(scanner) = &self.tokens {
            let mut scanner = scanner.clone();
            self.hash_tokens(&mut scanner)?;
        }
        if !self.prefix_group {
            self.batch.ignored.other_groups += 1;
            if let Some(group) = self.group.filter(|group| *group < u64::BITS) {
                self.batch.groups_aside |= 1 << group;
            }
            self.pass_over();
            return Ok(());
        }
        if self.lookahead {
            self.batch.ignored.lookahead += 1;
            self.pass_over();
            return Ok(());
        }
        let names = self.names.unwrap_or(0);
        let block_tokens = self.block_tokens.unwrap_or(0);
        match self.tokens {
            Tokens::NotIds => {
                self.batch.ignored.not_ids += 1;
                self.pass_over();
            }
            Tokens::Uneven { count } => {
                return Err(DecodeError::TokenCount { tokens: count, blocks: names, block_tokens });
            }
            Tokens::Absent | Tokens::Waiting(_) => {
                let (names, tier) = (self.named(), self.tier);
                self.batch.events.push(Event::Copied { names, tier });
            }
            Tokens::Hashed { count, per_block } => {
                if per_block == 0 || self.block_tokens.is_some_and(|told| told != per_block) {
                    return Err(DecodeError::TokenCount { tokens: count, blocks: names, block_tokens });
                }
                self.extra_keys()?;
                let lora = self.lora();
                let salt = self.salt.map(|salt| append(&mut self.batch.text, &[salt]));
                self.batch.names.truncate(self.names_start);
                let blocks = range(self.blocks_start, self.batch.blocks.len());
                let (parent, tier) = (self.parent, self.tier);
                let stored = Stored { parent, blocks, block_tokens: per_block, tier, lora, salt };
                self.batch.events.push(Event::Stored(stored));
            }
        }
        Ok(())
    }

    /// Adds each block's extra keys to its hash: nil, or a list of the adapter's name, parts of images, and the cache's
    /// salt (on a prompt's first block), without labels (vLLM, `v1/core/kv_cache_utils.py`,
    /// `generate_block_hash_extra_keys`).
    fn extra_keys(&mut self) -> Result<()> {
        let Some(mut scanner) = self.extra_keys.take() else { return Ok(()) };
        let (keys, blocks) = (scanner.array()?, self.names.unwrap_or(0));
        if keys == 0 {
            return Ok(());
        }
        if keys != blocks {
            return Err(DecodeError::ExtraKeys { keys, blocks });
        }
        for block in self.blocks_start..self.batch.blocks.len() {
            if scanner.nil() {
                continue;
            }
            let begins = block == self.blocks_start && self.parent.is_none();
            let (mut adapter, mut content) = (self.lora_name, self.batch.blocks[block].1);
            for _ in 0..scanner.array()? {
                let start = scanner.at();
                let item = match scanner.peek()? {
                    Kind::Str => Some(scanner.str()?),
                    _ => scanner.skip().map(|()| None)?,
                };
                if item.is_some() && item == adapter {
                    adapter = None;
                    continue;
                }
                match item {
                    Some(salt) if begins => self.salt = Some(salt),
                    _ => content = content.with(scanner.since(start)),
                }
            }
            self.batch.blocks[block].1 = content;
        }
        Ok(())
    }

    fn lora(&mut self) -> Option<Range<u32>> {
        // vLLM before 0.14 gives only the adapter's number. It cannot be mapped to a name and must not match one: no
        // adapter's name starts with this byte.
        let text = &mut self.batch.text;
        match (self.lora_name, self.lora_id) {
            (Some(name), _) => Some(append(text, &[name])),
            (None, Some(LoraId::Number(id))) => Some(append(text, &["\0lora_id ", &id.to_string()])),
            (None, Some(LoraId::Text(id))) => Some(append(text, &["\0lora_id ", id])),
            (None, None) => None,
        }
    }

    /// The block names of this event in the batch.
    fn named(&self) -> Range<u32> {
        range(self.names_start, self.batch.names.len())
    }

    fn pass_over(&mut self) {
        self.batch.blocks.truncate(self.blocks_start);
        self.batch.names.truncate(self.names_start);
    }
}

/// The tier of an engine's `medium`.
fn tier(medium: &[u8]) -> Tier {
    if medium == b"GPU" { Tier::Gpu } else { Tier::Cpu }
}

/// Whether a block of such layers implies the whole prefix before it. Other layers keep a window or a state, so that a
/// block says nothing about those before it (vLLM, `v1/kv_cache_interface.py`, `KVCacheSpecKind`).
fn is_prefix_group(kind: &[u8]) -> bool {
    matches!(kind, b"full_attention" | b"mla_attention" | b"sink_full_attention")
}

/// An engine's block name: a 64-bit integer of either sign, or a digest, whose last eight bytes the same engine can
/// also send as a number.
#[inline]
fn hash(scanner: &mut Scanner<'_>) -> Result<EngineHash> {
    if scanner.peek()? == Kind::Bin {
        let digest = scanner.bin()?;
        let last = digest.last_chunk().ok_or(DecodeError::HashLength(digest.len()))?;
        return Ok(EngineHash(u64::from_be_bytes(*last)));
    }
    Ok(EngineHash(scanner.bits()?))
}

fn whole(scanner: &mut Scanner<'_>, field: &'static str) -> Result<u32> {
    let value = scanner.int()?;
    u32::try_from(value).map_err(|_| DecodeError::Range { at: scanner.at(), field })
}

fn append(text: &mut String, parts: &[&str]) -> Range<u32> {
    let start = text.len();
    parts.iter().for_each(|part| text.push_str(part));
    range(start, text.len())
}

/// A list from one message is no longer than the message, which [`PAYLOAD_MAX`] limits.
fn range(start: usize, end: usize) -> Range<u32> {
    start as u32..end as u32
}
