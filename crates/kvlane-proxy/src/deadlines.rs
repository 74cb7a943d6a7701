//! How long each step of a request may take, by its path.

use std::time::Duration;

use crate::faults::RouteTimeouts;
use crate::settings::Settings;

/// The deadlines of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deadlines {
    /// Until its body is there.
    pub(super) body: Duration,
    /// Until an engine has begun to answer, if the answer is a stream.
    first_byte: Duration,
    /// The same for an answer that comes all at once, where its path says so: it begins when it is whole.
    first_byte_of_whole: Option<Duration>,
    /// Between two pieces of the answer.
    pub(super) idle: Duration,
    /// From its body to the answer's end.
    pub(super) total: Duration,
}

// === impl Deadlines ===

impl Deadlines {
    /// Those of a request to `path`.
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

    /// How long a request may take on any path, its body included.
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
    fn a_path_has_the_usual_deadlines_but_for_those_it_names() {
        let mut config = Settings::default();
        let usual = Deadlines::of(&config, "/v1/embeddings");
        assert_eq!((usual.body, usual.total), (config.server.body_timeout, config.server.request_timeout));
        assert_eq!(usual.first_byte(false), None, "a whole answer begins when it is whole");
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
