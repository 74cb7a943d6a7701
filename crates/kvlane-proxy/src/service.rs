//! One request of a client: admits it, reads its body, answers it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Response, header};
use http_body::Body as _;
use kvlane_http::address::Protocol;
use kvlane_http::connections::Connections;
use kvlane_wire::api::path::allows;

use crate::account::Account;
use crate::body::Body;
use crate::cors;
use crate::error::{ApiError, Told};
use crate::error_format::ErrorFormat;
use crate::forward;
use crate::grpc;
use crate::guard::{self, Purpose};
use crate::memory::Held;
use crate::own_api::{OwnApi, OwnRequest, Port};
use crate::paths;
use crate::proxy::Proxy;
use crate::read::{self, Source};
use crate::streamed::{self, Intake, Payload};

/// A request that has been received.
pub(crate) struct Received {
    pub(crate) parts: Parts,
    pub(crate) error_format: ErrorFormat,
    pub(crate) account: Arc<Account>,
    /// Its purpose and body, or why it is rejected.
    pub(crate) read: Result<(Purpose, Payload), ApiError>,
    /// The memory that its head takes, if it is large.
    pub(crate) held: Held,
}

// === impl Received ===

impl Received {
    /// Takes the end of the pipe where the rest of the body is to be put in, if there is one.
    pub(crate) fn take_intake(&mut self) -> Option<Intake> {
        self.read.as_mut().ok().and_then(|(_, body)| body.take_intake())
    }
}

/// What answers the requests of one relay thread.
pub struct Service {
    /// What all relay threads share.
    pub proxy: Arc<Proxy>,
    /// Answers what is for the gateway itself.
    pub own: Arc<dyn OwnApi>,
    /// The connections to workers of this thread.
    pub upstreams: Arc<Connections>,
    /// The port that it serves.
    pub port: Port,
}

// === impl Service ===

impl Service {
    /// Authorizes a request and reads its body; `head` is the result of checking its head.
    pub(crate) async fn receive(
        &self,
        mut parts: Parts,
        head: Result<(), ApiError>,
        body: impl Source,
    ) -> Received {
        if let (Port::Clients { .. }, Some(named)) = (self.port, paths::by_first_name(&parts.uri)) {
            parts.uri = named;
        }
        let path = parts.uri.path();
        let error_format = ErrorFormat::of_request(&parts);
        let purpose = head.and_then(|()| Purpose::of(&self.proxy, self.port, path));
        let purpose = purpose.map(|purpose| purpose.asked_with(&parts.method, path));
        let api = purpose.as_ref().ok().and_then(|purpose| purpose.api());
        let counted = matches!(self.port, Port::Clients { .. });
        let account = Account::open(&self.proxy, api, error_format, &parts, counted);
        let mut held = self.proxy.memory.share();
        let read = match purpose {
            Ok(purpose) if held.grow_to(bytes_of(&parts.headers)) => {
                self.let_in(&mut parts, purpose, body, &account).await
            }
            Ok(_) => Err(ApiError::NoMemory),
            Err(error) => Err(error),
        };
        Received { parts, error_format, account, read, held }
    }

    /// Whether clients of this port are asked to leave: each answer closes its connection.
    pub(crate) fn retires(&self) -> bool {
        self.proxy.fleet.stopping.load(Ordering::Relaxed) && matches!(self.port, Port::Clients { .. })
    }

    async fn let_in(
        &self,
        parts: &mut Parts,
        purpose: Purpose,
        body: impl Source,
        account: &Account,
    ) -> Result<(Purpose, Payload), ApiError> {
        guard::admit(&self.proxy, self.port, parts, purpose)?;
        check_call(parts)?;
        if guard::keeps_apart(&self.proxy, self.port, parts) {
            account.keep_apart();
        }
        let method = if parts.method == Method::HEAD { "GET" } else { parts.method.as_str() };
        if let Some(allow) = purpose.methods().filter(|allow| !allows(allow, method)) {
            let method = parts.method.as_str().chars().take(32).collect();
            return Err(ApiError::WrongMethod { method, path: parts.uri.path().into(), allow });
        }
        let body = match purpose {
            Purpose::Options(_) => Bytes::new().into(),
            Purpose::Own if !paths::takes_body(parts) => Bytes::new().into(),
            _ => match streamed::boundary(purpose, parts) {
                Some(boundary) => Box::pin(streamed::begin(&self.proxy, parts, body, &boundary)).await?,
                None => read::body(&self.proxy, parts, body).await?.into(),
            },
        };
        Ok((purpose, body))
    }

    /// The answer to a request.
    pub(crate) async fn respond(&self, received: Received) -> Response<Body> {
        let Received { mut parts, error_format, account, read, held: _held } = received;
        let is_head = parts.method == Method::HEAD;
        if is_head && !matches!(read, Ok((Purpose::Own, _))) {
            // Most engines take GET only.
            parts.method = Method::GET;
        }
        let origin = matches!(self.port, Port::Clients { .. })
            .then(|| cors::Asked::of(&self.proxy.settings(), &parts));
        let answered = match read {
            // Boxed, so that a connection whose request is still arriving takes little memory.
            Ok((purpose, mut body)) => {
                let fault = body.take_fault();
                let answered = Box::pin(self.dispatch(&parts, purpose, body, &account));
                match fault {
                    None => answered.await,
                    Some(fault) => fault.or(answered).await,
                }
            }
            Err(error) => Err(error),
        };
        let (mut response, status) = match answered {
            Ok(response) => {
                let status = grpc::status_of(response.status(), response.headers());
                (response, status)
            }
            Err(error) => {
                if let Some(reached) = error.reached() {
                    self.proxy.fleet.metrics.limits.reached(reached);
                }
                let error = self.explain(&parts, &account, error);
                let status = error.status();
                (error.into_response(error_format), status)
            }
        };
        account.set_status(status);
        if is_head && let Body::Relay(relay) = response.body() {
            let length = relay.size_hint().exact();
            *response.body_mut() = Body::Whole(None);
            response.headers_mut().extend(length.map(|length| (header::CONTENT_LENGTH, length.into())));
        }
        if !matches!(response.body(), Body::Relay(_)) {
            account.settle();
        }
        account.mark(response.headers_mut());
        if let Some(asked) = origin.flatten() {
            asked.permit(&mut response);
        }
        response
    }

    /// An error as its client may see it, with the cause where no endpoint is ready. Operators see the cause in any case:
    /// it is kept with the request's failure.
    pub(crate) fn explain(&self, parts: &Parts, account: &Account, mut error: ApiError) -> ApiError {
        if let ApiError::NoEndpoint { model, told, .. } = &mut error {
            *told = self.proxy.fleet.why_none_is_ready(model).map_or(Told::Where, Told::Problem);
        }
        if error.status().is_server_error() {
            account.failed(error.to_string());
        }
        if let ApiError::NoEndpoint { told, .. } = &mut error
            && !guard::shows_workers(&self.proxy, self.port, parts)
        {
            *told = Told::Nothing;
        }
        error
    }

    async fn dispatch(
        &self,
        parts: &Parts,
        purpose: Purpose,
        body: Payload,
        account: &Arc<Account>,
    ) -> Result<Response<Body>, ApiError> {
        if let Purpose::Options(methods) = purpose {
            return Ok(cors::methods(methods));
        }
        if matches!(purpose, Purpose::Own) {
            let (port, shows_workers) = (self.port, guard::shows_workers(&self.proxy, self.port, parts));
            let answered =
                self.own.answer(OwnRequest { parts, body: body.first(), port, shows_workers }).await?;
            let path = || parts.uri.path().chars().take(200).collect();
            return answered.ok_or_else(|| ApiError::UnknownPath(path()));
        }
        forward::forward(&self.proxy, &self.upstreams, purpose.row(), parts, body, account).await
    }
}

/// Bytes of the fields of a head.
fn bytes_of(headers: &http::HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum()
}

/// Rejects a request to a method that is no gRPC call.
///
/// # Errors
/// It is none.
fn check_call(parts: &Parts) -> Result<(), ApiError> {
    let path = parts.uri.path();
    if grpc::protocol_of(path) == Protocol::Http || grpc::is_call(parts) {
        return Ok(());
    }
    Err(ApiError::NotGrpc(path.chars().take(200).collect()))
}
