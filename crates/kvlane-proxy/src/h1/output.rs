//! What is to be sent to a client.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use tokio::io::AsyncWrite as _;

use crate::socket::Socket;

/// Size of the write buffer, and of the largest piece that is copied into it: a larger piece is written directly.
const WRITE_BYTES: usize = 64 << 10;
const COPIED_BYTES_MAX: usize = 2 << 10;

/// The pending output: `flat`, then `large`, then `last`.
#[derive(Default)]
pub(super) struct PendingOutput {
    pub(super) flat: Vec<u8>,
    /// Bytes of `flat` that are written.
    written: usize,
    large: Bytes,
    last: &'static [u8],
    /// The response has ended, or failed with this error.
    pub(super) ended: Option<io::Result<()>>,
}

/// How the end of a response is marked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// By its length, or there is no body.
    Length,
    Chunked,
    /// By closing the connection.
    Close,
}

// === impl PendingOutput ===

impl PendingOutput {
    pub(super) fn is_empty(&self) -> bool {
        self.flat.is_empty() && self.large.is_empty() && self.last.is_empty()
    }

    /// Whether there is room for more of the response.
    pub(super) fn takes_more(&self) -> bool {
        self.ended.is_none() && self.large.is_empty() && self.flat.len() < WRITE_BYTES
    }

    pub(super) fn push(&mut self, data: Bytes, end: End) {
        if data.is_empty() {
            return;
        }
        let after: &[u8] = if end == End::Chunked {
            put_hex(&mut self.flat, data.len());
            self.flat.extend_from_slice(b"\r\n");
            b"\r\n"
        } else {
            b""
        };
        if data.len() <= COPIED_BYTES_MAX {
            put(&mut self.flat, &[&data, after]);
        } else {
            (self.large, self.last) = (data, after);
        }
    }

    pub(super) fn end(&mut self, end: End) {
        if end == End::Chunked {
            self.flat.extend_from_slice(b"0\r\n\r\n");
        }
        self.ended = Some(Ok(()));
    }

    /// Writes part of the output.
    pub(super) fn poll_write(&mut self, socket: &mut Socket, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flat = &self.flat[self.written..];
        let written = if self.large.is_empty() && self.last.is_empty() {
            ready!(Pin::new(socket).poll_write(cx, flat))?
        } else {
            let slices = [IoSlice::new(flat), IoSlice::new(&self.large), IoSlice::new(self.last)];
            ready!(Pin::new(socket).poll_write_vectored(cx, &slices))?
        };
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.wrote(written);
        Poll::Ready(Ok(()))
    }

    fn wrote(&mut self, written: usize) {
        let of_flat = written.min(self.flat.len() - self.written);
        self.written += of_flat;
        if self.written == self.flat.len() {
            self.flat.clear();
            self.written = 0;
        }
        let of_large = (written - of_flat).min(self.large.len());
        self.large.advance(of_large);
        self.last = &self.last[written - of_flat - of_large..];
    }
}

pub(super) fn put(out: &mut Vec<u8>, pieces: &[&[u8]]) {
    pieces.iter().for_each(|piece| out.extend_from_slice(piece));
}

/// A chunk's size. Each event of a stream needs one, and `write!` takes ten times as long.
fn put_hex(out: &mut Vec<u8>, number: usize) {
    let digits = (usize::BITS - number.leading_zeros()).div_ceil(4).max(1);
    out.extend((0..digits).rev().map(|digit| b"0123456789abcdef"[number >> (4 * digit) & 15]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_size_is_written_in_hexadecimal() {
        for number in [0, 1, 9, 10, 15, 16, 255, 256, 4095, 65_536, 0xdead_beef, usize::MAX] {
            let mut out = Vec::new();
            put_hex(&mut out, number);
            assert_eq!(out, format!("{number:x}").into_bytes());
        }
    }

    #[test]
    fn output_written_in_parts_is_complete() {
        let large = Bytes::from(vec![b'x'; COPIED_BYTES_MAX + 1]);
        let mut out = PendingOutput::default();
        out.push(Bytes::from_static(b"small"), End::Chunked);
        out.push(large.clone(), End::Chunked);
        assert!(!out.takes_more(), "a large piece must be written first");
        let (flat, size) = (out.flat.clone(), large.len());
        assert_eq!(flat, format!("5\r\nsmall\r\n{size:x}\r\n").into_bytes());
        assert_eq!((out.large.len(), out.last), (size, &b"\r\n"[..]));
        for of in [1, flat.len() - 1, 7, size - 7, 1, 1] {
            out.wrote(of);
        }
        assert!(out.is_empty() && out.takes_more());
        out.end(End::Chunked);
        assert!(out.flat == b"0\r\n\r\n" && !out.takes_more());
    }
}
