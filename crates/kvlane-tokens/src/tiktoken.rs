//! tiktoken's rank files: a base64 token and its rank per line (tiktoken 0.14, `tiktoken/load.py`).
//!
//! A file contains neither the split pattern nor the special tokens. The latter are in `tokenizer_config.json`; the
//! pattern is part of each model's code, and is selected here by the file's or the tokenizer's name.

use std::path::Path;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::Value;

/// tiktoken's `cl100k_base` (tiktoken 0.14, `tiktoken_ext/openai_public.py`).
const CL100K: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s";

/// tiktoken's `o200k_base` and `o200k_harmony` (as above).
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen's first tokenizer (`QWenTokenizer`, `PAT_STR` of its `tokenization_qwen.py`).
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Kimi's tokenizer (`TikTokenTokenizer`, `pat_str` of its `tokenization_kimi.py`).
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Split patterns by tokenizer class or file name.
const PATTERNS: [(&str, &str); 5] = [
    ("QWenTokenizer", QWEN),
    ("TikTokenTokenizer", KIMI),
    ("cl100k_base.tiktoken", CL100K),
    ("o200k_base.tiktoken", O200K),
    ("o200k_harmony.tiktoken", O200K),
];

/// The tokens in a file and their ranks.
pub(crate) fn ranks(text: &str) -> Result<Vec<(Vec<u8>, u32)>, String> {
    let mut ranks = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let bad = || format!("line {}: not a base64 token and its rank; is it a tiktoken file?", at + 1);
        let (token, rank) = line.split_once(' ').ok_or_else(bad)?;
        let token = BASE64_STANDARD.decode(token).map_err(|_| bad())?;
        let rank: u32 = rank.trim_end().parse().map_err(|_| bad())?;
        // Kimi's file ends in tokens without bytes.
        if !token.is_empty() {
            ranks.push((token, rank));
        }
    }
    if ranks.is_empty() {
        return Err("no tokens; is it a tiktoken file?".into());
    }
    Ok(ranks)
}

/// The split pattern: `pat_str` of the configuration, otherwise by name.
pub(crate) fn pattern<'a>(path: &Path, config: &'a Value) -> Result<&'a str, String> {
    if let Some(pattern) = config["pat_str"].as_str() {
        return Ok(pattern);
    }
    let class = config["tokenizer_class"].as_str().unwrap_or_default();
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    PATTERNS.iter().find(|(name, _)| *name == class || *name == file).map(|(_, pattern)| *pattern).ok_or_else(
        || {
            format!(
                "the split pattern of its tokenizer class {class:?} is unknown; set it as \"pat_str\" in \
             tokenizer_config.json beside it, or use the model's tokenizer.json"
            )
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_tokens_and_ranks() {
        assert_eq!(
            ranks("IQ== 0\nIiM= 1\n\naGVsbG8= 2\n"),
            Ok(vec![(b"!".to_vec(), 0), (b"\"#".to_vec(), 1), (b"hello".to_vec(), 2)])
        );
        assert_eq!(ranks("IQ== 0\n 1\n"), Ok(vec![(b"!".to_vec(), 0)]), "a token of no bytes");
        for bad in ["", " 0", "IQ==", "I 0", "IQ 0", "IR== 0", "I-_= 0", "IQ== x", "IQ=! 1", "==== 1"] {
            assert!(ranks(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_pattern_is_known_by_name_or_given() {
        let config = serde_json::json!({"tokenizer_class": "QWenTokenizer"});
        assert_eq!(pattern(Path::new("qwen.tiktoken"), &config), Ok(QWEN));
        assert_eq!(pattern(Path::new("a/o200k_base.tiktoken"), &Value::Null), Ok(O200K));
        let config = serde_json::json!({"pat_str": "x"});
        assert_eq!(pattern(Path::new("tiktoken.model"), &config), Ok("x"));
        assert!(pattern(Path::new("tiktoken.model"), &Value::Null).is_err());
    }
}
