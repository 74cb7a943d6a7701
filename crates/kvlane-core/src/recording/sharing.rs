//! Which earlier request a prompt begins like, found by the hashes of a few of its blocks.

use super::Segment;
use super::file::Shared;
use crate::block::BlockHash;
use crate::recent::Recent;
use crate::request::RequestId;

/// What prompts share is known to so many tokens, or to a block if those are larger.
const SHARED_TOKENS: u32 = 128;

/// One block in so many is looked at, where blocks have so many tokens: what prompts share is known to that many blocks.
pub fn shared_blocks(block_tokens: u32) -> u32 {
    (SHARED_TOKENS / block_tokens.max(1)).max(1)
}

/// Who brought which beginning of a prompt, as far as it is remembered.
pub struct Sharing {
    owners: Recent<BlockHash, RequestId>,
}

// === impl Sharing ===

impl Sharing {
    /// Nothing is known; at most `hashes_max` will be, of 24 bytes or so each.
    pub fn new(hashes_max: usize) -> Self {
        Self { owners: Recent::new(hashes_max) }
    }

    /// A prompt came, with every [`shared_blocks`]th of its blocks' hashes: the request that brought the longest
    /// beginning it shares with any before it, and how long that is in units of so many blocks.
    pub fn of(&mut self, request: RequestId, hashes: &[BlockHash]) -> Option<(RequestId, u32)> {
        // A hash stands for all before it, so those that are known come first.
        let known = hashes.partition_point(|hash| self.owners.get(hash).is_some());
        let found = known.checked_sub(1).and_then(|last| self.owners.get(&hashes[last]).copied());
        hashes[known..].iter().for_each(|&hash| self.owners.insert(hash, request));
        found.map(|base| (base, known as u32))
    }

    /// What the prompts of a segment share with those before them. One that shares nothing needs no word.
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
    fn a_prompt_begins_like_whoever_brought_the_longest_beginning_of_it() {
        let mut sharing = Sharing::new(100);
        assert_eq!(sharing.of(RequestId(1), &hashes(&[1, 2, 3])), None);
        assert_eq!(sharing.of(RequestId(2), &hashes(&[1, 2, 30, 40])), Some((RequestId(1), 2)));
        assert_eq!(sharing.of(RequestId(3), &hashes(&[1, 2, 30, 40, 50])), Some((RequestId(2), 4)));
        assert_eq!(sharing.of(RequestId(4), &hashes(&[1])), Some((RequestId(1), 1)));
        assert_eq!(sharing.of(RequestId(5), &[]), None, "too short to be told");
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
