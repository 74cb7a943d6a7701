//! NFC normalization, used by Qwen's tokenizers.
//!
//! Nearly all text is in NFC already. Text is returned unchanged if each of its characters has combining class 0 and
//! never changes or composes with a neighbour; other text is normalized by the crate that `tokenizers` uses, so that
//! both use the same Unicode version.

use std::borrow::Cow;
use std::sync::LazyLock;

use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, char, is_nfc_quick};

/// One bit per code point: set if NFC leaves the character unchanged in any context.
static INERT: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let mut bits = vec![0; (char::MAX as usize + 1) / 64];
    for character in '\0'..=char::MAX {
        if char::canonical_combining_class(character) == 0
            && is_nfc_quick(std::iter::once(character)) == IsNormalized::Yes
        {
            bits[character as usize / 64] |= 1 << (character as usize % 64);
        }
    }
    bits
});

/// Normalizes `text` to NFC.
pub(super) fn normalize(text: &str) -> Cow<'_, str> {
    // NFC changes nothing below U+0300.
    if text.bytes().all(|byte| byte < 0xcc) {
        return Cow::Borrowed(text);
    }
    let inert = &*INERT;
    if text.chars().all(|character| inert[character as usize / 64] >> (character as usize % 64) & 1 == 1) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.nfc().map(|(character, _)| character).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_left_alone_is_text_the_crate_would_leave_alone() {
        for character in '\0'..'\u{30000}' {
            // Next to a letter that takes accents, a Hangul vowel, and an accent.
            let text = format!("e{character}\u{1161}{character}\u{301}");
            let expected: String = text.nfc().map(|(character, _)| character).collect();
            assert_eq!(normalize(&text), expected, "U+{:04X}", character as u32);
            let alone = character.to_string();
            let expected: String = alone.nfc().map(|(character, _)| character).collect();
            assert_eq!(normalize(&alone), expected, "U+{:04X}", character as u32);
            let after = format!("e{character}가");
            let expected: String = after.nfc().map(|(character, _)| character).collect();
            assert_eq!(normalize(&after), expected, "U+{:04X}", character as u32);
        }
    }

    #[test]
    fn plain_text_is_not_copied() {
        for text in ["", "plain", "Grüße, 世界! 한국 カタカナ Привет 🙂"] {
            assert!(matches!(normalize(text), Cow::Borrowed(_)), "{text}");
        }
    }
}
