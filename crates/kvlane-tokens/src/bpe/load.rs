//! Builds encoders from tokenizer files.

use std::sync::Mutex;

use hashbrown::HashMap;
use serde_json::Value;

use super::merge::{ID_MAX, Merges, RANK_MAX, Row};
use super::split::{DEEPSEEK, GPT2, Splitter};
use super::walk::Walk;
use super::words::Words;
use super::{Bpe, Unsupported};

type Vocabulary = HashMap<Vec<u8>, u32, foldhash::fast::FixedState>;

/// The steps before the merges.
#[derive(Debug, PartialEq, Eq)]
struct PreTokenizer {
    splitter: Splitter,
    prefix_space: bool,
}

/// The encoder of a parsed `tokenizer.json`.
pub(super) fn from_tokenizer(tokenizer: &Value) -> Result<Bpe, Unsupported> {
    let model = &tokenizer["model"];
    // Files from the time of GPT-2 have no type; the library treats a model with merges as BPE.
    if !(model["type"] == "BPE" || (model["type"].is_null() && model["merges"].is_array())) {
        return Err(Unsupported(format!("the model is {}, not \"BPE\"", model["type"])));
    }
    if !matches!(model["dropout"].as_f64(), None | Some(0.0)) {
        return Err(Unsupported("the model uses dropout (random merges)".into()));
    }
    for affix in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[affix].as_str().is_some_and(|affix| !affix.is_empty()) {
            return Err(Unsupported(format!("{affix} is set")));
        }
    }
    let nfc = normalizes(&tokenizer["normalizer"])?;
    let pre_tokenizer = pre_tokenizer(&tokenizer["pre_tokenizer"])?;

    let vocabulary = vocabulary(&model["vocab"])?;
    let pairs = merges(&model["merges"], &vocabulary)?;
    let whole = model["ignore_merges"].as_bool().unwrap_or(false);
    build(&vocabulary, &pairs, whole, pre_tokenizer, nfc)
}

/// The encoder of tiktoken ranks: two tokens merge wherever their concatenated bytes are a token, and that token's id
/// is the rank of the merge (tiktoken 0.14, `src/lib.rs`, `byte_pair_merge`).
pub(super) fn from_ranks(
    ranks: impl Iterator<Item = (Vec<u8>, u32)>,
    pattern: &str,
) -> Result<Bpe, Unsupported> {
    let splitter = splitter(pattern)?;
    let vocabulary: Vocabulary = ranks.collect();
    if let Some((_, id)) = vocabulary.iter().find(|(_, id)| **id >= ID_MAX) {
        return Err(Unsupported(format!("token id {id} is above {ID_MAX}")));
    }
    let mut pairs = Vec::new();
    for (token, &id) in &vocabulary {
        for middle in 1..token.len() {
            let (left, right) = token.split_at(middle);
            if let (Some(&left), Some(&right)) = (vocabulary.get(left), vocabulary.get(right)) {
                pairs.push((left, right, id, id));
            }
        }
    }
    build(&vocabulary, &pairs, true, PreTokenizer { splitter, prefix_space: false }, false)
}

/// If `whole`, words that are tokens are looked up before merging.
fn build(
    vocabulary: &Vocabulary,
    pairs: &[(u32, u32, u32, u32)],
    whole: bool,
    PreTokenizer { splitter, prefix_space }: PreTokenizer,
    nfc: bool,
) -> Result<Bpe, Unsupported> {
    // Built when the first tokenizer is loaded instead of at the first prompt.
    super::classes::of(0);
    if nfc {
        super::nfc::normalize("\u{301}");
    }
    let merges = Merges::new(bytes(vocabulary)?, pairs);
    let mut row = Row::default();
    let (mut one_token, mut made_by_merges) = (Vec::new(), Vec::new());
    for (token, &id) in vocabulary.iter().filter(|(token, _)| !token.is_empty()) {
        let made = merges.made(token, &mut row).filter(|made| made.token == id);
        made_by_merges.extend(made.map(|made| (&token[..], made)));
        if whole || made.is_some() {
            one_token.push((&token[..], id));
        }
    }
    let words = Words::new(one_token.into_iter());
    let walk = Walk::new(made_by_merges);
    Ok(Bpe { words, merges, walk, splitter, nfc, prefix_space, scratch: Mutex::default() })
}

/// Whether text is normalized to NFC.
fn normalizes(normalizer: &Value) -> Result<bool, Unsupported> {
    match normalizer["type"].as_str() {
        None if normalizer.is_null() => Ok(false),
        Some("NFC") => Ok(true),
        Some("Sequence") => {
            let all = normalizer["normalizers"].as_array().map(Vec::as_slice).unwrap_or_default();
            all.iter().try_fold(false, |nfc, one| Ok(normalizes(one)? | nfc))
        }
        _ => Err(Unsupported(format!("the normalizer is {}", normalizer["type"]))),
    }
}

fn pre_tokenizer(value: &Value) -> Result<PreTokenizer, Unsupported> {
    let mut stages = Vec::new();
    flatten(value, &mut stages);
    let Some((byte_level, splits)) = stages.split_last() else {
        return Err(Unsupported("there is no pre-tokenizer".into()));
    };
    if byte_level["type"] != "ByteLevel" {
        return Err(Unsupported(format!(
            "the last pre-tokenizer is {}, not \"ByteLevel\"",
            byte_level["type"]
        )));
    }
    // The library rejects a `ByteLevel` with missing fields, except for `use_regex`, which defaults to true.
    let prefix_space = byte_level["add_prefix_space"].as_bool().unwrap_or(true);
    let by_regex = byte_level["use_regex"].as_bool().unwrap_or(true);
    let splitter = match (splits, by_regex) {
        ([], true) => splitter(GPT2)?,
        ([digits], true) if digits["type"] == "Digits" => {
            Splitter::Digits { individual: digits["individual_digits"].as_bool().unwrap_or(false) }
        }
        ([split], false) => splitter(pattern(split, true)?)?,
        ([numbers, east_asian, rest], false)
            if [pattern(numbers, false)?, pattern(east_asian, false)?, pattern(rest, false)?] == DEEPSEEK =>
        {
            Splitter::DeepSeek
        }
        _ => {
            let stages: Vec<_> = stages.iter().map(|stage| stage["type"].as_str().unwrap_or("?")).collect();
            return Err(Unsupported(format!("the pre-tokenizers are {}", stages.join(", "))));
        }
    };
    if prefix_space && !splits.is_empty() {
        return Err(Unsupported("a space is added before every piece of the text".into()));
    }
    Ok(PreTokenizer { splitter, prefix_space })
}

fn flatten<'a>(pre_tokenizer: &'a Value, stages: &mut Vec<&'a Value>) {
    match pre_tokenizer["pretokenizers"].as_array() {
        Some(sequence) if pre_tokenizer["type"] == "Sequence" => {
            sequence.iter().for_each(|stage| flatten(stage, stages));
        }
        _ if pre_tokenizer.is_null() => {}
        _ => stages.push(pre_tokenizer),
    }
}

/// The regular expression of a `Split` whose matches become words. If the expression matches all text (`complete`), an
/// inverted `Removed` is equivalent.
fn pattern(split: &Value, complete: bool) -> Result<&str, Unsupported> {
    if split["type"] != "Split" {
        return Err(Unsupported(format!("the pre-tokenizer before \"ByteLevel\" is {}", split["type"])));
    }
    let invert = split["invert"].as_bool().unwrap_or(false);
    match (split["pattern"]["Regex"].as_str(), split["behavior"].as_str(), invert) {
        (Some(pattern), Some("Isolated"), false) => Ok(pattern),
        (Some(pattern), Some("Removed"), true) if complete => Ok(pattern),
        _ => Err(Unsupported(format!(
            "text is split by {} with behavior {}, invert {invert}",
            split["pattern"], split["behavior"]
        ))),
    }
}

fn splitter(pattern: &str) -> Result<Splitter, Unsupported> {
    Splitter::of_pattern(pattern)
        .ok_or_else(|| Unsupported(format!("no scanner for the split pattern {pattern}")))
}

fn vocabulary(value: &Value) -> Result<Vocabulary, Unsupported> {
    let object = value.as_object().ok_or_else(|| Unsupported("the vocabulary is not an object".into()))?;
    let mut vocabulary = Vocabulary::with_capacity_and_hasher(object.len(), Default::default());
    for (token, id) in object {
        let id = id.as_u64().filter(|id| *id < u64::from(ID_MAX)).ok_or_else(|| {
            Unsupported(format!("the id of token {token:?} is {id}, not a number below {ID_MAX}"))
        })?;
        // `ByteLevel` never produces other characters, so such a token is an added one.
        if let Some(bytes) = bytes_of(token) {
            vocabulary.insert(bytes, id as u32);
        }
    }
    Ok(vocabulary)
}

/// `(left, right, rank, made)` of every merge; merges are strings `"left right"` or pairs.
fn merges(value: &Value, vocabulary: &Vocabulary) -> Result<Vec<(u32, u32, u32, u32)>, Unsupported> {
    let merges = value.as_array().ok_or_else(|| Unsupported("the merges are not a list".into()))?;
    if merges.len() >= RANK_MAX as usize {
        return Err(Unsupported(format!("there are more than {RANK_MAX} merges")));
    }
    let mut pairs = Vec::with_capacity(merges.len());
    let mut made = Vec::new();
    for (rank, merge) in merges.iter().enumerate() {
        let refuse = || Unsupported(format!("merge {rank} is {merge}"));
        let (left, right) = match merge {
            Value::String(merge) if merge.starts_with("#version") => continue,
            Value::String(merge) => merge.split_once(' ').ok_or_else(refuse)?,
            Value::Array(pair) => match &pair[..] {
                [Value::String(left), Value::String(right)] => (left.as_str(), right.as_str()),
                _ => return Err(refuse()),
            },
            _ => return Err(refuse()),
        };
        let (left, right) = (bytes_of(left).ok_or_else(refuse)?, bytes_of(right).ok_or_else(refuse)?);
        made.clear();
        made.extend_from_slice(&left);
        made.extend_from_slice(&right);
        let id = |token: &[u8]| vocabulary.get(token).copied().ok_or_else(refuse);
        pairs.push((id(&left)?, id(&right)?, rank as u32, id(&made)?));
    }
    Ok(pairs)
}

/// The token of every byte. Bytes that cannot occur in UTF-8 may lack one.
fn bytes(vocabulary: &Vocabulary) -> Result<[u32; 256], Unsupported> {
    let mut ids = [0; 256];
    for byte in 0..=255 {
        match vocabulary.get(&[byte][..]) {
            Some(&id) => ids[byte as usize] = id,
            None if matches!(byte, 0xc0 | 0xc1 | 0xf5..) => {}
            None => return Err(Unsupported(format!("the vocabulary has no token for byte {byte:#04x}"))),
        }
    }
    Ok(ids)
}

/// The bytes of a token in the alphabet of `ByteLevel`: printable Latin-1 represents itself, and U+0100 and up
/// represent the other bytes in order (GPT-2, `encoder.py`, `bytes_to_unicode`).
fn bytes_of(token: &str) -> Option<Vec<u8>> {
    token
        .chars()
        .map(|character| match character as u32 {
            code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
            code @ 0x100..=0x120 => Some((code - 0x100) as u8),
            code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
            0x143 => Some(0xad),
            _ => None,
        })
        .collect()
}
