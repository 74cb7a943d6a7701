//! Deadlines of the steps of a request, by its path.

use std::time::Duration;

use crate::faults::RouteTimeouts;
use crate::settings::Settings;

/// The deadlines of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deadlines {
    /// Until its body has arrived.
    pub(super) body: Duration,
    /// Until an engine has begun to answer, for streams.
    first_byte: Duration,
    /// The same for a response that is not a stream, where its path sets it: such a response begins when it is
    /// complete.
    first_byte_of_whole: Option<Duration>,
    /// Between two pieces of the response.
    pub(super) idle: Duration,
    /// From the end of the request's body to the end of the response.
    pub(super) total: Duration,
}

// === impl Deadlines ===

impl Deadlines {
    /// The deadlines of a request to `path`.
    pub(super) fn of(config: &Settings, path: &str) -> Self {
        let usual = RouteTimeouts::default();
        let route = config.timeouts.routes.get(path).unwrap_or(&usual);
        let server = &config.server;
        Self {
            body: route.body_timeout.unwrap_or(server.body_timeout),
            first_byte: route.first_byte_timeout.unwrap_or(config.timeouts.first_byte_timeout),
            first_byte_of_whole: route.first_byte_timeout,
            idle: route.stream_idle_timeout.unwrap_or(server.stream_idle_timeout),
            total: route.request_timeout.unwrap_or(server.request_timeout),
        }
    }

    /// The longest time a request may take on any path, its body included.
    pub(super) fn longest(config: &Settings) -> Duration {
        let paths = config.timeouts.routes.keys().map(String::as_str).chain([""]);
        let spans = paths.map(|path| Self::of(config, path)).map(|of| of.body.saturating_add(of.total));
        spans.max().unwrap_or_default()
    }

    /// How long an engine may take to begin its answer.
    pub(super) fn first_byte(&self, streams: bool) -> Option<Duration> {
        if streams { Some(self.first_byte) } else { self.first_byte_of_whole }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_the_default_deadlines_except_those_it_sets() {
        let mut config = Settings::default();
        let usual = Deadlines::of(&config, "/v1/embeddings");
        assert_eq!((usual.body, usual.total), (config.server.body_timeout, config.server.request_timeout));
        assert_eq!(
            usual.first_byte(false),
            None,
            "a response that is not a stream begins when it is complete"
        );
        assert_eq!(usual.first_byte(true), Some(config.timeouts.first_byte_timeout));
        let (second, year) = (Duration::from_secs(1), Duration::from_secs(365 * 24 * 3600));
        let own = RouteTimeouts { first_byte_timeout: Some(second), ..RouteTimeouts::default() };
        config.timeouts.routes.insert("/v1/embeddings".into(), own);
        let own = RouteTimeouts { request_timeout: Some(year), ..RouteTimeouts::default() };
        config.timeouts.routes.insert("/v1/batches".into(), own);
        let embeddings = Deadlines::of(&config, "/v1/embeddings");
        assert_eq!((embeddings.first_byte(false), embeddings.first_byte(true)), (Some(second), Some(second)));
        assert_eq!(embeddings.total, usual.total);
        assert_eq!(Deadlines::of(&config, "/v1/embeddings/more"), usual);
        assert_eq!(Deadlines::longest(&config), config.server.body_timeout + year);
    }
}
