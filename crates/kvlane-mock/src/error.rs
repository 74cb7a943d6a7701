//! Errors as clients see them: OpenAI's envelope with vLLM's fields.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;

/// Why a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
}

impl ApiError {
    /// The request is invalid; a retry does not help.
    pub(crate) fn bad_request(message: impl ToString) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.to_string() }
    }

    /// The body of the answer; also the end of a broken stream.
    pub(crate) fn envelope(&self) -> serde_json::Value {
        let kind = match self.status {
            StatusCode::BAD_REQUEST => "BadRequestError",
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::METHOD_NOT_ALLOWED => "MethodNotAllowedError",
            StatusCode::PAYLOAD_TOO_LARGE => "PayloadTooLargeError",
            StatusCode::TOO_MANY_REQUESTS => "RateLimitError",
            _ => "InternalServerError",
        };
        serde_json::json!({
            "error": {"message": self.message, "type": kind, "param": null, "code": self.status.as_u16()}
        })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.envelope())).into_response()
    }
}
