//! Encoding of KV event batches: msgpack, as in each version of vLLM.
//!
//! [`kvlane_wire::kv::version`] defines the fields, their order, and whether events are arrays or maps. `fixtures/`
//! has frames made by each version's own publisher, and these bytes are equal to them.

use kvlane_wire::kv::version::{FieldOrder, REMOVED, STORED, Version};

use super::config::KvEventsHashes;

/// Wire format of batches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Encoding {
    pub(super) version: Version,
    pub(super) hashes: KvEventsHashes,
}

/// Stored blocks, consecutive.
#[derive(Clone, Debug)]
pub(super) struct Stored<'a> {
    pub(super) names: &'a [u64],
    pub(super) parent: Option<u64>,
    pub(super) token_ids: &'a [u32],
    pub(super) block_tokens: u32,
    pub(super) lora: Option<(u32, &'a str)>,
    /// Extra keys of each block besides its tokens; empty if not reported.
    pub(super) extra_keys: &'a [Vec<&'a str>],
    /// The group of layers of this cache. All layers of the models here have full attention; engines without groups
    /// report none.
    pub(super) group: Option<u32>,
}

/// A batch under construction.
#[derive(Debug)]
pub(super) struct Writer {
    encoding: Encoding,
    events: u32,
    body: Vec<u8>,
}

// === impl Writer ===

impl Writer {
    pub(super) fn new(encoding: Encoding) -> Self {
        Self { encoding, events: 0, body: Vec::new() }
    }

    pub(super) fn stored(&mut self, stored: &Stored<'_>) {
        let hashes = self.encoding.hashes;
        self.event("BlockStored", &STORED, |field, out| match field {
            "block_hashes" => array(out, stored.names, |name, out| hash(out, hashes, *name)),
            "parent_block_hash" => match stored.parent {
                Some(name) => hash(out, hashes, name),
                None => nil(out),
            },
            "token_ids" => array(out, stored.token_ids, |id, out| uint(out, u64::from(*id))),
            "block_size" => uint(out, u64::from(stored.block_tokens)),
            "lora_id" => match stored.lora {
                Some((id, _)) => uint(out, u64::from(id)),
                None => nil(out),
            },
            "lora_name" => match stored.lora {
                Some((_, name)) => str(out, name),
                None => nil(out),
            },
            "medium" => str(out, "GPU"),
            "extra_keys" if stored.extra_keys.is_empty() => nil(out),
            "extra_keys" => array(out, stored.extra_keys, |keys, out| match keys.as_slice() {
                [] => nil(out),
                keys => array(out, keys, |key, out| str(out, key)),
            }),
            "group_idx" => group(out, stored.group),
            "kv_cache_spec_kind" if stored.group.is_some() => str(out, "full_attention"),
            _ => nil(out),
        });
    }

    pub(super) fn removed(&mut self, names: &[u64], group_idx: Option<u32>) {
        let hashes = self.encoding.hashes;
        self.event("BlockRemoved", &REMOVED, |field, out| match field {
            "block_hashes" => array(out, names, |name, out| hash(out, hashes, *name)),
            "medium" => str(out, "GPU"),
            "group_idx" => group(out, group_idx),
            _ => nil(out),
        });
    }

    pub(super) fn cleared(&mut self) {
        self.event("AllBlocksCleared", &[], |_, out| nil(out));
    }

    /// The encoded batch, or `None` if there were no events.
    pub(super) fn finish(self, unix_secs: f64, rank: u32) -> Option<Vec<u8>> {
        if self.events == 0 {
            return None;
        }
        let mut out = Vec::with_capacity(self.body.len() + 24);
        array_head(&mut out, 3);
        out.push(0xCB);
        out.extend_from_slice(&unix_secs.to_be_bytes());
        array_head(&mut out, self.events as usize);
        out.extend_from_slice(&self.body);
        uint(&mut out, u64::from(rank));
        Some(out)
    }

    /// Writes one event. `write` writes a field's value, nil if there is none.
    fn event(&mut self, name: &str, fields: &'static [FieldOrder], write: impl Fn(&str, &mut Vec<u8>)) {
        let version = self.encoding.version;
        let out = &mut self.body;
        self.events += 1;
        let all = 1 + version.fields(fields).count();
        if !version.writes_maps() {
            array_head(out, all);
            str(out, name);
            version.fields(fields).for_each(|field| write(field.name, out));
            return;
        }
        // A field that is nil by default is omitted, so the number of fields is known only at the end. msgspec sizes
        // the head by the maximum number.
        let head = out.len();
        out.extend_from_slice(if all < 16 { &[0x80] } else { &[0xDE, 0, 0] });
        str(out, "type");
        str(out, name);
        let mut pairs: u8 = 1;
        for field in version.fields(fields) {
            let before = out.len();
            str(out, field.name);
            let value = out.len();
            write(field.name, out);
            if !field.always && out[value..] == [NIL] {
                out.truncate(before);
            } else {
                pairs += 1;
            }
        }
        if all < 16 {
            out[head] |= pairs;
        } else {
            out[head + 2] = pairs;
        }
    }
}

const NIL: u8 = 0xC0;

fn nil(out: &mut Vec<u8>) {
    out.push(NIL);
}

fn group(out: &mut Vec<u8>, group: Option<u32>) {
    match group {
        Some(group) => uint(out, u64::from(group)),
        None => nil(out),
    }
}

/// The smallest form of an unsigned integer.
fn uint(out: &mut Vec<u8>, value: u64) {
    if let Ok(value) = u8::try_from(value) {
        if value >= 0x80 {
            out.push(0xCC);
        }
        out.push(value);
    } else if let Ok(value) = u16::try_from(value) {
        out.push(0xCD);
        out.extend_from_slice(&value.to_be_bytes());
    } else if let Ok(value) = u32::try_from(value) {
        out.push(0xCE);
        out.extend_from_slice(&value.to_be_bytes());
    } else {
        out.push(0xCF);
        out.extend_from_slice(&value.to_be_bytes());
    }
}

/// A text shorter than 64 KiB: names and salts are bounded by the body, and truncated here if it was huge.
fn str(out: &mut Vec<u8>, text: &str) {
    let mut end = text.len().min(usize::from(u16::MAX));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let bytes = &text.as_bytes()[..end];
    match end {
        0..32 => out.push(0xA0 | end as u8),
        32..256 => out.extend_from_slice(&[0xD9, end as u8]),
        _ => {
            out.push(0xDA);
            out.extend_from_slice(&(end as u16).to_be_bytes());
        }
    }
    out.extend_from_slice(bytes);
}

fn array<T>(out: &mut Vec<u8>, items: &[T], write: impl Fn(&T, &mut Vec<u8>)) {
    array_head(out, items.len());
    items.iter().for_each(|item| write(item, out));
}

fn array_head(out: &mut Vec<u8>, items: usize) {
    match items {
        0..16 => out.push(0x90 | items as u8),
        16..65_536 => {
            out.push(0xDC);
            out.extend_from_slice(&(items as u16).to_be_bytes());
        }
        _ => {
            out.push(0xDD);
            out.extend_from_slice(&(items as u32).to_be_bytes());
        }
    }
}

/// A block hash. As in vLLM, the number is the last 64 bits of the string.
fn hash(out: &mut Vec<u8>, hashes: KvEventsHashes, name: u64) {
    match hashes {
        KvEventsHashes::Int => uint(out, name),
        KvEventsHashes::Bytes => {
            out.extend_from_slice(&[0xC4, 32]);
            for turn in (0..4_u64).rev() {
                let word = name.wrapping_mul(1 + (turn << 32)) ^ turn.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                out.extend_from_slice(&word.to_be_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn writer(version: Version) -> Writer {
        Writer::new(Encoding { version, hashes: KvEventsHashes::Int })
    }

    #[test]
    fn every_versions_bytes_are_those_of_its_own_publisher() {
        let fixtures = include_str!("../../fixtures/kv-events.txt");
        let mut seen = 0;
        for line in fixtures.lines().filter(|line| !line.starts_with('#')) {
            let [version, name, expected] =
                line.split(' ').collect::<Vec<_>>().try_into().expect("three words a line");
            let version = Version::parse(version).expect("a version");
            let mut writer = writer(version);
            let (unix_secs, rank) = match name {
                "root" => {
                    writer.stored(&Stored {
                        names: &[u64::MAX, 7],
                        parent: None,
                        token_ids: &[0, 1, 2, 3, 4, 5, 6, 7],
                        block_tokens: 4,
                        lora: None,
                        extra_keys: &[],
                        group: None,
                    });
                    (1.5, 0)
                }
                "lora" => {
                    writer.stored(&Stored {
                        names: &[9],
                        parent: Some(7),
                        token_ids: &[300, 70_000, 0, 1],
                        block_tokens: 4,
                        lora: Some((3, "ad")),
                        extra_keys: &[vec!["ad"]],
                        group: None,
                    });
                    (2.5, 0)
                }
                "removed" => {
                    writer.removed(&[7, 9], Some(0));
                    writer.cleared();
                    (4.0, 0)
                }
                other => panic!("{other}"),
            };
            let bytes = writer.finish(unix_secs, rank).expect("something happened");
            assert_eq!(hex(&bytes), expected, "{version} {name}");
            seen += 1;
        }
        assert_eq!(seen, 45, "three frames of each of 15 versions");
    }

    #[test]
    fn a_frame_of_a_real_engine_is_written_byte_for_byte() {
        let real = include_str!("../../fixtures/engine-0.32.0.txt");
        let mut writer = writer(Version(0, 32, 0));
        let ids = "878 2765 1113 2894 3856 2819 2674 312 2515 2620 720 2207 3006 1022 689 1913 1574 1125 3810 2641 2838 \
            2301 919 2824 1348 3472 3167 3198 249 958 3386 151 3317 1312 1663 1116 291 884 3760 3882 2343 3609 2960 1308 \
            890 2704 2064 1640 3643 3765 2653 1899 605 1104 591 1030 3071 2319 2227 1096 3079 2414 1774 3697";
        let ids: Vec<u32> = ids.split_whitespace().map(|id| id.parse().expect("a number")).collect();
        writer.stored(&Stored {
            names: &[12_982_576_977_561_189_910, 11_462_480_117_927_668_019],
            parent: None,
            token_ids: &ids,
            block_tokens: 32,
            lora: Some((1, "lora1")),
            extra_keys: &[vec!["lora1"], vec!["lora1"]],
            group: Some(0),
        });
        let bytes = writer.finish(1_795_163_795.801_009_4, 0).expect("something happened");
        assert_eq!(hex(&bytes), real.trim());
    }

    #[test]
    fn a_batch_in_which_nothing_happened_is_none() {
        assert_eq!(writer(Version(0, 32, 0)).finish(1.0, 0), None);
    }

    #[test]
    fn the_last_bytes_of_a_long_name_are_the_short_one() {
        let mut out = Vec::new();
        hash(&mut out, KvEventsHashes::Bytes, 0x0102_0304_0506_0708);
        assert_eq!((out.len(), &out[..2]), (34, [0xC4, 32].as_slice()));
        assert_eq!(out[26..], [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
