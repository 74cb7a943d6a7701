//! A name of the catalogue of models, and the model that serves it.

use http::{HeaderMap, HeaderName, HeaderValue};
use kvlane_fleet::worker::provider::Provider;

/// The model that answers, where the client used another name.
const MODEL: HeaderName = HeaderName::from_static("x-router-model");
/// Why a fallback answers.
const FALLBACK: HeaderName = HeaderName::from_static("x-router-fallback");

/// A name of the catalogue, and the model that serves it now.
#[derive(Debug)]
pub(crate) struct Alias {
    /// The name that the client used.
    pub(super) asked: String,
    /// The name under which workers serve the model.
    pub(super) model: String,
    /// The pool or adapter, by the fleet's name for it.
    pub(super) target: String,
    /// Why it is a fallback, if it is one.
    fallback: Option<&'static str>,
}

// === impl Alias ===

impl Alias {
    /// The name that a client used, and what serves it; of a fallback also why.
    pub(super) fn new(
        asked: &str,
        target: String,
        provider: Option<&Provider>,
        fallback: Option<&'static str>,
    ) -> Self {
        let model = provider.map_or(&*target, |provider| provider.own_name(&target)).to_owned();
        Self { asked: asked.to_owned(), model, target, fallback }
    }

    /// Whether the engine knows the model by another name than the client.
    pub(super) fn renames(&self) -> bool {
        self.asked != self.model
    }

    /// Sets the headers that say which model answers.
    pub(super) fn mark(&self, headers: &mut HeaderMap) {
        if let Ok(model) = HeaderValue::try_from(&self.target) {
            headers.insert(MODEL, model);
        }
        headers.extend(self.fallback.map(|why| (FALLBACK, HeaderValue::from_static(why))));
    }

    /// What it is to the entry of the catalogue.
    pub(super) fn why(&self) -> &'static str {
        self.fallback.unwrap_or("target")
    }
}
