//! One file per command.

pub(crate) mod check;
pub(crate) mod doctor;
pub(crate) mod key;
#[cfg(feature = "lab")]
pub(crate) mod lab;
pub(crate) mod migrate;
pub(crate) mod serve;
mod service_manager;
pub(crate) mod shell;
mod summary;
