//! Snapshots through a broker: a replica that has started asks an older one, which answers with the marks of all prompts, in
//! messages to the inbox that the request names. A hello alone is the last one; an empty message declines.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::{Message, Subject};
use bytes::Bytes;
use futures_util::StreamExt as _;
use kvlane_fleet::replicas::shown;
use kvlane_wire::replica::Hello;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::super::dial::{self, keep_marks};
use super::super::listen::{Resolver, pieces};
use super::super::outbox::{Budget, Taken};
use super::super::stream::{Ended, STEP_WITHIN};
use super::messages::{BYTES_MAX, opened, pack, read};
use super::{Exchange, is_unheard};

/// Most snapshots that are sent at a time; further requests are declined.
const ANSWERS_MAX: usize = 4;
/// How often it is looked whether a replica still lives.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The number of the next inbox.
static INBOXES: AtomicU64 = AtomicU64::new(0);

/// Gets a snapshot of an older replica, unless this one has one. It ends when the other is not heard any more.
pub(super) async fn warm(exchange: &Exchange, peer: &Hello) {
    let shared = &exchange.shared;
    let gone = async {
        while shared.fleet.replicas.live(shared.fleet.clock.now()).contains(&peer.replica) {
            sleep(LOOK_EVERY).await;
        }
    };
    tokio::select! {
        _ = dial::warm(shared, peer, || fetch(exchange, peer)) => {}
        () = gone => {}
    }
}

/// Takes over a snapshot. Returns its number of marks.
async fn fetch(exchange: &Exchange, peer: &Hello) -> Result<u64, Ended> {
    let Exchange { shared, subjects, client, .. } = exchange;
    let inbox = subjects.inbox(&INBOXES.fetch_add(1, Ordering::Relaxed).to_string());
    let mut answers = exchange.subscribe(&inbox).await.map_err(std::io::Error::other)?;
    for request in pack(&shared.hello(), Taken::default(), BYTES_MAX) {
        let asked = client.publish_with_reply(subjects.snapshot(peer.replica), inbox.clone(), request);
        asked.await.map_err(std::io::Error::other)?;
    }
    let (mut resolver, mut marks) = (Resolver::default(), 0);
    loop {
        let answer = timeout(STEP_WITHIN, answers.next()).await;
        let answer = answer.map_err(|_| Ended::Late("the next part of a snapshot", STEP_WITHIN))?;
        let answer = answer.filter(|answer| !is_unheard(answer)).ok_or(Ended::Closed)?;
        shared.count("received", answer.payload.len());
        let (_, mut frames) = read(answer.payload)?;
        let mut is_last = true;
        while let Some(frame) = frames.frame()? {
            is_last = false;
            marks += keep_marks(shared, &mut resolver, frame);
        }
        if is_last {
            return Ok(marks);
        }
    }
}

/// Answers a request.
pub(super) fn answer(exchange: &Arc<Exchange>, request: Message, answers: &mut JoinSet<()>) {
    let shared = &exchange.shared;
    let Some(inbox) = request.reply.filter(|inbox| exchange.subjects.is_inbox(inbox)) else { return };
    let Some((peer, _)) = opened(shared, request.payload) else { return };
    let declines = shared.fleet.replicas.await_snapshot() || answers.len() >= ANSWERS_MAX;
    let exchange = Arc::clone(exchange);
    answers.spawn(async move {
        let done = match declines {
            true => exchange.send(&inbox, Bytes::new()).await,
            false => snapshot(&exchange, &inbox).await,
        };
        if let Err(problem) = done {
            tracing::info!(replica = shown(peer.replica), problem, "snapshot for a replica ended");
        }
    });
}

/// Sends the marks of all prompts, within the bandwidth for one replica.
async fn snapshot(exchange: &Exchange, inbox: &Subject) -> Result<(), String> {
    let shared = &exchange.shared;
    let mut budget = Budget::new(shared.config.bandwidth, Instant::now());
    for news in pieces(&shared.fleet) {
        let part = Taken { news: vec![news], ..Taken::default() };
        for message in pack(&shared.hello(), part, BYTES_MAX.min(exchange.client.max_payload())) {
            budget.spend(Instant::now(), message.len());
            exchange.send(inbox, message).await?;
            budget.wait().await;
        }
    }
    for last in pack(&shared.hello(), Taken::default(), BYTES_MAX) {
        exchange.send(inbox, last).await?;
    }
    Ok(())
}
