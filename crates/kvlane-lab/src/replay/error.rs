//! Errors: before sending, and of single requests.

/// Why nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The address is invalid.
    #[error("cannot replay onto `{url}`: {why}; the URL must be http://host:port or https://host")]
    BaseUrl {
        /// As configured.
        url: String,
        /// The cause.
        why: String,
    },
    /// The speed is not a positive number.
    #[error("speed {speed} is not a positive number; 1 is the trace's own pace")]
    Speed {
        /// As configured.
        speed: f64,
    },
    /// The clock's thread cannot be started.
    #[error("cannot start the replay's clock thread: {0}")]
    Thread(std::io::Error),
    /// The API key is not a valid header value.
    #[error("the API key contains characters that are not allowed in a header")]
    ApiKey,
    /// A field of bodies that the replay writes itself.
    #[error("the field `{0}` is set by the replay itself; remove it")]
    Field(String),
    /// There are requests but no prompts.
    #[error("no prompt to send: the file of prompts is empty")]
    NoPrompts,
    /// A request of the trace has no usable timestamp.
    #[error("request {index} of the trace arrives at {arrival_s} s; arrivals must be at least 0 s")]
    Arrival {
        /// Its index in the trace.
        index: usize,
        /// The value.
        arrival_s: f64,
    },
    /// A request of the trace has no usable think time.
    #[error("request {index} of the trace has a think time of {think_s} s; think times must be at least 0 s")]
    Think {
        /// Its index in the trace.
        index: usize,
        /// The value.
        think_s: f32,
    },
    /// A request of the trace is longer than the maximum.
    #[error(
        "request {index} of the trace has {tokens} input tokens, more than {}; drop or cut it",
        super::PROMPT_TOKENS_MAX
    )]
    TooLong {
        /// Its index in the trace.
        index: usize,
        /// Its length.
        tokens: u32,
    },
    /// The server does not list its models.
    #[error("cannot list the models of {url}: {why}; set --model")]
    Models {
        /// As configured.
        url: String,
        /// The cause.
        why: String,
    },
}

/// Class of a request's failure. The record's `error` is the class's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// No connection.
    Connect,
    /// A status other than 200.
    Status,
    /// The connection broke before the answer's end.
    Reset,
    /// Not finished within `request_timeout`.
    Timeout,
    /// The answer ended regularly but was not complete: no `[DONE]` or other last event.
    Truncated,
    /// The answer had begun and then reported an error.
    Failed,
}

// === impl ErrorClass ===

impl ErrorClass {
    /// Its name, as records carry it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Status => "status",
            Self::Reset => "reset",
            Self::Timeout => "timeout",
            Self::Truncated => "truncated",
            Self::Failed => "failed",
        }
    }
}
