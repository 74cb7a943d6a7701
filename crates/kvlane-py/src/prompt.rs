//! Prompts of Python's callers: token ids, texts or block hashes become a chain of block hashes.

use kvlane_core::block::{BYTES_PER_TOKEN, BlockHash, ChainSeed};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PyListMethods, PyMemoryView, PyTuple};

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
            Self::Tokens(tokens) => {
                let ids = Ids::of(tokens)?;
                let count = counted(ids.count()?)?;
                match &ids {
                    Ids::Packed(bytes) => seed.chain(bytes.as_bytes(), block_bytes, chain),
                    Ids::Numbers(numbers) => seed.chain_tokens(numbers, block_tokens as usize, chain),
                }
                Ok(count)
            }
        }
    }
}

/// Token ids, as cheap to read as their object allows.
enum Ids<'py> {
    /// Little-endian integers of 32 bits.
    Packed(Bound<'py, PyBytes>),
    /// Numbers.
    Numbers(Vec<u32>),
}

// === impl Ids ===

impl<'py> Ids<'py> {
    /// Of bytes, a list, a tuple, an array (`array`, NumPy: anything with a buffer of integers), or anything that can be iterated.
    fn of(tokens: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = tokens.cast::<PyBytes>() {
            return Ok(Self::Packed(bytes.clone()));
        }
        let items = match tokens.cast::<PyTuple>() {
            Ok(tuple) => Some(tuple.clone()),
            Err(_) => tokens.cast::<PyList>().ok().map(PyListMethods::to_tuple),
        };
        match items {
            Some(items) => match packed(&items) {
                Some(bytes) => Ok(Self::native(bytes)),
                None => numbers(items.iter().map(Ok)).map(Self::Numbers),
            },
            None => Ok(Self::Numbers(ids(tokens)?)),
        }
    }

    /// Of integers of 32 bits in this machine's order.
    fn native(bytes: Bound<'py, PyBytes>) -> Self {
        match cfg!(target_endian = "little") {
            true => Self::Packed(bytes),
            false => Self::Numbers(words(bytes.as_bytes())),
        }
    }

    /// Their number.
    fn count(&self) -> PyResult<usize> {
        match self {
            Self::Packed(bytes) => {
                let len = bytes.as_bytes().len();
                if !len.is_multiple_of(ID_BYTES) {
                    return Err(PyValueError::new_err(format!(
                        "tokens: {len} bytes are not whole ids of {ID_BYTES} bytes (little-endian)"
                    )));
                }
                Ok(len / ID_BYTES)
            }
            Self::Numbers(numbers) => Ok(numbers.len()),
        }
    }
}

/// The items as native integers of 32 bits; `None` if one of them is none. Python packs them in half the time that reading them from
/// here takes: its stable interface has a call for each item and each number.
fn packed<'py>(items: &Bound<'py, PyTuple>) -> Option<Bound<'py, PyBytes>> {
    static STRUCT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = items.py();
    let packer = STRUCT.import(py, "struct", "Struct").ok()?.call1((format!("{}I", items.len()),)).ok()?;
    packer.call_method1(intern!(py, "pack"), items.clone()).ok()?.cast_into().ok()
}

/// The items as numbers.
fn numbers<'py>(items: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>) -> PyResult<Vec<u32>> {
    let id = |(at, item): (usize, PyResult<Bound<'py, PyAny>>)| {
        let item = item?;
        item.extract::<u32>().map_err(|_| {
            let item = item.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
            PyValueError::new_err(format!("tokens[{at}] is {item}, not an integer from 0 to {}", u32::MAX))
        })
    };
    items.enumerate().map(id).collect()
}

/// Token ids of a list, a tuple, an array (`array`, NumPy: anything with a buffer of integers), or bytes.
pub(crate) fn ids(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(list) = tokens.cast::<PyList>() {
        return numbers(list.iter().map(Ok));
    }
    if let Ok(tuple) = tokens.cast::<PyTuple>() {
        return numbers(tuple.iter().map(Ok));
    }
    if let Ok(view) = PyMemoryView::from(tokens) {
        return from_buffer(view.as_any());
    }
    match tokens.try_iter() {
        Ok(items) => numbers(items),
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
    let py = view.py();
    let format: String = view.getattr(intern!(py, "format"))?.extract()?;
    let dimensions: usize = view.getattr(intern!(py, "ndim"))?.extract()?;
    let width: usize = view.getattr(intern!(py, "itemsize"))?.extract()?;
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
    let copy = view.call_method0(intern!(py, "tobytes"))?;
    let bytes = copy.cast::<PyBytes>()?.as_bytes();
    if let Some(ids) = narrowed(bytes, width, is_signed) {
        return Ok(ids);
    }
    // One is out of range, or they are of one or two bytes.
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

/// Integers of 32 or 64 bits as token ids; `None` if one is out of range, or for other widths. Two loops without a branch inside, so that
/// several integers are read at once: a negative one has its highest bit set.
fn narrowed(bytes: &[u8], width: usize, is_signed: bool) -> Option<Vec<u32>> {
    match (width, is_signed) {
        (ID_BYTES, false) => Some(words(bytes)),
        (ID_BYTES, true) => {
            let ids = words(bytes);
            (ids.iter().fold(0, |bits, id| bits | id) <= i32::MAX as u32).then_some(ids)
        }
        (8, _) => {
            let values = bytes.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes));
            let bits = values.clone().fold(0, |bits, value| bits | value);
            (bits <= u64::from(u32::MAX)).then(|| values.map(|value| value as u32).collect())
        }
        _ => None,
    }
}

/// Native integers of 32 bits.
fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect()
}

/// The number of a prompt's tokens.
fn counted(tokens: usize) -> PyResult<u32> {
    match u32::try_from(tokens) {
        Ok(count) if tokens <= TOKENS_MAX => Ok(count),
        _ => Err(PyValueError::new_err(format!("a prompt of {tokens} tokens: the maximum is {TOKENS_MAX}"))),
    }
}
