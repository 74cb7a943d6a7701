//! Logs which workers are down, why, and what to do: at the first failed probe, when the cause becomes another one, and at
//! intervals that grow.

use std::time::Duration;

use http::StatusCode;
use kvlane_http::client::AskError;
use kvlane_http::remedy::WRITE_HTTPS;
use kvlane_http::upstream::Upstream;
use tokio::time::Instant;

use kvlane_fleet::worker::Worker;

/// Time between the first warning and the second; each further pause is twice as long.
const PAUSE: Duration = Duration::from_secs(30);
/// The longest pause between two warnings about one worker.
const PAUSE_MAX: Duration = Duration::from_secs(30 * 60);
/// Causes of one outage that are logged at once; further ones wait for the next warning.
const CAUSES_MAX: usize = 8;

/// The last warning about a worker that is down.
#[derive(Debug, Default)]
pub(super) struct ProblemLog(Option<Down>);

#[derive(Clone, Debug)]
struct Down {
    since: Instant,
    /// When the next warning is due.
    next: Instant,
    /// The pause after that one.
    pause: Duration,
    /// The causes that were logged.
    causes: Vec<String>,
}

// === impl ProblemLog ===

impl ProblemLog {
    /// Warns that a worker is down, if a warning is due. Called after each probe.
    pub(super) fn look(&mut self, worker: &Worker, now: Instant) {
        let (healthy, quiet, problem) = {
            let state = worker.state();
            // It is leaving, or it has answered probes again, but not yet often enough.
            (state.healthy, state.leaving || state.probes.failures() == 0, state.problem.clone())
        };
        if healthy {
            self.0 = None;
        }
        let Some(problem) = problem.filter(|_| !healthy && !quiet) else { return };
        let worker = &worker.url;
        match self.due(now, &problem) {
            Some(Duration::ZERO) => {
                tracing::warn!(%worker, problem, "worker unhealthy; no requests are placed on it")
            }
            Some(down) => {
                let down_s = down.as_secs();
                tracing::warn!(%worker, problem, down_s, "worker still unhealthy; no requests are placed on it");
            }
            None => {}
        }
    }

    /// For how long the worker has been down, if a warning is due; zero for the first one.
    fn due(&mut self, now: Instant, cause: &str) -> Option<Duration> {
        let Some(down) = &mut self.0 else {
            let causes = vec![cause.to_owned()];
            self.0 = Some(Down { since: now, next: now + PAUSE, pause: 2 * PAUSE, causes });
            return Some(Duration::ZERO);
        };
        let is_another = down.causes.len() < CAUSES_MAX && !down.causes.iter().any(|known| known == cause);
        if is_another {
            down.causes.push(cause.to_owned());
        } else if now < down.next {
            return None;
        } else {
            (down.next, down.pause) = (now + down.pause, (2 * down.pause).min(PAUSE_MAX));
        }
        Some(now - down.since)
    }
}

/// The problem when a probe got an error status, and what to do.
pub(super) fn of_status(worker: &Worker, path: &str, status: StatusCode) -> String {
    let what = format!("GET {path} answered {}", status.as_u16());
    let Upstream { address, .. } = &*worker.upstream;
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if worker.upstream.authorization().is_some() => {
            format!(
                "{what}: the worker does not accept its key; correct --worker-api-key (upstream.api_key), or the worker's own api_key"
            )
        }
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            format!(
                "{what}: the worker requires a key; set --worker-api-key (upstream.api_key), or the worker's own \
                 api_key (--api-key is the key of kvlane's clients and is not sent to workers)"
            )
        }
        StatusCode::NOT_FOUND if address.base_path.contains("/v1") => {
            format!("{what}: the URL of a worker ends before /v1; write http://host:port")
        }
        StatusCode::NOT_FOUND if path == "/v1/models" => {
            format!(
                "{what}: is it an OpenAI-compatible server? If it does not list its models, give the worker's model"
            )
        }
        StatusCode::NOT_FOUND => format!(
            "{what}: is it an OpenAI-compatible server? If its health check has another path, set --health-check-endpoint (health.path)"
        ),
        StatusCode::SERVICE_UNAVAILABLE => format!("{what}: it may still be loading its model"),
        StatusCode::BAD_REQUEST if !address.tls => format!("{what}: {WRITE_HTTPS}"),
        status if status.is_redirection() => {
            format!(
                "{what}: redirects are not followed; write the URL that it redirects to, such as one with https://"
            )
        }
        _ => what,
    }
}

/// The problem when a probe got no response, and what to do.
pub(super) fn of_error(error: &AskError) -> String {
    match error {
        AskError::Late { .. } => {
            format!("{error}: the server is overloaded or stuck, or health.timeout is too short")
        }
        _ => error.with_remedy(),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use http::Method;
    use kvlane_core::health::{Probe, Thresholds};
    use kvlane_fleet::worker::config::WorkerSpec;
    use kvlane_fleet::worker::{Origin, WorkerId};
    use kvlane_http::connections::UpstreamError;
    use kvlane_http::secret::Secret;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_stays_down_is_warned_about_at_growing_intervals() {
        let mut problem_log = ProblemLog::default();
        let begin = Instant::now();
        let mut at_s = Vec::new();
        // A probe every two seconds for three hours.
        for probe in 0..5400u64 {
            let now = begin + Duration::from_secs(2 * probe);
            if let Some(down) = problem_log.due(now, "refused") {
                assert_eq!(down, now - begin);
                at_s.push(down.as_secs());
            }
        }
        assert_eq!(at_s, [0, 30, 90, 210, 450, 930, 1890, 3690, 5490, 7290, 9090]);
    }

    #[tokio::test(start_paused = true)]
    async fn another_cause_is_warned_about_at_once_and_only_once() {
        let (mut problem_log, begin) = (ProblemLog::default(), Instant::now());
        let mut due =
            |at_s: u64, cause: &str| problem_log.due(begin + Duration::from_secs(at_s), cause).is_some();
        assert!(due(0, "refused") && due(2, "401"));
        assert!(!due(4, "refused") && !due(6, "401"));
        // However many causes there are.
        let warned = (0..100).filter(|n| due(8, &format!("cause {n}"))).count();
        assert_eq!(warned, CAUSES_MAX - 2);
    }

    fn worker(key: Option<&str>) -> Worker {
        let spec = WorkerSpec { api_key: key.map(Secret::new), ..WorkerSpec::new("http://gpu:8000") };
        Worker::new(WorkerId(1), &spec, Origin::Config, None).expect("right")
    }

    #[test]
    fn a_worker_that_comes_up_and_goes_down_is_warned_about_again() {
        let (worker, mut problem_log) = (worker(None), ProblemLog::default());
        problem_log.look(&worker, Instant::now());
        assert!(problem_log.0.is_none(), "it has not been probed yet");
        worker.state().problem = Some("it is down".into());
        worker.state().probes.note(&Thresholds { failures: 3, successes: 2 }, false, Probe::Failure);
        problem_log.look(&worker, Instant::now());
        assert!(problem_log.0.is_some());
        worker.state().healthy = true;
        problem_log.look(&worker, Instant::now());
        assert!(problem_log.0.is_none());
    }

    #[test]
    fn a_probe_problem_says_what_to_do() {
        let upstream = |error| {
            of_error(&AskError::Upstream { method: Method::GET, path: "/health".into(), error, tls: false })
        };
        let refused = upstream(UpstreamError::Connect(io::ErrorKind::ConnectionRefused.into()));
        assert!(
            refused.starts_with("GET /health: cannot connect: ") && refused.contains("start the server"),
            "{refused}"
        );
        let unknown = io::Error::other("failed to lookup address information: Name or service not known");
        let unknown = upstream(UpstreamError::Connect(unknown));
        assert!(unknown.contains("cannot be resolved"), "{unknown}");
        let status = |key, path, status: u16| {
            of_status(&worker(key), path, StatusCode::from_u16(status).expect("one"))
        };
        for wanting in [401, 403] {
            let said = status(None, "/v1/models", wanting);
            assert!(
                said.contains(&format!("/v1/models answered {wanting}"))
                    && said.contains("set --worker-api-key"),
                "{said}"
            );
            let said = status(Some("k"), "/v1/models", wanting);
            assert!(said.contains("does not accept its key"), "{said}");
        }
        assert!(status(None, "/health", 404).contains("--health-check-endpoint"));
        assert!(status(None, "/v1/models", 404).contains("give the worker's model"));
        assert!(status(None, "/health", 503).contains("loading"));
        assert!(status(None, "/health", 400).contains("https://"));
        assert!(status(None, "/health", 301).contains("redirects"));
        let spec = WorkerSpec::new("http://gpu:8000/v1/models");
        let too_long = Worker::new(WorkerId(1), &spec, Origin::Config, None).expect("right");
        let said = of_status(&too_long, "/health", StatusCode::NOT_FOUND);
        assert!(said.contains("ends before /v1"), "{said}");
        assert_eq!(status(None, "/health", 500), "GET /health answered 500");
    }
}
