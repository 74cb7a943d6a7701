//! Forms that are passed on while they arrive.
//!
//! A small form is held like any other body. Of a larger one the beginning is held, as far as its
//! field `model`; then the request is placed, and the rest goes through a pipe of a fixed size. So a file of any size takes
//! little memory, and an engine that reads slowly slows its client down. Once anything was taken out of the pipe the request
//! cannot be sent again.

use std::time::Duration;

use bytes::Bytes;
use http::header;
use http::request::Parts;
use hyper::body::Incoming;
use kvlane_http::connections::Upload;
use kvlane_http::connections::upload::{self, Feed};
use kvlane_wire::api::Body;
use kvlane_wire::multipart;
use tokio::sync::{Mutex, oneshot};
use tokio::time::timeout;

use crate::deadlines::Deadlines;
use crate::error::ApiError;
use crate::form::{Beginning, Limits};
use crate::guard::Purpose;
use crate::memory::Held;
use crate::proxy::Proxy;
use crate::read::{Begun, Source, piece};

/// The body of a request: whole, or its beginning and a pipe.
pub(crate) struct Payload {
    first: Bytes,
    upload: Option<Mutex<Upload>>,
    fault: Option<Fault>,
    intake: Option<Intake>,
}

/// Becomes the error of a body that breaks while it is passed on.
pub(crate) struct Fault(oneshot::Receiver<ApiError>);

/// The end of the pipe where the client's bytes are put in.
pub(crate) struct Intake {
    feed: Feed,
    fault: Option<oneshot::Sender<ApiError>>,
    /// Longest silence of the client.
    pub(super) within: Duration,
    limit: u64,
    /// Bytes that may still come.
    left: u64,
    _held: Held,
}

/// What to do after a piece.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Read on.
    Read,
    /// The body is complete.
    Complete,
    /// No more is wanted.
    Stop,
}

/// The boundary of a form that may be passed on while it arrives.
pub(super) fn boundary(purpose: Purpose, parts: &Parts) -> Option<String> {
    let may = match purpose {
        Purpose::Engine(row) => matches!(row.body, Body::Form | Body::Any),
        Purpose::Extra => true,
        Purpose::Operate(..) | Purpose::Own | Purpose::Options(_) => false,
    };
    let kind = parts.headers.get(header::CONTENT_TYPE).filter(|_| may)?;
    multipart::boundary(kind.to_str().ok()?)
}

/// Reads the beginning of a form, or all of it.
pub(super) async fn begin(
    proxy: &Proxy,
    parts: &mut Parts,
    body: impl Source,
    boundary: &str,
) -> Result<Payload, ApiError> {
    let (within, limits) = {
        let config = proxy.settings();
        let limits = Limits::new(config.server.max_payload_size, config.server.max_upload_size);
        (Deadlines::of(&config, parts.uri.path()).body, limits)
    };
    let (mut held, mut of_pipe) = (proxy.memory.share(), proxy.memory.share());
    let mut begun = Beginning::new(boundary);
    let read = timeout(within, body.begin(parts, &mut begun, &limits, &mut held)).await;
    match read.unwrap_or(Err(ApiError::BodyTimeout(within)))? {
        Begun::Whole(whole) => Ok(held.with(whole).into()),
        Begun::Part(..) if !of_pipe.grow_to(upload::BYTES_MAX) => Err(ApiError::NoMemory),
        Begun::Part(first, length) => {
            let left = limits.upload_bytes.saturating_sub(first.len() as u64);
            let first = held.with(first);
            let (upload, feed) = Upload::new(first.clone(), length);
            let (broken, fault) = oneshot::channel();
            let intake = Intake {
                feed,
                fault: Some(broken),
                within,
                limit: limits.upload_bytes,
                left,
                _held: of_pipe,
            };
            let upload = Some(Mutex::new(upload));
            Ok(Payload { first, upload, fault: Some(Fault(fault)), intake: Some(intake) })
        }
    }
}

// === impl Payload ===

impl From<Bytes> for Payload {
    fn from(whole: Bytes) -> Self {
        Self { first: whole, upload: None, fault: None, intake: None }
    }
}

impl Payload {
    /// The body; of one that is passed on while it arrives, its beginning.
    pub(crate) fn first(&self) -> &Bytes {
        &self.first
    }

    /// The body, if it is passed on while it arrives.
    pub(crate) fn upload(&self) -> Option<&Mutex<Upload>> {
        self.upload.as_ref()
    }

    /// Whether it cannot be sent again.
    pub(crate) fn is_spent(&self) -> bool {
        let upload = self.upload.as_ref().and_then(|upload| upload.try_lock().ok());
        upload.is_some_and(|upload| !upload.is_whole())
    }

    pub(crate) fn take_fault(&mut self) -> Option<Fault> {
        self.fault.take()
    }

    pub(crate) fn take_intake(&mut self) -> Option<Intake> {
        self.intake.take()
    }
}

// === impl Fault ===

impl Fault {
    /// The error, if the body breaks before there is an answer.
    pub(crate) async fn or<T>(
        self,
        answered: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        tokio::select! {
            biased;
            Ok(error) = self.0 => Err(error),
            answered = answered => answered,
        }
    }
}

// === impl Intake ===

impl Intake {
    /// Waits until there is room for a piece.
    ///
    /// # Errors
    /// No more is wanted.
    pub(super) async fn room(&self) -> Result<(), upload::Unwanted> {
        self.feed.room().await
    }

    /// Takes what comes next: a piece, the end, or an error.
    pub(super) async fn take(&mut self, next: Result<Option<Bytes>, ApiError>) -> Next {
        let next = match next {
            Ok(Some(piece)) => match self.left.checked_sub(piece.len() as u64) {
                Some(left) => {
                    self.left = left;
                    return if self.feed.put(piece).await.is_ok() { Next::Read } else { Next::Stop };
                }
                None => Err(ApiError::UploadTooLarge { limit: self.limit }),
            },
            next => next.map(drop),
        };
        match (next, self.fault.take()) {
            (Ok(()), _) => {
                // If it is not wanted, the answer is on its way.
                let _ = self.feed.end().await;
                return Next::Complete;
            }
            (Err(error), Some(fault)) => _ = fault.send(error),
            (Err(_), None) => {}
        }
        Next::Stop
    }

    /// Passes the rest of the body of an HTTP/2 stream on while it is answered.
    pub(super) async fn pass_on_beside<T>(
        mut self,
        body: &mut Incoming,
        answer: impl Future<Output = T>,
    ) -> T {
        let passing_on = async {
            while self.room().await.is_ok() {
                let next = timeout(self.within, piece(body)).await;
                let next = next.unwrap_or(Err(ApiError::BodyTimeout(self.within)));
                if self.take(next).await != Next::Read {
                    break;
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            biased;
            answer = answer => answer,
            () = passing_on => unreachable!("it never ends"),
        }
    }
}
