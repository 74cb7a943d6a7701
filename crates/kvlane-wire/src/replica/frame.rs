//! The frames, and their limits.

use std::sync::Arc;

use kvlane_core::block::BlockHash;
use kvlane_core::limit;
use kvlane_core::replica::{Estimate, ReplicaId, Service, Share, Subject, Turn};

/// The version that is written here.
pub const VERSION: u64 = 1;
/// Largest frame, without its prefix of five bytes.
pub const FRAME_BYTES_MAX: usize = 512 << 10;
/// Most names of one stream, from one to the next [`News`] that begins the list anew.
pub const NAMES_MAX: usize = 1 << 16;
/// Longest name of an endpoint, a pool or a cluster, in bytes.
pub const NAME_BYTES_MAX: usize = 1 << 10;

/// Most bytes of all names of one stream.
pub(super) const NAMES_BYTES_MAX: usize = 8 << 20;
/// Most shares in one frame, and most estimates and turns: of at most 72 bytes each.
pub(super) const SHARES_MAX: usize = 1 << 11;
/// Most marks in one frame: of 8 bytes each.
pub(super) const MARKS_MAX: usize = 1 << 13;
/// Most usages in one frame, and most services: of at most 80 bytes each.
pub(super) const USAGES_MAX: usize = 1 << 11;
/// Most bytes of names in one frame.
pub(super) const FRAME_NAMES_BYTES_MAX: usize = 32 << 10;

/// An estimate, with the name of its endpoint.
pub type Learned = (Subject<Arc<str>>, Estimate);

/// A frame.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// The first of a stream.
    Hello(Hello),
    /// News of one router.
    News(News),
    /// Usage under one entry of `limits`.
    Limit(limit::News),
    /// Of a kind that only later versions know.
    Unknown,
}

/// Who sends a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The version of its frames.
    pub version: u64,
    /// The oldest version whose readers understand them.
    pub readable_from: u64,
    /// The sending process.
    pub replica: ReplicaId,
    /// Only replicas of the same cluster exchange news.
    pub cluster: String,
    /// Milliseconds since it started.
    pub age_ms: u64,
}

/// News of one router, as in [`kvlane_core::replica::News`], with names instead of ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct News {
    /// The model of its pool.
    pub pool: Arc<str>,
    /// Rises with each news of this router.
    pub number: u64,
    /// What it has placed on endpoints, by their names.
    pub shares: Vec<(Arc<str>, Share)>,
    /// How much it has served tenants.
    pub services: Vec<Service>,
    /// What it has learned from its own answers, with the names of endpoints.
    pub learned: Vec<Learned>,
    /// The last turns of conversations, with the names of their endpoints.
    pub turns: Vec<(Arc<str>, Turn)>,
    /// Tokens of a block of `prompts`. Marks of other blocks are of no use.
    pub block_tokens: u32,
    /// The marks of prompts that were sent to endpoints, by their names.
    pub prompts: Vec<(Arc<str>, Vec<BlockHash>)>,
}

// === impl Hello ===

impl Hello {
    /// The hello of this version.
    pub fn new(replica: ReplicaId, cluster: &str, age_ms: u64) -> Self {
        Self { version: VERSION, readable_from: 1, replica, cluster: cluster.into(), age_ms }
    }

    /// Whether the frames of its sender are understood here.
    pub fn is_readable(&self) -> bool {
        self.readable_from <= VERSION
    }
}
