//! Where a decode engine finds the blocks of a prefill leg, for connectors whose second leg must say so.
//!
//! SGLang: at the worker's bootstrap port. Mooncake: there too, by an engine id that its bootstrap server tells. NIXL
//! that pushes: as the answer to an earlier first leg says; until there was one, legs are sent in turn.

use std::sync::Arc;
use std::time::Duration;

use kvlane_fleet::worker::Worker;
use kvlane_http::client::Client;
use kvlane_http::connections::{Connections, ConnectionsConfig};
use kvlane_http::upstream::{Upstream, UpstreamId};
use kvlane_wire::disaggregation::{
    BOOTSTRAP_PORT, Connector, ENGINES_PATH, Source, SourceOf, bootstrap_url, engine_ids, transfer_params,
};

use crate::attempt_error::TransferError;
use crate::lease::Lease;

/// Longest wait for a bootstrap server: it answers from memory.
const BOOTSTRAP_TIMEOUT: Duration = Duration::from_secs(2);

/// Where the blocks of a prefill leg will be.
pub(super) struct Found {
    pub(super) source: Source<'static>,
    /// The data-parallel rank to which the first leg must go, where the leg's endpoint is all of them.
    pub(super) rank: Option<u32>,
}

/// Where the blocks of a prefill leg will be; `None` if only its answer will tell, or nothing needs to be told. `room`
/// chooses among ranks.
pub(super) async fn find(
    leg: &Lease,
    connector: Connector,
    room: u64,
) -> Result<Option<Found>, TransferError> {
    let (worker, rank) = (&*leg.worker, leg.endpoint.number);
    match connector.source() {
        SourceOf::Worker => Ok(Some(Found { source: bootstrap(worker), rank: None })),
        SourceOf::EarlierAnswer => {
            let known = worker.kv_sources.steady(rank.unwrap_or(0));
            Ok(known.map(|source| Found { source: (*source).clone(), rank: None }))
        }
        SourceOf::BootstrapServer => match registered(worker, rank, room) {
            Some(found) => Ok(Some(found)),
            None => {
                ask(worker).await.map_err(TransferError::Bootstrap)?;
                let absent = || format!("its bootstrap server has no rank {}", rank.unwrap_or(0));
                registered(worker, rank, room).map(Some).ok_or_else(|| TransferError::Bootstrap(absent()))
            }
        },
        SourceOf::Nothing => Ok(None),
    }
}

/// Learns from the answer to a first leg. Whether the blocks are where the second leg was told that they are.
pub(super) fn learn(leg: &Lease, connector: Connector, told: &Source<'_>, said: &[u8]) -> bool {
    if connector.source() != SourceOf::EarlierAnswer {
        return true;
    }
    let Some(source) = transfer_params(said).ok().and_then(|params| params.source()) else { return true };
    let is_there = source == *told;
    let Source { host, port, engine_id, tp_size, pp_size, dcp_size } = source;
    let (host, engine_id) = (host.into_owned().into(), engine_id.into_owned().into());
    let source = Source { host, port, engine_id, tp_size, pp_size, dcp_size };
    leg.worker.kv_sources.learn(leg.endpoint.number.unwrap_or(0), source);
    is_there
}

fn bootstrap(worker: &Worker) -> Source<'static> {
    Source {
        host: worker.upstream.address.host.clone().into(),
        port: worker.spec.bootstrap_port.unwrap_or(BOOTSTRAP_PORT),
        ..Source::default()
    }
}

/// What a Mooncake bootstrap server has said of a rank, or of one of several if the endpoint is all of them.
fn registered(worker: &Worker, rank: Option<u32>, room: u64) -> Option<Found> {
    let ranks = worker.kv_sources.ranks();
    let among = rank.or_else(|| ranks.get(usize::try_from(room).ok()? % ranks.len().max(1)).copied())?;
    let source = (*worker.kv_sources.get(among)?).clone();
    Some(Found { source, rank: (rank.is_none() && ranks.len() > 1).then_some(among) })
}

/// Asks a worker's Mooncake bootstrap server for the engine ids of its ranks.
async fn ask(worker: &Worker) -> Result<(), String> {
    let place = bootstrap(worker);
    let url = bootstrap_url(&place.host, place.port);
    // On the worker's host, so within the same networks.
    let upstream = Upstream::new(UpstreamId(worker.id.0), &url, None, worker.upstream.allowed().cloned())?;
    let config = ConnectionsConfig { connect_timeout: BOOTSTRAP_TIMEOUT, ..ConnectionsConfig::default() };
    let connections = Connections::new(config, Arc::default());
    let client = Client::new(Arc::new(upstream), connections, BOOTSTRAP_TIMEOUT);
    let of = |problem: String| format!("{url}{ENGINES_PATH}: {problem}");
    let (status, answer) = client.get(ENGINES_PATH).await.map_err(of)?;
    if status != 200 {
        return Err(of(format!("answered {status}")));
    }
    for (rank, engine_id) in engine_ids(&answer).map_err(of)? {
        worker.kv_sources.learn(rank, Source { engine_id: engine_id.into(), ..place.clone() });
    }
    Ok(())
}
