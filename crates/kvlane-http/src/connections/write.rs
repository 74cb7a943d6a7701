//! Writing to engines.

use std::io::{self, IoSlice};

use tokio::io::{AsyncWrite, AsyncWriteExt};

/// Writes head and body with as few calls as possible. Sets `taken` when the socket accepts the first byte.
pub(super) async fn write_all(
    stream: &mut (impl AsyncWrite + Unpin),
    head: &[u8],
    body: &[u8],
    taken: &mut bool,
) -> io::Result<()> {
    let mut written = 0;
    while written < head.len() {
        let slices = [IoSlice::new(&head[written..]), IoSlice::new(body)];
        match stream.write_vectored(&slices).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            n => written += n,
        }
        *taken = true;
    }
    stream.write_all(&body[written - head.len()..]).await?;
    // TLS may still buffer what was written.
    stream.flush().await
}
