//! Discovery of workers in Kubernetes: pods, EndpointSlices, InferencePools.
//!
//! [`run`] lists and watches what the configuration names, and publishes all workers that follow from it each time
//! they change. While an API server is away, or says things that cannot be understood, nothing is taken back: the
//! fleet stays as it was, and the source's status says why and since when.
//!
//! The client is `kube`'s: kubeconfig, TLS, tokens that rotate, credential plug-ins. Lists and watches are [`watch`]'s
//! own, because `kube::runtime::watcher` cannot be held to what a gateway needs: it keeps bookmarks to itself, so that
//! the age of what is known cannot be told; it goes on with a watch after an event that it could not read; it repeats a
//! watch for ever that is refused with a version that is too old or too new; and it keeps whole pods.

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods))]

mod access;
mod assembly;
mod collection;
mod objects;
mod pods;
mod refusal;
mod run;
mod slices;
mod state;
mod watch;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use crate::run::run;
