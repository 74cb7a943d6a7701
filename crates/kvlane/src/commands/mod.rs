//! One file per command.

pub(crate) mod bench;
pub(crate) mod calibrate;
pub(crate) mod check;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod explain;
pub(crate) mod key;
pub(crate) mod mock_engine;
mod page;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod roofline;
pub(crate) mod serve;
pub(crate) mod simulate;
pub(crate) mod trace;
