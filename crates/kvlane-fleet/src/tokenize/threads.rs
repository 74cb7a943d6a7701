//! Tokenizer threads, separate from the relay threads: encoding a long prompt takes longer than any other step of a
//! request, and must not delay the streams of others.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::{io, thread};

use bytes::Bytes;
use kvlane_core::block::ChainSeed;
use kvlane_tokens::{Prompt, Tokenizer, Unknown};
use kvlane_wire::api::Api;
use tokio::sync::oneshot;

use super::counted::Counted;
use crate::clock::date;

/// Prompt memory beyond which a thread frees it after use: a million tokens with their text.
const SCRATCH_BYTES_MAX: usize = 8 << 20;

/// The threads. When dropped, they end after their current prompt.
pub struct TokenThreads {
    queue: Arc<Queue>,
}

/// A prompt to count.
pub struct Job {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The API whose body this is.
    pub api: Api,
    /// The body of the request.
    pub body: Bytes,
    /// The seed of the chain of block hashes.
    pub seed: ChainSeed,
    /// The tenant whose cached encodings may be used.
    pub apart: u64,
    /// The engine's name for the model's weights, which is part of the names of images.
    pub root: Option<Arc<str>>,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Receives the result.
    pub answer: oneshot::Sender<Result<Counted, Unknown>>,
}

struct Queue {
    len_max: usize,
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

// === impl TokenThreads ===

impl TokenThreads {
    /// Starts `threads` threads (0: one per core), with room for `queue_size` waiting prompts.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(threads: usize, queue_size: usize) -> io::Result<Self> {
        let queue = Arc::new(Queue { len_max: queue_size, state: Mutex::default(), more: Condvar::new() });
        let this = Self { queue };
        let threads = match threads {
            0 => thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        for n in 0..threads {
            let queue = Arc::clone(&this.queue);
            thread::Builder::new().name(format!("tokens-{n}")).spawn(move || queue.work())?;
        }
        Ok(this)
    }

    /// Queues a prompt; false if the queue is full.
    pub fn submit(&self, job: Job) -> bool {
        let mut state = self.queue.state();
        let room = state.jobs.len() < self.queue.len_max;
        if room {
            state.jobs.push_back(job);
            drop(state);
            self.queue.more.notify_one();
        }
        room
    }

    /// Prompts in the queue.
    pub fn waiting(&self) -> usize {
        self.queue.state().jobs.len()
    }
}

impl Drop for TokenThreads {
    fn drop(&mut self) {
        self.queue.state().closed = true;
        self.queue.more.notify_all();
    }
}

// === impl Queue ===

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self) {
        let mut prompt = Prompt::default();
        while let Some(job) = self.next() {
            // The client may have disconnected while it waited.
            if job.answer.is_closed() {
                continue;
            }
            // A tokenizer is third-party code that runs on untrusted text: a panic there only costs one prompt's
            // count.
            let counted = catch_unwind(AssertUnwindSafe(|| job.count(&mut prompt))).unwrap_or_else(|_| {
                prompt = Prompt::default();
                Err(Unknown::Tokenizer("the tokenizer panicked".into()))
            });
            if 4 * prompt.tokens.capacity() + prompt.text.capacity() > SCRATCH_BYTES_MAX {
                prompt = Prompt::default();
            }
            // If the request has ended meanwhile, the count is dropped.
            let _ = job.answer.send(counted);
        }
    }
}

// === impl Job ===

impl Job {
    fn count(&self, prompt: &mut Prompt) -> Result<Counted, Unknown> {
        prompt.clear();
        prompt.apart = self.apart;
        prompt.root.clone_from(&self.root);
        self.tokenizer.prompt(self.api, &self.body, date(), prompt)?;
        Ok(Counted::of_prompt(self.seed, prompt, self.block_tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Arc<Tokenizer> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvlane-tokens/tests/data/tiny");
        let source = kvlane_tokens::Source::at(path);
        Arc::new(Tokenizer::load(&source, &kvlane_tokens::Config::default()).expect("it loads"))
    }

    fn job(tokenizer: &Arc<Tokenizer>) -> (Job, oneshot::Receiver<Result<Counted, Unknown>>) {
        let (answer, answered) = oneshot::channel();
        let body = Bytes::from_static(br#"{"model":"m","prompt":"one two three four"}"#);
        let (tokenizer, seed) = (Arc::clone(tokenizer), ChainSeed::new("m", None, None));
        let job = Job {
            tokenizer,
            api: Api::Completions,
            body,
            seed,
            apart: 0,
            root: None,
            block_tokens: 2,
            answer,
        };
        (job, answered)
    }

    #[test]
    fn all_prompts_of_a_list_are_counted_and_the_first_is_matched() {
        let tokenizer = tokenizer();
        let counted = |body: &'static str| {
            let (mut job, _) = job(&tokenizer);
            job.body = Bytes::from_static(body.as_bytes());
            job.count(&mut Prompt::default()).expect("text")
        };
        let (one, other) =
            (counted(r#"{"prompt":"one two three four"}"#), counted(r#"{"prompt":"five six"}"#));
        let both = counted(r#"{"prompt":["one two three four","five six"]}"#);
        assert_eq!((both.tokens, &both.chain), (one.tokens + other.tokens, &one.chain));
        let ids = counted(r#"{"prompt":[[1,2,3],[4,5]]}"#);
        assert_eq!((ids.tokens, ids.chain.len()), (5, 1));
    }

    #[test]
    fn a_full_queue_rejects_prompts_and_cancelled_prompts_are_not_counted() {
        let queue = Arc::new(Queue { len_max: 2, state: Mutex::default(), more: Condvar::new() });
        let threads = TokenThreads { queue: Arc::clone(&queue) };
        let tokenizer = tokenizer();
        let (first, gone) = job(&tokenizer);
        let (second, waits) = job(&tokenizer);
        let (third, refused) = job(&tokenizer);
        assert!(threads.submit(first) && threads.submit(second));
        assert!(!threads.submit(third), "two prompts are queued already");
        assert_eq!(threads.waiting(), 2);
        drop(gone);
        let worker = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || queue.work())
        };
        let counted = waits.blocking_recv().expect("an answer").expect("text");
        assert_eq!(counted.chain.len(), counted.tokens as usize / 2);
        assert!(refused.blocking_recv().is_err(), "a rejected prompt is reported at once");
        drop(threads);
        worker.join().expect("the thread ends when its queue is dropped");
        let counted: u64 = tokenizer.stats().hits + tokenizer.stats().misses;
        assert!(counted <= 1, "{counted} prompts were counted, one of them cancelled");
    }
}
