//! An answer whose `model` is given the name that the client used.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use http_body::{Body, Frame};
use memchr::memmem::Finder;

use crate::alias::Alias;

/// A body in which one name is replaced. Within the strings of JSON quotes are escaped, so what is found is a member.
pub(super) struct Renamed<B> {
    inner: B,
    /// Both ways to write the member, and what replaces each.
    members: [(Finder<'static>, Bytes); 2],
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
        let quoted = |name: &str| serde_json::Value::from(name).to_string();
        let (from, to) = (quoted(&alias.model), quoted(&alias.asked));
        let member = |space: &str| {
            let found = Finder::new(format!("\"model\":{space}{from}").as_bytes()).into_owned();
            (found, Bytes::from(format!("\"model\":{space}{to}")))
        };
        Self { inner, members: [member(""), member(" ")], held: Bytes::new() }
    }

    /// The next bytes of the body after this piece of the engine's.
    fn rename(&mut self, piece: Bytes) -> Bytes {
        let mut piece = match self.held.is_empty() {
            true => piece,
            false => [std::mem::take(&mut self.held), piece].concat().into(),
        };
        for (finder, to) in &self.members {
            piece = replaced(piece, finder, to);
        }
        let begun = |finder: &Finder<'_>| {
            let member = finder.needle();
            (1..member.len().min(piece.len() + 1)).rev().find(|&length| piece.ends_with(&member[..length]))
        };
        let begun = self.members.iter().filter_map(|(finder, _)| begun(finder)).max().unwrap_or(0);
        self.held = piece.split_off(piece.len() - begun);
        piece
    }
}

/// A piece in which each occurrence is replaced.
fn replaced(piece: Bytes, finder: &Finder<'_>, to: &[u8]) -> Bytes {
    let mut found = finder.find_iter(&piece).peekable();
    if found.peek().is_none() {
        drop(found);
        return piece;
    }
    let (mut out, mut from) = (BytesMut::with_capacity(piece.len() + to.len()), 0);
    for at in found {
        out.extend_from_slice(&piece[from..at]);
        out.extend_from_slice(to);
        from = at + finder.needle().len();
    }
    out.extend_from_slice(&piece[from..]);
    out.freeze()
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
        let alias = Alias::new("gpt", "m/1".into(), None);
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
