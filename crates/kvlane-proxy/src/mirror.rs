//! Copies of requests for another model (`models.*.mirror`). Their answers are discarded, and no client is charged for them.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http_body_util::BodyExt;
use kvlane_fleet::metrics::MirrorLabels;
use kvlane_http::connections::Connections;
use kvlane_wire::api::EnginePath;

use crate::account::Account;
use crate::error_format::ErrorFormat;
use crate::forward;
use crate::model::Chain;
use crate::proxy::Proxy;

/// Most copies in flight; further ones are not sent.
pub(super) const COPIES_MAX: usize = 64;

/// Sends a copy of a request to `model`, apart from the request itself.
pub(super) fn send(
    proxy: &Arc<Proxy>,
    upstreams: &Arc<Connections>,
    row: Option<&'static EnginePath>,
    parts: &Parts,
    body: &Bytes,
    model: String,
) {
    let note = |outcome: &'static str, model: &str| {
        let labels = MirrorLabels { model: model.to_owned(), outcome };
        proxy.fleet.metrics.requests.mirrored.get_or_create(&labels).inc();
    };
    let Ok(permit) = Arc::clone(&proxy.copies).try_acquire_owned() else { return note("dropped", &model) };
    note("sent", &model);
    let (proxy, upstreams, parts, body) =
        (Arc::clone(proxy), Arc::clone(upstreams), parts.clone(), body.clone());
    let copy: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
        let api = row.and_then(EnginePath::api);
        let account = Account::open(&proxy, api, ErrorFormat::of(parts.uri.path()), &parts, false);
        let mut chain = Chain::of_copy(model);
        if let Ok(mut response) =
            forward::once(&proxy, &upstreams, row, &parts, body, &account, &mut chain).await
        {
            while let Some(Ok(_)) = response.body_mut().frame().await {}
            account.settle();
        }
        drop(permit);
    });
    #[expect(
        clippy::disallowed_methods,
        reason = "no one waits for a copy: it may be cut when the process ends"
    )]
    tokio::spawn(copy);
}
