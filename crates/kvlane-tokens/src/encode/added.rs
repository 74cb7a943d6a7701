//! Added tokens: texts with an id of their own, independent of their context. Texts are cut at them.
//!
//! Follows `AddedVocabulary::find_matches` of the `tokenizers` library (0.23, `tokenizer/added_vocabulary.rs`): the
//! leftmost longest match is used; a token may include adjacent white space, or match only between words.

use std::collections::HashMap;

use aho_corasick::{AhoCorasick, AhoCorasickBuilder, MatchKind};

/// One added token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AddedToken {
    pub(crate) id: u32,
    pub(crate) content: String,
    /// It includes preceding white space.
    pub(crate) lstrip: bool,
    /// It includes following white space.
    pub(crate) rstrip: bool,
    /// It matches only where no word touches it.
    pub(crate) single_word: bool,
    /// It is matched in the normalized text.
    pub(crate) normalized: bool,
}

/// A set of added tokens, matched in one pass.
pub(super) struct Added {
    finder: Option<AhoCorasick>,
    tokens: Vec<AddedToken>,
}

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// Text to encode, and its start.
    Text(&'a str, usize),
    /// An added token.
    Token(u32),
}

// === impl Added ===

impl Added {
    pub(super) fn new(tokens: Vec<AddedToken>) -> Result<Added, String> {
        // Of two tokens with equal content, the one with the higher id never matches.
        let mut by_content: HashMap<&str, u32> = HashMap::with_capacity(tokens.len());
        for token in &tokens {
            let id = by_content.entry(&token.content).or_insert(token.id);
            *id = token.id.min(*id);
        }
        let tokens: Vec<AddedToken> = tokens
            .iter()
            .filter(|token| !token.content.is_empty() && by_content[token.content.as_str()] == token.id)
            .cloned()
            .collect();
        let finder = if tokens.is_empty() {
            None
        } else {
            let finder = AhoCorasickBuilder::new()
                .match_kind(MatchKind::LeftmostLongest)
                .build(tokens.iter().map(|token| token.content.as_bytes()))
                .map_err(|error| error.to_string())?;
            Some(finder)
        };
        Ok(Added { finder, tokens })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Calls the function for each piece of `text`, in order.
    pub(super) fn split<'a, E>(
        &self,
        text: &'a str,
        mut each: impl FnMut(Piece<'a>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0;
        let matches = self.finder.iter().flat_map(|finder| finder.find_iter(text));
        for found in matches {
            let token = &self.tokens[found.pattern().as_usize()];
            let (mut start, mut end) = (found.start(), found.end());
            if token.single_word && (ends_in_word(&text[..start]) || begins_with_word(&text[end..])) {
                continue;
            }
            if token.lstrip {
                start = text[..start].trim_end().len().max(done);
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            if done < start {
                each(Piece::Text(&text[done..start], done))?;
            }
            each(Piece::Token(token.id))?;
            done = end;
        }
        if done < text.len() {
            each(Piece::Text(&text[done..], done))?;
        }
        Ok(())
    }
}

/// Whether the last character is a word character, which is `\w` in the library.
fn ends_in_word(text: &str) -> bool {
    text.chars().next_back().is_some_and(is_word)
}

fn begins_with_word(text: &str) -> bool {
    text.chars().next().is_some_and(is_word)
}

/// `\w` is letters, marks, decimal digits, connectors and joiners. Letters and digits suffice here: if a single-word
/// token makes the results differ, the load-time probe detects it and texts are not cut.
fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32, content: &str) -> AddedToken {
        AddedToken { id, content: content.into(), ..AddedToken::default() }
    }

    #[track_caller]
    fn check(tokens: Vec<AddedToken>, text: &str, expect: &[Piece<'_>]) {
        let mut pieces = Vec::new();
        let added = Added::new(tokens).expect("tokens");
        let Ok(()) = added.split(text, |piece| {
            pieces.push(piece);
            Ok::<(), std::convert::Infallible>(())
        });
        assert_eq!(pieces, expect);
    }

    #[test]
    fn the_leftmost_longest_token_counts() {
        let tokens = || vec![token(1, "<a>"), token(2, "<a><b>"), token(3, "<c>")];
        check(
            tokens(),
            "x<a><b>y<c>",
            &[Piece::Text("x", 0), Piece::Token(2), Piece::Text("y", 7), Piece::Token(3)],
        );
        check(tokens(), "<a><c>", &[Piece::Token(1), Piece::Token(3)]);
        check(tokens(), "", &[]);
        check(Vec::new(), "plain", &[Piece::Text("plain", 0)]);
    }

    #[test]
    fn white_space_goes_with_a_token_that_strips_it() {
        let left = AddedToken { lstrip: true, ..token(1, "<m>") };
        let right = AddedToken { rstrip: true, ..token(2, "<n>") };
        check(
            vec![left, right],
            "a \n<m> b <n>\t c<n>  ",
            &[
                Piece::Text("a", 0),
                Piece::Token(1),
                Piece::Text(" b ", 6),
                Piece::Token(2),
                Piece::Text("c", 14),
                Piece::Token(2),
            ],
        );
    }

    #[test]
    fn a_token_of_single_words_needs_room() {
        let word = AddedToken { single_word: true, ..token(1, "ab") };
        check(
            vec![word.clone()],
            "xab ab.ab",
            &[Piece::Text("xab ", 0), Piece::Token(1), Piece::Text(".", 6), Piece::Token(1)],
        );
    }
}
