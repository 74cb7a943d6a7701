//! What can go wrong: before anything is sent, and with one request.

/// Why nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The address cannot be used.
    #[error("cannot replay onto `{url}`: {why}; give http://host:port or https://host")]
    BaseUrl {
        /// As configured.
        url: String,
        /// What is wrong with it.
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
    /// The API key cannot be a header's value.
    #[error("the API key contains characters that a header cannot carry")]
    ApiKey,
    /// A field of bodies that the replay writes itself.
    #[error("the field `{0}` is what a replay makes itself; leave it out")]
    Field(String),
    /// There are requests and no prompts for them.
    #[error("there is no prompt to send; the file of prompts is empty")]
    NoPrompts,
    /// A request of the trace has no usable timestamp.
    #[error("request {index} of the trace arrives at {arrival_s} s; arrivals are seconds from 0")]
    Arrival {
        /// Its place in the trace.
        index: usize,
        /// What stands there.
        arrival_s: f64,
    },
    /// A request of the trace has no usable think time.
    #[error("request {index} of the trace has a think time of {think_s} s; think times are seconds from 0")]
    Think {
        /// Its place in the trace.
        index: usize,
        /// What stands there.
        think_s: f32,
    },
    /// A request of the trace is longer than this client sends.
    #[error(
        "request {index} of the trace has {tokens} input tokens, more than {}; drop or cut it",
        super::PROMPT_TOKENS_MAX
    )]
    TooLong {
        /// Its place in the trace.
        index: usize,
        /// Its length.
        tokens: u32,
    },
    /// The server does not say what it serves.
    #[error("cannot ask {url} for its models: {why}; name one with --model")]
    Models {
        /// As configured.
        url: String,
        /// What happened.
        why: String,
    },
}

/// How a request failed. The record's `error` is the class's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// No connection.
    Connect,
    /// Another status than 200.
    Status,
    /// The connection broke before the answer's end.
    Reset,
    /// Not over within `request_timeout`.
    Timeout,
    /// The answer ended in good order but was not complete: no `[DONE]` or other last event.
    Truncated,
    /// The answer had begun and said that it had failed.
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
