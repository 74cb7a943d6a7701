//! Sends spans to a collector, over HTTP, from its own thread.
//!
//! A failed batch is retried a few times and then dropped, to bound the gateway's memory.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvlane_http::client::Client;
use kvlane_wire::otlp::{self, Resource, Span};
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use kvlane_proxy::Proxy;
use kvlane_proxy::traces::config::{Tracing, collector};

/// Most attempts to send one batch,
const ATTEMPTS: u32 = 3;
/// and the pause before the second; each is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(500);
/// How long shutdown waits for the last spans.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The current collector, and whether it accepted the last batch.
struct Collector {
    endpoint: String,
    path: String,
    client: Client,
}

/// Sends queued spans until `kill`, and then the rest of the queue. Then cancels `done`.
pub async fn export(proxy: Arc<Proxy>, kill: CancellationToken, done: CancellationToken) {
    let Some(mut queue) = proxy.traces.receiver() else { return };
    let mut sender = Sender { proxy, collector: None, works: true };
    let mut batch = Vec::new();
    loop {
        tokio::select! {
            () = gather(&sender.proxy, &mut queue, &mut batch) => {}
            () = kill.cancelled() => break,
        }
        tokio::select! {
            () = sender.send(&mut batch, ATTEMPTS) => {}
            () = kill.cancelled() => break,
        }
    }
    let last = async {
        while let Ok(spans) = queue.try_recv() {
            batch.extend(spans);
        }
        sender.send(&mut batch, 1).await;
    };
    if timeout(LAST_WORDS, last).await.is_err() {
        sender.count("failed", batch.len() as u64);
    }
    done.cancel();
}

/// Waits for spans: for a full batch, or until the interval after the first one has passed.
async fn gather(proxy: &Proxy, queue: &mut Receiver<Vec<Span>>, batch: &mut Vec<Span>) {
    if batch.is_empty() {
        match queue.recv().await {
            Some(spans) => batch.extend(spans),
            None => return std::future::pending().await,
        }
    }
    let Tracing { batch_size, interval, .. } = proxy.settings().tracing.clone();
    let due = Instant::now() + interval;
    while batch.len() < batch_size {
        match timeout_at(due, queue.recv()).await {
            Ok(Some(spans)) => batch.extend(spans),
            Ok(None) | Err(_) => return,
        }
    }
}

struct Sender {
    proxy: Arc<Proxy>,
    collector: Option<Collector>,
    /// Whether the collector accepted the last batch: changes are logged.
    works: bool,
}

// === impl Sender ===

impl Sender {
    /// Sends a batch, with retries, and empties it.
    async fn send(&mut self, batch: &mut Vec<Span>, attempts: u32) {
        if batch.is_empty() {
            return;
        }
        let config = self.proxy.settings().tracing.clone();
        let instance = self.proxy.traces.instance.clone();
        let resource = Resource {
            service_name: &config.service_name,
            service_version: env!("CARGO_PKG_VERSION"),
            service_instance: &instance,
        };
        let body = Bytes::from(otlp::encode(&resource, batch));
        let (mut pause, mut tried) = (PAUSE, 0);
        let sent = loop {
            let sent = self.post(&config, &body).await;
            tried += 1;
            match sent {
                Err(Failed { again: true, .. }) if tried < attempts => {}
                done => break done,
            }
            sleep(pause).await;
            pause *= 2;
        };
        let count = batch.len() as u64;
        batch.clear();
        match sent {
            Ok((0, _)) => self.count("sent", count),
            Ok((rejected, why)) => {
                tracing::warn!(rejected, why, "trace collector rejected some spans");
                self.count("sent", count.saturating_sub(rejected));
                self.count("rejected", rejected.min(count));
            }
            Err(Failed { why, .. }) => {
                self.count("failed", count);
                if std::mem::replace(&mut self.works, false) {
                    tracing::warn!(endpoint = config.endpoint, why, "sending spans failed; spans dropped");
                }
                return;
            }
        }
        if !std::mem::replace(&mut self.works, true) {
            tracing::info!(endpoint = config.endpoint, "sending spans failed; retrying");
        }
    }

    /// One attempt: the number of rejected spans, and why.
    async fn post(&mut self, config: &Tracing, body: &Bytes) -> Result<(u64, String), Failed> {
        let Some(endpoint) = &config.endpoint else {
            return Err(Failed { again: false, why: "trace export was disabled".into() });
        };
        if self.collector.as_ref().is_none_or(|collector| collector.endpoint != *endpoint) {
            self.collector = Some(Collector::at(endpoint, config.timeout)?);
        }
        let Some(Collector { path, client, .. }) = &self.collector else {
            return Err(Failed { again: false, why: "no collector is configured".into() });
        };
        let mut fields = format!("content-type: {}\r\n", otlp::CONTENT_TYPE);
        for (name, secret) in &config.headers {
            let value = secret.read().map_err(|why| Failed { again: true, why })?;
            if http::HeaderValue::from_str(&value).is_err() {
                let why = format!("tracing.headers: the value of '{name}' is not a valid header value");
                return Err(Failed { again: false, why });
            }
            fields += &format!("{name}: {value}\r\n");
        }
        let answered = client.post_with(path, &fields, body).await;
        match answered.map_err(|why| Failed { again: true, why })? {
            (200..300, answer) => Ok(otlp::rejected(&answer)),
            // Retryable statuses (OTLP, "Retryable Response Codes").
            (status, answer) => {
                let why = String::from_utf8_lossy(&answer[..answer.len().min(200)]).into_owned();
                let again = matches!(status, 429 | 502 | 503 | 504);
                Err(Failed { again, why: format!("HTTP status {status}: {why}") })
            }
        }
    }

    fn count(&self, outcome: &'static str, spans: u64) {
        if spans > 0 {
            self.proxy.fleet.metrics.spans.note(outcome, spans);
        }
    }
}

/// Why a batch was not accepted.
struct Failed {
    /// Whether another attempt may succeed.
    again: bool,
    why: String,
}

// === impl Collector ===

impl Collector {
    fn at(endpoint: &str, limit: Duration) -> Result<Self, Failed> {
        let wrong = |why: String| Failed { again: false, why };
        let (base, path) = collector(endpoint).map_err(wrong)?;
        let client = Client::at(&base, limit).map_err(wrong)?;
        Ok(Self { endpoint: endpoint.into(), path, client })
    }
}
