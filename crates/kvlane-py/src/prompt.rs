//! Prompts of Python's callers: token ids, texts or block hashes become a chain of block hashes.

use kvlane_core::block::{BYTES_PER_TOKEN, BlockHash, ChainSeed};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyMemoryView, PyTuple};

/// The longest prompt, in tokens.
const TOKENS_MAX: usize = 1 << 30;

/// Bytes of a token id.
const ID_BYTES: usize = size_of::<u32>();

/// The content of a prompt.
pub(crate) enum Prompt<'py> {
    /// Token ids.
    Tokens(Bound<'py, PyAny>),
    /// A text, which counts as one token for every four bytes.
    Text(String),
    /// Hashes of blocks, each of which covers the blocks before it, and the number of tokens.
    Blocks(Vec<u64>, Option<u32>),
}

// === impl Prompt ===

impl<'py> Prompt<'py> {
    /// The one of them that is given.
    pub(crate) fn of(
        tokens: Option<Bound<'py, PyAny>>,
        text: Option<String>,
        block_hashes: Option<Vec<u64>>,
        prompt_tokens: Option<u32>,
    ) -> PyResult<Self> {
        let only_blocks = "prompt_tokens is for block_hashes; tokens and text are counted";
        match (tokens, text, block_hashes) {
            (None, None, Some(hashes)) => Ok(Self::Blocks(hashes, prompt_tokens)),
            (Some(_), None, None) | (None, Some(_), None) if prompt_tokens.is_some() => {
                Err(PyTypeError::new_err(only_blocks))
            }
            (Some(tokens), None, None) => Ok(Self::Tokens(tokens)),
            (None, Some(text), None) => Ok(Self::Text(text)),
            _ => Err(PyTypeError::new_err("arrive() needs exactly one of tokens, text and block_hashes")),
        }
    }

    /// Replaces `chain` by the hashes of its full blocks and returns the number of its tokens.
    pub(crate) fn hash(
        &self,
        seed: ChainSeed,
        block_tokens: u32,
        chain: &mut Vec<BlockHash>,
    ) -> PyResult<u32> {
        chain.clear();
        let block_bytes = block_tokens as usize * ID_BYTES;
        match self {
            Self::Blocks(hashes, told) => {
                let tokens = told.map_or(hashes.len() * block_tokens as usize, |tokens| tokens as usize);
                if hashes.len() * (block_tokens as usize) > tokens {
                    let blocks = hashes.len();
                    return Err(PyValueError::new_err(format!(
                        "{blocks} blocks of {block_tokens} tokens are more than prompt_tokens={tokens}"
                    )));
                }
                chain.extend(hashes.iter().copied().map(BlockHash));
                counted(tokens)
            }
            Self::Text(text) => {
                let tokens = counted(text.len().div_ceil(BYTES_PER_TOKEN))?;
                seed.chain(text.as_bytes(), block_tokens as usize * BYTES_PER_TOKEN, chain);
                Ok(tokens)
            }
            Self::Tokens(tokens) => match tokens.cast::<PyBytes>() {
                Ok(bytes) => {
                    let bytes = bytes.as_bytes();
                    if bytes.len() % ID_BYTES != 0 {
                        let len = bytes.len();
                        return Err(PyValueError::new_err(format!(
                            "tokens: {len} bytes are not whole ids of {ID_BYTES} bytes (little-endian)"
                        )));
                    }
                    let tokens = counted(bytes.len() / ID_BYTES)?;
                    seed.chain(bytes, block_bytes, chain);
                    Ok(tokens)
                }
                Err(_) => {
                    let ids = ids(tokens)?;
                    seed.chain_tokens(&ids, block_tokens as usize, chain);
                    counted(ids.len())
                }
            },
        }
    }
}

/// Token ids of a list, a tuple, an array (`array`, NumPy: anything with a buffer of integers), or bytes.
pub(crate) fn ids(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let id = |(at, item): (usize, Bound<'_, PyAny>)| {
        item.extract::<u32>().map_err(|_| {
            let item = item.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
            PyValueError::new_err(format!("tokens[{at}] is {item}, not an integer from 0 to {}", u32::MAX))
        })
    };
    if let Ok(list) = tokens.cast::<PyList>() {
        return list.iter().enumerate().map(id).collect();
    }
    if let Ok(tuple) = tokens.cast::<PyTuple>() {
        return tuple.iter().enumerate().map(id).collect();
    }
    if let Ok(view) = PyMemoryView::from(tokens) {
        return from_buffer(view.as_any());
    }
    match tokens.try_iter() {
        Ok(items) => items.enumerate().map(|(at, item)| id((at, item?))).collect(),
        Err(_) => {
            let kind = tokens.get_type().name()?;
            Err(PyTypeError::new_err(format!(
                "tokens must be a sequence of integers or an array, not {kind}"
            )))
        }
    }
}

/// The integers of a buffer. Its copy costs less than reading them one by one through Python.
fn from_buffer(view: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let format: String = view.getattr("format")?.extract()?;
    let dimensions: usize = view.getattr("ndim")?.extract()?;
    let width: usize = view.getattr("itemsize")?.extract()?;
    let kind = format.trim_start_matches(['@', '=', '<']);
    let wrong = || {
        let text = format!(
            "tokens must be a one-dimensional array of integers, not one of format {format:?} with {dimensions} dimensions"
        );
        PyTypeError::new_err(text)
    };
    if dimensions != 1 || !["B", "b", "H", "h", "I", "i", "L", "l", "Q", "q"].contains(&kind) {
        return Err(wrong());
    }
    let is_signed = kind.chars().all(char::is_lowercase);
    let copy = view.call_method0("tobytes")?;
    let bytes = copy.cast::<PyBytes>()?.as_bytes();
    if (width, is_signed) == (ID_BYTES, false) {
        return Ok(bytes.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect());
    }
    let value = |bytes: &[u8]| -> Option<i128> {
        Some(match (bytes.len(), is_signed) {
            (1, false) => bytes[0].into(),
            (1, true) => (bytes[0] as i8).into(),
            (2, false) => u16::from_ne_bytes(bytes.try_into().ok()?).into(),
            (2, true) => i16::from_ne_bytes(bytes.try_into().ok()?).into(),
            (4, _) => i32::from_ne_bytes(bytes.try_into().ok()?).into(),
            (8, false) => u64::from_ne_bytes(bytes.try_into().ok()?).into(),
            (8, true) => i64::from_ne_bytes(bytes.try_into().ok()?).into(),
            _ => return None,
        })
    };
    let id = |(at, bytes): (usize, &[u8])| {
        let value = value(bytes).ok_or_else(wrong)?;
        u32::try_from(value).map_err(|_| {
            PyValueError::new_err(format!("tokens[{at}] is {value}, not an integer from 0 to {}", u32::MAX))
        })
    };
    bytes.chunks_exact(width.max(1)).enumerate().map(id).collect()
}

/// The number of a prompt's tokens.
fn counted(tokens: usize) -> PyResult<u32> {
    match u32::try_from(tokens) {
        Ok(count) if tokens <= TOKENS_MAX => Ok(count),
        _ => Err(PyValueError::new_err(format!("a prompt of {tokens} tokens: the maximum is {TOKENS_MAX}"))),
    }
}
