//! Checks at load time whether texts may be cut, with texts that are known to be difficult for tokenizers.
//!
//! White space of every kind at the cut, long runs of digits, composing letters, scripts without spaces, emoji with
//! joiners, code, and added tokens next to each other and to all of these.

use crate::unknown::Unknown;

use super::{AddedToken, Chunks, Encoder};

/// Texts placed between added tokens.
const TEXTS: [&str; 30] = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n ",
    "\t",
    "\r\n",
    "\u{a0}",
    "\u{3000}",
    "a",
    " a",
    "a ",
    "user\n\nHello, world! How's it going? They'll say: we've DONE it.",
    "Grüße aus Köln, naïve façade; Übergröße. e\u{301}a\u{308} ﬁ ½ Ⅻ ² ｱ",
    "Привет, мир! Как дела?  Всё хорошо.",
    "你好，世界。今天天气很好，我们去公园吧！",
    "こんにちは世界。テストです。한국어 문장입니다.",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    "🙂🚀👩‍👩‍👧‍👦🇩🇪 ok 👍🏽!",
    "1234567890 3.14159 1e-9 0xFF 12,345,678.90 2026-11-20T16:37:30Z",
    "fn main() {\n    let x: Vec<u8> = vec![0; 16];\n\tprintln!(\"{x:?}\");\n}\n",
    "def f(a, b=None):\n    return {'a': a, \"b\": [b] * 3}  # ok\n\n\n",
    "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Köln\", \"n\": 3}}\n",
    "<b>&amp;</b> <|not|> </s <s <| |> [INST",
    "https://example.org/a/b?c=d&e=f#g user@example.org C:\\dir\\file.txt",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "00000000000000000000000000000000000000000000000000000000000000000001",
    "----------------------------------------==========================######",
    "                                                \n                       x",
];

/// Chunks so short that these texts are cut many times.
const SHORT: Chunks = Chunks { bytes_min: 3, bytes_max: 40, one_in: 3 };

/// Most added tokens that are tested.
const TOKENS_MAX: usize = 12;

// === impl Encoder ===

impl Encoder {
    /// Compares pieces with the whole, encoded by `library` or, without one, by the backend. The error describes the
    /// difference.
    pub(super) fn probe(
        &mut self,
        library: Option<&tokenizers::Tokenizer>,
        added: &[AddedToken],
    ) -> Result<(), String> {
        if self.positional && self.guard.is_none() {
            return Err(
                "the start of a text is encoded differently, and no special token can replace it".into()
            );
        }
        let chunks = std::mem::replace(&mut self.chunks, SHORT);
        let result = self.compare(library, added);
        self.chunks = chunks;
        // Entries from the probe belong to no prompt.
        self.cache.reset();
        result
    }

    fn compare(&self, library: Option<&tokenizers::Tokenizer>, added: &[AddedToken]) -> Result<(), String> {
        let tokens = tried(added);
        let mut text = String::new();
        self.same(&TEXTS.concat(), library)?;
        self.same(&TEXTS.join(" "), library)?;
        for (at, one) in TEXTS.iter().enumerate() {
            self.same(one, library)?;
            // Every two texts meet at some token, and every token precedes and follows every text.
            for (of, token) in tokens.iter().enumerate() {
                let other = TEXTS[(at * 7 + of) % TEXTS.len()];
                text.clear();
                for part in [one, token.content.as_str(), other, &tokens[(of + 1) % tokens.len()].content] {
                    text.push_str(part);
                }
                self.same(&text, library)?;
            }
        }
        for one in &tokens {
            for two in &tokens {
                self.same(
                    &format!("x{}{} {}\n{}y", one.content, two.content, one.content, two.content),
                    library,
                )?;
            }
        }
        Ok(())
    }

    fn same(&self, text: &str, library: Option<&tokenizers::Tokenizer>) -> Result<(), String> {
        let failed = |error: Unknown| error.to_string();
        let mut pieces = Vec::new();
        self.encode(text, false, 0, &mut pieces).map_err(failed)?;
        let mut whole = Vec::new();
        match (library, &self.backend) {
            (Some(library), _) => {
                whole.extend_from_slice(super::library_ids(library, text).map_err(failed)?.get_ids())
            }
            (None, super::Backend::Library(library)) => {
                whole.extend_from_slice(super::library_ids(library, text).map_err(failed)?.get_ids());
            }
            // With tiktoken ranks there is no other encoder; compares chunks with the whole.
            (None, super::Backend::Own(own)) => self.raw.split(text, |piece| {
                match piece {
                    super::Piece::Token(id) => whole.push(id),
                    super::Piece::Text(text, _) => own.encode(text, &mut whole),
                }
                Ok::<(), String>(())
            })?,
        }
        if pieces == whole {
            return Ok(());
        }
        let at = pieces.iter().zip(&whole).take_while(|(a, b)| a == b).count();
        let shown: String = text.chars().take(60).collect();
        Err(format!("{shown:?} encoded in pieces differs from the whole from token {at} on"))
    }
}

/// Some added tokens of every kind, the first ones first.
fn tried(added: &[AddedToken]) -> Vec<&AddedToken> {
    let kinds: [fn(&AddedToken) -> bool; 5] = [
        |token| token.lstrip,
        |token| token.rstrip,
        |token| token.single_word,
        |token| token.normalized,
        |token| !token.normalized,
    ];
    let mut tried: Vec<&AddedToken> = Vec::new();
    for kind in kinds {
        for token in added.iter().filter(|token| kind(token)).take(TOKENS_MAX / 2) {
            if tried.len() < TOKENS_MAX && !tried.iter().any(|other| other.id == token.id) {
                tried.push(token);
            }
        }
    }
    tried
}
