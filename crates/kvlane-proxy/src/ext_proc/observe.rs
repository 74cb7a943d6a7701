//! The answer of a request, as it passes through the picker.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use kvlane_fleet::metrics::FailureKind;
use kvlane_fleet::pool::PoolEndpoint;
use kvlane_wire::ext_proc::{Head, Received, Value};
use tokio::time::Instant;

use super::destination::{DESTINATION_NAMESPACE, SERVED};
use crate::account::Account;
use crate::attributes::Attributes;
use crate::lease::Lease;
use crate::proxy::Proxy;
use crate::relay::{PieceKind, Watch};
use crate::routed::Routed;

/// An answer that passes through the picker.
pub(super) struct Observer {
    lease: Option<Lease>,
    account: Arc<Account>,
    watch: Watch,
    status: StatusCode,
    attributes: Attributes,
    /// When the last piece arrived.
    last_piece: Instant,
}

/// The endpoint that served a request, if the data plane says so.
fn served<'a>(received: &Received<'a>) -> Option<&'a str> {
    let named =
        received.metadata(DESTINATION_NAMESPACE, SERVED).or_else(|| received.attribute("upstream.address"));
    match named? {
        Value::Text(text) => Some(text),
        Value::List(texts) => texts.first().copied(),
    }
}

// === impl Observer ===

impl Observer {
    /// The answer whose head is `head`. `picked` is the address that was named first.
    pub(super) async fn begin(
        proxy: &Arc<Proxy>,
        routed: &Routed,
        lease: Lease,
        account: &Arc<Account>,
        picked: &str,
        received: &Received<'_>,
        head: &Head<'_>,
    ) -> Self {
        let lease = match served(received) {
            Some(served) if served != picked => moved(proxy, routed, lease, served).await,
            _ => Some(lease),
        };
        let mut headers = HeaderMap::new();
        let mut status = StatusCode::OK;
        for (name, value) in head.fields() {
            if name == b":status" {
                status = StatusCode::from_bytes(value).unwrap_or(StatusCode::OK);
            } else if name == b"content-type"
                && let Ok(value) = HeaderValue::from_bytes(value)
            {
                headers.insert(http::header::CONTENT_TYPE, value);
            }
        }
        account.set_status(status);
        let (account, last_piece) = (Arc::clone(account), Instant::now());
        let watch = Watch::new(&headers, lease.as_ref());
        let attributes = routed.attributes;
        let mut observer = Self { lease, account, watch, status, attributes, last_piece };
        observer.judge();
        if head.is_all {
            observer.end();
        }
        observer
    }

    /// Reports what the status says about the engine.
    fn judge(&mut self) {
        let Some(lease) = &self.lease else { return };
        match self.status {
            // Of a sidecar it cannot be told which engine it speaks of.
            status
                if lease.is_split()
                    && (status.is_server_error()
                        || matches!(status, StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS)) =>
            {
                lease.transfer_failed();
                self.lease = None;
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                lease.busy(None);
                self.lease = None;
            }
            StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => {
                lease.failed(FailureKind::status);
                self.lease = None;
            }
            _ => {}
        }
    }

    /// The header fields that say where the request was placed.
    pub(super) fn marks(&self) -> Vec<(HeaderName, HeaderValue)> {
        let mut headers = HeaderMap::new();
        if let Some(lease) = &self.lease {
            crate::placement_headers::mark(&mut headers, lease, &self.attributes);
        }
        self.account.mark(&mut headers);
        headers.into_iter().filter_map(|(name, value)| Some((name?, value))).collect()
    }

    /// A piece of the body.
    pub(super) fn piece(&mut self, piece: &Bytes, is_last: bool) {
        self.last_piece = Instant::now();
        if let Some(lease) = &mut self.lease {
            match self.watch.see(piece) {
                PieceKind::Tokens(tokens) => lease.progress(self.last_piece, tokens),
                PieceKind::Beginning => lease.begin(),
                PieceKind::Nothing => {}
            }
        }
        if is_last {
            self.end();
        }
    }

    /// The rest of the answer will not be seen. Returns the request, if it is still in flight.
    pub(super) fn give_up(&mut self) -> Option<Lease> {
        self.account.settle();
        self.lease.take()
    }

    /// The answer is complete.
    pub(super) fn end(&mut self) {
        if let Some(mut lease) = self.lease.take() {
            if let Watch::Events(scanner) = &mut self.watch {
                let failed = scanner.has_failed();
                lease.progress(self.last_piece, scanner.finish());
                if failed {
                    lease.faulted();
                    self.account.settle();
                    return;
                }
            }
            lease.complete(self.watch.usage(), self.watch.end());
            // A 500 may be the engine's fault or the request's.
            if !self.status.is_server_error() {
                lease.succeeded();
            }
        }
        self.account.settle();
    }
}

/// The request was served elsewhere: the chosen endpoint has failed it, and its load belongs to the other one.
async fn moved(proxy: &Arc<Proxy>, routed: &Routed, lease: Lease, served: &str) -> Option<Lease> {
    let pool = &routed.served.pool;
    let endpoints = pool.endpoints();
    let is_there = |endpoint: &PoolEndpoint| endpoint.worker.upstream.address.place() == served;
    if is_there(&lease.endpoint) {
        return Some(lease);
    }
    lease.failed(FailureKind::connect);
    drop(lease);
    // An address that is not in the pool: the data plane used another one of its own.
    endpoints.iter().find(|endpoint| is_there(endpoint))?;
    let others = endpoints.iter().filter(|endpoint| !is_there(endpoint)).map(|endpoint| endpoint.id);
    let lease = proxy.place(routed, 1, &others.collect()).await.ok()?;
    lease.sent();
    Some(lease)
}
