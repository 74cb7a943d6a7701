//! Text for traces that carry only block ids: equal ids give equal text, different ids different text.
//!
//! The text is made of common three-letter English words, each with a space before it. Such a piece is one token in
//! the byte-pair vocabularies of current models and one token of `kvlane mock-engine` (four bytes), so a prompt's
//! length in tokens is close to the trace's without a tokenizer. Eight random bits per token keep blocks of four or
//! more tokens apart.

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

/// Appends the prompt of the request at `index` to `out`: exactly `input_tokens * BYTES_PER_TOKEN` bytes of text that
/// needs no JSON escaping. A last block that reaches beyond `input_tokens` is cut.
pub fn append(out: &mut Vec<u8>, seed: u64, trace: &Trace, index: u32) {
    let mut left = trace.requests[index as usize].input_tokens;
    out.reserve(left as usize * BYTES_PER_TOKEN);
    let mut blocks = Vec::new();
    trace.blocks(index, &mut blocks);
    for block in blocks {
        let tokens = trace.block_tokens.min(left);
        words(out, seed, block, tokens);
        left -= tokens;
    }
}

/// Appends `tokens` words of a block. A shorter draw is a prefix of a longer one.
fn words(out: &mut Vec<u8>, seed: u64, block: u64, tokens: u32) {
    let mut rng = Rng::new(seed.rotate_left(17) ^ block.wrapping_mul(0x9E37_79B9_7F4A_7C15));
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

    #[test]
    fn blocks_and_seeds_do_not_collide() {
        let prompts: Vec<(u32, &[u64])> = vec![(8, &[]); 1000];
        let mut all = [texts(1, &prompts), texts(2, &prompts)].concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 2000);
    }
}
