//! Finds the earlier request with the longest shared prefix, by a sample of block hashes.

use super::Segment;
use super::file::Shared;
use crate::block::BlockHash;
use crate::recent::Recent;
use crate::request::RequestId;

/// Resolution of shared prefixes in tokens; one block where blocks are larger.
const SHARED_TOKENS: u32 = 128;

/// Sampling distance in blocks of `block_tokens`: the resolution of shared prefixes.
pub fn shared_blocks(block_tokens: u32) -> u32 {
    (SHARED_TOKENS / block_tokens.max(1)).max(1)
}

/// Remembers which request first had each prefix.
pub struct Sharing {
    owners: Recent<BlockHash, RequestId>,
}

// === impl Sharing ===

impl Sharing {
    /// An empty table of at most `hashes_max` hashes, of about 24 bytes each.
    pub fn new(hashes_max: usize) -> Self {
        Self { owners: Recent::new(hashes_max) }
    }

    /// The request that first had the longest known prefix of this prompt, and the prefix length in sampled blocks.
    /// `hashes` is every [`shared_blocks`]th block hash of the prompt.
    pub fn of(&mut self, request: RequestId, hashes: &[BlockHash]) -> Option<(RequestId, u32)> {
        // A hash identifies everything before it, so known hashes come first.
        let known = hashes.partition_point(|hash| self.owners.get(hash).is_some());
        let found = known.checked_sub(1).and_then(|last| self.owners.get(&hashes[last]).copied());
        hashes[known..].iter().for_each(|&hash| self.owners.insert(hash, request));
        found.map(|base| (base, known as u32))
    }

    /// Shared prefixes of a segment's prompts. Prompts without one are omitted.
    pub fn of_segment(&mut self, segment: &Segment) -> Vec<Shared> {
        let mut hashes = &segment.hashes[..];
        let mut shared = Vec::with_capacity(segment.prompts.len());
        for &(request, len) in &segment.prompts {
            let (own, rest) = hashes.split_at((len as usize).min(hashes.len()));
            hashes = rest;
            if let base @ Some(_) = self.of(request, own) {
                shared.push(Shared { request, base });
            }
        }
        shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(of: &[u64]) -> Vec<BlockHash> {
        of.iter().map(|&hash| BlockHash(hash)).collect()
    }

    #[test]
    fn a_prompt_shares_with_the_request_of_its_longest_prefix() {
        let mut sharing = Sharing::new(100);
        assert_eq!(sharing.of(RequestId(1), &hashes(&[1, 2, 3])), None);
        assert_eq!(sharing.of(RequestId(2), &hashes(&[1, 2, 30, 40])), Some((RequestId(1), 2)));
        assert_eq!(sharing.of(RequestId(3), &hashes(&[1, 2, 30, 40, 50])), Some((RequestId(2), 4)));
        assert_eq!(sharing.of(RequestId(4), &hashes(&[1])), Some((RequestId(1), 1)));
        assert_eq!(sharing.of(RequestId(5), &[]), None, "shorter than one sampled block");
    }

    #[test]
    fn what_is_remembered_is_bounded_and_what_was_used_last_stays() {
        let mut sharing = Sharing::new(8);
        sharing.of(RequestId(1), &hashes(&[1]));
        for n in 2..100 {
            assert_eq!(sharing.of(RequestId(n), &hashes(&[1, n])), Some((RequestId(1), 1)));
        }
        assert_eq!(sharing.of(RequestId(100), &hashes(&[1, 2])), Some((RequestId(1), 1)), "2 is forgotten");
    }
}
