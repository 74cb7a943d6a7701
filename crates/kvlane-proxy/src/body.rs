//! The body of an answer to a client.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite};

/// The body of an answer: the gateway's own, or a worker's.
pub enum Body {
    /// All of it.
    Whole(Option<Bytes>),
    /// A worker's, as it arrives.
    Relay(Pin<Box<dyn http_body::Body<Data = Bytes, Error = io::Error> + Send>>),
    /// The connection of a worker that has switched to another protocol.
    Tunnel(Box<dyn Tunnel>),
}

/// The connection of a client.
pub trait Connection: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Connection for T {}

/// The connection of a worker that has switched to another protocol. Dropping it closes the connection.
pub trait Tunnel: Send {
    /// Copies bytes both ways until it ends. `ahead` is what the client has sent already.
    fn run<'a>(
        self: Box<Self>,
        client: &'a mut dyn Connection,
        ahead: Bytes,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;
}

/// A response with a JSON body.
pub fn json_response(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    text_response(status, "application/json", value.to_string())
}

/// A whole answer.
pub fn text_response(status: StatusCode, content_type: &'static str, text: String) -> Response<Body> {
    let mut response = Response::new(Body::Whole(Some(text.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Relay(relay) => relay.as_mut().poll_frame(cx),
            Self::Tunnel(_) => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Self::Relay(relay) => relay.is_end_stream(),
            Self::Tunnel(_) => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Relay(relay) => relay.size_hint(),
            Self::Tunnel(_) => SizeHint::with_exact(0),
        }
    }
}
