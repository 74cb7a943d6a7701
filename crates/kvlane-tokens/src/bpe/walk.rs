//! Encodes long words in linear time, from the left, preferring the longest possible token.
//!
//! A sequence of tokens is a word's encoding exactly if each token encodes as itself and every two neighbours encode as
//! themselves. So the encoding can be built from the left, one token at a time, checking each only against its
//! predecessor; where no token fits, the last token was too long and is replaced by a shorter one. No position is tried
//! twice. (The idea is from van Antwerpen and Neubeck, "So many tokens, so little time", GitHub 2024; here it applies
//! to any list of merges in which a merge's result comes after its parts.)

use super::merge::{Made, Merges, Row};

const NONE: u32 = u32::MAX;
/// Parent of the root, which marks neither a node nor a free slot.
const NO_PARENT: u32 = NONE - 1;

/// The tokens that encode as themselves, by prefix and by their last merge.
#[derive(Debug)]
pub(super) struct Walk {
    /// Double-array trie: the child of a node for a byte is at the node's `base ^ byte`, if its parent is that node.
    nodes: Vec<Node>,
    /// By token id.
    tokens: Vec<Token>,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    parent: u32,
    base: u32,
    token: u32,
}

#[derive(Debug, Clone, Copy)]
struct Token {
    bytes: u32,
    /// The longest other token that is a prefix of this one.
    shorter: u32,
    /// The two tokens it is merged from, and the rank; meaningless for a single byte.
    left: u32,
    right: u32,
    rank: u32,
}

// === impl Walk ===

impl Walk {
    /// The walk over `tokens`, each of which encodes as itself; `None` if a token's merge comes before those of its
    /// parts, or if two tokens share an id.
    pub(super) fn new(mut tokens: Vec<(&[u8], Made)>) -> Option<Walk> {
        tokens.sort_unstable_by_key(|(bytes, _)| *bytes);
        let ids = tokens.iter().map(|(_, made)| made.token as usize + 1).max().unwrap_or(0);
        let absent = Token { bytes: 0, shorter: NONE, left: NONE, right: NONE, rank: 0 };
        let mut walk = Walk { nodes: Vec::new(), tokens: vec![absent; ids] };
        for (bytes, made) in &tokens {
            let token = &mut walk.tokens[made.token as usize];
            if token.bytes > 0 {
                return None;
            }
            let &Made { left, right, rank, .. } = made;
            *token = Token { bytes: bytes.len() as u32, shorter: NONE, left, right, rank };
        }
        let in_order = |token: &Token| {
            let part = |id: u32| {
                let part = &walk.tokens[id as usize];
                part.bytes == 1 || part.rank < token.rank
            };
            token.bytes < 2 || (part(token.left) && part(token.right))
        };
        if !walk.tokens.iter().all(in_order) {
            return None;
        }
        walk.nodes = Trie::build(&tokens, &mut walk.tokens);
        Some(walk)
    }

    /// Appends the tokens of `word`.
    pub(super) fn encode(&self, word: &[u8], merges: &Merges, row: &mut Row, out: &mut Vec<u32>) {
        let start = out.len();
        // Positions from which the rest of the word cannot be encoded.
        let closed = row.bits(word.len() + 1);
        let (mut at, mut token) = (0, self.longest(word));
        loop {
            let last = if out.len() > start { out.last().copied() } else { None };
            let end = loop {
                let Token { bytes, shorter, .. } = self.tokens[token as usize];
                let end = at + bytes as usize;
                if closed[end / 64] >> (end % 64) & 1 == 0
                    && last.is_none_or(|last| self.neighbours(last, token, merges))
                {
                    break Some(end);
                }
                if shorter == NONE {
                    break None;
                }
                token = shorter;
            };
            match (end, last) {
                (Some(end), _) => {
                    out.push(token);
                    if end == word.len() {
                        return;
                    }
                    at = end;
                    token = self.longest(&word[at..]);
                }
                (None, Some(last)) => {
                    closed[at / 64] |= 1 << (at % 64);
                    out.pop();
                    at -= self.tokens[last as usize].bytes as usize;
                    token = last;
                }
                (None, None) => unreachable!("every word has an encoding whose first token is a prefix"),
            }
        }
    }

    /// The longest token that is a prefix of `text`. Every byte is a token.
    #[inline]
    fn longest(&self, text: &[u8]) -> u32 {
        let (mut node, mut token) = (0, NONE);
        for &byte in text {
            let child = self.nodes[node as usize].base ^ u32::from(byte);
            let found = self.nodes[child as usize];
            if found.parent != node {
                break;
            }
            if found.token != NONE {
                token = found.token;
            }
            node = child;
        }
        token
    }

    /// Whether two adjacent tokens encode as themselves: no merge across their boundary precedes the merges that
    /// produce them. Undoes their last merges one by one, latest first; at each step the two parts at the boundary must
    /// not merge before the merge undone last.
    #[inline]
    fn neighbours(&self, mut left: u32, mut right: u32, merges: &Merges) -> bool {
        // A lower rank would have merged first.
        let mut limit = NONE;
        loop {
            if merges.rank(left, right) < limit {
                return false;
            }
            let (of_left, of_right) = (&self.tokens[left as usize], &self.tokens[right as usize]);
            let (left_whole, right_whole) = (of_left.bytes > 1, of_right.bytes > 1);
            if left_whole && (!right_whole || of_left.rank > of_right.rank) {
                // Of two merges with equal rank the left one comes first: here the one inside `left`,
                limit = of_left.rank;
                left = of_left.right;
            } else if right_whole {
                // and here the one across the boundary.
                limit = of_right.rank + 1;
                right = of_right.left;
            } else {
                return true;
            }
        }
    }
}

/// A double-array trie under construction.
struct Trie {
    nodes: Vec<Node>,
    /// All slots below this are in use.
    free_from: usize,
}

/// Free slots examined for a node with several children before it gets a new block.
const TRIES_MAX: usize = 32;

// === impl Trie ===

impl Trie {
    /// Builds the trie of `sorted` tokens; sets the `shorter` of each.
    fn build(sorted: &[(&[u8], Made)], tokens: &mut [Token]) -> Vec<Node> {
        let mut trie = Trie { nodes: Vec::new(), free_from: 1 };
        trie.grow();
        trie.nodes[0].parent = NO_PARENT;
        // Nodes without children so far: their tokens, their depth, and the longest token on their path.
        let mut open = vec![(0, sorted, 0, NONE)];
        let mut labels = Vec::new();
        while let Some((node, mut below, depth, mut prefix)) = open.pop() {
            if let Some(((bytes, made), rest)) = below.split_first()
                && bytes.len() == depth
            {
                tokens[made.token as usize].shorter = prefix;
                trie.nodes[node].token = made.token;
                prefix = made.token;
                below = rest;
            }
            labels.clear();
            labels.extend(below.chunk_by(|a, b| a.0[depth] == b.0[depth]).map(|tokens| tokens[0].0[depth]));
            if labels.is_empty() {
                continue;
            }
            let base = trie.place(&labels);
            trie.nodes[node].base = base as u32;
            for &label in &labels {
                trie.nodes[base ^ usize::from(label)].parent = node as u32;
            }
            for tokens in below.chunk_by(|a, b| a.0[depth] == b.0[depth]) {
                open.push((base ^ usize::from(tokens[0].0[depth]), tokens, depth + 1, prefix));
            }
        }
        trie.nodes
    }

    /// A base for which the slots of all `labels` are free.
    fn place(&mut self, labels: &[u8]) -> usize {
        while self.free_from < self.nodes.len() && self.nodes[self.free_from].parent != NONE {
            self.free_from += 1;
        }
        let free = |nodes: &[Node], slot: usize| nodes[slot].parent == NONE;
        let mut tries = 0;
        for slot in self.free_from..self.nodes.len() {
            if !free(&self.nodes, slot) {
                continue;
            }
            let base = slot ^ usize::from(labels[0]);
            if labels.iter().all(|&label| free(&self.nodes, base ^ usize::from(label))) {
                return base;
            }
            tries += 1;
            if tries == TRIES_MAX {
                break;
            }
        }
        self.grow()
    }

    /// Adds a block of free slots.
    fn grow(&mut self) -> usize {
        let base = self.nodes.len();
        self.nodes.resize(base + 256, Node { parent: NONE, base: 0, token: NONE });
        base
    }
}
