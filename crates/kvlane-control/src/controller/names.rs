//! The names under which workers serve their models.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kvlane_core::endpoint::EndpointId;
use kvlane_wire::models::Model;

use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::snapshot::{Served, Snapshot};
use kvlane_fleet::worker::{ServedName, WorkerId};

/// Lists the names that `workers` serve, and removes pools without endpoints.
pub(super) fn list_names(snapshot: &mut Snapshot, workers: &[(WorkerId, Arc<[ServedName]>)]) {
    snapshot.pools.retain(|pool| pool.router.read(|scheduler| scheduler.pool().endpoints().next().is_some()));
    snapshot.by_name.clear();
    snapshot.cards.clear();
    let Snapshot { pools, by_name, cards } = snapshot;
    let mut holders: HashMap<&str, (&Arc<ModelPool>, HashSet<EndpointId>)> = HashMap::new();
    let mut adapters: HashSet<&str> = HashSet::new();
    for (worker, names) in workers {
        for ServedName { name, base, card } in names.iter() {
            let Some(pool) = pools.iter().find(|pool| pool.model == *base) else { continue };
            let own = pool.endpoints_of(*worker);
            if own.is_empty() {
                continue;
            }
            let (first, endpoints) = holders.entry(name).or_insert_with(|| (pool, HashSet::new()));
            if Arc::ptr_eq(first, pool) {
                endpoints.extend(own);
                if !card["parent"].is_null() {
                    adapters.insert(name);
                }
                // Clients do not see what only the catalogue leads to.
                if pool.provider.is_none() {
                    cards.entry(name.clone()).or_insert_with(|| card.clone());
                }
            }
        }
    }
    for (name, (pool, holders)) in holders {
        let lacking = pool.router.read(|scheduler| {
            let endpoints = scheduler.pool().endpoints().map(|endpoint| endpoint.id);
            endpoints.filter(|endpoint| !holders.contains(endpoint)).collect()
        });
        let adapter = adapters.contains(name).then(|| name.into());
        by_name.insert(name.to_owned(), Arc::new(Served { pool: Arc::clone(pool), lacking, adapter }));
    }
}

/// The names and their base models. A model with a `parent` is an adapter of it; models with the same `root` are one
/// model under several names, and the first name is that of its pool.
pub(super) fn served_names(models: Vec<Model>) -> Result<Vec<ServedName>, String> {
    let mut bases: Vec<(Option<String>, String)> = Vec::new();
    for Model { id, root, .. } in models.iter().filter(|model| model.parent.is_none()) {
        if root.is_none() || !bases.iter().any(|(other, _)| other == root) {
            bases.push((root.clone(), id.clone()));
        }
    }
    let Some((_, first)) = bases.first() else { return Err("GET /v1/models lists no model".into()) };
    let base_of = |model: &Model| match &model.parent {
        Some(parent) => bases.iter().find(|(_, base)| base == parent).map_or(first, |(_, base)| base).clone(),
        None => {
            let same_root = bases.iter().find(|(root, _)| root.is_some() && *root == model.root);
            same_root.map_or_else(|| model.id.clone(), |(_, base)| base.clone())
        }
    };
    let served = |model: Model| ServedName { base: base_of(&model), name: model.id, card: model.card };
    Ok(models.into_iter().map(served).collect())
}

#[cfg(test)]
mod tests {
    use kvlane_core::router::Router;
    use kvlane_fleet::clock::Clock;
    use kvlane_fleet::metrics::Metrics;
    use kvlane_fleet::settings::Settings;
    use kvlane_fleet::tokenize::Counting;
    use kvlane_fleet::worker::config::WorkerSpec;
    use kvlane_fleet::worker::{Origin, Rank, Worker};
    use kvlane_wire::models;
    use serde_json::json;
    use tokio::sync::mpsc;

    use super::*;

    /// A pool with one endpoint, of this worker.
    fn pool_of(model: &str, worker: u32) -> Arc<ModelPool> {
        let router = Router::new(Settings::default().router(model));
        let metrics = Metrics::new().pool(model);
        let (drained, _) = mpsc::unbounded_channel();
        let pool = ModelPool::new(model, router, Counting::Estimate, metrics, Clock::start(1.0), drained);
        let spec = WorkerSpec::new(format!("http://127.0.0.1:{worker}"));
        let worker = Worker::new(WorkerId(worker.into()), &spec, Origin::Config, None).expect("a good URL");
        pool.join(&Arc::new(worker), Rank { number: 0, source: None }, false, None, Default::default())
            .expect("room for one");
        Arc::new(pool)
    }

    #[test]
    fn a_worker_without_an_endpoint_does_not_claim_a_name() {
        let served = |name: &str, base: &str| ServedName {
            name: name.into(),
            base: base.into(),
            card: json!({"id": name}),
        };
        let mut snapshot = Snapshot { pools: vec![pool_of("a", 3), pool_of("b", 2)], ..Snapshot::default() };
        let workers = [
            // Not in the pool yet.
            (WorkerId(1), [served("x", "a")].into()),
            (WorkerId(2), [served("x", "b")].into()),
            (WorkerId(3), [served("y", "a")].into()),
        ];
        list_names(&mut snapshot, &workers);
        let pools = snapshot.by_name.iter().map(|(name, served)| (&**name, &*served.pool.model));
        assert_eq!(pools.collect::<std::collections::BTreeMap<_, _>>(), [("x", "b"), ("y", "a")].into());
    }

    fn bases(body: &str) -> Vec<(String, String)> {
        let names = served_names(models::parse(body.as_bytes()).expect("a list")).expect("models");
        names.into_iter().map(|served| (served.name, served.base)).collect()
    }

    fn pair(name: &str, base: &str) -> (String, String) {
        (name.into(), base.into())
    }

    #[test]
    fn adapters_and_aliases_share_the_pool_of_their_model() {
        let body = r#"{"data":[
            {"id":"llama","root":"/models/llama","parent":null},
            {"id":"llama-alias","root":"/models/llama","parent":null},
            {"id":"sql","root":"/adapters/sql","parent":"llama"},
            {"id":"lost","root":"/adapters/lost","parent":"unknown"}]}"#;
        let expect = [
            pair("llama", "llama"),
            pair("llama-alias", "llama"),
            pair("sql", "llama"),
            pair("lost", "llama"),
        ];
        assert_eq!(bases(body), expect);
    }

    #[test]
    fn models_without_a_common_root_have_pools_of_their_own() {
        let body = r#"{"data":[{"id":"a"},{"id":"b"},{"no":"id"}]}"#;
        assert_eq!(bases(body), [pair("a", "a"), pair("b", "b")]);
    }

    #[test]
    fn a_list_without_models_is_an_error() {
        for body in [r#"{"data":[]}"#, r#"{"data":[{"id":7}]}"#, r#"{"data":[{"id":"a","parent":"b"}]}"#] {
            let models = models::parse(body.as_bytes()).expect("a list");
            assert!(served_names(models).is_err(), "{body}");
        }
    }
}
