//! Errors as Python's exceptions: the text has all causes, the type is that of the cause.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Time between two looks whether the user has interrupted long work.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Ends work that the user has interrupted.
struct Interrupted;

/// An exception for an error: the `OSError` of a file that cannot be read, `ValueError` for everything else.
pub(crate) fn exception(error: impl Into<anyhow::Error>) -> PyErr {
    let error = error.into();
    let text = told_once(&error);
    let os = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    match os {
        Some(cause) if cause.kind() != io::ErrorKind::InvalidData => {
            io::Error::new(cause.kind(), text).into()
        }
        _ => PyValueError::new_err(text),
    }
}

/// An error with its causes. A cause that an error already contains is not repeated.
fn told_once(error: &anyhow::Error) -> String {
    let mut told = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !told.contains(&cause) {
            told.extend([if told.is_empty() { "" } else { ": " }, &cause]);
        }
    }
    told
}

/// Runs long work without the global lock. `work` calls what it gets often: there it ends if the user has interrupted it.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&(dyn Fn() + Sync)) -> Result<T, anyhow::Error> + Send,
) -> PyResult<T> {
    let stop = AtomicBool::new(false);
    let check = || {
        if stop.load(Ordering::Relaxed) {
            std::panic::resume_unwind(Box::new(Interrupted));
        }
    };
    let (over, caller) = (AtomicBool::new(false), thread::current());
    thread::scope(|scope| {
        let worker = thread::Builder::new().name("kvlane".into()).spawn_scoped(scope, || {
            let done = catch_unwind(AssertUnwindSafe(|| work(&check)));
            over.store(true, Ordering::Release);
            caller.unpark();
            done
        });
        let worker = worker.map_err(PyOSError::new_err)?;
        let mut interrupted = Ok(());
        while !over.load(Ordering::Acquire) {
            py.detach(|| thread::park_timeout(SIGNALS_EVERY));
            if interrupted.is_ok() {
                interrupted = py.check_signals();
                stop.store(interrupted.is_err(), Ordering::Relaxed);
            }
        }
        let done = py.detach(|| worker.join()).and_then(|done| done);
        interrupted?;
        done.map_err(|panic| PyRuntimeError::new_err(told(&*panic)))?.map_err(exception)
    })
}

/// The text of a panic.
fn told(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic");
    format!("kvlane failed: {text}; this is a defect of kvlane, please report it")
}
