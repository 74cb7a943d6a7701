//! The one place where errors become HTTP: status, envelope, retry advice.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, StatusCode, header};
use kvlane_core::decision::Rejection;
use kvlane_core::request::Slo;
use kvlane_core::time::Nanos;
use kvlane_fleet::metrics::Reached;
use kvlane_wire::engine::calls::SERVICE;
use kvlane_wire::openai::ParseError;

use crate::attempt_error::AttemptError;
use crate::auth::Denied;
use crate::body::{Body, json_response};
use crate::error_format::ErrorFormat;
use crate::grpc;
use crate::limits::Limited;

/// `Retry-After` of a 503 for want of memory: bodies take seconds to be read and sent.
const NO_MEMORY_FOR_S: u64 = 1;

/// Where operators look, for clients that may not see workers.
const NOT_TOLD: &str =
    "operators see the cause in the log, on the dashboard, and at GET /readiness with an operator's key";
/// An object of an engine that has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "object `{id}` is lost with its engine: the worker{} that kept it {}; create the object again, or send the whole \
     conversation",
    worker.as_deref().map_or_else(String::new, |url| format!(" {url}")),
    if *left { "has left the fleet" } else { "has ended or restarted since" }
)]
pub struct Lost {
    /// Its id.
    pub id: String,
    /// The URL of its worker, unless the client must not learn it.
    pub worker: Option<Arc<str>>,
    /// The worker is no longer in the fleet.
    pub left: bool,
}

/// Why a client gets no answer from an engine.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The body is not valid for the API.
    #[error("{0}")]
    BadRequest(#[from] ParseError),
    /// The body ended too early.
    #[error("the request body is incomplete: {0}")]
    BodyBroken(String),
    /// A field that the gateway needs is missing.
    #[error("{0}")]
    MissingField(String),
    /// The body did not arrive in time.
    #[error("the request body did not arrive within {0:?}")]
    BodyTimeout(Duration),
    /// The body is too large.
    #[error("the request body is larger than {limit} bytes: shorten it, or raise --max-payload-size")]
    TooLarge {
        /// The limit.
        limit: usize,
    },
    /// The form is too large.
    #[error("the form is larger than {limit} bytes: shorten it, or raise server.max_upload_size")]
    UploadTooLarge {
        /// The limit.
        limit: u64,
    },
    /// No pool serves this model.
    #[error("the model `{0}` does not exist: GET /v1/models lists the models")]
    UnknownModel(String),
    /// The path is unknown.
    #[error("no such path: {0}")]
    UnknownPath(String),
    /// A gRPC method, called by other means.
    #[error("{0} is a gRPC method: call it over HTTP/2 with the content type application/grpc")]
    NotGrpc(String),
    /// The workers of the model speak another protocol than the request.
    #[error(
        "the model `{model}` is served over {} only",
        if *over_grpc { format!("the gRPC service {SERVICE}") } else { "HTTP".to_owned() }
    )]
    OtherProtocol {
        /// The model.
        model: String,
        /// Its workers speak gRPC.
        over_grpc: bool,
    },
    /// The path is an engine's administration.
    #[error(
        "{0} is administration of one engine and is not relayed: call the engine itself, or open the path with \
         server.extra_paths"
    )]
    ClosedPath(String),
    /// Two servers may parse the head differently.
    #[error("the request head is ambiguous: {0}")]
    BadHead(&'static str),
    /// The head is not a valid request head.
    #[error("the request is not HTTP/1.1: {0}")]
    NoHttp(&'static str),
    /// The head has too many fields.
    #[error("the request head has more than 100 fields")]
    TooManyFields,
    /// The head is too large.
    #[error("the request head is larger than {limit} bytes")]
    HeadTooLarge {
        /// The limit.
        limit: usize,
    },
    /// The requests of all clients use all the memory they may.
    #[error("request bodies use all of server.body_memory: try again later, or raise it")]
    NoMemory,
    /// Another server may read the path as a different one.
    #[error("the path is ambiguous: send it without percent-encoding, `;`, `//`, `.` and `..` segments")]
    BadPath,
    /// No object with this id, or it belongs to another tenant.
    #[error("object `{0}` does not exist")]
    UnknownObject(String),
    /// The object was made by an engine that has ended.
    #[error(transparent)]
    LostObject(Lost),
    /// This gateway has not seen the object being made, and several engines could have made it.
    #[error(
        "object `{id}` does not exist, as far as this gateway knows: it has not seen it being created{}; create it again",
        unasked_text(*unasked)
    )]
    NotFoundAnywhere {
        /// Its id.
        id: String,
        /// Workers that could not be asked for it.
        unasked: usize,
    },
    /// The objects of this path are not separated by tenant.
    #[error("{0} is not available with auth.isolate_tenants: engines share its objects between all tenants")]
    NotIsolated(&'static str),
    /// The requests of this path cannot say whose blocks they may share.
    #[error(
        "{0} is not available with auth.isolate_tenants: its requests have no cache salt, which keeps the blocks of \
         tenants apart"
    )]
    NotSalted(&'static str),
    /// The path does not take this method.
    #[error("{path} does not allow {method}: use {allow}")]
    WrongMethod {
        /// The method.
        method: String,
        /// The path.
        path: String,
        /// The methods that it takes.
        allow: &'static str,
    },
    /// No endpoint of the model takes requests.
    #[error("{}", no_endpoint_text(model, *waited, told))]
    NoEndpoint {
        /// The model; empty if the request names none.
        model: String,
        /// How long the request has waited for one.
        waited: Duration,
        /// `Retry-After`, in seconds.
        retry_after_s: u64,
        /// What is told of the workers.
        told: Told,
    },
    /// The scheduler rejected the request.
    #[error("{}", rejection_text(*why))]
    Rejected {
        /// Why.
        why: Rejection,
        /// `Retry-After`, in seconds.
        retry_after_s: u64,
    },
    /// It should miss its latency objectives everywhere.
    #[error(
        "no endpoint can meet the latency objectives of this request ({targets}): try again later, or with larger ones"
    )]
    Late {
        /// What was asked for.
        targets: Slo,
        /// `Retry-After`, in seconds.
        retry_after_s: u64,
    },
    /// The client is over a limit.
    #[error("{0}")]
    RateLimited(Limited),
    /// No worker answered.
    #[error("worker {worker}: {error} ({attempts} attempts)")]
    Upstream {
        /// The worker of the last attempt.
        worker: String,
        /// Its error.
        error: AttemptError,
        /// Number of attempts.
        attempts: u32,
    },
    /// Engines died with this prompt in flight.
    #[error(
        "several engines failed while this request was in flight, so it is not retried for {} s: it may be \
         the cause",
        left.0.div_ceil(1_000_000_000)
    )]
    KillsEngines {
        /// The remaining time.
        left: Nanos,
    },
    /// The worker did not begin to answer in time.
    #[error("worker {worker} sent no response within {limit:?}")]
    UpstreamTimeout {
        /// The worker.
        worker: String,
        /// The limit.
        limit: Duration,
    },
    /// A web page of another origin asks for a WebSocket.
    #[error("pages of {0} may open no WebSocket here: add the origin to server.cors_allowed_origins")]
    ForeignOrigin(String),
    /// The client is not authorized.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// A request to the admin API that cannot be carried out.
    #[error("{message}")]
    Admin {
        /// The status.
        status: StatusCode,
        /// What is wrong.
        message: String,
    },
}

fn unasked_text(unasked: usize) -> String {
    match unasked {
        0 => String::new(),
        unasked => format!(", and {unasked} of the workers could not be asked for it"),
    }
}

/// What a client is told of the workers when none is ready.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Told {
    /// Where to look.
    #[default]
    Where,
    /// The problem of a worker, or that there is none, and what to do.
    Problem(String),
    /// Nothing: this client may not see workers.
    Nothing,
}

fn no_endpoint_text(model: &str, waited: Duration, told: &Told) -> String {
    let of = if model.is_empty() { String::new() } else { format!(" for the model `{model}`") };
    let waited = match waited.as_secs_f64() {
        0.0 => String::new(),
        seconds => format!(
            " after {seconds:.1} s of waiting (routing.empty_pool_timeout; for an adapter, adapters.load_timeout)"
        ),
    };
    let told = match told {
        Told::Where => "try again later; GET /readiness shows which are down and why".to_owned(),
        Told::Problem(problem) => format!("{problem}; GET /readiness lists all problems"),
        Told::Nothing => format!("try again later; {NOT_TOLD}"),
    };
    format!("no endpoint is ready{of}{waited}: {told}")
}

fn rejection_text(why: Rejection) -> &'static str {
    match why {
        Rejection::NoEndpoint => "no endpoint is ready for this request: try again later",
        Rejection::QueueFull => "too many requests are waiting for this model: try again later",
        Rejection::QueueTimeout => "the request waited too long in the queue: try again later",
        Rejection::BudgetSpent => "the retry budget is spent: try again later",
        Rejection::SloMissed => {
            "no endpoint can meet the latency objectives of this request: try again later"
        }
    }
}

/// The code of each error, and the list of all codes.
macro_rules! codes {
    ($($error:pat => $code:literal,)+) => {
        /// All values of `code`.
        pub const CODES: &[&str] = &[$($code),+];

        /// OpenAI's `code`.
        fn code(&self) -> &'static str {
            match self {
                $($error => $code,)+
            }
        }
    };
}

// === impl ApiError ===

impl ApiError {
    /// Its HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::BadRequest(_)
            | Self::MissingField(_)
            | Self::BodyBroken(_)
            | Self::BadPath
            | Self::BadHead(_)
            | Self::NoHttp(_) => StatusCode::BAD_REQUEST,
            Self::TooManyFields | Self::HeadTooLarge { .. } => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::NoMemory => StatusCode::SERVICE_UNAVAILABLE,
            Self::BodyTimeout(_) => StatusCode::REQUEST_TIMEOUT,
            Self::TooLarge { .. } | Self::UploadTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NotGrpc(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::UnknownModel(_)
            | Self::OtherProtocol { .. }
            | Self::UnknownPath(_)
            | Self::ClosedPath(_)
            | Self::UnknownObject(_)
            | Self::LostObject(_)
            | Self::NotFoundAnywhere { .. } => StatusCode::NOT_FOUND,
            Self::NotIsolated(_) | Self::NotSalted(_) | Self::ForeignOrigin(_) => StatusCode::FORBIDDEN,
            Self::WrongMethod { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::NoEndpoint { .. } | Self::Rejected { why: Rejection::NoEndpoint, .. } => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Rejected { .. } | Self::Late { .. } | Self::RateLimited(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Upstream { error, .. } if error.is_timeout() => StatusCode::GATEWAY_TIMEOUT,
            Self::UpstreamTimeout { .. } => StatusCode::GATEWAY_TIMEOUT,
            Self::Upstream { .. } => StatusCode::BAD_GATEWAY,
            Self::KillsEngines { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Denied(denied) => denied.status(),
            Self::Admin { status, .. } => *status,
        }
    }

    /// The limit that was reached, if only this response reports it.
    pub(super) fn reached(&self) -> Option<Reached> {
        match self {
            Self::HeadTooLarge { .. } => Some(Reached::HeadBytes),
            Self::NoMemory => Some(Reached::BodyMemory),
            _ => None,
        }
    }

    /// OpenAI's `type`.
    pub fn kind_of(status: StatusCode) -> &'static str {
        match status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            503 => "service_unavailable",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }

    codes! {
        Self::BadRequest(_) | Self::BodyBroken(_) => "invalid_body",
        Self::MissingField(_) => "missing_field",
        Self::BodyTimeout(_) => "body_timeout",
        Self::TooLarge { .. } | Self::UploadTooLarge { .. } => "body_too_large",
        Self::NotGrpc(_) => "not_grpc",
        Self::UnknownModel(_) | Self::OtherProtocol { .. } => "model_not_found",
        Self::UnknownPath(_) | Self::ClosedPath(_) => "not_found",
        Self::UnknownObject(_) | Self::NotFoundAnywhere { .. } => "object_not_found",
        Self::LostObject(_) => "object_lost",
        Self::NotIsolated(_) | Self::NotSalted(_) => "not_isolated",
        Self::ForeignOrigin(_) => "origin_not_allowed",
        Self::BadPath => "bad_path",
        Self::BadHead(_) | Self::NoHttp(_) => "bad_head",
        Self::TooManyFields => "too_many_fields",
        Self::HeadTooLarge { .. } => "head_too_large",
        Self::NoMemory => "body_memory_full",
        Self::WrongMethod { .. } => "method_not_allowed",
        Self::NoEndpoint { .. } | Self::Rejected { why: Rejection::NoEndpoint, .. } => "no_endpoint_ready",
        Self::Rejected { why: Rejection::QueueFull, .. } => "queue_full",
        Self::Rejected { why: Rejection::QueueTimeout, .. } => "queue_timeout",
        Self::Rejected { why: Rejection::BudgetSpent, .. } => "retry_budget_spent",
        Self::Rejected { why: Rejection::SloMissed, .. } | Self::Late { .. } => "slo_missed",
        Self::RateLimited(_) => "rate_limited",
        Self::Upstream { .. } => "upstream_error",
        Self::KillsEngines { .. } => "request_fails_engines",
        Self::UpstreamTimeout { .. } => "upstream_timeout",
        Self::Denied(Denied::Missing) => "missing_api_key",
        Self::Denied(Denied::Invalid) => "invalid_api_key",
        Self::Denied(Denied::Forbidden { .. }) => "permission_denied",
        Self::Admin { .. } => "admin",
    }

    /// The whole answer, in the client's error format.
    pub fn into_response(self, error_format: ErrorFormat) -> http::Response<Body> {
        let status = self.status();
        let (kind, text) = (Self::kind_of(status), self.to_string());
        let mut response = match error_format {
            ErrorFormat::Grpc => grpc::failed(status, &text),
            _ => json_response(status, &error_format.envelope(status, kind, self.code(), &text)),
        };
        if let Self::WrongMethod { allow, .. } = self {
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        let retry_after_s = match &self {
            Self::NoEndpoint { retry_after_s, .. }
            | Self::Rejected { retry_after_s, .. }
            | Self::Late { retry_after_s, .. } => Some(*retry_after_s),
            Self::RateLimited(limited) => Some(limited.retry_after_s()),
            Self::NoMemory => Some(NO_MEMORY_FOR_S),
            _ => None,
        };
        if let Some(retry_after_s) = retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(retry_after_s));
        }
        if matches!(self, Self::KillsEngines { .. }) {
            // OpenAI's and Anthropic's clients retry a 500 by themselves unless told not to.
            response.headers_mut().insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if matches!(
            self,
            Self::BodyBroken(_)
                | Self::BodyTimeout(_)
                | Self::TooLarge { .. }
                | Self::UploadTooLarge { .. }
                | Self::BadHead(_)
                | Self::NoHttp(_)
                | Self::TooManyFields
                | Self::HeadTooLarge { .. }
                | Self::NoMemory
        ) {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}
