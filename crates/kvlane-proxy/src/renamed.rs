//! An answer whose `model` is given the name that the client used.

use std::io;
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use http_body::{Body, Frame};
use memchr::memchr_iter;
use memchr::memmem::Finder;

use crate::alias::Alias;

/// What precedes the name.
const MEMBER: &[u8] = b"\"model\":";

/// A body in which one name is replaced. Within the strings of JSON quotes are escaped, so what is found is a member.
pub(super) struct Renamed<B> {
    inner: B,
    /// The name as JSON, and what replaces it.
    from: Bytes,
    to: Bytes,
    /// The end of the last piece, which may be the beginning of the member.
    held: Bytes,
}

/// Whether an answer of this kind names its model.
pub(super) fn names_model(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.starts_with("application/json") || kind.starts_with("text/event-stream")
}

// === impl Renamed ===

impl<B> Renamed<B> {
    pub(super) fn new(inner: B, alias: &Alias) -> Self {
        let quoted = |name: &str| serde_json::Value::from(name).to_string().into();
        Self { inner, from: quoted(&alias.model), to: quoted(&alias.asked), held: Bytes::new() }
    }

    /// The next bytes of the body after this piece of the engine's.
    fn rename(&mut self, piece: Bytes) -> Bytes {
        let piece = match self.held.is_empty() {
            true => piece,
            false => [std::mem::take(&mut self.held), piece].concat().into(),
        };
        let mut piece = self.replaced(piece);
        self.held = piece.split_off(piece.len() - self.begun(&piece));
        piece
    }

    /// A piece in which each occurrence is replaced.
    fn replaced(&self, piece: Bytes) -> Bytes {
        static FINDER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(MEMBER));
        let (mut out, mut kept) = (BytesMut::new(), 0);
        for at in FINDER.find_iter(&piece) {
            let value = value_of(&piece[at..]);
            if !value.starts_with(&self.from) {
                continue;
            }
            let start = piece.len() - value.len();
            if out.is_empty() {
                out.reserve(piece.len() + self.to.len());
            }
            out.extend_from_slice(&piece[kept..start]);
            out.extend_from_slice(&self.to);
            kept = start + self.from.len();
        }
        if kept == 0 {
            return piece;
        }
        out.extend_from_slice(&piece[kept..]);
        out.freeze()
    }

    /// Length of the piece's end that may be the beginning of the member.
    fn begun(&self, piece: &[u8]) -> usize {
        // Events end with a line, and the member has none.
        if piece.last() == Some(&b'\n') {
            return 0;
        }
        let longest = MEMBER.len() + b" ".len() + self.from.len() - 1;
        let end = &piece[piece.len() - longest.min(piece.len())..];
        let begins = |at: &usize| {
            let end = &end[*at..];
            let value = value_of(end);
            if end.len() <= MEMBER.len() {
                MEMBER.starts_with(end)
            } else {
                end.starts_with(MEMBER) && self.from.starts_with(value)
            }
        };
        memchr_iter(b'"', end).find(begins).map_or(0, |at| end.len() - at)
    }
}

/// What follows a member's name, and the space that may be before it.
fn value_of(member: &[u8]) -> &[u8] {
    let value = member.get(MEMBER.len()..).unwrap_or_default();
    value.strip_prefix(b" ").unwrap_or(value)
}

impl<B: Body<Data = Bytes, Error = io::Error> + Unpin> Body for Renamed<B> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            let frame = match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None if self.held.is_empty() => return Poll::Ready(None),
                None => return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.held))))),
            };
            match frame.into_data() {
                Ok(data) => {
                    let data = self.rename(data);
                    if !data.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                }
                Err(other) => return Poll::Ready(Some(Ok(other))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn renamed(pieces: &[&[u8]]) -> Vec<u8> {
        let alias = Alias::new("gpt", "m/1".into(), None, None);
        let mut renamed = Renamed::new((), &alias);
        let mut out = Vec::new();
        for piece in pieces {
            out.extend_from_slice(&renamed.rename(Bytes::copy_from_slice(piece)));
        }
        out.extend_from_slice(&renamed.held);
        out
    }

    proptest! {
        #[test]
        fn however_an_answer_is_cut_the_member_and_nothing_else_is_renamed(cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6)) {
            let answer = br#"{"id":"m/1","model":"m/1","x":{"model": "m/1"},"t":"\"model\":\"m/1\"","model":"m/11"}"#;
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(answer.len())).collect();
            at.extend([0, answer.len()]);
            at.sort_unstable();
            let pieces: Vec<&[u8]> = at.windows(2).map(|ends| &answer[ends[0]..ends[1]]).collect();
            let expected = br#"{"id":"m/1","model":"gpt","x":{"model": "gpt"},"t":"\"model\":\"m/1\"","model":"m/11"}"#;
            prop_assert_eq!(String::from_utf8(renamed(&pieces)).expect("text"), str::from_utf8(expected).expect("text"));
        }
    }
}
