//! Detects engines that make no progress on their requests, by the rule of [`kvlane_core::stall`].
//!
//! An endpoint without any sign of progress for a second is checked more closely: its metrics page is read once a
//! second, and compared with the one before. When it is stalled, the scheduler places no request there, and requests
//! without content leave it. It recovers with the next sign of progress: a token, a KV event, a changed metrics page,
//! or, because an idle engine shows none of these, the answer to a request for one token that is sent from here.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::scheduler::Input;
use kvlane_core::stall::Counters;
use kvlane_core::time::Nanos;
use kvlane_http::client::ask;
use kvlane_http::connections::Connections;
use kvlane_wire::engine::progress;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use kvlane_fleet::Fleet;
use kvlane_fleet::pool::{ModelPool, PoolEndpoint};

/// How often endpoints are checked.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Silence after which the engine's own counters are read, and how often.
const CLOSER_AFTER: Nanos = Nanos::from_secs(1);
/// How long a page counts as current: it is read once a second, and may take [`PAGE_WITHIN`].
const PAGE_COUNTS_FOR: Nanos = Nanos::from_secs(3);
/// Timeout of a metrics page.
const PAGE_WITHIN: Duration = Duration::from_secs(2);
/// Largest metrics page.
const PAGE_BYTES_MAX: usize = 8 << 20;
/// Timeout of a request for one token, and the pauses before it: the first one, and the longest.
const TOKEN_WITHIN: Duration = Duration::from_secs(5);
const TOKEN_AFTER_MIN: Nanos = Nanos::from_secs(2);
const TOKEN_AFTER_MAX: Nanos = Nanos::from_secs(60);
/// Largest response to a request for one token.
const TOKEN_BYTES_MAX: usize = 64 << 10;

/// Identifies an endpoint of a pool while it is registered.
type Key = (String, EndpointId);

/// The state of an endpoint that is silent or stalled.
struct Watched {
    pool: Arc<ModelPool>,
    endpoint: Arc<PoolEndpoint>,
    /// Its last metrics page.
    page: Option<Page>,
    /// When it was queried last.
    asked: Nanos,
    asking: bool,
    /// When it was found stalled, and the pause until it is asked for a token.
    stalled: Option<Nanos>,
    token_after: Nanos,
}

/// The progress figures of a metrics page.
struct Page {
    progress: u64,
    /// When this page was first and last read.
    since: Nanos,
    read: Nanos,
}

/// An engine's answer.
enum EngineAnswer {
    /// The progress figures of its page; none if there was no page.
    Page(Option<u64>),
    /// Whether it has produced a token.
    Token(bool),
}

/// Watches all endpoints for as long as it is polled; none without connections to query them.
pub async fn watch(fleet: Arc<Fleet>, upstreams: Option<Arc<Connections>>) {
    let Some(upstreams) = upstreams else { return };
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut watched, mut asked) = (HashMap::<Key, Watched>::new(), JoinSet::new());
    loop {
        tokio::select! {
            _ = looks.tick() => {
                note_silent(&fleet, &mut watched);
                let now = fleet.clock.now();
                watched.retain(|key, endpoint| {
                    let goes_on = endpoint.look(&fleet, now);
                    if let Some(question) = goes_on.then(|| endpoint.question(now)).flatten() {
                        let upstreams = Arc::clone(&upstreams);
                        let (key, pool, asked_of) =
                            (key.clone(), Arc::clone(&endpoint.pool), Arc::clone(&endpoint.endpoint));
                        asked.spawn(async move { (key, question.ask(&upstreams, &pool, &asked_of).await) });
                    }
                    goes_on
                });
            }
            Some(Ok((key, said))) = asked.join_next() => {
                if let Some(endpoint) = watched.get_mut(&key) {
                    endpoint.hear(fleet.clock.now(), said);
                }
            }
        }
    }
}

/// Starts to watch endpoints that have been silent for long enough.
fn note_silent(fleet: &Fleet, watched: &mut HashMap<Key, Watched>) {
    let now = fleet.clock.now();
    for pool in &fleet.snapshot().pools {
        for endpoint in pool.endpoints() {
            // A service outside the fleet has no page, and a request for one token costs money.
            if endpoint.worker.provider.is_some() {
                continue;
            }
            if endpoint.vitals.is_idle() || now - endpoint.vitals.heard() < CLOSER_AFTER {
                continue;
            }
            watched.entry((pool.model.clone(), endpoint.id)).or_insert_with(|| Watched {
                pool: Arc::clone(pool),
                endpoint,
                page: None,
                asked: Nanos::ZERO,
                asking: false,
                stalled: None,
                token_after: TOKEN_AFTER_MIN,
            });
        }
    }
}

// === impl Watched ===

impl Watched {
    /// Whether it has to be checked again.
    fn look(&mut self, fleet: &Fleet, now: Nanos) -> bool {
        let vitals = &self.endpoint.vitals;
        if let Some(told) = self.endpoint.feed.as_ref().and_then(|feed| feed.last_batch()) {
            vitals.hear(told);
        }
        let silent = now - vitals.heard();
        if let Some(since) = self.stalled {
            if self.pool.endpoint(self.endpoint.id).is_none() {
                return false;
            }
            if vitals.heard() > since {
                self.set_stalled(fleet, now, None);
            }
            return self.stalled.is_some();
        }
        if vitals.is_idle() || silent < CLOSER_AFTER {
            return false;
        }
        let expected = self.pool.router.read(|scheduler| scheduler.expected(self.endpoint.id));
        let (counters, still) = match &self.page {
            // A first reading is needed while the silence is short, to compare later ones with.
            Some(page) if now - page.read < PAGE_COUNTS_FOR => {
                (Counters::Still, silent.min(page.read - page.since + CLOSER_AFTER))
            }
            _ => (Counters::Absent, silent),
        };
        let patience = expected.and_then(|expected| expected.patience(counters));
        if patience.is_some_and(|patience| still >= patience) {
            self.set_stalled(fleet, now, Some(silent));
        }
        true
    }

    fn set_stalled(&mut self, fleet: &Fleet, now: Nanos, silent: Option<Nanos>) {
        let (endpoint, worker, stalled) = (self.endpoint.id, &*self.endpoint.name, silent.is_some());
        self.stalled = stalled.then_some(now);
        self.endpoint.vitals.set_stalled(stalled);
        self.pool.step(Input::Stalled { endpoint, stalled });
        fleet.metrics.faults.note_stalled(worker, stalled);
        let model = &*self.pool.model;
        match silent {
            Some(silent) => tracing::warn!(
                worker,
                model,
                silent_s = silent.as_secs_f64(),
                "worker stalled: its engine makes no progress with requests in flight; no requests are placed on it \
                 until it does. Check the engine's log, or restart it"
            ),
            None => tracing::info!(worker, model, "worker recovered from a stall"),
        }
    }

    /// The query that is due, if any.
    fn question(&mut self, now: Nanos) -> Option<Question> {
        if self.asking {
            return None;
        }
        let question = match self.stalled {
            Some(_) if now - self.asked >= self.token_after => {
                self.token_after = (self.token_after + self.token_after).min(TOKEN_AFTER_MAX);
                Question::Token
            }
            None if now - self.asked >= CLOSER_AFTER => Question::Page,
            _ => return None,
        };
        (self.asked, self.asking) = (now, true);
        Some(question)
    }

    /// Processes its answer.
    fn hear(&mut self, now: Nanos, said: EngineAnswer) {
        self.asking = false;
        match said {
            EngineAnswer::Page(None) | EngineAnswer::Token(false) => {}
            EngineAnswer::Token(true) => self.endpoint.vitals.hear(now),
            EngineAnswer::Page(Some(progress)) => match &mut self.page {
                Some(page) if page.progress == progress => page.read = now,
                before => {
                    if before.is_some() {
                        self.endpoint.vitals.hear(now);
                    }
                    *before = Some(Page { progress, since: now, read: now });
                }
            },
        }
    }
}

/// A query to an engine.
enum Question {
    Page,
    Token,
}

// === impl Question ===

impl Question {
    async fn ask(
        self,
        upstreams: &Arc<Connections>,
        pool: &ModelPool,
        endpoint: &PoolEndpoint,
    ) -> EngineAnswer {
        let worker = &endpoint.worker;
        match self {
            Self::Page => {
                let (method, nothing) = (&Method::GET, &Bytes::new());
                let page = ask(
                    upstreams,
                    &worker.upstream,
                    method,
                    "/metrics",
                    nothing,
                    PAGE_WITHIN,
                    PAGE_BYTES_MAX,
                )
                .await;
                let Ok((StatusCode::OK, page)) = page else { return EngineAnswer::Page(None) };
                let by_rank = progress(std::str::from_utf8(&page).unwrap_or_default());
                EngineAnswer::Page(by_rank.get(&endpoint.number.unwrap_or(0)).copied())
            }
            Self::Token => {
                let model = worker
                    .state()
                    .names
                    .iter()
                    .find(|name| name.base == pool.model)
                    .map(|name| name.name.clone());
                let body =
                    serde_json::json!({"model": model, "prompt": "0", "max_tokens": 1, "stream": false});
                let answer = ask(
                    upstreams,
                    &worker.upstream,
                    &Method::POST,
                    "/v1/completions",
                    &body.to_string().into(),
                    TOKEN_WITHIN,
                    TOKEN_BYTES_MAX,
                )
                .await;
                EngineAnswer::Token(matches!(answer, Ok((StatusCode::OK, _))))
            }
        }
    }
}
