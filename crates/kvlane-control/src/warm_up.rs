//! Tries a transfer between two engines before requests are split between them, if their first transfer takes longer
//! than later ones because they connect first: 7 s with NIXL, which no client should wait for.
//!
//! An endpoint that decodes is tried with at most `disaggregation.warm_up_pairs` endpoints that prefill, one after the
//! other, because its engine connects to one at a time. Until a pair's turn is over, requests are split elsewhere or
//! served by one engine. A pair that fails stays closed, and is tried again. Pairs beyond the limit are open: their
//! first transfer is a request's, and its price says so.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvlane_core::disaggregation::{Part, WarmUp};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::rng::Rng;
use kvlane_core::scheduler::Input;
use kvlane_core::time::Nanos;
use kvlane_fleet::Fleet;
use kvlane_fleet::clock::unix_time;
use kvlane_fleet::metrics::WarmUpLabel;
use kvlane_fleet::pool::{ModelPool, PoolEndpoint};
use kvlane_http::client::Client;
use kvlane_http::connections::Connections;
use kvlane_wire::disaggregation::{BOOTSTRAP_PORT, Connector};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::pair_check::{NoTransfer, Pair, words_of};

/// How often the endpoints are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Endpoints that are tried at the same time, each with one other.
const AT_ONCE: usize = 64;
/// Pause before a pair that failed is tried again, and the longest: it doubles.
const AGAIN_AFTER: Duration = Duration::from_secs(30);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(600);

/// The warm-ups of a fleet.
struct WarmUps {
    fleet: Arc<Fleet>,
    upstreams: Arc<Connections>,
    /// Limits the endpoints that are tried at the same time.
    turns: Arc<Semaphore>,
    /// By model.
    pools: HashMap<String, Pool>,
    rounds: JoinSet<Round>,
}

/// The warm-ups of a pool.
#[derive(Default)]
struct Pool {
    /// The endpoints that were ready at the last look, each with the number of times it was away before.
    ready: Vec<(EndpointId, Part, u32)>,
    /// When a pair is due again, or a round has ended.
    look_at: Option<Instant>,
    receivers: HashMap<EndpointId, Receiver>,
}

/// An endpoint that decodes.
#[derive(Default)]
struct Receiver {
    /// Whether a round is under way.
    busy: bool,
    tried: HashMap<EndpointId, Tried>,
}

/// The last result of a pair.
#[derive(Clone, Copy, Debug)]
struct Tried {
    /// When it is due again, and the pause before; none if it is warm.
    again: Option<(Instant, Duration)>,
}

/// An endpoint, and the number of times it was away before: between these its engine is one process.
type Presence = (EndpointId, u32);

/// The end of an endpoint's turn.
struct Round {
    model: String,
    to: Presence,
    /// Whether a transfer from each of them has ended.
    tried: Vec<(Presence, bool)>,
}

/// Tries transfers for as long as it is polled.
pub async fn watch(fleet: Arc<Fleet>, upstreams: Option<Arc<Connections>>) {
    let Some(upstreams) = upstreams else { return };
    let mut reloads = fleet.reloads.watch();
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (turns, rounds) = (Arc::new(Semaphore::new(AT_ONCE)), JoinSet::new());
    let mut warm_ups = WarmUps { fleet, upstreams, turns, pools: HashMap::new(), rounds };
    loop {
        let connector = warm_ups.connector();
        if connector.is_none() {
            warm_ups.open_all();
        }
        tokio::select! {
            _ = looks.tick(), if connector.is_some() => {
                if let Some(connector) = connector {
                    warm_ups.look(connector);
                }
            }
            Ok(()) = reloads.changed() => {}
            Some(Ok(round)) = warm_ups.rounds.join_next() => warm_ups.note(&round),
        }
    }
}

// === impl WarmUps ===

impl WarmUps {
    /// The fleet's connector, if pairs are to be warmed up.
    fn connector(&self) -> Option<Connector> {
        let disaggregation = &self.fleet.settings().disaggregation;
        let is_on = disaggregation.warm_up_pairs > 0;
        disaggregation.connector.filter(|connector| is_on && connector.shakes_hands())
    }

    /// Starts what is due.
    fn look(&mut self, connector: Connector) {
        let pools = self.fleet.pools();
        self.pools.retain(|model, _| pools.iter().any(|pool| pool.model == *model));
        let most = self.fleet.settings().disaggregation.warm_up_pairs as usize;
        for pool in pools {
            let known = self.pools.entry(pool.model.clone()).or_default();
            for (to, due) in known.look(&pool, most) {
                let (fleet, upstreams) = (Arc::clone(&self.fleet), Arc::clone(&self.upstreams));
                let (turns, pool) = (Arc::clone(&self.turns), Arc::clone(&pool));
                let turn = Turn { fleet, upstreams, pool, connector };
                self.rounds.spawn(async move { turn.run(&turns, to, due).await });
            }
        }
    }

    /// Forgets all results. Pairs that failed are open again.
    fn open_all(&mut self) {
        for pool in self.fleet.pools() {
            let Some(known) = self.pools.remove(&pool.model) else { continue };
            for (&to, receiver) in &known.receivers {
                let failed = receiver.tried.iter().filter(|(_, tried)| tried.again.is_some());
                failed.for_each(|(&from, _)| pool.step(Input::WarmUp { from, to, warm_up: WarmUp::Skipped }));
            }
        }
        self.pools.clear();
    }

    /// A round has ended.
    fn note(&mut self, round: &Round) {
        let Some(pool) = self.pools.get_mut(&round.model) else { return };
        pool.look_at = Some(Instant::now());
        let is_there = |presence: Presence| pool.ready.iter().any(|(id, _, n)| (*id, *n) == presence);
        if !is_there(round.to) {
            return;
        }
        let Some(receiver) = pool.receivers.get_mut(&round.to.0) else { return };
        receiver.busy = false;
        for &((from, _), is_warm) in round.tried.iter().filter(|(from, _)| is_there(*from)) {
            let before = receiver.tried.get(&from).and_then(|tried| tried.again);
            let pause = before.map_or(AGAIN_AFTER, |(_, pause)| (2 * pause).min(AGAIN_AFTER_MAX));
            let again = (!is_warm).then(|| (Instant::now() + pause, pause));
            receiver.tried.insert(from, Tried { again });
        }
    }
}

// === impl Pool ===

impl Pool {
    /// The endpoints that decode, each with those that a transfer from is due, at most `most`.
    fn look(&mut self, pool: &ModelPool, most: usize) -> Vec<(Presence, Vec<Presence>)> {
        let mut ready: Vec<(EndpointId, Part, u32)> =
            pool.router.read(|scheduler| match scheduler.has_pairs() {
                true => scheduler.pool().eligible().map(|endpoint| (endpoint.id, endpoint.part, 0)).collect(),
                false => Vec::new(),
            });
        for (id, _, absences) in &mut ready {
            *absences = pool.endpoint(*id).map_or(0, |endpoint| endpoint.worker.state().absences);
        }
        let now = Instant::now();
        if ready == self.ready && self.look_at.is_none_or(|at| at > now) {
            return Vec::new();
        }
        // An endpoint that was away may be another process.
        let before: HashSet<Presence> = self.ready.iter().map(|(id, _, n)| (*id, *n)).collect();
        let stayed = ready.iter().filter(|(id, _, absences)| before.contains(&(*id, *absences)));
        let there: HashSet<EndpointId> = stayed.map(|(id, ..)| *id).collect();
        self.receivers.retain(|to, _| there.contains(to));
        for receiver in self.receivers.values_mut() {
            receiver.tried.retain(|from, _| there.contains(from));
        }
        let mut due = Vec::new();
        let receivers = ready.iter().filter(|(_, part, _)| part.may_decode());
        for (at, (to, part, absences)) in receivers.enumerate() {
            let senders = ready.iter().filter(|(from, sender, _)| from != to && sender.can_prefill_for(part));
            let senders: Vec<Presence> = senders.map(|(from, _, absences)| (*from, *absences)).collect();
            let receiver = self.receivers.entry(*to).or_default();
            let (mut chosen, others): (Vec<Presence>, Vec<Presence>) =
                senders.into_iter().partition(|(from, _)| receiver.tried.contains_key(from));
            // Each one starts elsewhere, so that no endpoint is asked by all at once.
            let room = most.saturating_sub(chosen.len()).min(others.len());
            chosen.extend((0..room).map(|n| others[(at + n) % others.len()]));
            let is_due = |(from, _): &Presence| match receiver.tried.get(from) {
                Some(tried) => tried.again.is_some_and(|(again, _)| again <= now),
                None => true,
            };
            let senders: Vec<Presence> = chosen.into_iter().filter(is_due).collect();
            if !receiver.busy && !senders.is_empty() {
                receiver.busy = true;
                due.push(((*to, *absences), senders));
            }
        }
        self.ready = ready;
        let again = self.receivers.values().filter(|receiver| !receiver.busy);
        let again = again.flat_map(|receiver| receiver.tried.values().filter_map(|tried| tried.again));
        self.look_at = again.map(|(at, _)| at).min();
        due
    }
}

/// The turn of an endpoint that decodes.
struct Turn {
    fleet: Arc<Fleet>,
    upstreams: Arc<Connections>,
    pool: Arc<ModelPool>,
    connector: Connector,
}

// === impl Turn ===

impl Turn {
    /// Tries a transfer from each of these endpoints.
    async fn run(self, turns: &Semaphore, to: Presence, due: Vec<Presence>) -> Round {
        let _turn = turns.acquire().await;
        let step = |(from, _): Presence, warm_up| self.pool.step(Input::WarmUp { from, to: to.0, warm_up });
        due.iter().for_each(|&from| step(from, WarmUp::Due));
        let (mut tried, mut longest) = (Vec::new(), Nanos::ZERO);
        for from in due {
            // One that has left has no pairs.
            let (Some(prefill), Some(decode)) = (self.pool.endpoint(from.0), self.pool.endpoint(to.0)) else {
                continue;
            };
            let (warm_up, outcome) = match self.transfer(&prefill, &decode).await {
                Ok((first, next, tokens)) => {
                    longest = longest.max(first);
                    (WarmUp::Ended { first, next, tokens }, "ended")
                }
                Err((lost, error)) => {
                    let (prefill, decode, model) = (&*prefill.name, &*decode.name, &*self.pool.model);
                    if error.is_of_the_pair() {
                        tracing::warn!(
                            prefill, decode, model, %error,
                            "no transfer of KV blocks between two workers: no request is split between them until one \
                             succeeds; `kvlane doctor` shows what is wrong"
                        );
                        (WarmUp::Failed { lost }, "failed")
                    } else {
                        tracing::info!(prefill, decode, model, %error, "no transfer of KV blocks could be tried");
                        (WarmUp::Skipped, "skipped")
                    }
                }
            };
            step(from, warm_up);
            self.fleet.metrics.workers.pair_warm_ups.get_or_create(&WarmUpLabel { outcome }).inc();
            tried.push((from, outcome == "ended"));
        }
        if let Some(decode) = self.pool.endpoint(to.0) {
            let (decode, model, pairs) = (&*decode.name, &*self.pool.model, tried.len());
            let ended = tried.iter().filter(|(_, is_warm)| *is_warm).count();
            let longest_s = longest.as_secs_f64();
            tracing::info!(
                decode,
                model,
                pairs,
                ended,
                longest_s,
                "transfers of KV blocks tried before requests are split"
            );
        }
        Round { model: self.pool.model.clone(), to, tried }
    }

    /// The times of the first transfer and of the next one, and the tokens of that. Or the time that was lost.
    async fn transfer(
        &self,
        from: &PoolEndpoint,
        to: &PoolEndpoint,
    ) -> Result<(Nanos, Nanos, u32), (Nanos, NoTransfer)> {
        let clock = self.fleet.clock;
        let limit = self.fleet.settings().disaggregation.transfer_timeout;
        let client = |endpoint: &PoolEndpoint| {
            let client =
                Client::new(Arc::clone(&endpoint.worker.upstream), Arc::clone(&self.upstreams), limit);
            match endpoint.number {
                Some(rank) => client.at_rank(rank),
                None => client,
            }
        };
        let names = Arc::clone(&from.worker.state().names);
        let name = names.iter().find(|name| name.base == self.pool.model);
        let pair = Pair {
            prefill: &client(from),
            decode: &client(to),
            connector: self.connector,
            bootstrap_port: from.worker.spec.bootstrap_port.unwrap_or(BOOTSTRAP_PORT),
            model: name.map_or(&*self.pool.model, |name| &*name.name),
        };
        let words = words_of(self.pool.router.block_tokens());
        let seed = unix_time().to_bits() ^ ((from.id.slot() as u64) << 32) ^ to.id.slot() as u64;
        let mut rng = Rng::new(seed);
        let mut taken = [Nanos::ZERO; 2];
        let mut tokens = 0;
        for taken in &mut taken {
            let began = clock.now();
            let trial = pair.transfer(words, &mut rng).await;
            let transferred = trial.result.map_err(|error| (clock.now() - began, error))?;
            *taken = clock.at(transferred.decoded) - clock.at(transferred.computed);
            tokens = transferred.tokens;
        }
        Ok((taken[0], taken[1], tokens))
    }
}
