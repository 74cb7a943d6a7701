//! A panic only costs the work in progress: a connection, or the state of one feed.
//!
//! The fault is in the log here: a subscriber that panics at certain lines stands for a bug in the code around them.
//! A process has one subscriber, so these tests have a program of their own.

use std::fmt::{Debug, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvlane_core::cache_accuracy::Feed;
use kvlane_fleet::panics;
use kvlane_gateway::testing::{
    CachingEngine, FakeEngine, TestGateway, caching_config, caching_gateway, chat, config, eventually,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Panics at log lines with this text, a number of times.
struct Breaks {
    /// The text, in the message or the fields.
    at: &'static str,
    times: AtomicUsize,
}

/// An engine rejected an attempt: logged on the request's relay thread, in the middle of the request.
static REQUEST: Breaks = Breaks { at: "attempt failed", times: AtomicUsize::new(0) };
/// A feed is trusted: logged by the task that applies it.
static FEED: Breaks = Breaks { at: "to=\"live\"", times: AtomicUsize::new(0) };

struct Broken;

#[derive(Default)]
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, "{field}={value:?} ");
    }
}

impl Subscriber for Broken {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("kvlane")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        for breaks in [&REQUEST, &FEED] {
            let left = |times: usize| times.checked_sub(1);
            if line.0.contains(breaks.at)
                && breaks.times.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok()
            {
                panic!("a mistake in the code");
            }
        }
    }
}

/// Installs the subscriber, once per process.
fn break_the_log() {
    static SET: OnceLock<()> = OnceLock::new();
    SET.get_or_init(|| {
        tracing::subscriber::set_global_default(Broken).expect("the first one");
        panics::watch();
    });
}

async fn counted(gateway: &TestGateway, thread: &str) -> f64 {
    gateway.metric(&format!(r#"kvlane_panics_total{{thread="{thread}"}}"#)).await.expect("a metric")
}

/// Invariant: A panic ends the connection or task it happens in; one in the middle of a change to the decision core
/// ends the process.
///
/// Also held by `a_feed_whose_task_panics_is_not_trusted_until_a_full_replay`,
/// `a_panic_in_the_middle_of_a_change_ends_the_process`, `a_panic_unwinds_in_every_profile`.
#[tokio::test]
async fn a_panic_in_a_request_costs_its_connection_only() {
    break_the_log();
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    // One relay thread, so that the other stream would end if the thread did.
    config.server.relay_threads = 1;
    config.retry.max_total_retries = 0;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let before = counted(&gateway, "relay").await;

    let mut next = gateway.begin(chat("m", "a long answer")).await;
    let call = engine.call().await;

    REQUEST.times.store(1, Ordering::Relaxed);
    let mut client = gateway.begin(chat("m", "hi")).await;
    engine.call().await.reset();
    client.closed().await;
    eventually("it panicked", || REQUEST.times.load(Ordering::Relaxed) == 0).await;

    call.answer(200, "{}").await;
    assert_eq!(next.reply().await.status, 200, "the other stream goes on");
    gateway.ledger_is_zero().await;
    let mut client = gateway.begin(chat("m", "hi")).await;
    let (reply, _) = tokio::join!(client.reply(), engine.answer("{}"));
    assert_eq!(reply.status, 200, "new requests are served");
    assert_eq!(counted(&gateway, "relay").await, before + 1.0);
    gateway.end().await;
}

#[tokio::test]
async fn a_feed_whose_task_panics_is_not_trusted_until_a_full_replay() {
    break_the_log();
    let mut a = CachingEngine::start().await;
    FEED.times.store(1, Ordering::Relaxed);
    let (gateway, endpoints) = caching_gateway(caching_config(), &[&a]).await;
    a.publish(1, 5);
    eventually("it panicked", || {
        let seen = endpoints[0].seen();
        seen.state == Feed::Syncing
            && seen.problem.is_some_and(|problem| problem.contains("resyncing the feed"))
    })
    .await;
    eventually("it is subscribed again", || a.feed.subscriptions() == 2).await;
    endpoints[0].is_right(&a).await;
    assert_eq!(counted(&gateway, "apply").await, 1.0);
    gateway.end().await;
}
