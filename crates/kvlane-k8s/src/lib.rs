//! Discovery of workers in Kubernetes: pods, EndpointSlices, InferencePools.

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods))]
