//! Unicode classes used by the split patterns: one byte of flags per code point.
//!
//! The ranges come from `regex-syntax`, the tables of the regular expressions in `tokenizers`, so that the classes
//! agree with that library's for every code point.

use std::sync::LazyLock;

use regex_syntax::hir::{Class, Hir, HirKind};

/// `\p{Lu}` and `\p{Lt}`.
pub(super) const UPPER: u8 = 1;
/// `\p{Ll}`.
pub(super) const LOWER: u8 = 2;
/// `\p{Lm}` and `\p{Lo}`.
pub(super) const CASELESS: u8 = 4;
/// `\p{M}`.
pub(super) const MARK: u8 = 8;
/// `\p{N}`.
pub(super) const NUMBER: u8 = 16;
/// `\s`.
pub(super) const SPACE: u8 = 32;
/// `\p{P}` and `\p{S}`.
pub(super) const SYMBOL: u8 = 64;
/// `\p{Han}`.
pub(super) const HAN: u8 = 128;
/// `\p{L}`.
pub(super) const LETTER: u8 = UPPER | LOWER | CASELESS;

const PATTERNS: [(&str, u8); 8] = [
    (r"[\p{Lu}\p{Lt}]", UPPER),
    (r"\p{Ll}", LOWER),
    (r"[\p{Lm}\p{Lo}]", CASELESS),
    (r"\p{M}", MARK),
    (r"\p{N}", NUMBER),
    (r"\s", SPACE),
    (r"[\p{P}\p{S}]", SYMBOL),
    (r"\p{Han}", HAN),
];

/// The classes of ASCII; no class for bytes above it.
pub(super) const ASCII: [u8; 256] = {
    let mut classes = [0; 256];
    let mut byte = 0;
    while byte < 128 {
        let letter = byte as u8;
        classes[byte] = match letter {
            b'A'..=b'Z' => UPPER,
            b'a'..=b'z' => LOWER,
            b'0'..=b'9' => NUMBER,
            b'\t'..=b'\r' | b' ' => SPACE,
            b'!'..=b'~' => SYMBOL,
            _ => 0,
        };
        byte += 1;
    }
    classes
};

/// Code points per block of the table.
const BLOCK: usize = 128;

/// A two-level table that stores equal blocks once (about 40 KB in total).
struct Classes {
    block_of: Vec<u16>,
    blocks: Vec<[u8; BLOCK]>,
}

static CLASSES: LazyLock<Classes> = LazyLock::new(|| {
    let mut flat = vec![0; char::MAX as usize + 1];
    for (pattern, class) in PATTERNS {
        for (first, last) in ranges(pattern) {
            for flags in &mut flat[first as usize..=last as usize] {
                *flags |= class;
            }
        }
    }
    let mut blocks: Vec<[u8; BLOCK]> = Vec::new();
    let mut seen = hashbrown::HashMap::<[u8; BLOCK], u16, foldhash::fast::FixedState>::default();
    let block_of = flat
        .chunks_exact(BLOCK)
        .map(|chunk| {
            let block: [u8; BLOCK] = std::array::from_fn(|i| chunk[i]);
            *seen.entry(block).or_insert_with(|| {
                blocks.push(block);
                (blocks.len() - 1) as u16
            })
        })
        .collect();
    Classes { block_of, blocks }
});

/// The code point ranges of a character class.
fn ranges(pattern: &str) -> Vec<(char, char)> {
    match regex_syntax::parse(pattern).map(Hir::into_kind) {
        Ok(HirKind::Class(Class::Unicode(class))) => {
            class.iter().map(|range| (range.start(), range.end())).collect()
        }
        other => unreachable!("{pattern} is not a Unicode class but {other:?}"),
    }
}

/// The classes of one code point.
pub(super) fn of(code_point: u32) -> u8 {
    let classes = &*CLASSES;
    let block = classes.block_of[code_point as usize / BLOCK];
    classes.blocks[block as usize][code_point as usize % BLOCK]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_point_has_the_classes_the_regular_expressions_give_it() {
        for (pattern, class) in PATTERNS {
            let mut expected = vec![false; char::MAX as usize + 1];
            for (first, last) in ranges(pattern) {
                expected[first as usize..=last as usize].fill(true);
            }
            for (code_point, &expected) in expected.iter().enumerate() {
                assert_eq!(of(code_point as u32) & class != 0, expected, "U+{code_point:04X} in {pattern}");
            }
        }
    }

    #[test]
    fn the_ascii_table_is_the_head_of_the_whole_table() {
        for byte in 0..128 {
            assert_eq!(ASCII[byte as usize], of(byte), "byte {byte}");
        }
    }
}
