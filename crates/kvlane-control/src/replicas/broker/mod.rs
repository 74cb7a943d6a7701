//! Exchange through a broker: each replica publishes its news at a NATS server, and hears there what the others publish.
//!
//! Core NATS, without streams: a message that is lost is repaired by the next one, as between connected replicas. The client
//! connects again by itself. What is told waits in one outbox for all replicas, and is published only while the connection
//! stands and carries it ([`Pace`]): the latest loads go when it stands again.
//!
//! [`messages`] has subjects and messages, [`hearing`] takes in what arrives, [`snapshot`] asks for snapshots and answers.

mod hearing;
mod messages;
mod snapshot;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Auth, AuthError, Client, ConnectOptions, Event, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use kvlane_fleet::replicas::shown;
use kvlane_http::secret::Secret;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use self::messages::{BYTES_MAX, Subjects, pack};
use super::config::Broker;
use super::outbox::{Budget, Taken};
use super::pace::{Pace, flows};
use super::{OpenOutbox, Problem, Shared, jittered};

/// The first and the longest pause before the next attempt to connect.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Timeout of an attempt to connect, and of the answer to a ping.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// How often the broker has to show that it can be reached, and the same while it is not known that it takes all news.
const PING_EVERY: Duration = Duration::from_secs(1);
const PING_BUSY_EVERY: Duration = Duration::from_millis(50);
/// Most messages that wait to be read; those beyond are lost.
const UNREAD_MAX: usize = 1 << 10;

/// What the parts of an exchange through a broker share.
struct Exchange {
    shared: Arc<Shared>,
    client: Client,
    subjects: Subjects,
    link: Arc<Link>,
}

/// The connection to the broker, as its events tell.
struct Link {
    shared: Arc<Shared>,
    /// The broker, as problems and logs name it.
    url: String,
    /// Connections that were opened or lost so far.
    changes: watch::Sender<u64>,
    /// A problem of this outage, or of this connection, was logged.
    is_told: AtomicBool,
    /// The broker refuses something on this connection.
    is_denied: AtomicBool,
}

/// Exchanges news through the broker for as long as it is polled.
pub(super) async fn exchange(shared: Arc<Shared>) {
    let broker = match shared.config.broker() {
        Ok(Some(broker)) => broker,
        Ok(None) => return,
        Err(error) => return tracing::error!(%error, "cannot use the broker of replicas"),
    };
    if !broker.has_tls && !is_loopback(&broker.host) {
        tracing::warn!(
            broker = broker.url,
            "replicas exchange news through the broker without TLS: any host that can publish there is believed; write tls://, or let only replicas reach it"
        );
    }
    let link = Arc::new(Link {
        shared: Arc::clone(&shared),
        url: broker.url.clone(),
        changes: watch::Sender::default(),
        is_told: AtomicBool::new(false),
        is_denied: AtomicBool::new(false),
    });
    // The problem is forgotten when this ends.
    let _known = Problem { shared: &shared, of: broker.url.clone() };
    let client = match options(&shared, &broker, &link).connect(broker.url.as_str()).await {
        Ok(client) => client,
        Err(error) => return tracing::error!(%error, "cannot use the broker of replicas"),
    };
    let subjects = Subjects::new(&shared.config.cluster, shared.own);
    let exchange = Arc::new(Exchange { shared: Arc::clone(&shared), client, subjects, link });
    tokio::join!(exchange.tell(), hearing::hear(&exchange));
}

fn options(shared: &Arc<Shared>, broker: &Broker, link: &Arc<Link>) -> ConnectOptions {
    let (config, link) = (shared.config.clone(), Arc::clone(link));
    let mut options = ConnectOptions::with_auth_callback(move |_| {
        let read = |secret: &Option<Secret>| secret.as_ref().map(Secret::read).transpose();
        let auth = read(&config.broker_password).and_then(|password| {
            let mut auth = Auth::new();
            (auth.username, auth.password) = (config.broker_user.clone(), password);
            auth.token = read(&config.broker_token)?;
            Ok(auth)
        });
        std::future::ready(auth.map_err(AuthError::new))
    })
    .name(format!("kvlane {}", shown(shared.own)))
    .no_echo()
    .retry_on_initial_connect()
    .connection_timeout(ANSWER_WITHIN)
    .subscription_capacity(UNREAD_MAX)
    .require_tls(broker.has_tls)
    .reconnect_delay_callback(|attempts| match attempts {
        0 | 1 => Duration::ZERO,
        more => jittered(PAUSE_FIRST.saturating_mul(1 << more.min(8)).min(PAUSE_MAX)),
    })
    .event_callback(move |event| {
        link.note(&event);
        std::future::ready(())
    });
    if let Some(ca) = &shared.config.ca {
        options = options.add_root_certificates(ca.clone());
    }
    if let (Some(certificate), Some(key)) = (&shared.config.certificate, &shared.config.private_key) {
        options = options.add_client_certificate(certificate.clone(), key.clone());
    }
    options
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

// === impl Link ===

impl Link {
    fn note(&self, event: &Event) {
        let (broker, own) = (&self.url, shown(self.shared.own));
        match event {
            Event::Connected => {
                self.is_denied.store(false, Ordering::Relaxed);
                self.is_told.store(false, Ordering::Relaxed);
                self.shared.fleet.replicas.set_problem(&self.url, None);
                tracing::info!(broker, replica = own, "connected to the broker of replicas");
                self.changes.send_modify(|changes| *changes += 1);
            }
            Event::Disconnected => {
                self.complain("the connection broke");
                self.changes.send_modify(|changes| *changes += 1);
            }
            Event::ServerError(error) => {
                self.is_denied.store(true, Ordering::Relaxed);
                self.complain(&error.to_string());
            }
            Event::ClientError(error) => self.complain(&error.to_string()),
            Event::Closed | Event::Draining | Event::LameDuckMode | Event::SlowConsumer(_) => {}
        }
    }

    /// Keeps why nothing can be told, and logs the first reason.
    fn complain(&self, problem: &str) {
        self.shared.fleet.replicas.set_problem(&self.url, Some(problem.to_owned()));
        if !self.is_told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                broker = self.url,
                problem,
                "cannot exchange news through the broker of replicas; trying again"
            );
        }
    }
}

// === impl Exchange ===

impl Exchange {
    /// Tells news on one connection after another.
    async fn tell(&self) {
        let mut changes = self.link.changes.subscribe();
        loop {
            changes.mark_unchanged();
            let is_connected = self.client.connection_state() == State::Connected;
            let session = async {
                match is_connected {
                    true => self.session().await,
                    false => sleep(PAUSE_MAX).await,
                }
            };
            tokio::select! {
                () = session => {}
                _ = changes.changed() => {}
            }
        }
    }

    /// One connection, until the broker cannot be reached.
    async fn session(&self) {
        let Some(open) = self.shared.open_outbox(self.shared.own) else { return };
        let pace = watch::Sender::new(Pace::default());
        let done = tokio::select! {
            done = self.publish(&open, &pace) => done,
            done = self.ping(&pace) => done,
        };
        if let Err(problem) = done {
            self.link.complain(&problem);
            // The client ends only with this exchange.
            let _ = self.client.force_reconnect().await;
            sleep(PAUSE_MAX).await;
        }
    }

    /// Publishes what is put into the outbox, after a hello to which the others answer with all they have.
    async fn publish(&self, open: &OpenOutbox, pace: &watch::Sender<Pace>) -> Result<(), String> {
        let Self { shared, subjects, .. } = self;
        let OpenOutbox { outbox, .. } = open;
        let mut paced = pace.subscribe();
        let mut budget = Budget::new(shared.config.bandwidth, Instant::now());
        for hello in pack(&shared.hello(), Taken::default(), BYTES_MAX) {
            self.send(subjects.greeting(), hello).await?;
        }
        loop {
            outbox.filled().await;
            budget.wait().await;
            flows(&mut paced).await;
            let room = pace.borrow().room();
            let taken = outbox.take(room.min(budget.marks(Instant::now())));
            if taken == Taken::default() {
                // Marks wait for room.
                sleep(shared.config.interval).await;
                continue;
            }
            let marks = taken.news.iter().flat_map(|news| &news.prompts).map(|(_, marks)| marks.len()).sum();
            pace.send_if_modified(|pace| {
                pace.send(marks);
                false
            });
            for message in pack(&shared.hello(), taken, BYTES_MAX.min(self.client.max_payload())) {
                budget.spend(Instant::now(), message.len());
                self.send(subjects.news(), message).await?;
            }
        }
    }

    /// Publishes, and waits until the connection has taken it.
    async fn send(&self, subject: &str, message: Bytes) -> Result<(), String> {
        self.shared.count("sent", message.len());
        self.client.publish(subject.to_owned(), message).await.map_err(|error| error.to_string())?;
        self.client.flush().await.map_err(|error| error.to_string())
    }

    /// Asks again and again for an answer that comes behind all that was published before; ends when none comes.
    async fn ping(&self, pace: &watch::Sender<Pace>) -> Result<(), String> {
        let (subject, reply) = (self.subjects.ping(), self.subjects.inbox("ping"));
        let mut answers = self.subscribe(&reply).await?;
        loop {
            pace.send_modify(|pace| pace.ask(Instant::now()));
            let asked = self.client.publish_with_reply(subject.to_owned(), reply.clone(), Bytes::new());
            asked.await.map_err(|error| error.to_string())?;
            match timeout(ANSWER_WITHIN, answers.next()).await {
                Ok(Some(_)) => pace.send_modify(|pace| pace.answer(Instant::now())),
                Ok(None) => return Err("the connection broke".into()),
                // It does not answer what it refuses.
                Err(_) if self.link.is_denied.load(Ordering::Relaxed) => {
                    pace.send_modify(|pace| pace.answer(Instant::now()));
                }
                Err(_) => return Err(format!("the answer to a ping took longer than {ANSWER_WITHIN:?}")),
            }
            let is_free = pace.borrow().is_free();
            sleep(if is_free { PING_EVERY } else { PING_BUSY_EVERY }).await;
        }
    }

    async fn subscribe(&self, subject: &str) -> Result<Subscriber, String> {
        self.client.subscribe(subject.to_owned()).await.map_err(|error| error.to_string())
    }
}

/// Whether the broker itself answers, because the subject of the request has no subscriber.
fn is_unheard(answer: &Message) -> bool {
    answer.status == Some(StatusCode::NO_RESPONDERS)
}
