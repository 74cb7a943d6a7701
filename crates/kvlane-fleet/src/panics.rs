//! Panic handling: counting, logging, restarting tasks. See `docs/decisions/0014-panics.md`.
//!
//! A panic unwinds and only costs the work in progress: a connection, a prompt's count, a segment of a recording. A
//! hook counts and logs every panic, caught or not. Tasks that must go on are restarted ([`persist`]). The process
//! aborts if a thread that all requests need panics outside of its tasks ([`guard`]), or if a panic leaves the
//! decision core in an inconsistent state.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

/// Time between a task's panic and its restart, so that a task that panics repeatedly costs little.
pub const AGAIN: Duration = Duration::from_secs(1);

/// The kinds of threads, by prefix of their names; the last stands for all others.
const THREADS: [&str; 13] = [
    "relay",
    "tokens",
    "ingest",
    "apply",
    "control",
    "discovery",
    "replicas",
    "admin",
    "recorder",
    "traces",
    "snapshot",
    "dispatches",
    "other",
];

static COUNTS: [AtomicU64; THREADS.len()] = [const { AtomicU64::new(0) }; THREADS.len()];

/// Counts and logs panics of this process from now on. A panic's message is logged only where it is a literal: a
/// formatted message may quote a prompt.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            note(panic);
            if !tracing::enabled!(tracing::Level::ERROR) {
                before(panic);
            }
        }));
    });
}

fn note(panic: &PanicHookInfo<'_>) {
    thread_local! {
        static NOTING: Cell<bool> = const { Cell::new(false) };
    }
    let thread = std::thread::current();
    let name = thread.name().unwrap_or_default();
    COUNTS[kind(name)].fetch_add(1, Ordering::Relaxed);
    // Logging may panic itself, and a second panic in here would abort the process.
    if !NOTING.replace(true) {
        let at = panic.location().map(ToString::to_string).unwrap_or_default();
        let text = panic.payload().downcast_ref::<&'static str>().copied().unwrap_or("(not shown)");
        let trace = std::backtrace::Backtrace::capture();
        let _ = catch_unwind(AssertUnwindSafe(|| match trace.status() {
            std::backtrace::BacktraceStatus::Captured => {
                tracing::error!(thread = name, at, text, %trace, "panic; please report it");
            }
            _ => tracing::error!(thread = name, at, text, "panic; please report it"),
        }));
        NOTING.set(false);
    }
}

fn kind(name: &str) -> usize {
    THREADS.iter().position(|kind| name.starts_with(kind)).unwrap_or(THREADS.len() - 1)
}

/// Runs a task to its end; restarts it, after a pause, each time it panics. Dropping the future ends the task.
pub async fn persist<F>(name: &str, mut task: impl FnMut() -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut running = JoinSet::new();
    running.spawn(task());
    while let Some(Err(error)) = running.join_next().await
        && error.is_panic()
    {
        tracing::error!(task = name, "task panicked; restarting it");
        sleep(AGAIN).await;
        running.spawn(task());
    }
}

/// Runs a thread's work; if it panics and all requests `need` the thread, the process aborts, to be restarted as a
/// whole.
pub fn guard(name: &str, need: bool, work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        tracing::error!(thread = name, aborts = need, "thread panicked");
        if need {
            std::process::abort();
        }
    }
}

/// Panics so far, by kind of thread.
pub fn counts() -> impl Iterator<Item = (&'static str, u64)> {
    THREADS.into_iter().zip(COUNTS.iter().map(|count| count.load(Ordering::Relaxed)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_is_restarted_until_it_ends() {
        let begun = Arc::new(AtomicUsize::new(0));
        let counting = Arc::clone(&begun);
        persist("a test", move || {
            let begun = Arc::clone(&counting);
            async move { assert!(begun.fetch_add(1, Ordering::Relaxed) >= 3, "not yet") }
        })
        .await;
        assert_eq!(begun.load(Ordering::Relaxed), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_ends_with_the_future_that_restarts_it() {
        let (alive, mut ended) = tokio::sync::mpsc::channel::<()>(1);
        let mut running = Box::pin(persist("a test", move || {
            let alive = alive.clone();
            async move {
                std::future::pending::<()>().await;
                drop(alive);
            }
        }));
        let began = std::future::poll_fn(|cx| std::task::Poll::Ready(running.as_mut().poll(cx))).await;
        assert!(began.is_pending());
        drop(running);
        assert_eq!(timeout(AGAIN, ended.recv()).await, Ok(None), "its sender is dropped");
    }

    #[test]
    fn kinds_of_threads_are_found_by_name() {
        for (name, expect) in [
            ("relay-3", "relay"),
            ("tokens-0", "tokens"),
            ("apply-0", "apply"),
            ("main", "other"),
            ("", "other"),
        ] {
            assert_eq!(THREADS[kind(name)], expect, "{name}");
        }
    }

    #[test]
    fn a_panic_in_a_thread_that_is_not_needed_ends_only_that_thread() {
        guard("a test", false, || panic!("it breaks"));
    }
}
