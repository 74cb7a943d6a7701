//! Aborts the process if a panic leaves the scheduler or an index half changed.
//!
//! After a panic in the middle of a change the state is inconsistent: a request could stay in flight for ever, or an
//! endpoint could be credited with an evicted block, and no check can tell. The process aborts while the lock is still
//! held, so that no other thread uses that state; a supervisor restarts it. A panic during a read changes nothing and
//! unwinds. See `docs/decisions/0014-panics.md`.

use std::ops::{Deref, DerefMut};
use std::process::abort;
use std::thread::panicking;

/// Exists while shared state is being changed.
pub(crate) struct AbortOnPanic {
    /// The thread was already unwinding when the change began; the change is part of the clean-up.
    unwinding: bool,
}

// === impl AbortOnPanic ===

impl AbortOnPanic {
    #[inline]
    pub(crate) fn begin() -> Self {
        Self { unwinding: panicking() }
    }
}

impl Drop for AbortOnPanic {
    #[inline]
    fn drop(&mut self) {
        if panicking() && !self.unwinding {
            abort();
        }
    }
}

/// A lock guard for a change.
pub(crate) struct AbortOnPanicGuard<G> {
    // Dropped first, so that the lock is still held when the process aborts.
    _change: AbortOnPanic,
    locked: G,
}

// === impl AbortOnPanicGuard ===

impl<G> AbortOnPanicGuard<G> {
    #[inline]
    pub(crate) fn of(locked: G) -> Self {
        Self { _change: AbortOnPanic::begin(), locked }
    }
}

impl<G: Deref> Deref for AbortOnPanicGuard<G> {
    type Target = G::Target;

    #[inline]
    fn deref(&self) -> &G::Target {
        &self.locked
    }
}

impl<G: DerefMut> DerefMut for AbortOnPanicGuard<G> {
    #[inline]
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.locked
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::process::Command;

    use super::*;

    /// Set for the child process that panics in the middle of a change.
    const BREAK: &str = "KVLANE_TEST_BREAK_A_CHANGE";

    #[test]
    fn a_panic_in_the_middle_of_a_change_ends_the_process() {
        if std::env::var_os(BREAK).is_some() {
            let _ = catch_unwind(|| {
                let _change = AbortOnPanic::begin();
                resume_unwind(Box::new("in the middle"));
            });
            return;
        }
        let this = std::env::current_exe().expect("this test");
        let name = "abort_on_panic::tests::a_panic_in_the_middle_of_a_change_ends_the_process";
        let ended = Command::new(this).args(["--exact", name]).env(BREAK, "1").output().expect("it runs");
        assert!(!ended.status.success() && ended.status.code().is_none(), "{:?}", ended.status);
    }

    #[test]
    fn a_change_that_is_made_while_something_else_unwinds_is_made() {
        struct ClearsUp<'a>(&'a mut bool);
        impl Drop for ClearsUp<'_> {
            fn drop(&mut self) {
                let _change = AbortOnPanic::begin();
                *self.0 = true;
            }
        }
        let mut done = false;
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let _clears_up = ClearsUp(&mut done);
            resume_unwind(Box::new("something else"));
        }));
        assert!(unwound.is_err() && done);
    }
}
