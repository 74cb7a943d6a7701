//! Long words in time linear in their length: from the left, always the longest token that may stand there.
//!
//! Tokens are a word's encoding exactly if each encodes as itself and every two neighbours encode as themselves. So the
//! encoding can be built from the left, one token at a time, checking each against its neighbour alone; where no token
//! fits, the last one was too long and is taken back. No place is tried twice. (The idea is that of van Antwerpen and
//! Neubeck, "So many tokens, so little time", GitHub 2024; here it holds for any list of merges in which what a merge
//! makes comes after its parts.)

use super::merge::{Made, Merges, Row};

const NONE: u32 = u32::MAX;
/// The parent of the root, which is no node and not a free slot either.
const NO_PARENT: u32 = NONE - 1;

/// The tokens that encode as themselves, by their prefixes and by how they are made.
#[derive(Debug)]
pub(super) struct Walk {
    /// Double-array trie: the child of a node for a byte is at the node's `base ^ byte`, if that names it as parent.
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
    /// The longest token that is a shorter prefix of this one.
    shorter: u32,
    /// The two tokens it is made of, and at which rank; of no meaning for a single byte.
    left: u32,
    right: u32,
    rank: u32,
}

// === impl Walk ===

impl Walk {
    /// The walk over `tokens`, each of which encodes as itself; `None` where one is made by a merge that comes before
    /// those of its parts, or where two share an id.
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
        // Ends of tokens from which the rest of the word cannot be reached.
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
                (None, None) => unreachable!("every word has an encoding, and its first token is a prefix"),
            }
        }
    }

    /// The longest token that `text` starts with. Every byte is a token.
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

    /// Whether two tokens side by side encode as themselves: no merge across the boundary between them comes before the
    /// merges that make them. Their last merges are undone one by one, latest first; at each step the two parts at the
    /// boundary must not merge before what was undone last.
    #[inline]
    fn neighbours(&self, mut left: u32, mut right: u32, merges: &Merges) -> bool {
        // Ranks below this would have merged first.
        let mut limit = NONE;
        loop {
            if merges.rank(left, right) < limit {
                return false;
            }
            let (of_left, of_right) = (&self.tokens[left as usize], &self.tokens[right as usize]);
            let (left_whole, right_whole) = (of_left.bytes > 1, of_right.bytes > 1);
            if left_whole && (!right_whole || of_left.rank > of_right.rank) {
                // Of two merges of one rank the one on the left comes first: that inside of `left` here,
                limit = of_left.rank;
                left = of_left.right;
            } else if right_whole {
                // and that across the boundary here.
                limit = of_right.rank + 1;
                right = of_right.left;
            } else {
                return true;
            }
        }
    }
}

/// A double-array trie in the making.
struct Trie {
    nodes: Vec<Node>,
    /// No slot below this is free.
    free_from: usize,
}

/// Free slots looked at for a node of several children before it gets a block of its own.
const TRIES_MAX: usize = 32;

// === impl Trie ===

impl Trie {
    /// `sorted` tokens; sets the `shorter` of each.
    fn build(sorted: &[(&[u8], Made)], tokens: &mut [Token]) -> Vec<Node> {
        let mut trie = Trie { nodes: Vec::new(), free_from: 1 };
        trie.grow();
        trie.nodes[0].parent = NO_PARENT;
        // Nodes to give children to: their tokens, their depth, the longest token on the way to them.
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

    /// A base whose slots for `labels` are all free.
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

    /// A block of free slots at the end.
    fn grow(&mut self) -> usize {
        let base = self.nodes.len();
        self.nodes.resize(base + 256, Node { parent: NONE, base: 0, token: NONE });
        base
    }
}
