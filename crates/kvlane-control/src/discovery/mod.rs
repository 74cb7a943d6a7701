//! Sources of discovery that need no orchestrator: a file with a list of workers, and DNS.
//!
//! Each runs until it is stopped and publishes through its [`Source`](kvlane_fleet::discovery::Source); the
//! [`controller`](crate::controller) follows what is published.

pub mod dns;
pub mod file;
