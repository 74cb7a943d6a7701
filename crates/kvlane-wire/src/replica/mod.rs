//! What replicas of the gateway send each other: messages in [`grpc`](crate::grpc) frames.
//!
//! A stream begins with a [`Hello`]; [`News`] follows. Endpoints have other ids in each process, so they go by their
//! names. A name is written once for each stream, and then by its place in the list of names written so far.
//!
//! ```text
//! Frame  { Hello hello = 1; News news = 2; Limit limit = 3; }
//! Hello  { version = 1; readable_from = 2; fixed64 replica = 3; string cluster = 4; age_ms = 5; }
//! News   { string pool = 1; number = 2; bool names_anew = 3; repeated string names = 4; repeated Share shares = 5;
//!          block_tokens = 6; repeated Prompt prompts = 7; repeated Service services = 8;
//!          repeated Learned learned = 9; repeated Turn turns = 10; }
//! Share  { endpoint = 1; requests = 2; prefilling = 3; moving = 4; prefill_tokens = 5; prefill_pairs = 6;
//!          context_tokens = 7; double placed_s = 8; breaker_changes = 9; lower_tokens = 10; }
//! Prompt { endpoint = 1; repeated fixed64 marks = 2; }
//! Service { sint priority = 1; lane = 2; fixed64 tenant = 3; since = 4; sint tokens = 5; }
//! Turn   { endpoint = 1; fixed64 session = 2; fixed64 stamp = 3; prompt_tokens = 4; }
//! Learned { of = 1; endpoint = 2; kind = 3; double value = 4; observations = 5; }
//! Limit  { string key = 1; string model = 2; number = 3; repeated Usage usages = 4; }
//! Usage  { fixed64 key = 1; requests_ns = 2; tokens_ns = 3; requests_owed_ns = 4; tokens_owed_ns = 5; asked = 6;
//!          in_flight = 7; age_ns = 8; }
//! ```
//!
//! `Learned.of` is 0 for seconds of a prefill, 1 for those of a decode step, 2 for tokens of an answer. Its `endpoint` is a
//! place in the list of names, and its `kind` one of answers, each plus 1; 0 stands for the whole pool.
//! Numbers are `uint64`, or `sint64` (zigzag), those that are 0 are left out, and names are written before they are used. A reader skips
//! fields and frames that it does not know, so that a later version may add some. Everything else that it cannot read is
//! an error, which ends the stream. No frame makes a reader keep more than a small multiple of [`FRAME_BYTES_MAX`].

mod decode;
mod encode;
mod frame;
#[cfg(test)]
mod tests;

pub use self::decode::{DecodeError, Decoder};
pub use self::encode::{Encoder, hello, limit};
pub use self::frame::{FRAME_BYTES_MAX, Frame, Hello, Learned, NAME_BYTES_MAX, NAMES_MAX, News, VERSION};
