//! Questions of the gateway's own to a worker: one request, its whole answer, within a time and a size.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Method, StatusCode};
use tokio::time::timeout;

use crate::upstream::Upstreams;
use crate::worker::Worker;

/// Asks `worker` and reads all that it answers.
///
/// # Errors
/// What went wrong, for people: no connection, no whole answer within `limit`, or one of more than `bytes_max`.
pub(crate) async fn ask(
    upstreams: &Arc<Upstreams>,
    worker: &Worker,
    method: &Method,
    path: &str,
    body: &Bytes,
    limit: Duration,
    bytes_max: usize,
) -> Result<(StatusCode, Bytes), String> {
    let address = &worker.address;
    let mut head = format!(
        "{method} {}{path} HTTP/1.1\r\nhost: {}\r\nuser-agent: kvlane\r\naccept: */*\r\n",
        address.base_path, address.authority
    );
    if *method == Method::POST {
        head += &format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
    }
    head += "\r\n";
    let exchange = async {
        let answer = upstreams.send(worker, method, head.as_bytes(), body).await;
        let mut answer = answer.map_err(|error| format!("{method} {path}: {error}"))?;
        let mut whole = BytesMut::new();
        while let Some(piece) = std::future::poll_fn(|cx| answer.body.poll_piece(cx)).await {
            whole.extend_from_slice(&piece.map_err(|error| format!("{method} {path}: {error}"))?);
            if whole.len() > bytes_max {
                return Err(format!("{method} {path} answered more than {bytes_max} bytes"));
            }
        }
        Ok((answer.status, whole.freeze()))
    };
    timeout(limit, exchange)
        .await
        .unwrap_or_else(|_| Err(format!("{method} {path}: no answer within {limit:?}")))
}
