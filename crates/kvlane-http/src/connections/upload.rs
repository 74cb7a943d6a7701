//! A request body that is sent while it arrives, piece by piece, within a fixed number of bytes.

use std::future::pending;
use std::io;

use bytes::Bytes;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::write::write_all;

/// Most bytes of a piece, by the rules of the one who feeds.
pub const PIECE_BYTES: usize = 64 << 10;
/// Pieces that wait to be sent.
const PIECES_MAX: usize = 2;
/// Most bytes between the two ends: pieces that wait, one that is being read and one that is being sent.
pub const BYTES_MAX: usize = (PIECES_MAX + 2) * PIECE_BYTES;

/// A body of which the first bytes are held, and the others come through a pipe.
pub struct Upload {
    first: Bytes,
    /// Its whole length; none if it is sent in chunks.
    length: Option<u64>,
    rest: mpsc::Receiver<Option<Bytes>>,
    /// Whether anything was taken out of the pipe.
    taken: bool,
}

/// The end of the pipe where pieces are put in.
pub struct Feed(mpsc::Sender<Option<Bytes>>);

/// The other side takes no more.
#[derive(Debug, PartialEq, Eq)]
pub struct Unwanted;

// === impl Upload ===

impl Upload {
    /// A body that begins with `first`, and has this length if it is known.
    pub fn new(first: Bytes, length: Option<u64>) -> (Self, Feed) {
        let (feed, rest) = mpsc::channel(PIECES_MAX);
        (Self { first, length, rest, taken: false }, Feed(feed))
    }

    /// Begins with other bytes from now on.
    pub fn begin_with(&mut self, first: Bytes) {
        let (before, now) = (self.first.len() as u64, first.len() as u64);
        self.length = self.length.map(|length| length - before + now);
        self.first = first;
    }

    /// Its whole length; none if it is sent in chunks.
    pub fn length(&self) -> Option<u64> {
        self.length
    }

    /// Whether it can be sent from the start, even if its first bytes were sent before.
    pub fn is_whole(&self) -> bool {
        !self.taken
    }

    /// The next piece; none at the end. A pipe whose other end was dropped before has no end: a body that was cut must not
    /// pass for a complete one.
    async fn next(&mut self) -> Option<Bytes> {
        let next = self.rest.recv().await;
        self.taken = true;
        match next {
            Some(piece) => piece,
            None => pending().await,
        }
    }

    /// Sends head and body. Sets `taken` when the socket accepts the first byte.
    pub(super) async fn write(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        head: &[u8],
        taken: &mut bool,
    ) -> io::Result<()> {
        let in_chunks = self.length.is_none();
        let first = if in_chunks { chunk(&self.first) } else { self.first.clone() };
        write_all(stream, head, &first, taken).await?;
        drop(first);
        while let Some(piece) = self.next().await {
            if in_chunks && !piece.is_empty() {
                let size = format!("{:x}\r\n", piece.len());
                write_all(stream, size.as_bytes(), &piece, taken).await?;
                stream.write_all(b"\r\n").await?;
            } else {
                stream.write_all(&piece).await?;
            }
            stream.flush().await?;
        }
        if in_chunks {
            stream.write_all(b"0\r\n\r\n").await?;
        }
        stream.flush().await
    }
}

fn chunk(data: &[u8]) -> Bytes {
    if data.is_empty() {
        return Bytes::new();
    }
    [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat().into()
}

// === impl Feed ===

impl Feed {
    /// Puts the next piece in, once there is room.
    ///
    /// # Errors
    /// No more is wanted.
    pub async fn put(&self, piece: Bytes) -> Result<(), Unwanted> {
        self.0.send(Some(piece)).await.map_err(|_| Unwanted)
    }

    /// Waits for room.
    ///
    /// # Errors
    /// No more is wanted.
    pub async fn room(&self) -> Result<(), Unwanted> {
        self.0.reserve().await.map(drop).map_err(|_| Unwanted)
    }

    /// The body is complete.
    ///
    /// # Errors
    /// No more is wanted.
    pub async fn end(&self) -> Result<(), Unwanted> {
        self.0.send(None).await.map_err(|_| Unwanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn sent(length: Option<u64>, pieces: &[&'static str]) -> String {
        let (mut upload, feed) = Upload::new(Bytes::from_static(b"first"), length);
        let (mut out, mut taken) = (Vec::new(), false);
        let fed = async {
            for piece in pieces {
                feed.put(Bytes::from_static(piece.as_bytes())).await.expect("it is wanted");
            }
            feed.end().await.expect("it is wanted");
        };
        let ((), written) = tokio::join!(fed, upload.write(&mut out, b"head ", &mut taken));
        written.expect("memory takes it");
        assert!(taken && !upload.is_whole());
        String::from_utf8(out).expect("text")
    }

    #[tokio::test]
    async fn a_body_is_framed_as_it_came() {
        assert_eq!(sent(Some(11), &["second", ""]).await, "head firstsecond");
        let chunks = "head 5\r\nfirst\r\n6\r\nsecond\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n";
        assert_eq!(sent(None, &["second", "0123456789abcdef"]).await, chunks);
    }

    /// Invariant: A body that its client has not sent to its end never reaches an engine as a complete one.
    #[tokio::test(start_paused = true)]
    async fn a_body_that_is_cut_has_no_end() {
        let (mut upload, feed) = Upload::new(Bytes::from_static(b"first"), None);
        let mut out = Vec::new();
        drop(feed);
        let mut taken = false;
        let written = tokio::time::timeout(
            std::time::Duration::from_secs(600),
            upload.write(&mut out, b"", &mut taken),
        );
        assert!(written.await.is_err(), "it waits to be dropped");
        assert!(!out.ends_with(b"0\r\n\r\n"));
    }

    #[tokio::test]
    async fn pieces_wait_for_room() {
        let (upload, feed) = Upload::new(Bytes::new(), None);
        for _ in 0..PIECES_MAX {
            feed.put(Bytes::from_static(b"piece")).await.expect("it is wanted");
        }
        assert!(upload.is_whole(), "nothing was taken out");
        tokio::select! {
            biased;
            room = feed.room() => panic!("{room:?}"),
            () = std::future::ready(()) => {}
        }
        drop(upload);
        assert_eq!(feed.room().await, Err(Unwanted));
    }
}
