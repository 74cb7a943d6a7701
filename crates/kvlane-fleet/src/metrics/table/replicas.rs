//! Metrics of replicas.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::row::rows;
use crate::metrics::labels::{DirectionLabel, ReplicaLabel};

rows! {
    Replicas, "Replicas", "Other [replicas](replicas.md) of the gateway; all are 0 or absent without `replicas.listen` or `replicas.broker`.";

    pub replicas: Gauge {
        seconds: false,
        labels: &[],
        help: "Other replicas that were heard in the last three seconds",
        meaning: "Other replicas that were heard in the last three seconds: their requests in flight count here",
        worry: "it is lower than the number of other replicas: the log says why one cannot be reached, and `GET /readiness` lists those that were heard",
    },

    pub replica_age: Family<ReplicaLabel, Gauge<f64, AtomicU64>> {
        seconds: true,
        labels: &["replica"],
        help: "Time since the replica was last heard",
        meaning: "Time since the replica was last heard; absent a minute later. `replica` is drawn at each start of a gateway",
        worry: "above 3: that replica is dead or cannot reach this one, and its load is not known here",
    },

    pub replica_problems: Gauge {
        seconds: false,
        labels: &[],
        help: "Addresses of replicas that cannot be told anything, names of replicas that cannot be resolved, and a broker that cannot be used",
        meaning: "Addresses in `replicas.peers`, or that its names have, which cannot be told what is in flight here, names that cannot be resolved, and `replicas.broker` if it cannot be used",
        worry: "it is not 0 for minutes: `problems` in `GET /readiness` says why",
    },

    pub replica_bytes: Family<DirectionLabel, Counter> {
        seconds: false,
        labels: &["direction"],
        help: "Bytes exchanged with other replicas, without those of HTTP/2 and TLS",
        meaning: "Bytes `sent` to and `received` from all other replicas, without those of HTTP/2 and TLS; through a broker each message is sent once",
        worry: "`sent` nears `replicas.bandwidth` for each replica",
    },

    pub replica_marks_shed: Counter {
        seconds: false,
        labels: &[],
        help: "Marks of sent prompts that were not told to a replica, for lack of bandwidth or because it is slow",
        meaning: "Marks of sent prompts (one for each 128 tokens) that were not told to a replica: `replicas.bandwidth` is used up, or the replica reads too slowly",
        worry: "it grows: other replicas do not know where those prompts are cached; raise `replicas.bandwidth`",
    },
}
