//! Text for traces that contain only block ids: equal ids give equal text, different ids different text.
//!
//! The text consists of common three-letter English words, each with a space before it. Such a piece is one token in
//! the byte-pair vocabularies of current models and one token of `kvlane mock-engine` (four bytes), so a prompt's
//! length in tokens is close to the trace's without a tokenizer. Eight random bits per token make blocks of four or
//! more tokens distinct. With the model's tokenizer, [`Words::pick`] selects words that are one token each, alone and
//! in a row: then every block has exactly its tokens.
//!
//! Real prompts are in [`given`].

pub mod given;

use std::sync::Arc;

use kvlane_core::rng::Rng;
use kvlane_trace::trace::Trace;

/// Bytes of text per token of the trace.
pub const BYTES_PER_TOKEN: usize = 4;

/// 256 words of three letters, each after a space.
const WORDS: &[u8; 256 * BYTES_PER_TOKEN] = b" the and for are but not you all any can had her was one our out day \
get has him his how man new now old see two way who boy did its let put say she too use dad mom act add age ago aid \
aim air arm art ask bad bag ban bar bat bay bed bet bid big bit bow box bus buy cap car cat cow cry cup cut dig dog \
dry due ear eat egg end eye far fat fee few fig fit fix fly fun gap gas gun guy hat hit hot ice ill ink inn job joy \
key kid kit lab law lay led leg lie lip log lot low mad map mat mix mud net nor nut oak odd oil own pan pay pen pet \
pie pig pin pop pot pub ran rat raw red rid row run sad sat saw sea set sir sit six sky son sun tax tea ten tie tin \
tip toe ton top toy try van via war wet win won yes yet zoo abs ace ads ale ant ape app apt arc ash ate awe axe bee \
beg bin bio bug bun cab cam cod con cop cue den dim dip dot dug dye ego elf era eve fan fed fog fox fur gel gem gin \
god got gum gym ham hay hen hid hip hop hug hut icy jam jar jaw jet jog lap mid mob nap oat opt orb owe owl pad pal \
paw pea peg per pit pod pro";

/// Minimum number of words to make blocks distinct: 16 tokens of them are 64 bits.
const WORDS_MIN: usize = 16;
/// Words of the text that tests whether they stay separate in a row.
const ROW_WORDS: usize = 1024;

/// Words of one token each.
#[derive(Clone, Debug)]
pub struct Words {
    words: Arc<[Box<[u8]>]>,
}

/// Why a tokenizer yields no words.
#[derive(Debug, thiserror::Error)]
pub enum WordsError {
    /// Nearly all tested words are several tokens.
    #[error(
        "only {found} of the tested words are one token of this tokenizer, {WORDS_MIN} are needed; omit the tokenizer: prompts then have about the length in the trace"
    )]
    TooFew {
        /// Number of words.
        found: usize,
    },
    /// A row of words has another number of tokens.
    #[error(
        "{words} words in a row are {tokens} tokens of this tokenizer, though each alone is one; omit the tokenizer: prompts then have about the length in the trace"
    )]
    Together {
        /// Words in the row.
        words: usize,
        /// Its tokens.
        tokens: usize,
    },
}

/// Appends the prompt of the request at `index` to `out`, in the words that are one token of most models: exactly
/// `input_tokens * BYTES_PER_TOKEN` bytes of text that needs no JSON escaping. A last block that reaches beyond
/// `input_tokens` is cut.
pub fn append(out: &mut Vec<u8>, seed: u64, trace: &Trace, index: u32) {
    Words::default().append(out, seed, trace, index);
}

// === impl Words ===

impl Default for Words {
    /// Words that are one token of most models.
    fn default() -> Self {
        Self { words: WORDS.chunks_exact(BYTES_PER_TOKEN).map(Box::from).collect() }
    }
}

impl Words {
    /// Words that are one token each for a tokenizer; `count` returns the number of tokens of a text.
    ///
    /// # Errors
    ///
    /// If a tokenizer has too few of them, or tokenizes a row of words differently.
    pub fn pick<E: From<WordsError>>(mut count: impl FnMut(&str) -> Result<usize, E>) -> Result<Self, E> {
        // Some chat templates trim their input, so that a prompt begins without the space of its first word.
        let (mut words, mut spaced) = (Vec::new(), Vec::new());
        for word in candidates() {
            if count(&word)? == 1 {
                if count(word.trim_start())? == 1 { &mut words } else { &mut spaced }.push(word);
            }
        }
        if words.len() < WORDS_MIN {
            words.append(&mut spaced);
        }
        if words.len() < WORDS_MIN {
            return Err(WordsError::TooFew { found: words.len() }.into());
        }
        words.truncate(256);
        let words = Self { words: words.into_iter().map(|word| word.into_bytes().into()).collect() };
        let mut row = Vec::new();
        words.block(&mut row, 0, 0, ROW_WORDS as u32);
        let tokens = count(&String::from_utf8_lossy(&row))?;
        if tokens != ROW_WORDS {
            return Err(WordsError::Together { words: ROW_WORDS, tokens }.into());
        }
        Ok(words)
    }

    /// Appends the prompt of the request at `index` to `out`: `input_tokens` words that need no JSON escaping. A last block
    /// that reaches beyond them is cut.
    pub fn append(&self, out: &mut Vec<u8>, seed: u64, trace: &Trace, index: u32) {
        let mut left = trace.requests[index as usize].input_tokens;
        out.reserve(left as usize * BYTES_PER_TOKEN);
        let mut blocks = Vec::new();
        trace.blocks(index, &mut blocks);
        for block in blocks {
            let tokens = trace.block_tokens.min(left);
            self.block(out, seed, block, tokens);
            left -= tokens;
        }
    }

    /// Appends `tokens` words of a block. A shorter draw is a prefix of a longer one.
    fn block(&self, out: &mut Vec<u8>, seed: u64, block: u64, tokens: u32) {
        let mut rng = Rng::new(seed.rotate_left(17) ^ block.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        for first in (0..tokens).step_by(8) {
            let draw = rng.next_u64().to_le_bytes();
            for &lot in &draw[..(tokens - first).min(8) as usize] {
                out.extend_from_slice(&self.words[(usize::from(lot) * self.words.len()) >> 8]);
            }
        }
    }
}

/// Candidates: the words, and for small vocabularies one letter or two, each with a space before it.
fn candidates() -> impl Iterator<Item = String> {
    let words = WORDS.chunks_exact(BYTES_PER_TOKEN).map(|word| String::from_utf8_lossy(word).into_owned());
    let letters = || b'a'..=b'z';
    let one = letters().map(|a| format!(" {}", char::from(a)));
    let two =
        letters().flat_map(move |a| letters().map(move |b| format!(" {}{}", char::from(a), char::from(b))));
    words.chain(one).chain(two)
}

#[cfg(test)]
mod tests {
    use kvlane_trace::trace::{Builder, TraceRequest};

    use super::*;

    /// The prompts of a trace in blocks of 16 tokens.
    fn texts(seed: u64, prompts: &[(u32, &[u64])]) -> Vec<String> {
        let mut builder = Builder::new(16);
        for &(input_tokens, ids) in prompts {
            builder.push(TraceRequest { input_tokens, ..TraceRequest::default() }, ids);
        }
        let trace = builder.finish();
        let text = |index| {
            let mut out = Vec::new();
            append(&mut out, seed, &trace, index);
            String::from_utf8(out).expect("words are ASCII")
        };
        (0..prompts.len() as u32).map(text).collect()
    }

    #[test]
    fn there_are_256_distinct_words_of_one_piece_each() {
        let mut words: Vec<&[u8]> = WORDS.chunks_exact(BYTES_PER_TOKEN).collect();
        assert!(words.iter().all(|word| word[0] == b' ' && word[1..].iter().all(u8::is_ascii_lowercase)));
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 256);
    }

    #[test]
    fn prompts_are_equal_as_far_as_their_blocks_are() {
        let texts = texts(1, &[(48, &[7, 8, 9]), (48, &[7, 8, 10]), (48, &[5, 8, 9])]);
        assert_eq!(texts[0].len(), 48 * BYTES_PER_TOKEN);
        assert_eq!(texts[0][..128], texts[1][..128]);
        assert_ne!(texts[0][128..], texts[1][128..]);
        assert_ne!(texts[0][..64], texts[2][..64]);
        assert_ne!(texts[0][64..128], texts[2][64..128], "an id tells of all before it");
    }

    #[test]
    fn the_last_block_is_cut_to_the_prompts_length() {
        let texts = texts(1, &[(32, &[7, 8]), (21, &[7, 8])]);
        assert_eq!(texts[1].len(), 21 * BYTES_PER_TOKEN);
        assert!(texts[0].starts_with(&texts[1]));
    }

    #[test]
    fn tokens_without_ids_are_text_of_one_request_alone() {
        let texts = texts(1, &[(40, &[7]), (40, &[7])]);
        assert_eq!([texts[0].len(), texts[1].len()], [160; 2]);
        assert_eq!(texts[0][..64], texts[1][..64]);
        assert_ne!(texts[0][64..], texts[1][64..]);
    }

    #[test]
    fn a_prompt_that_begins_with_an_answer_has_text_for_it_that_others_share() {
        let mut builder = Builder::new(16);
        builder.push(TraceRequest { input_tokens: 20, output_tokens: 40, ..TraceRequest::default() }, &[]);
        for input_tokens in [64, 80] {
            let turn =
                TraceRequest { input_tokens, base: Some(0), shared_blocks: 3, ..TraceRequest::default() };
            builder.branch(turn);
        }
        let trace = builder.finish();
        let [mut first, mut a, mut b] = [const { Vec::new() }; 3];
        append(&mut first, 1, &trace, 0);
        append(&mut a, 1, &trace, 1);
        append(&mut b, 1, &trace, 2);
        assert!(a.starts_with(&first) && b.starts_with(&a[..192]));
        assert_ne!(a[192..], b[192..256]);
    }

    /// A tokenizer that has these words with a space before them, and otherwise makes a token of each character.
    fn tokens(known: &[&str], text: &str) -> usize {
        let mut count = 0;
        for part in text.split_inclusive(' ') {
            let word = part.trim_end();
            count += if known.contains(&word) { 1 } else { word.len() };
        }
        count.max(usize::from(!text.is_empty()))
    }

    #[test]
    fn words_of_a_tokenizer_are_those_that_it_has_and_make_blocks_of_as_many_tokens() {
        let known: Vec<&str> =
            std::str::from_utf8(&WORDS[..200]).expect("ASCII").split(' ').skip(1).collect();
        let count = |text: &str| Ok::<_, WordsError>(tokens(&known, text));
        let words = Words::pick(count).expect("fifty words and the letters");
        let mut builder = Builder::new(16);
        builder.push(TraceRequest { input_tokens: 41, ..TraceRequest::default() }, &[7, 8]);
        let mut text = Vec::new();
        words.append(&mut text, 1, &builder.finish(), 0);
        let text = String::from_utf8(text).expect("ASCII");
        assert_eq!(tokens(&known, &text), 41);
        assert!(text.split(' ').skip(1).all(|word| known.contains(&word) || word.len() == 1));
    }

    #[test]
    fn a_tokenizer_without_such_words_is_refused() {
        let none = |text: &str| Ok::<_, WordsError>(text.len());
        assert!(matches!(Words::pick(none), Err(WordsError::TooFew { found: 0 })));
        let merging = |text: &str| Ok::<_, WordsError>(text.len().div_ceil(8));
        assert!(matches!(Words::pick(merging), Err(WordsError::Together { words: 1024, .. })));
    }

    #[test]
    fn blocks_and_seeds_do_not_collide() {
        let prompts: Vec<(u32, &[u64])> = vec![(8, &[]); 1000];
        let mut all = [texts(1, &prompts), texts(2, &prompts)].concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 2000);
    }
}
