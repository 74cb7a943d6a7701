//! Adapters (LoRA) at engines, as the section `adapters` has them: loads one that too few workers have, or that a request
//! waits for. Where all slots of a worker are taken, an adapter that no request uses is unloaded first.
//!
//! Each worker loads one at a time. What it has loaded is what it lists at `/v1/models`; adapters that the configuration does
//! not name are left alone.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use kvlane_core::adapters::AdapterUse;
use kvlane_core::request::AdapterKey;
use kvlane_fleet::adapters::{AdapterSpec, Adapters};
use kvlane_fleet::metrics::AdapterLabel;
use kvlane_fleet::worker::{ServedName, Worker, WorkerId};
use kvlane_http::client::Client;
use kvlane_wire::engine::{self, AdapterPaths};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::Controller;

/// Bytes of an engine's error that are logged.
const ERROR_BYTES_MAX: usize = 500;

/// A worker at which adapters can be loaded.
#[derive(Debug)]
struct Host {
    id: WorkerId,
    /// The base models that it lists.
    bases: Vec<String>,
    /// The adapters that it lists.
    loaded: BTreeMap<String, AdapterUse>,
    /// Adapters that it can have loaded at once.
    slots: usize,
}

/// The changes in progress, and loads that have failed.
#[derive(Default)]
struct Tries {
    /// What each of these workers loads.
    loading: HashMap<WorkerId, String>,
    /// Until when a load is not tried again.
    failed: HashMap<(WorkerId, String), Instant>,
}

/// A load at a worker, and what is unloaded there before it.
#[derive(Debug, PartialEq, Eq)]
struct Change {
    at: WorkerId,
    name: String,
    unload: Option<String>,
}

// === impl Controller ===

impl Controller {
    /// Loads and unloads adapters until the gateway stops.
    pub(super) async fn keep_adapters(self: Arc<Self>) {
        let mut reloads = self.fleet.reloads.watch();
        let mut tries = Tries::default();
        let mut running = JoinSet::new();
        loop {
            while let Some(change) = self.next_change(&tries) {
                tries.loading.insert(change.at, change.name.clone());
                let controller = Arc::clone(&self);
                running.spawn(async move { (controller.carry_out(&change).await, change) });
            }
            let again = tries.failed.values().min().copied();
            tokio::select! {
                Some(done) = running.join_next() => match done {
                    Ok((is_loaded, Change { at, name, .. })) => {
                        tries.loading.remove(&at);
                        let until = Instant::now() + self.fleet.settings().adapters.retry_after;
                        if !is_loaded {
                            tries.failed.insert((at, name), until);
                        }
                    }
                    // The task that does this is started again.
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                },
                () = self.fleet.empty_pools.moved() => {}
                Ok(()) = reloads.changed() => tries.failed.clear(),
                () = sleep_until(again.unwrap_or_else(Instant::now)), if again.is_some() => {
                    let now = Instant::now();
                    tries.failed.retain(|_, until| *until > now);
                }
                () = self.tasks.stop.cancelled() => return,
            }
        }
    }

    fn next_change(&self, tries: &Tries) -> Option<Change> {
        let settings = self.fleet.settings();
        if settings.adapters.names.is_empty() {
            return None;
        }
        let hosts: Vec<_> = self.workers().iter().filter_map(|worker| self.host(worker)).collect();
        next(&settings.adapters, &hosts, tries, |name| self.fleet.empty_pools.is_awaited(name))
    }

    /// A worker as one that can load adapters, if it takes requests and its engine can load them.
    fn host(&self, worker: &Worker) -> Option<Host> {
        // Of a worker whose model is configured, the list of models is not used.
        if worker.model.is_some() || paths_of(worker).is_none() {
            return None;
        }
        let names = {
            let state = worker.state();
            let takes_requests = state.healthy && !state.draining && !state.leaving;
            takes_requests.then(|| Arc::clone(&state.names))?
        };
        let endpoints = self.endpoints_of(worker.id);
        let slots = endpoints.iter().filter_map(|(pool, endpoint)| {
            pool.router.read(|scheduler| scheduler.adapter_slots(endpoint.id)).map(|slots| slots as usize)
        });
        let (adapters, bases): (Vec<_>, Vec<_>) = names.iter().partition(|served| is_adapter(served));
        let mut bases: Vec<_> = bases.into_iter().map(|served| served.base.clone()).collect();
        bases.dedup();
        let loaded =
            adapters.into_iter().map(|served| (served.name.clone(), self.use_of(worker, &served.name)));
        Some(Host {
            id: worker.id,
            bases,
            slots: slots.min().unwrap_or(usize::MAX),
            loaded: loaded.collect(),
        })
    }

    /// How the requests in flight at a worker use an adapter.
    fn use_of(&self, worker: &Worker, adapter: &str) -> AdapterUse {
        let key = AdapterKey::named(adapter.as_bytes());
        let mut all = AdapterUse::default();
        for (pool, endpoint) in self.endpoints_of(worker.id) {
            let AdapterUse { users, used } =
                pool.router.read(|scheduler| scheduler.adapter_use(endpoint.id, key));
            all = AdapterUse { users: all.users + users, used: all.used.max(used) };
        }
        all
    }

    /// Returns whether the worker has the adapter loaded now.
    async fn carry_out(&self, change: &Change) -> bool {
        let Some(worker) = self.fleet.workers().get(&change.at).cloned() else { return false };
        let path = self.fleet.settings().adapters.names.get(&change.name).map(|spec| spec.path.clone());
        let (Some(path), Some(paths)) = (path, paths_of(&worker)) else { return false };
        if let Some(unloaded) = &change.unload {
            self.unload(&worker, paths, unloaded).await;
        }
        let (url, adapter) = (&*worker.url, &*change.name);
        let asked = self.ask_for(&worker, paths.load, json!({"lora_name": adapter, "lora_path": path})).await;
        // An engine that has it loaded already refuses to load it.
        let listed = self.list_again(&worker).await;
        let lists = || worker.state().names.iter().any(|served| served.name == adapter && is_adapter(served));
        let error = match (asked, listed) {
            (_, Ok(())) if lists() => {
                tracing::info!(worker = url, adapter, path, "adapter loaded");
                self.count_change("loaded");
                return true;
            }
            (Ok((404, said)), _) => format!("{} answered 404 ({said}); {}", paths.load, paths.needs),
            (Ok((status, said)), Ok(())) => format!("{} answered {status} ({said})", paths.load),
            (_, Err(error)) | (Err(error), _) => error,
        };
        tracing::warn!(
            worker = url,
            adapter,
            path,
            error,
            "adapter load failed; another worker is asked at once, this one again after adapters.retry_after"
        );
        self.count_change("failed");
        false
    }

    /// Unloads an adapter that no request uses. Requests that come for it are placed elsewhere, or wait for a load.
    async fn unload(&self, worker: &Arc<Worker>, paths: &AdapterPaths, adapter: &str) {
        let others = worker.state().names.iter().filter(|served| served.name != adapter).cloned().collect();
        self.serve_names(worker, others).await;
        let url = &*worker.url;
        if self.use_of(worker, adapter).users == 0 {
            match self.ask_for(worker, paths.unload, json!({"lora_name": adapter})).await {
                Ok((200..=299, _)) => {
                    tracing::info!(worker = url, adapter, "adapter unloaded");
                    self.count_change("unloaded");
                }
                Ok((status, said)) => {
                    tracing::warn!(
                        worker = url,
                        adapter,
                        status,
                        said,
                        "adapter unload was refused by the engine"
                    );
                }
                Err(error) => tracing::warn!(worker = url, adapter, error, "adapter unload failed"),
            }
        }
    }

    /// Status and beginning of the answer.
    async fn ask_for(&self, worker: &Worker, path: &str, body: Value) -> Result<(u16, String), String> {
        let limit = self.fleet.settings().adapters.load_timeout;
        let client = Client::new(Arc::clone(&worker.upstream), Arc::clone(&self.upstreams), limit);
        let (status, said) = client.post(path, &Bytes::from(body.to_string())).await?;
        Ok((status, String::from_utf8_lossy(&said[..said.len().min(ERROR_BYTES_MAX)]).into_owned()))
    }

    /// Reads which names a worker serves.
    async fn list_again(&self, worker: &Arc<Worker>) -> Result<(), String> {
        let names = self.names(worker).await?;
        self.serve_names(worker, names).await;
        Ok(())
    }

    async fn serve_names(&self, worker: &Arc<Worker>, names: Vec<ServedName>) {
        {
            let turn = self.turn();
            let (leaving, ranks) = {
                let state = worker.state();
                (state.leaving, state.ranks.clone())
            };
            if !leaving {
                self.register(worker, names, ranks, &turn);
            }
        }
        self.list_names().await;
    }

    fn count_change(&self, outcome: &'static str) {
        self.fleet.metrics.workers.adapter_changes.get_or_create(&AdapterLabel { outcome }).inc();
    }
}

fn is_adapter(served: &ServedName) -> bool {
    !served.card["parent"].is_null()
}

/// How the engine of a worker loads adapters, if it can.
fn paths_of(worker: &Worker) -> Option<&'static AdapterPaths> {
    if worker.provider.is_some() {
        return None;
    }
    let state = worker.state();
    let base = state.names.iter().find(|served| !is_adapter(served))?;
    engine::of_card(&base.card).unwrap_or(engine::ASSUMED).adapter_paths.as_ref()
}

/// The next load: of an adapter that a request waits for and no worker has, or that fewer workers have than are wanted.
fn next(
    adapters: &Adapters,
    hosts: &[Host],
    tries: &Tries,
    is_awaited: impl Fn(&str) -> bool,
) -> Option<Change> {
    let holders = |name: &str| {
        let has = |host: &&Host| {
            host.loaded.contains_key(name) || tries.loading.get(&host.id).is_some_and(|other| other == name)
        };
        hosts.iter().filter(has).count()
    };
    let mut wanted: Vec<_> =
        adapters.names.iter().map(|(name, spec)| (!is_awaited(name), name, spec)).collect();
    wanted.sort_unstable_by_key(|(is_not_awaited, ..)| *is_not_awaited);
    wanted.into_iter().find_map(|(is_not_awaited, name, spec)| {
        let copies = (spec.copies as usize).max(usize::from(!is_not_awaited));
        if holders(name) >= copies {
            return None;
        }
        let fits = |host: &&Host| {
            !host.loaded.contains_key(name)
                && !tries.loading.contains_key(&host.id)
                && !tries.failed.contains_key(&(host.id, name.clone()))
                && is_base_at(host, hosts, spec)
        };
        let spare = |host: &Host| {
            let may_go = |(other, used): &(&String, &AdapterUse)| {
                let spec = adapters.names.get(*other);
                used.users == 0
                    && spec.is_some_and(|spec| holders(other) > spec.copies as usize)
                    && !is_awaited(other)
            };
            let idle = host.loaded.iter().filter(may_go).min_by_key(|(_, used)| used.used);
            idle.map(|(name, _)| name.clone())
        };
        let choice = hosts.iter().filter(fits).map(|host| {
            let is_full = host.loaded.len() >= host.slots;
            let unload = if is_full { spare(host) } else { None };
            // A load where nothing can be unloaded evicts what the engine chooses.
            ((is_full && unload.is_none(), is_full, host.loaded.len(), host.id), unload)
        });
        let ((.., at), unload) = choice.min_by_key(|(rank, _)| *rank)?;
        Some(Change { at, name: name.clone(), unload })
    })
}

/// Whether a worker serves the base model of an adapter: the one that the adapter names, or the only one of all workers.
fn is_base_at(host: &Host, hosts: &[Host], spec: &AdapterSpec) -> bool {
    match &spec.model {
        Some(model) => host.bases.contains(model),
        None => host.bases.len() == 1 && hosts.iter().all(|other| other.bases == host.bases),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn adapters(names: &[(&str, u32)]) -> Adapters {
        let spec = |copies| AdapterSpec { path: "/a".into(), model: None, copies };
        let names = names.iter().map(|(name, copies)| ((*name).to_owned(), spec(*copies))).collect();
        Adapters { names, ..Adapters::default() }
    }

    /// A worker with two slots that has these loaded, with the requests that use each; the later ones were used later.
    fn host(id: u64, loaded: &[(&str, u32)]) -> Host {
        let used = |(at, (name, users)): (usize, &(&str, u32))| {
            ((*name).to_owned(), AdapterUse { users: *users, used: at as u64 + 1 })
        };
        let loaded = loaded.iter().enumerate().map(used).collect();
        Host { id: WorkerId(id), bases: vec!["m".into()], loaded, slots: 2 }
    }

    fn change(at: u64, name: &str, unload: Option<&str>) -> Option<Change> {
        Some(Change { at: WorkerId(at), name: name.into(), unload: unload.map(str::to_owned) })
    }

    fn planned(adapters: &Adapters, hosts: &[Host], awaited: &[&str]) -> Option<Change> {
        next(adapters, hosts, &Tries::default(), |name| awaited.contains(&name))
    }

    #[test]
    fn an_adapter_is_loaded_where_the_fewest_are_until_it_has_its_copies() {
        let wanted = adapters(&[("sql", 2)]);
        let hosts = [host(1, &[("law", 0)]), host(2, &[])];
        assert_eq!(planned(&wanted, &hosts, &[]), change(2, "sql", None));
        let hosts = [host(1, &[("law", 0)]), host(2, &[("sql", 0)])];
        assert_eq!(planned(&wanted, &hosts, &[]), change(1, "sql", None));
        assert_eq!(planned(&wanted, &[host(1, &[("sql", 0)]), host(2, &[("sql", 0)])], &[]), None);
    }

    #[test]
    fn one_without_copies_is_loaded_when_a_request_waits_for_it() {
        let wanted = adapters(&[("law", 1), ("sql", 0)]);
        let hosts = [host(1, &[])];
        assert_eq!(planned(&wanted, &hosts, &[]), change(1, "law", None));
        assert_eq!(
            planned(&wanted, &hosts, &["sql"]),
            change(1, "sql", None),
            "what is waited for comes first"
        );
        assert_eq!(planned(&wanted, &[host(1, &[("law", 0), ("sql", 0)])], &["sql"]), None);
    }

    #[test]
    fn where_all_slots_are_taken_the_one_that_was_used_longest_ago_goes() {
        let wanted = adapters(&[("a", 0), ("b", 0), ("sql", 1)]);
        assert_eq!(planned(&wanted, &[host(1, &[("a", 0), ("b", 0)])], &[]), change(1, "sql", Some("a")));
        assert_eq!(planned(&wanted, &[host(1, &[("a", 1), ("b", 0)])], &[]), change(1, "sql", Some("b")));
        assert_eq!(planned(&wanted, &[host(1, &[("a", 0), ("b", 0)])], &["a"]), change(1, "sql", Some("b")));
        let in_use = [host(1, &[("a", 1), ("b", 2)])];
        assert_eq!(planned(&wanted, &in_use, &[]), change(1, "sql", None), "the engine has to evict one");
        let elsewhere = [host(1, &[("a", 1), ("b", 2)]), host(2, &[("a", 0), ("b", 0)])];
        assert_eq!(planned(&wanted, &elsewhere, &[]), change(2, "sql", Some("a")));
    }

    #[test]
    fn what_is_to_have_copies_or_is_not_configured_is_not_unloaded() {
        let wanted = adapters(&[("a", 1), ("sql", 1)]);
        assert_eq!(planned(&wanted, &[host(1, &[("a", 0), ("own", 0)])], &[]), change(1, "sql", None));
        let twice = [host(1, &[("a", 0), ("own", 0)]), host(2, &[("a", 0), ("own", 0)])];
        assert_eq!(planned(&wanted, &twice, &[]), change(1, "sql", Some("a")), "the other one stays");
    }

    #[test]
    fn a_worker_loads_one_at_a_time_and_a_failure_is_not_repeated_at_once() {
        let wanted = adapters(&[("law", 1), ("sql", 1)]);
        let hosts = [host(1, &[]), host(2, &[])];
        let mut tries = Tries::default();
        tries.loading.insert(WorkerId(1), "law".into());
        let planned = |tries: &Tries| next(&wanted, &hosts, tries, |_| false);
        assert_eq!(planned(&tries), change(2, "sql", None));
        tries.failed.insert((WorkerId(2), "sql".into()), Instant::now() + Duration::from_secs(9));
        assert_eq!(planned(&tries), None);
        tries.loading.clear();
        assert_eq!(planned(&tries), change(1, "law", None));
        tries.loading.insert(WorkerId(2), "law".into());
        assert_eq!(planned(&tries), change(1, "sql", None));
    }

    #[test]
    fn an_adapter_is_loaded_at_workers_of_its_base_model() {
        let mut wanted = adapters(&[("sql", 1)]);
        let other = Host { bases: vec!["n".into()], ..host(1, &[]) };
        assert_eq!(
            planned(&wanted, &[host(2, &[]), Host { id: WorkerId(3), ..host(2, &[]) }], &[]),
            change(2, "sql", None)
        );
        let hosts = [other, host(2, &[])];
        assert_eq!(planned(&wanted, &hosts, &[]), None, "there are two base models, and it names none");
        wanted.names.get_mut("sql").expect("it").model = Some("m".into());
        assert_eq!(planned(&wanted, &hosts, &[]), change(2, "sql", None));
    }
}
