//! Token usage reported by an answer, in the format of each API.
//!
//! OpenAI (vLLM, SGLang): `usage.prompt_tokens`, `completion_tokens`, `prompt_tokens_details.cached_tokens`; its
//! responses have `input_tokens`, `output_tokens`, `input_tokens_details`. Anthropic counts cached tokens separately
//! from `input_tokens`, as `cache_read_input_tokens` and `cache_creation_input_tokens`, so its prompt is their sum.
//! Engines may have another object with counts, see [`engine`](crate::engine).

use std::sync::LazyLock;

use memchr::memmem::Finder;

use crate::engine::{ComputedNames, ENGINES, UsageObject};
use crate::json::{JsonError, Kind, Scanner};

/// Bytes of a usage object that are read; typical ones have about two hundred.
const OBJECT_BYTES_MAX: usize = 4 << 10;

/// Token usage of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Output tokens.
    pub completion_tokens: u32,
    /// Prompt tokens served from the prefix cache, if reported.
    pub cached_tokens: Option<u32>,
}

/// The usage in a JSON answer, searched in `bytes`: the whole answer or its tail. If there are several, the last
/// counts.
pub fn usage_in_json(bytes: &[u8]) -> Option<Usage> {
    let mut counts = Counts::default();
    counts.read_answer(bytes);
    counts.usage()
}

/// Counts as reported, possibly over several events of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    prompt: Option<u32>,
    input: Option<u32>,
    output: Option<u32>,
    cached: Option<u32>,
    cache_read: Option<u32>,
    cache_creation: Option<u32>,
    // Under the engine's own names.
    own_computed: Option<u32>,
    own_output: Option<u32>,
    own_cached: Option<u32>,
}

impl Counts {
    /// Reads the counts in `bytes`, which may be the tail of an answer.
    pub(crate) fn read_answer(&mut self, bytes: &[u8]) {
        let found = self.read_objects(bytes, &USAGE, None);
        // Other reports are the last member of an answer; this check saves their searches in other chunks.
        if bytes.trim_ascii_end().ends_with(b"}}") || bytes.trim_ascii_end().ends_with(b"}}]") {
            for (key, object) in OBJECTS.iter().filter(|(_, object)| object.adds || !found) {
                self.read_objects(bytes, key, object.names.as_ref());
            }
        }
    }

    /// The combined usage, once prompt or output tokens were counted.
    pub(crate) fn usage(&self) -> Option<Usage> {
        let cached = self.cached.or(self.cache_read).or(self.own_cached);
        let apart = |input: u32| {
            let cached = self.cache_read.unwrap_or(0).saturating_add(self.cache_creation.unwrap_or(0));
            input.saturating_add(cached)
        };
        let with_cached = |computed: u32| computed.saturating_add(self.own_cached.unwrap_or(0));
        let prompt = self.prompt.or(self.input.map(apart)).or(self.own_computed.map(with_cached));
        let output = self.output.or(self.own_output);
        (prompt.is_some() || output.is_some()).then(|| Usage {
            prompt_tokens: prompt.unwrap_or(0),
            completion_tokens: output.unwrap_or(0),
            cached_tokens: cached,
        })
    }

    /// Reads every object under this key; returns whether there was one.
    fn read_objects(&mut self, bytes: &[u8], key: &Finder<'_>, names: Option<&ComputedNames>) -> bool {
        let (mut found, mut rest) = (false, bytes);
        // Usually there is none, which costs one search.
        while let Some(at) = key.find(rest) {
            rest = &rest[at + key.needle().len()..];
            let Some(value) = rest.trim_ascii_start().strip_prefix(b":") else { continue };
            let value = value.trim_ascii_start();
            if value.first() == Some(&b'{') {
                let mut counts = *self;
                if counts.read_object(&mut Scanner::new(text(value)), names).is_ok() {
                    *self = counts;
                    found = true;
                }
            }
        }
        found
    }

    fn read_object(
        &mut self,
        scanner: &mut Scanner<'_>,
        names: Option<&ComputedNames>,
    ) -> Result<(), JsonError> {
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let kind = scanner.peek()?;
            let count = match &*key.decode() {
                "prompt_tokens" => &mut self.prompt,
                "input_tokens" => &mut self.input,
                "completion_tokens" | "output_tokens" => &mut self.output,
                "cached_tokens" => &mut self.cached,
                "cache_read_input_tokens" => &mut self.cache_read,
                "cache_creation_input_tokens" => &mut self.cache_creation,
                "prompt_tokens_details" | "input_tokens_details" if kind == Kind::Object => {
                    self.read_details(scanner)?;
                    continue;
                }
                own => match names {
                    Some(names) if own == names.computed => &mut self.own_computed,
                    Some(names) if own == names.cached => &mut self.own_cached,
                    Some(names) if own == names.output => &mut self.own_output,
                    _ => {
                        scanner.skip()?;
                        continue;
                    }
                },
            };
            if kind == Kind::Number {
                *count = scanner.whole()?.or(*count);
            } else {
                scanner.skip()?;
            }
        }
        Ok(())
    }

    fn read_details(&mut self, scanner: &mut Scanner<'_>) -> Result<(), JsonError> {
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            if key.decode() == "cached_tokens" && scanner.peek()? == Kind::Number {
                self.cached = scanner.whole()?.or(self.cached);
            } else {
                scanner.skip()?;
            }
        }
        Ok(())
    }
}

/// The valid UTF-8 text at the start of `bytes`.
fn text(bytes: &[u8]) -> &str {
    let bytes = &bytes[..bytes.len().min(OBJECT_BYTES_MAX)];
    let valid = std::str::from_utf8(bytes).map_or_else(|error| error.valid_up_to(), str::len);
    std::str::from_utf8(&bytes[..valid]).unwrap_or_default()
}

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static OBJECTS: LazyLock<Vec<(Finder<'static>, &'static UsageObject)>> = LazyLock::new(|| {
    let objects = ENGINES.iter().filter_map(|engine| engine.usage.as_ref());
    objects.map(|object| (Finder::new(object.key), object)).collect()
});

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(answer: &str, prompt_tokens: u32, completion_tokens: u32, cached_tokens: Option<u32>) {
        let expected = Some(Usage { prompt_tokens, completion_tokens, cached_tokens });
        assert_eq!(usage_in_json(answer.as_bytes()), expected, "{answer}");
    }

    #[test]
    fn each_api_tells_its_usage_in_its_own_words() {
        check(r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}"#, 9, 2, None);
        check(
            r#"{"usage": {"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":8}}, "id":1}"#,
            9,
            2,
            Some(8),
        );
        check(
            r#"{"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":null}}"#,
            9,
            2,
            None,
        );
        check(
            r#"{"usage":{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":8}}}"#,
            9,
            2,
            Some(8),
        );
        check(r#"{"usage":{"input_tokens":1,"output_tokens":2,"cache_read_input_tokens":8}}"#, 9, 2, Some(8));
        check(
            r#"{"usage":{"prompt_tokens":9,"completion_tokens":2},"timings":{"cache_n":8,"prompt_n":1}}"#,
            9,
            2,
            Some(8),
        );
        check(r#"{"content":"x","timings":{"cache_n":8,"prompt_n":1,"predicted_n":2}}"#, 9, 2, Some(8));
        check(
            r#"[{"text":"x","meta_info":{"prompt_tokens":9,"completion_tokens":2,"cached_tokens":8}}]"#,
            9,
            2,
            Some(8),
        );
        check(r#"{"object":"list","usage":{"prompt_tokens":9,"total_tokens":9}}"#, 9, 0, None);
    }

    #[test]
    fn the_tail_of_an_answer_is_enough_and_the_last_usage_counts() {
        check(
            r#"\"usage\": {\"x\"..."}],"usage":{"prompt_tokens":1},"usage":{"prompt_tokens":2}}"#,
            2,
            0,
            None,
        );
    }

    #[test]
    fn words_in_the_answers_text_are_no_usage() {
        for answer in [
            "",
            r#"{"usage":null}"#,
            r#"{"usage":{"prompt_tokens":"#,
            r#"{"usage":{"prompt_tokens":-1}}"#,
            r#"{"content":"\"usage\":{\"prompt_tokens\":1}"}"#,
            r#"{"content":"usage"}"#,
        ] {
            assert_eq!(usage_in_json(answer.as_bytes()), None, "{answer}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_searched_without_a_panic(before: Vec<u8>, after: Vec<u8>, prompt: u32) {
            let object = format!("\"usage\":{{\"prompt_tokens\":{prompt}}}");
            let answer = [&before[..], object.as_bytes(), &after[..]].concat();
            prop_assert_eq!(usage_in_json(&answer).map(|usage| usage.prompt_tokens), Some(prompt));
        }
    }
}
