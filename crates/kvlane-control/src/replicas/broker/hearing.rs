//! What other replicas publish at a broker.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use async_nats::{Message, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use kvlane_core::replica::ReplicaId;
use kvlane_wire::replica::Hello;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use super::super::Shared;
use super::super::listen::{self, Resolver};
use super::messages::{complain, opened};
use super::{Exchange, PAUSE_MAX, snapshot};

/// Most replicas that are asked for a snapshot, if they are older.
const OLDER_MAX: usize = 256;

/// Hears for as long as it is polled.
pub(super) async fn hear(exchange: &Arc<Exchange>) {
    loop {
        if let Err(problem) = hear_on(exchange).await {
            exchange.link.complain(&problem);
            sleep(PAUSE_MAX).await;
        }
    }
}

async fn hear_on(exchange: &Arc<Exchange>) -> Result<(), String> {
    let Exchange { shared, subjects, .. } = &**exchange;
    let mut news = exchange.subscribe(&subjects.all_news()).await?;
    let mut greetings = exchange.subscribe(subjects.greeting()).await?;
    let mut asked = exchange.subscribe(&subjects.snapshot(shared.own)).await?;
    let (mut resolver, mut older) = (Resolver::default(), Older::default());
    let mut answers = JoinSet::new();
    loop {
        tokio::select! {
            message = next(&mut news) => {
                if let Some(peer) = hear_news(shared, message?.payload, &mut resolver) {
                    older.meet(exchange, peer);
                }
            }
            message = next(&mut greetings) => {
                if opened(shared, message?.payload).is_some() {
                    shared.greeted.store(true, Ordering::Relaxed);
                }
            }
            message = next(&mut asked) => snapshot::answer(exchange, message?, &mut answers),
            Some(_) = answers.join_next() => {}
        }
    }
}

async fn next(messages: &mut Subscriber) -> Result<Message, String> {
    messages.next().await.ok_or_else(|| "the client of the broker has ended".to_owned())
}

/// Takes over one message. Returns its sender.
fn hear_news(shared: &Shared, message: Bytes, resolver: &mut Resolver) -> Option<Hello> {
    shared.count("received", message.len());
    let (peer, mut frames) = opened(shared, message)?;
    let now = shared.fleet.clock.now();
    if !shared.fleet.replicas.live(now).contains(&peer.replica) {
        // It may not have heard everything.
        shared.greeted.store(true, Ordering::Relaxed);
    }
    shared.fleet.replicas.hear(now, peer.replica, None);
    loop {
        match frames.frame() {
            Ok(Some(frame)) => listen::hear(shared, &peer, resolver, frame),
            Ok(None) => return Some(peer),
            Err(problem) => {
                complain(shared, &problem.into());
                return Some(peer);
            }
        }
    }
}

/// Older replicas, which may send a snapshot, for as long as they live.
#[derive(Default)]
struct Older {
    asking: JoinSet<()>,
    known: BTreeMap<ReplicaId, AbortHandle>,
}

impl Older {
    /// A replica was heard.
    fn meet(&mut self, exchange: &Arc<Exchange>, peer: Hello) {
        while self.asking.try_join_next().is_some() {}
        self.known.retain(|_, asks| !asks.is_finished());
        let is_older = peer.age_ms > exchange.shared.hello().age_ms;
        if is_older && !self.known.contains_key(&peer.replica) && self.known.len() < OLDER_MAX {
            let exchange = Arc::clone(exchange);
            let replica = peer.replica;
            let asks = self.asking.spawn(async move { snapshot::warm(&exchange, &peer).await });
            self.known.insert(replica, asks);
        }
    }
}
