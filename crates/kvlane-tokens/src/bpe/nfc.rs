//! Normalization form C, as Qwen's tokenizers ask for it.
//!
//! Nearly all text has that form already. A text of which every character is of combining class 0 and never changes or
//! joins its neighbour is left as it is; any other goes through the crate that `tokenizers` uses, so that both know the
//! same version of Unicode.

use std::borrow::Cow;
use std::sync::LazyLock;

use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, char, is_nfc_quick};

/// One bit per code point: set where the character is left alone wherever it stands.
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

/// `text` in form C.
pub(super) fn normalize(text: &str) -> Cow<'_, str> {
    // Nothing below U+0300 is changed by this form.
    if text.bytes().all(|byte| byte < 0xcc) {
        return Cow::Borrowed(text);
    }
    let inert = &*INERT;
    if text.chars().all(|character| inert[character as usize / 64] >> (character as usize % 64) & 1 == 1) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.nfc().map(|(character, _)| character).collect())
}
