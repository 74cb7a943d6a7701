//! The addresses of replicas: those of the configuration, and all that its host names resolve to, again and again.
//!
//! A name that cannot be resolved replaces nothing, as in discovery of workers by DNS.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use hickory_resolver::TokioResolver;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::config::{Replicas, Seed};
use super::{Problem, Shared};
use crate::discovery::dns::{self, REFRESH};

/// Addresses, each with the name that its certificate is for.
pub(super) type Members = BTreeMap<SocketAddr, Arc<str>>;

/// Publishes the addresses of replicas, whenever they or the configured `peers` change.
pub(super) async fn find(
    shared: Arc<Shared>,
    mut peers: watch::Receiver<Vec<String>>,
    found: Arc<watch::Sender<Members>>,
) {
    let mut known: BTreeMap<Seed, Members> = BTreeMap::new();
    loop {
        let seeds = Replicas::seeds(&peers.borrow_and_update());
        known.retain(|seed, _| seeds.contains(seed));
        let mut resolutions = JoinSet::new();
        let (tell, mut told) = tokio::sync::mpsc::channel(seeds.len().max(1));
        for seed in seeds {
            match seed.address() {
                Some(address) => {
                    let name = seed.host.as_str().into();
                    known.insert(seed, [(address, name)].into());
                }
                None => {
                    let tell = tell.clone();
                    resolutions.spawn(resolve(Arc::clone(&shared), seed, tell));
                }
            }
        }
        drop(tell);
        loop {
            let members: Members =
                known.values().flatten().map(|(at, name)| (*at, Arc::clone(name))).collect();
            found.send_if_modified(|before| {
                let differs = *before != members;
                *before = members;
                differs
            });
            tokio::select! {
                Some((seed, members)) = told.recv() => {
                    known.insert(seed, members);
                }
                changed = peers.changed() => match changed {
                    Ok(()) => break,
                    // The gateway ends.
                    Err(_) => return std::future::pending().await,
                }
            }
        }
    }
}

/// Resolves one name again and again.
async fn resolve(shared: Arc<Shared>, seed: Seed, tell: tokio::sync::mpsc::Sender<(Seed, Members)>) {
    let (mut pause, mut resolver) = (REFRESH.least, None);
    let known = Problem { shared: &shared, of: format!("{}:{}", seed.host, seed.port) };
    loop {
        let resolved = once(&seed, &mut resolver).await;
        pause = REFRESH.after(resolved.as_ref().map(|(_, ttl)| *ttl).map_err(|_| ()), pause);
        match resolved {
            Ok((addresses, _)) => {
                known.set(None);
                let name: Arc<str> = seed.host.trim_end_matches('.').into();
                let members = addresses.into_iter().map(|address| (address, Arc::clone(&name))).collect();
                if tell.send((seed.clone(), members)).await.is_err() {
                    return;
                }
            }
            Err(problem) => {
                if known.set(Some(problem.clone())) {
                    tracing::warn!(
                        problem,
                        "cannot resolve the name of replicas; keeping those that are known"
                    );
                }
            }
        }
        sleep(pause).await;
    }
}

async fn once(seed: &Seed, resolver: &mut Option<TokioResolver>) -> dns::Query {
    let resolver = match resolver {
        Some(resolver) => resolver,
        None => resolver.insert(dns::system()?),
    };
    dns::addresses(&seed.host, seed.port, resolver).await
}
