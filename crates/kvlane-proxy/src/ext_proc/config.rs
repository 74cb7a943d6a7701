//! The configuration section `epp`.

use std::net::{IpAddr, Ipv4Addr};

use kvlane_core::section;

use crate::config::host;

section! {
    /// The endpoint picker for Envoy (`kvlane epp`): its ports, and what it does with answers.
    pub struct EndpointPicker {
        /// Address of the picker's ports.
        #[serde(deserialize_with = "host")]
        pub host: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
        /// Port of external processing (gRPC), with health checks; 0 takes a free one.
        pub port: u16 = 9002;
        /// Port of health checks alone (gRPC without TLS), as Kubernetes probes need it; 0 takes a free one.
        pub health_port: u16 = 9003;
        /// Whether the port of external processing uses TLS: with `tls.certificate`, or with a certificate that the
        /// picker signs itself, which data planes accept without verification.
        pub secure_serving: bool = true;
        /// Whether answers pass through the picker, which counts their tokens. Then they break if the picker dies.
        /// Otherwise the stream of a request ends with the pick, and the end of its answer is estimated.
        pub observe_responses: bool = false;
        /// Endpoints named after the first, in the order in which the data plane may try them. 0 for data planes that
        /// take a single endpoint, such as Envoy's ORIGINAL_DST.
        pub fallbacks: usize = 2, in 0..=8;
    }
}
