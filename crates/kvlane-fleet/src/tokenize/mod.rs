//! Token counts as the engine's: by a local tokenizer, by asking an engine, or estimated.
//!
//! A pool counts in one way, set when it opens ([`Counting`]). If counting one prompt fails, because a queue is full,
//! the prompt has an image, or an engine does not answer, that prompt is estimated and the request continues: a count
//! decides where a prompt is cheapest, never whether it is served.

mod config;
pub mod counted;
pub mod hub;
pub mod threads;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_tokens::{Source, Tokenizer};
use serde_json::{Value, json};

use crate::routing::PoolOverride;

pub use self::config::{Content, TokenSource, Tokens};
pub use self::config::{Plan, plan};
pub use self::counted::Counted;
use self::hub::{Hub, is_id};
use self::threads::TokenThreads;

/// How a pool counts the tokens of its prompts.
#[derive(Clone)]
pub enum Counting {
    /// With this tokenizer.
    Local(Arc<Local>),
    /// By asking one of its workers.
    Engine,
    /// Four bytes of the rendered prompt count as a token.
    Estimate,
}

/// A tokenizer and its files.
#[derive(Clone)]
pub struct Local {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The file it was loaded from.
    pub path: PathBuf,
    /// Where the pool's engines say that the model's weights are.
    pub root: Option<Arc<str>>,
}

/// A tokenizer's path, and that of its chat template if that is another.
type Files = (PathBuf, Option<PathBuf>);

/// Where a worker's tokenizer may be.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// Where the list that names the worker says that it is.
    pub named: Option<PathBuf>,
    /// Where the engine says that the model's weights are.
    pub root: Option<String>,
}

/// The tokenizers and tokenizer threads of all pools.
pub struct Tokenizers {
    /// Every loaded tokenizer, by its files: pools with the same one share its cache.
    loaded: Mutex<BTreeMap<Files, Arc<Local>>>,
    /// How each model's pool counts, once set.
    settled: Mutex<BTreeMap<String, Counting>>,
    /// Where tokenizers that are given by a model's id are.
    hub: Hub,
    /// The threads that tokenize.
    pub threads: TokenThreads,
    /// The next worker to ask.
    pub turn: AtomicUsize,
}

// === impl Counting ===

impl Counting {
    /// Its name in metrics and the admin API.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Local(_) => "local",
            Self::Engine => "engine",
            Self::Estimate => "estimate",
        }
    }

    /// Whether tokens are estimated from the length of a prompt.
    pub fn is_estimate(&self) -> bool {
        matches!(self, Self::Estimate)
    }

    /// Its description in the admin API.
    pub fn describe(&self) -> Value {
        match self {
            Self::Local(local) => json!({"source": "local", "path": local.path.display().to_string()}),
            other => json!({"source": other.name()}),
        }
    }
}

// === impl Tokenizers ===

impl Tokenizers {
    /// Loads every configured tokenizer, and starts the threads.
    ///
    /// # Errors
    /// A tokenizer that is missing or unusable, and what to do; or a thread cannot be started.
    pub fn start(tokens: &Tokens, pools: &BTreeMap<String, PoolOverride>) -> io::Result<Self> {
        let Tokens { threads, queue_size, .. } = *tokens;
        let threads = TokenThreads::start(threads, queue_size)?;
        let (loaded, settled) = (Mutex::default(), Mutex::default());
        let hub = Hub::of_environment(tokens.allow_download);
        let this = Self { loaded, settled, hub, threads, turn: AtomicUsize::new(0) };
        let own = pools.keys().map(|model| (format!("routing.pools.{model}.tokenizer"), model.as_str()));
        for (field, model) in own.chain([("tokens.path".to_owned(), "")]) {
            if let Plan::Local(source) = plan(tokens, pools, model)
                && let Err(why) = this.load(&source, &tokens.limits())
            {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{field}: {why}")));
            }
        }
        Ok(this)
    }

    /// Prompts waiting for a thread.
    pub fn waiting(&self) -> usize {
        self.threads.waiting()
    }

    /// The loaded tokenizers.
    pub fn loaded(&self) -> Vec<Arc<Local>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The tokenizer of a source, loaded from its files if needed. Takes seconds for a large vocabulary, and longer where
    /// the source is the id of a model and its files are downloaded.
    ///
    /// # Errors
    /// What is wrong with its files.
    pub fn load(&self, source: &Source, limits: &kvlane_tokens::Config) -> Result<Arc<Local>, String> {
        let key = (source.path.clone(), source.chat_template.clone());
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(local) = loaded.get(&key) {
            return Ok(Arc::clone(local));
        }
        let path = match source.path.to_str() {
            Some(id) if is_id(&source.path) && !source.path.exists() => self.hub.tokenizer_of(id)?,
            _ => source.path.clone(),
        };
        let source = Source { path, chat_template: source.chat_template.clone() };
        let tokenizer = Tokenizer::load(&source, limits).map_err(|error| error.to_string())?;
        tracing::info!(
            path = %source.path.display(),
            vocabulary = tokenizer.vocab_size(),
            chat_template = tokenizer.has_template(),
            cut = ?tokenizer.cut(),
            "tokenizer loaded"
        );
        let local = Arc::new(Local { tokenizer: Arc::new(tokenizer), path: source.path, root: None });
        loaded.insert(key, Arc::clone(&local));
        Ok(local)
    }

    /// How the pool of `model` counts.
    pub fn counting(&self, model: &str) -> Counting {
        self.settled().get(model).cloned().unwrap_or(Counting::Estimate)
    }

    /// Whether it is set how the pool of `model` counts.
    pub fn is_settled(&self, model: &str) -> bool {
        self.settled().contains_key(model)
    }

    /// Sets how the pool of `model` counts, whose tokenizer is at `places` if the configuration names none. May read
    /// files.
    pub fn settle(
        &self,
        tokens: &Tokens,
        pools: &BTreeMap<String, PoolOverride>,
        model: &str,
        places: &Places,
    ) {
        let counting = match self.counting_of(tokens, plan(tokens, pools, model), model, places) {
            Counting::Local(local) => {
                let root = places.root.as_deref().map(Arc::from);
                Counting::Local(Arc::new(Local { root, ..(*local).clone() }))
            }
            other => other,
        };
        self.settled().entry(model.to_owned()).or_insert(counting);
    }

    fn settled(&self) -> MutexGuard<'_, BTreeMap<String, Counting>> {
        self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the tokenizer of an engine's `root` is, if this process can read it: a directory, or the id of a model that
    /// is in the Hub's cache on this machine. Any other relative path is a directory of the engine.
    fn dir_of(&self, root: &str) -> Option<PathBuf> {
        let (path, names) = (Path::new(root), ["tokenizer.json", "tiktoken.model"]);
        if path.is_absolute() {
            return names.iter().any(|name| path.join(name).is_file()).then(|| path.to_owned());
        }
        (root.contains('/') && is_id(path)).then(|| self.hub.find(root)).flatten()
    }

    fn counting_of(&self, tokens: &Tokens, plan: Plan, model: &str, places: &Places) -> Counting {
        let limits = tokens.limits();
        let chat_template = match plan {
            Plan::Engine => return Counting::Engine,
            Plan::Estimate => return Counting::Estimate,
            Plan::Local(source) => match self.load(&source, &limits) {
                Ok(local) => return Counting::Local(local),
                Err(why) => {
                    // It was loaded at start, so its files have changed since.
                    tracing::warn!(
                        model,
                        why,
                        "the configured tokenizer is not usable any more; tokens are estimated"
                    );
                    return Counting::Estimate;
                }
            },
            Plan::Auto { chat_template } => chat_template,
        };
        let root = places.root.as_deref().and_then(|root| self.dir_of(root));
        for path in places.named.as_deref().into_iter().chain(root.as_deref()) {
            let source = Source { path: path.into(), chat_template: chat_template.clone() };
            match self.load(&source, &limits) {
                Ok(local) => return Counting::Local(local),
                Err(why) => {
                    tracing::warn!(model, path = %path.display(), why, "the tokenizer of a worker is not usable");
                }
            }
        }
        Counting::Estimate
    }
}
