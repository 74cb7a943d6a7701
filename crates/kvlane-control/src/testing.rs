//! KV event messages for tests.

/// One event of a batch.
#[derive(Clone, Debug)]
pub enum Told<'a> {
    /// `BlockStored`: hashes, parent, tokens, block size, adapter.
    Stored(&'a [u64], Option<u64>, &'a [u32], u32, Option<&'a str>),
    /// `BlockRemoved`.
    Removed(&'a [u64]),
    /// `AllBlocksCleared`.
    Cleared,
}

/// A batch as vLLM 0.14 to 0.23 encodes it, of `rank` if one is given.
pub fn batch(rank: Option<u32>, events: &[Told<'_>]) -> Vec<u8> {
    let mut out = Pack(Vec::new());
    out.array(3);
    out.0.push(0xCB);
    out.0.extend_from_slice(&kvlane_fleet::clock::unix_time().to_be_bytes());
    out.array(events.len());
    for event in events {
        match event {
            Told::Stored(names, parent, tokens, block_tokens, lora) => {
                out.array(8);
                out.text(Some("BlockStored"));
                out.numbers(names.iter().copied());
                out.number(*parent);
                out.numbers(tokens.iter().map(|&token| token.into()));
                out.number(Some(u64::from(*block_tokens)));
                out.number(None);
                out.text(Some("GPU"));
                out.text(*lora);
            }
            Told::Removed(names) => {
                out.array(3);
                out.text(Some("BlockRemoved"));
                out.numbers(names.iter().copied());
                out.text(Some("GPU"));
            }
            Told::Cleared => {
                out.array(1);
                out.text(Some("AllBlocksCleared"));
            }
        }
    }
    out.number(rank.map(u64::from));
    out.0
}

/// Writes the msgpack types that a batch needs, each value in its longest form.
struct Pack(Vec<u8>);

// === impl Pack ===

impl Pack {
    fn array(&mut self, length: usize) {
        self.0.push(0xDD);
        self.0.extend_from_slice(&(length as u32).to_be_bytes());
    }

    fn number(&mut self, value: Option<u64>) {
        match value {
            None => self.0.push(0xC0),
            Some(value) => {
                self.0.push(0xCF);
                self.0.extend_from_slice(&value.to_be_bytes());
            }
        }
    }

    fn numbers(&mut self, values: impl ExactSizeIterator<Item = u64>) {
        self.array(values.len());
        values.for_each(|value| self.number(Some(value)));
    }

    fn text(&mut self, text: Option<&str>) {
        let Some(text) = text else { return self.number(None) };
        self.0.push(0xDB);
        self.0.extend_from_slice(&(text.len() as u32).to_be_bytes());
        self.0.extend_from_slice(text.as_bytes());
    }
}
