//! The configuration section `discovery`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use kvlane_core::config::{ConfigError, TIME, wrong};
use kvlane_core::section;
use kvlane_http::address::Address;

section! {
    /// Where workers are found while the gateway runs, in addition to those in `workers`.
    pub struct Discovery {
        /// Pods of a Kubernetes cluster (docs/kubernetes.md).
        pub kubernetes: Kubernetes = Kubernetes::default();
        /// URLs whose host names are resolved again and again: each address is a worker, as in
        /// `http://vllm.default.svc:8000` for a headless Service.
        pub dns: Vec<String> = Vec::new(), in 0..=64;
        /// A YAML or JSON file with a list of workers, as under `workers`. A change of the file takes effect at once.
        pub workers_file: Option<PathBuf> = None;
        /// How long readiness waits at start for the sources to report their workers.
        #[serde(with = "humantime_serde")]
        pub sync_timeout: Duration = Duration::from_secs(30), in TIME;
    }
}

section! {
    /// Workers from a Kubernetes API server. One of `selector`, `service`, `inference_pool` or the two selectors of
    /// roles names the pods.
    pub struct Kubernetes {
        /// Whether pods are discovered.
        pub enabled: bool = false;
        /// Namespaces of the pods; empty: the gateway's own namespace.
        pub namespaces: Vec<String> = Vec::new(), in 0..=64;
        /// Label selector of the pods, as in `app=vllm,tier!=test`.
        pub selector: Option<String> = None;
        /// Label selector of the pods that only prefill.
        pub prefill_selector: Option<String> = None;
        /// Label selector of the pods that decode.
        pub decode_selector: Option<String> = None;
        /// A Service, whose EndpointSlices name the pods.
        pub service: Option<String> = None;
        /// An InferencePool (inference.networking.k8s.io/v1), whose selector and ports name the pods.
        pub inference_pool: Option<String> = None;
        /// Ports of each pod; several are one engine each, such as the ranks of a data-parallel engine. Empty: the port
        /// named `http`, else the only port of the pod. An InferencePool has its own.
        pub ports: Vec<u16> = Vec::new(), in 0..=8;
        /// The kubeconfig file; the pod's own service account if not set and there is one.
        pub kubeconfig: Option<PathBuf> = None;
    }
}

// === impl Discovery ===

impl Discovery {
    /// Checks what bounds cannot.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.kubernetes.validate()?;
        for (n, url) in self.dns.iter().enumerate() {
            let field = format!("discovery.dns[{n}]");
            match Address::parse(url) {
                Err(problem) => return wrong(&field, problem),
                Ok(address) if address.host.parse::<IpAddr>().is_ok() => {
                    return wrong(
                        &field,
                        format!("'{url}' has no host name to resolve: write it under `workers`"),
                    );
                }
                Ok(_) => {}
            }
        }
        Ok(())
    }
}

// === impl Kubernetes ===

impl Kubernetes {
    fn validate(&self) -> Result<(), ConfigError> {
        if !self.enabled {
            return Ok(());
        }
        if self.ports.contains(&0) {
            return wrong(
                "discovery.kubernetes.ports",
                "port 0 is not valid: write the port of the engine".into(),
            );
        }
        let by_role = self.prefill_selector.is_some() || self.decode_selector.is_some();
        let ways = [self.selector.is_some(), self.service.is_some(), self.inference_pool.is_some(), by_role];
        match ways.iter().filter(|way| **way).count() {
            1 => Ok(()),
            0 => wrong(
                "discovery.kubernetes",
                "nothing names the pods: set `selector`, `service`, `inference_pool`, or `prefill_selector` and \
                 `decode_selector`"
                    .into(),
            ),
            _ => wrong(
                "discovery.kubernetes",
                "several keys name the pods: keep one of `selector`, `service`, `inference_pool`, or the two selectors \
                 of roles"
                    .into(),
            ),
        }
    }
}
