//! The mock tokenizer: four bytes of the rendered prompt are one token, and the token's id is those bytes.
//!
//! Four bytes are about the size of an English token in current vocabularies. The id is the little-endian number of
//! the four bytes, so a prompt given as the ids from `/tokenize` is the same prompt, and hits the same blocks, as its
//! text. A last piece shorter than four bytes is padded with zeros in its id.

use kvlane_core::block::{BlockHash, ChainSeed, ContentHash};

/// Bytes of prompt per token.
pub(crate) const TOKEN_BYTES: usize = 4;

/// Words of answers: each is one token.
const WORDS: &[u8; 64 * TOKEN_BYTES] = b" and any are ask bad big bit box but buy can car cut day dry ear eat end far \
few fit fly for get got had has her him his hot how ice its key law let lot low man map may mix new not now odd off old \
one our out own put red run say sea see six sky sun the two";

/// A prompt as the engine sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prompt {
    pub(crate) rendered: Vec<u8>,
    pub(crate) tokens: u32,
    /// Its adapter.
    pub(crate) lora: Option<String>,
    pub(crate) salt: Option<String>,
    /// Chained hashes of its full blocks, and after [`Prompt::answered`] also of those of its answer.
    pub(crate) blocks: Vec<BlockHash>,
    seed: ChainSeed,
    /// A hash of the whole prompt, the partial block included: the seed of its answer.
    pub(crate) key: u64,
}

impl Prompt {
    /// Cuts a rendered prompt into blocks of `block_tokens`. `None` if it has more tokens than can be counted.
    pub(crate) fn new(seed: ChainSeed, rendered: Vec<u8>, block_tokens: u32) -> Option<Self> {
        let tokens = u32::try_from(rendered.len().div_ceil(TOKEN_BYTES)).ok()?;
        let block_bytes = block_tokens as usize * TOKEN_BYTES;
        let mut blocks = Vec::new();
        seed.chain(&rendered, block_bytes, &mut blocks);
        let rest = ContentHash::of(&rendered[blocks.len() * block_bytes..]);
        let key = seed.next(blocks.last().copied(), rest).0;
        Some(Self { rendered, tokens, lora: None, salt: None, blocks, seed, key })
    }

    /// Adds the blocks of an answer of this length, so that a prompt which continues the answer, token for token,
    /// finds them.
    #[must_use]
    pub(crate) fn answered(mut self, block_tokens: u32, output_tokens: u32) -> Self {
        let block_bytes = block_tokens as usize * TOKEN_BYTES;
        let mut block: Vec<u8> =
            ids(&self.rendered[self.blocks.len() * block_bytes..]).flat_map(u32::to_le_bytes).collect();
        let mut word: &[u8] = &[];
        for index in 0..=output_tokens {
            block.extend_from_slice(word);
            // The prompt alone may fill it, with a last token of fewer bytes.
            if block.len() == block_bytes {
                let hash = self.seed.next(self.blocks.last().copied(), ContentHash::of(&block));
                self.blocks.push(hash);
                block.clear();
            }
            word = answer_word(self.key, index);
        }
        self
    }
}

/// Token ids of a rendered prompt.
pub(crate) fn ids(rendered: &[u8]) -> impl Iterator<Item = u32> {
    rendered.chunks(TOKEN_BYTES).map(|piece| {
        let mut bytes = [0; TOKEN_BYTES];
        bytes[..piece.len()].copy_from_slice(piece);
        u32::from_le_bytes(bytes)
    })
}

/// The text of token ids, without the last one's padding. Ids that are no text become replacement characters.
pub(crate) fn text(mut rendered: &[u8]) -> String {
    for _ in 1..TOKEN_BYTES {
        rendered = rendered.strip_suffix(b"\0").unwrap_or(rendered);
    }
    String::from_utf8_lossy(rendered).into_owned()
}

/// The token at `index` of the answer to the prompt with this key. It needs no JSON escaping.
pub(crate) fn answer_word(key: u64, index: u32) -> &'static [u8] {
    let draw = (key ^ u64::from(index)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 58;
    let at = draw as usize * TOKEN_BYTES;
    &WORDS[at..at + TOKEN_BYTES]
}

/// The id of that token.
pub(crate) fn answer_id(key: u64, index: u32) -> u32 {
    let word = answer_word(key, index);
    word.iter().rev().fold(0, |id, byte| id << 8 | u32::from(*byte))
}

/// The first `tokens` tokens of an answer.
pub(crate) fn answer(key: u64, tokens: u32) -> String {
    (0..tokens).flat_map(|index| answer_word(key, index)).map(|&byte| char::from(byte)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(text: &str) -> Prompt {
        Prompt::new(ChainSeed::new("m", None, None), text.into(), 2).expect("short")
    }

    #[test]
    fn a_block_that_ends_in_a_token_short_of_its_bytes_is_one_and_those_of_the_answer_follow() {
        for text in ["abcdefgh", "abcdefg", "abcde"] {
            let blocks = |output_tokens| prompt(text).answered(2, output_tokens).blocks.len();
            assert_eq!([blocks(0), blocks(1), blocks(2), blocks(5)], [1, 1, 2, 3], "{text}");
        }
        // Its bytes are those of the token, padded with zeros.
        assert_eq!(prompt("abcdefg").answered(2, 0).blocks, prompt("abcdefg\0").blocks);
    }

    #[test]
    fn four_bytes_are_a_token_and_a_rest_counts_as_one() {
        assert_eq!(prompt("abcdefgh").tokens, 2);
        assert_eq!(prompt("abcdefghi").tokens, 3);
        assert_eq!(prompt("abcdefghi").blocks, prompt("abcdefgh").blocks);
        assert_ne!(prompt("abcdefghi").key, prompt("abcdefghj").key);
    }

    #[test]
    fn ids_are_the_text_itself() {
        let bytes: Vec<u8> = ids(b"hello").flat_map(u32::to_le_bytes).collect();
        assert_eq!(bytes, b"hello\0\0\0");
        assert_eq!(text(&bytes), "hello");
        assert_eq!(text(b"\xff\xfe"), "\u{fffd}\u{fffd}");
    }

    #[test]
    fn a_prompt_that_goes_on_with_the_answer_has_its_blocks() {
        for text in ["abcdefgh", "abcdefghijkl"] {
            let first = prompt(text);
            let next = prompt(&format!("{text}{}", answer(first.key, 5)));
            assert_eq!(first.answered(2, 5).blocks, next.blocks);
        }
        assert_eq!(prompt("abcdefghijkl").answered(2, 0), prompt("abcdefghijkl"));
        assert_eq!(answer_id(1, 3).to_le_bytes(), answer_word(1, 3));
    }

    #[test]
    fn an_answer_is_a_word_per_token_and_depends_on_the_prompt() {
        assert_eq!(answer(1, 50).len(), 50 * TOKEN_BYTES);
        assert_eq!(answer(1, 50), answer(1, 50));
        assert_ne!(answer(1, 50), answer(2, 50));
        assert!(answer(1, 500).bytes().all(|byte| byte == b' ' || byte.is_ascii_lowercase()));
    }
}
