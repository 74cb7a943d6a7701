//! One gRPC call of a data plane.

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use kvlane_wire::grpc::{CONTENT_TYPE, Frames, Status};

/// One gRPC call.
pub(super) struct Call {
    request: RecvStream,
    frames: Frames,
    /// The head of the answer has not been sent.
    respond: SendResponse<Bytes>,
    answer: Option<h2::SendStream<Bytes>>,
    /// Largest message.
    bytes_max: usize,
}

/// Why a call cannot go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The peer has reset the call, or its connection broke.
    #[error("the call was reset: {0}")]
    Reset(#[from] h2::Error),
    /// A message is not valid.
    #[error("{0}")]
    Message(#[from] kvlane_wire::grpc::FrameError),
    /// Messages are missing.
    #[error("the call ended within a message")]
    Cut,
}

// === impl Call ===

impl Call {
    /// A call, before its first message. No message may be larger than `bytes_max`.
    pub(super) fn new(request: RecvStream, respond: SendResponse<Bytes>, bytes_max: usize) -> Self {
        Self { request, frames: Frames::default(), respond, answer: None, bytes_max }
    }

    /// Refuses a request that is not gRPC.
    pub(super) fn refuse(&mut self) {
        let mut refusal = Response::new(());
        *refusal.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        // The peer may have gone.
        let _ = self.respond.send_response(refusal, true);
    }

    /// The next message; none when the peer sends no more.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, CallError> {
        loop {
            if let Some(message) = self.frames.next(self.bytes_max)? {
                return Ok(Some(message));
            }
            match self.request.data().await {
                Some(piece) => {
                    let piece = piece?;
                    // It never fails for what was received.
                    let _ = self.request.flow_control().release_capacity(piece.len());
                    self.frames.push(piece);
                }
                None if self.frames.is_within() => return Err(CallError::Cut),
                None => return Ok(None),
            }
        }
    }

    /// Sends frames.
    pub(super) fn send(&mut self, frames: Vec<u8>) -> Result<(), CallError> {
        if self.answer.is_none() {
            let mut head = Response::new(());
            head.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
            self.answer = Some(self.respond.send_response(head, false)?);
        }
        if let Some(answer) = &mut self.answer {
            answer.send_data(frames.into(), false)?;
        }
        Ok(())
    }

    /// Waits until the peer has reset the call or its connection broke.
    pub(super) async fn reset(&mut self) {
        let Some(answer) = &mut self.answer else { return std::future::pending().await };
        let _ = std::future::poll_fn(|cx| answer.poll_reset(cx)).await;
    }

    /// Waits until the peer gives up the request for which it waits: it resets the call or, if `by_silence`, says that it
    /// sends nothing more.
    pub(super) async fn given_up(&mut self, by_silence: bool) {
        while let Some(Ok(piece)) = self.request.data().await {
            // A message here is not part of the protocol.
            let _ = self.request.flow_control().release_capacity(piece.len());
        }
        if !by_silence {
            let _ = std::future::poll_fn(|cx| self.respond.poll_reset(cx)).await;
        }
    }

    /// Ends the call. What was sent before is still delivered.
    pub(super) fn end(&mut self, status: Status) {
        let code = HeaderValue::from(status as u16);
        let sent = match &mut self.answer {
            Some(answer) => {
                let mut trailers = HeaderMap::with_capacity(1);
                trailers.insert("grpc-status", code);
                answer.send_trailers(trailers)
            }
            None => {
                let mut head = Response::new(());
                head.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
                head.headers_mut().insert("grpc-status", code);
                self.respond.send_response(head, true).map(drop)
            }
        };
        if let Err(error) = sent {
            tracing::debug!(%error, "call of a data plane was reset");
        }
    }
}
