//! Text for traces that carry only block ids: equal ids give equal text, different ids different text.
//!
//! The text is made of common three-letter English words, each with a space before it. Such a piece is one token in
//! the byte-pair vocabularies of current models and one token of `kvlane mock-engine` (four bytes), so a prompt's
//! length in tokens is close to the trace's without a tokenizer. Eight random bits per token keep blocks of four or
//! more tokens apart.

use kvlane_core::rng::Rng;
use kvlane_trace::request::TraceRequest;

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

/// What text is drawn from: a block many requests may share, or the part of one request that no block id describes.
#[derive(Clone, Copy)]
enum Source {
    Block(u64),
    Unshared(u64),
}

/// Appends the prompt of the request at `index` to `out`: exactly `input_tokens * BYTES_PER_TOKEN` bytes of text that
/// needs no JSON escaping.
///
/// A last block that reaches beyond `input_tokens` is cut. Where the ids cover less than `input_tokens`, as in traces
/// without hashes, the rest is text of this request alone.
pub fn append(out: &mut Vec<u8>, seed: u64, index: u64, request: &TraceRequest, block_tokens: u32) {
    let mut left = request.input_tokens;
    out.reserve(left as usize * BYTES_PER_TOKEN);
    for &block in &request.blocks {
        let tokens = block_tokens.min(left);
        words(out, seed, Source::Block(block), tokens);
        left -= tokens;
    }
    words(out, seed, Source::Unshared(index), left);
}

/// Appends `tokens` words drawn from `source`. A shorter draw is a prefix of a longer one.
fn words(out: &mut Vec<u8>, seed: u64, source: Source, tokens: u32) {
    // Indices are small, so their complements stay clear of the ids of any trace that counts its blocks.
    let id = match source {
        Source::Block(id) => id,
        Source::Unshared(index) => !index,
    };
    let mut rng = Rng::new(seed.rotate_left(17) ^ id.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    for first in (0..tokens).step_by(8) {
        let draw = rng.next_u64().to_le_bytes();
        for &word in &draw[..(tokens - first).min(8) as usize] {
            let at = usize::from(word) * BYTES_PER_TOKEN;
            out.extend_from_slice(&WORDS[at..at + BYTES_PER_TOKEN]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(seed: u64, index: u64, input_tokens: u32, blocks: &[u64]) -> String {
        let request =
            TraceRequest { arrival_s: 0.0, input_tokens, output_tokens: 1, blocks: blocks.to_vec() };
        let mut out = Vec::new();
        append(&mut out, seed, index, &request, 16);
        String::from_utf8(out).expect("words are ASCII")
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
    fn equal_block_ids_give_equal_text_wherever_they_stand() {
        let (a, b) = (text(1, 0, 48, &[7, 8, 9]), text(1, 1, 48, &[5, 8, 9]));
        assert_eq!(a.len(), 48 * BYTES_PER_TOKEN);
        assert_ne!(a[..64], b[..64]);
        assert_eq!(a[64..], b[64..]);
    }

    #[test]
    fn the_last_block_is_cut_to_the_prompts_length() {
        let (long, short) = (text(1, 0, 32, &[7, 8]), text(1, 0, 21, &[7, 8]));
        assert_eq!(short.len(), 21 * BYTES_PER_TOKEN);
        assert!(long.starts_with(&short));
        assert_eq!(text(1, 0, 16, &[7, 8, 9]).len(), 64, "ids beyond the prompt add nothing");
    }

    #[test]
    fn tokens_without_ids_are_text_of_one_request_alone() {
        let (a, b) = (text(1, 0, 40, &[7]), text(1, 1, 40, &[7]));
        assert_eq!((a.len(), b.len()), (160, 160));
        assert_eq!(a[..64], b[..64]);
        assert_ne!(a[64..], b[64..]);
    }

    #[test]
    fn ids_and_seeds_do_not_collide() {
        let mut all: Vec<String> = (0..1000).map(|id| text(1, 0, 8, &[id])).collect();
        all.extend((0..1000).map(|index| text(1, index, 8, &[])));
        all.extend((0..1000).map(|id| text(2, 0, 8, &[id])));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 3000);
    }
}
