//! One pool: who sits where, and who waits for a place.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::request::RequestId;
use kvlane_core::router::Router;
use kvlane_core::scheduler::{Input, Output, Scheduler};
use kvlane_core::time::Nanos;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::{Gateway, ModelPool, Occupant};
use crate::first_tokens::FirstTokens;
use crate::history::Lately;
use crate::ingest::EventFeed;
use crate::worker::{Worker, WorkerId};

// === impl ModelPool ===

impl ModelPool {
    pub(crate) fn new(gateway: &Gateway, model: &str) -> Self {
        let timings = gateway.timings.load();
        let timing = timings.of(model).map(|file| &file.timing);
        let config = gateway.config().router(model, timing);
        let router = Router::new(config);
        gateway.recordings.attach(&router, model);
        Self {
            model: model.into(),
            router,
            counting: gateway.tokenizers.counting(model),
            metrics: gateway.metrics.pool(model),
            first_tokens: FirstTokens::default(),
            lately: Lately::default(),
            seats: ArcSwap::default(),
            waiters: Mutex::default(),
            ticker: Ticker::default(),
            block_sizes: Mutex::default(),
        }
    }

    /// Its policy's name.
    pub fn policy(&self) -> &'static str {
        self.router.read(|scheduler| scheduler.config().policy.name())
    }

    /// Routes as the gateway's configuration says from here on. Callers take turns: the fleet's lock.
    pub(crate) fn configure(&self, gateway: &Gateway) {
        let timings = gateway.timings.load();
        let timing = timings.of(&self.model).map(|file| &file.timing);
        let (before, mut outputs) = (self.policy(), Vec::new());
        let config = gateway.config().router(&self.model, timing);
        self.router.configure(gateway.clock.now(), config, &mut outputs);
        let policy = self.policy();
        if policy != before {
            // Placements are counted by policy.
            let seats = self.seats.load();
            let counted = |occupant: &Arc<Occupant>| {
                let selections = gateway.metrics.selection(&occupant.name, policy);
                let Occupant { endpoint, worker, rank, name, feed, vitals, .. } = &**occupant;
                let (worker, name, vitals) = (Arc::clone(worker), Arc::clone(name), Arc::clone(vitals));
                let (endpoint, rank, feed) = (*endpoint, *rank, feed.clone());
                Arc::new(Occupant { endpoint, worker, rank, name, feed, vitals, selections })
            };
            let seats: Vec<_> = seats.iter().map(|seat| seat.as_ref().map(counted)).collect();
            self.seats.store(Arc::new(seats));
            tracing::info!(model = self.model, from = before, to = policy, "another policy");
        }
        gateway.deliver(self, &mut outputs);
    }

    /// The block size of each endpoint that has told it. They are all the same.
    pub(crate) fn block_sizes(&self) -> MutexGuard<'_, BTreeMap<EndpointId, u32>> {
        self.block_sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a worker a place, or one of its ranks if it has several. Callers take turns: the fleet's lock.
    pub(crate) fn seat(
        &self,
        gateway: &Gateway,
        worker: &Arc<Worker>,
        rank: Option<u32>,
        feed: Option<Arc<EventFeed>>,
    ) -> Option<EndpointId> {
        // Whoever is placed on an endpoint looks for its occupant: so that is there first.
        let endpoint = self.router.read(|scheduler| scheduler.pool().next_id())?;
        let name = worker.seat_name(rank);
        let selections = gateway.metrics.selection(&name, self.policy());
        let mut seats = Vec::clone(&self.seats.load());
        if seats.len() <= endpoint.slot() {
            seats.resize(endpoint.slot() + 1, None);
        }
        let (worker_there, called) = (Arc::clone(worker), Arc::clone(&name));
        let vitals = Arc::default();
        let occupant =
            Occupant { endpoint, worker: worker_there, rank, name: called, feed, vitals, selections };
        seats[endpoint.slot()] = Some(Arc::new(occupant));
        self.seats.store(Arc::new(seats));
        let mut outputs = Vec::new();
        let now = gateway.clock.now();
        let (healthy, draining) = {
            let state = worker.state();
            (state.healthy, state.draining)
        };
        let joined = self.router.join(now, name, healthy, draining, &mut outputs);
        assert_eq!(joined, Some(endpoint), "joins and leaves take turns");
        gateway.deliver(self, &mut outputs);
        Some(endpoint)
    }

    /// Takes a worker's place away. Callers take turns: the fleet's lock.
    pub(crate) fn unseat(&self, gateway: &Gateway, endpoint: EndpointId) {
        let mut outputs = Vec::new();
        self.router.leave(gateway.clock.now(), endpoint, &mut outputs);
        let mut seats = Vec::clone(&self.seats.load());
        seats[endpoint.slot()] = None;
        self.seats.store(Arc::new(seats));
        gateway.deliver(self, &mut outputs);
    }

    /// The endpoints of other ranks than this one, where any endpoint has it: whoever asks for a rank gets one of that
    /// number.
    pub(crate) fn of_other_ranks(&self, rank: u32) -> Vec<EndpointId> {
        let seats = self.seats.load();
        let occupants = || seats.iter().flatten();
        if !occupants().any(|occupant| occupant.rank == Some(rank)) {
            return Vec::new();
        }
        occupants().filter(|other| other.rank != Some(rank)).map(|other| other.endpoint).collect()
    }

    /// All endpoints that are not this worker; none if it has no endpoint here.
    pub(crate) fn endpoints_but(&self, worker: WorkerId) -> Vec<EndpointId> {
        let seats = self.seats.load();
        let occupants = || seats.iter().flatten();
        if !occupants().any(|occupant| occupant.worker.id == worker) {
            return Vec::new();
        }
        occupants().filter(|other| other.worker.id != worker).map(|other| other.endpoint).collect()
    }

    /// All endpoints that are this worker.
    pub(crate) fn endpoints_of(&self, worker: &Worker) -> Vec<EndpointId> {
        let seats = self.seats.load();
        let same = seats.iter().flatten().filter(|occupant| occupant.worker.id == worker.id);
        same.map(|occupant| occupant.endpoint).collect()
    }

    /// Everybody who sits here.
    pub(crate) fn occupants(&self) -> Vec<Arc<Occupant>> {
        self.seats.load().iter().flatten().cloned().collect()
    }

    pub(crate) fn occupant(&self, endpoint: EndpointId) -> Option<Arc<Occupant>> {
        self.seats.load().get(endpoint.slot())?.as_ref().filter(|seat| seat.endpoint == endpoint).cloned()
    }

    pub(super) fn waiters(&self) -> MutexGuard<'_, HashMap<RequestId, oneshot::Sender<Output>>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whose turn it is, of those who wait, to step the scheduler when something is due. One does, whoever has waited longest:
/// ten thousand that wait cost what one costs.
#[derive(Default)]
pub(super) struct Ticker {
    turn: tokio::sync::Mutex<()>,
    /// Somebody has begun to wait: something may be due sooner.
    look: Notify,
}

/// A request that may have to wait. Dropped before its answer, it leaves the queue.
pub(super) struct Waiting<'a> {
    gateway: &'a Arc<Gateway>,
    pool: &'a ModelPool,
    id: RequestId,
    answer: oneshot::Receiver<Output>,
    pub(super) answered: bool,
}

// === impl Waiting ===

impl<'a> Waiting<'a> {
    pub(super) fn new(gateway: &'a Arc<Gateway>, pool: &'a ModelPool, id: RequestId) -> Self {
        let (tell, answer) = oneshot::channel();
        pool.waiters().insert(id, tell);
        Self { gateway, pool, id, answer, answered: false }
    }

    /// Waits for the answer, or for `deadline`. Time passes for the scheduler only when it is stepped, so one of those who
    /// wait sees to it that it is.
    pub(super) async fn wait(&mut self, deadline: Instant) -> Option<Output> {
        let ticker = &self.pool.ticker;
        ticker.look.notify_one();
        let _turn = tokio::select! {
            answer = &mut self.answer => return answer.ok(),
            turn = ticker.turn.lock() => turn,
            () = tokio::time::sleep_until(deadline) => return None,
        };
        loop {
            let due = self.pool.router.read(Scheduler::next_deadline).unwrap_or(Nanos::MAX);
            let now = self.gateway.clock.now();
            // One that should have been dealt with and was not: the clock ticks coarser than the scheduler.
            let span = if due <= now { OVERDUE_TICK } else { Duration::from_nanos((due - now).0) };
            let tick = Instant::now() + span.min(WAIT_TICK);
            tokio::select! {
                answer = &mut self.answer => return answer.ok(),
                () = ticker.look.notified() => {}
                () = tokio::time::sleep_until(tick.min(deadline)) => {
                    if Instant::now() >= deadline {
                        return None;
                    }
                    self.gateway.step(self.pool, Input::Tick);
                }
            }
        }
    }
}

/// How soon the scheduler is stepped again when what was due has not happened.
const OVERDUE_TICK: Duration = Duration::from_millis(10);
/// How often the ticker looks when something is due: an endpoint may have become busy until a time that is sooner.
const WAIT_TICK: Duration = Duration::from_millis(250);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.pool.waiters().remove(&self.id);
        if !self.answered {
            self.gateway.step(self.pool, Input::Finished { request: self.id });
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_core::recording::Recorder;
    use tokio::sync::mpsc;

    use super::*;
    use crate::clock::Clock;
    use crate::config::Config;
    use crate::gateway::Security;
    use crate::timings::Timings;
    use crate::tokenize::Tokenizers;

    #[tokio::test(start_paused = true)]
    async fn a_thousand_that_wait_step_the_scheduler_as_often_as_one() {
        let config = Config::default();
        let tokenizers = Tokenizers::start(&config).expect("threads");
        let security = Security::read(&config).expect("right");
        let (drained, _drained) = mpsc::unbounded_channel();
        let timings = Timings::default();
        let gateway = Gateway::new(config, security, Clock::start(1.0), timings, tokenizers, drained);
        let gateway = Arc::new(gateway);
        let pool = Arc::new(ModelPool::new(&gateway, "m"));
        pool.router.record(Some(Recorder::in_memory()));
        let deadline = Instant::now() + Duration::from_secs(10);
        let waits: Vec<_> = (0..1000)
            .map(|n| {
                let (gateway, pool) = (Arc::clone(&gateway), Arc::clone(&pool));
                tokio::spawn(async move {
                    let mut waiting = Waiting::new(&gateway, &pool, RequestId(n));
                    let answer = waiting.wait(deadline).await;
                    waiting.answered = true;
                    answer.is_some()
                })
            })
            .collect();
        tokio::task::yield_now().await;
        // One of them has its turn: whoever steps the scheduler is another one then.
        let refused = kvlane_core::decision::Refused::at_once(kvlane_core::decision::Rejection::QueueTimeout);
        let mut outputs = vec![Output::Reject { request: RequestId(0), refused }];
        gateway.deliver(&pool, &mut outputs);
        let mut answered = 0;
        for wait in waits {
            answered += usize::from(wait.await.expect("no panic"));
        }
        assert_eq!((answered, Instant::now()), (1, deadline));
        let recording = pool.router.recording();
        let ticks = recording.inputs.iter().filter(|(_, input)| matches!(input, Input::Tick)).count();
        let usual = 10_000 / WAIT_TICK.as_millis() as usize;
        assert!((usual - 1..=usual + 1).contains(&ticks), "{ticks} instead of {usual}");
    }
}
