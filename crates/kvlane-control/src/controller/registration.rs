//! Registration: the endpoints of a worker in the pools of its models.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use kvlane_core::scheduler::Input;
use kvlane_fleet::metrics::Reached;
use kvlane_fleet::pool::{ModelPool, PoolEndpoint};
use kvlane_fleet::worker::{Rank, ServedName, Worker};
use kvlane_http::address::Protocol;
use tokio::task::yield_now;

use super::Controller;
use super::names::list_names;

// === impl Controller ===

impl Controller {
    /// Registers each rank of the worker in the pools of the base models among `names`, and in no other pool. The caller
    /// [lists](Self::list_names) those names.
    pub(super) fn register(
        &self,
        worker: &Arc<Worker>,
        names: Vec<ServedName>,
        ranks: Vec<Rank>,
        _turn: &MutexGuard<'_, ()>,
    ) {
        if self.place(worker, names, ranks) {
            self.unlisted.store(true, Ordering::Relaxed);
        }
    }

    /// Lists the names of all workers that have been registered. A list takes time in proportion to the fleet, so workers
    /// that are registered at the same time share one.
    pub(super) async fn list_names(&self) {
        if self.unlisted.load(Ordering::Relaxed) {
            // Others whose answers have come are registered first.
            yield_now().await;
            let turn = self.turn();
            if self.unlisted.load(Ordering::Relaxed) {
                self.publish_names(&turn);
            }
        }
    }

    /// Takes a worker that has left out of all pools. The caller publishes the names.
    pub(super) fn unregister(&self, worker: &Arc<Worker>, _turn: &MutexGuard<'_, ()>) {
        self.place(worker, Vec::new(), Vec::new());
    }

    /// Lists the names under which the workers serve, for clients.
    pub(super) fn publish_names(&self, _turn: &MutexGuard<'_, ()>) {
        self.unlisted.store(false, Ordering::Relaxed);
        let names = |worker: &Arc<Worker>| (worker.id, Arc::clone(&worker.state().names));
        let served: Vec<_> = self.fleet.workers().values().map(names).collect();
        self.fleet.change_snapshot(|snapshot| list_names(snapshot, &served));
    }

    /// Makes the worker's endpoints those of `names` and `ranks`. Returns whether anything has changed.
    fn place(&self, worker: &Arc<Worker>, names: Vec<ServedName>, ranks: Vec<Rank>) -> bool {
        let disaggregation = self.fleet.settings().disaggregation.clone();
        let part = disaggregation.part_of(worker);
        let mut bases: Vec<&str> = match disaggregation.uses(worker.spec.role) {
            true => names.iter().map(|served| served.base.as_str()).collect(),
            // It is shown with its models, and no request goes there.
            false => Vec::new(),
        };
        bases.sort_unstable();
        bases.dedup();
        let before = self.endpoints_of(worker.id);
        {
            let state = worker.state();
            if *state.names == *names && state.ranks == ranks && before.len() == bases.len() * ranks.len() {
                return false;
            }
        }
        let several = ranks.len() > 1;
        let wanted = |(pool, endpoint): &(Arc<ModelPool>, Arc<PoolEndpoint>)| {
            bases.contains(&pool.model.as_str())
                && ranks.contains(&endpoint.rank)
                && endpoint.number.is_some() == several
                && endpoint.feed.is_some() == (endpoint.rank.source.is_some() && bases.len() == 1)
        };
        let (mut endpoints, given_up): (Vec<_>, Vec<_>) = before.into_iter().partition(wanted);
        for (base, rank) in bases.iter().flat_map(|base| ranks.iter().map(move |rank| (*base, rank))) {
            if endpoints.iter().any(|(pool, endpoint)| pool.model == base && endpoint.rank == *rank) {
                continue;
            }
            let pool = self.pool(base, worker);
            // Events do not state to which of several base models they belong.
            let source = rank.source.clone().filter(|_| bases.len() == 1);
            let number = several.then_some(rank.number);
            let feed = source.map(|source| self.ingest.feed(worker, number, source));
            match pool.join(worker, rank.clone(), several, feed, part) {
                Some(endpoint) => {
                    if let Some(feed) = &endpoint.feed {
                        self.ingest.open(feed, &pool, endpoint.id);
                    }
                    endpoints.push((pool, endpoint));
                }
                None => {
                    self.fleet.metrics.limits.reached(Reached::PoolEndpoints);
                    tracing::error!(worker = %worker.url, model = base, "pool is full; endpoint not added")
                }
            }
        }
        {
            let mut state = worker.state();
            (state.names, state.ranks) = (names.into(), ranks);
            // Either may have changed while the endpoints were being registered.
            for (pool, endpoint) in &endpoints {
                let (endpoint, healthy, draining) = (endpoint.id, state.healthy, state.draining);
                pool.step(Input::Health { endpoint, healthy });
                pool.step(Input::Draining { endpoint, draining });
            }
        }
        if !given_up.is_empty() && !endpoints.is_empty() {
            tracing::info!(worker = %worker.url, "re-registering worker: models, ranks or KV event feeds changed");
        }
        for (pool, gone) in given_up {
            if let Some(feed) = &gone.feed {
                feed.close();
            }
            pool.leave(gone.id);
            pool.metrics.engine_reuse.forget(gone.id);
            let elsewhere = || {
                let of_other =
                    |endpoint: &PoolEndpoint| endpoint.worker.id != worker.id && endpoint.name == gone.name;
                self.fleet.snapshot().endpoints().any(|(_, endpoint)| of_other(&endpoint))
            };
            if !endpoints.iter().any(|(_, kept)| kept.number == gone.number) && !elsewhere() {
                self.fleet.metrics.forget_endpoint(&gone.name);
            }
        }
        true
    }

    /// Applies the routing configuration to all pools.
    pub fn configure_pools(&self) {
        // Under the lock a pool that is being opened either uses this configuration already, or is in the table.
        let _turn = self.turn();
        for pool in self.fleet.pools() {
            pool.configure(self.fleet.router_config(&pool.model));
        }
    }

    /// Checks that the other workers of its models speak what this one speaks: a request is sent to any of them.
    ///
    /// # Errors
    /// Which model's workers speak another protocol.
    pub(super) fn check_protocol(
        &self,
        worker: &Worker,
        names: &[ServedName],
        _turn: &MutexGuard<'_, ()>,
    ) -> Result<(), String> {
        let own = worker.upstream.address.protocol;
        let table = self.fleet.snapshot();
        let differs = |pool: &&Arc<ModelPool>| {
            pool.protocol != own && names.iter().any(|served| served.base == pool.model)
        };
        let Some(pool) = table.pools.iter().find(differs) else { return Ok(()) };
        let others = match pool.protocol {
            Protocol::Http => "HTTP, and this one speaks gRPC",
            Protocol::Grpc => "gRPC, and this one speaks HTTP",
        };
        Err(format!(
            "the other workers of the model `{}` speak {others}: give all workers of a model grpc:// addresses, or none",
            pool.model
        ))
    }

    /// The pool of a base model; opened if needed.
    fn pool(&self, base: &str, worker: &Worker) -> Arc<ModelPool> {
        if let Some(pool) = self.fleet.snapshot().pools.iter().find(|pool| pool.model == base) {
            return Arc::clone(pool);
        }
        let pool = self.fleet.new_pool(base).speaking(worker.upstream.address.protocol);
        let pool = Arc::new(match &worker.provider {
            Some(provider) => pool.of_provider(Arc::clone(provider)),
            None => pool,
        });
        tracing::info!(model = base, policy = pool.policy(), "pool created");
        self.fleet.change_snapshot(|snapshot| snapshot.pools.push(Arc::clone(&pool)));
        pool
    }
}

#[cfg(test)]
mod tests {
    use kvlane_fleet::Fleet;
    use kvlane_fleet::clock::Clock;
    use kvlane_fleet::settings::Settings;
    use kvlane_fleet::tokenize::{Tokenizers, Tokens};
    use kvlane_fleet::worker::Origin;
    use kvlane_fleet::worker::config::WorkerSpec;
    use kvlane_http::network::Allowed;
    use serde_json::json;
    use tokio::runtime::Handle;
    use tokio::sync::mpsc;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::controller::Tasks;
    use crate::health::Health;
    use crate::index_snapshot::IndexSnapshot;
    use crate::ingest::Ingest;

    fn controller() -> Arc<Controller> {
        let tokenizers = Tokenizers::start(&Tokens::default(), &Default::default()).expect("threads");
        let (drained, drained_workers) = mpsc::unbounded_channel();
        let clock = Clock::start(1.0);
        let fleet = Arc::new(Fleet::new(Settings::default(), Arc::default(), clock, tokenizers, drained));
        let index = Arc::new(IndexSnapshot::read(None, &clock));
        let ingest = Ingest::new(Arc::clone(&fleet), Handle::current(), vec![Handle::current()]);
        let tasks = Tasks::new(Handle::current(), CancellationToken::new());
        let allowed = Arc::new(Allowed::default());
        Controller::new(fleet, Health::default(), allowed, ingest, index, drained_workers, tasks)
    }

    /// Otherwise the time in which many workers join grows with the square of their number.
    #[tokio::test]
    async fn workers_that_are_registered_at_the_same_time_share_one_list_of_names() {
        let controller = controller();
        let mut joining = Vec::new();
        for n in 1..=20 {
            let id = controller.fleet.next_worker_id();
            let spec = WorkerSpec::new(format!("http://10.0.0.{n}"));
            let worker = Arc::new(Worker::new(id, &spec, Origin::Config, None).expect("a good URL"));
            controller.fleet.workers().insert(id, Arc::clone(&worker));
            let controller = Arc::clone(&controller);
            joining.push(tokio::spawn(async move {
                let names = vec![ServedName { name: "m".into(), base: "m".into(), card: json!({"id": "m"}) }];
                {
                    let turn = controller.turn();
                    controller.register(&worker, names, vec![Rank { number: 0, source: None }], &turn);
                }
                controller.list_names().await;
                Arc::clone(&controller.fleet.snapshot())
            }));
        }
        let mut lists = Vec::new();
        for joined in joining {
            lists.push(joined.await.expect("no panic"));
        }
        let served = lists[0].by_name.get("m").expect("it is listed when the first one goes on");
        assert_eq!((served.pool.endpoints().len(), served.lacking.len()), (20, 0));
        assert!(lists.iter().all(|list| Arc::ptr_eq(list, &lists[0])), "one list for all");
    }
}
