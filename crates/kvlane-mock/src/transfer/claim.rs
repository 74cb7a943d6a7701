//! A second leg's questions to a prefill engine's store.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::leg::Elsewhere;
use super::store::{CLAIM, Claimed, Claiming, RELEASE};

/// Time to connect: vLLM's handshake with a dead port took 5.1 s.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest answer, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 10;

/// Blocks that a prefill engine holds for a second leg. Dropping it releases them.
pub(crate) struct Claim {
    address: String,
    claiming: Claiming,
    /// Whether they are the blocks of this prompt.
    pub(crate) right: bool,
}

/// The prefill engine is gone, or is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unreachable;

/// Asks for the blocks of a prompt. Waits as long as the other engine says nothing.
pub(crate) async fn claim(from: &Elsewhere, prompt: u64) -> Result<Claim, Unreachable> {
    let Elsewhere { address, engine_id, key, waits, .. } = from.clone();
    let claiming = Claiming { engine_id, key, prompt, waits };
    // Before the question, since the other engine may have heard it when this future is dropped.
    let mut claim = Claim { address: address.clone(), claiming, right: false };
    let answer = post(&address, CLAIM, &claim.claiming).await.ok_or(Unreachable)?;
    let Claimed { right } = serde_json::from_slice(&answer).map_err(|_| Unreachable)?;
    claim.right = right;
    Ok(claim)
}

/// The body of a successful answer.
async fn post(address: &str, path: &str, body: &Claiming) -> Option<Bytes> {
    let connecting = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address));
    let stream = connecting.await.ok()?.ok()?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.ok()?;
    // Ends with the sender.
    tokio::spawn(connection);
    let request = Request::post(path)
        .header("host", address)
        .header("content-type", "application/json")
        .body(Body::from(serde_json::to_vec(body).ok()?))
        .ok()?;
    let answer = sender.send_request(request).await.ok()?;
    if !matches!(answer.status(), StatusCode::OK | StatusCode::NO_CONTENT) {
        return None;
    }
    axum::body::to_bytes(Body::new(answer.into_body()), ANSWER_BYTES_MAX).await.ok()
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (address, claiming) = (std::mem::take(&mut self.address), self.claiming.clone());
        // A prefill engine that is gone has nothing to release.
        runtime.spawn(async move { post(&address, RELEASE, &claiming).await });
    }
}
