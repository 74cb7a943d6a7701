//! KV event formats by vLLM version: the fields, their order, and whether events are arrays or maps.
//!
//! Taken from each listed version's publisher (`vllm/distributed/kv_events.py`); a field's first version is the first
//! one examined, so an unlisted version before it may also have the field.

/// A version of vLLM: major, minor, patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u16, pub u16, pub u16);

/// A field of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldOrder {
    /// Its name, and its key where events are maps.
    pub name: &'static str,
    /// The first version with it.
    pub since: Version,
    /// Whether a map contains it even if nil, because it has no default.
    pub always: bool,
}

/// The first listed version.
pub const OLDEST: Version = Version(0, 9, 2);

/// Every version whose frames were compared, oldest first.
pub const VERSIONS: [Version; 15] = [
    OLDEST,
    Version(0, 10, 2),
    Version(0, 12, 0),
    Version(0, 14, 1),
    Version(0, 16, 0),
    Version(0, 19, 1),
    Version(0, 22, 1),
    Version(0, 23, 0),
    MAPS_SINCE,
    Version(0, 25, 1),
    REPLAY_TOPIC_SINCE,
    Version(0, 29, 0),
    Version(0, 31, 0),
    Version(0, 32, 0),
    Version(0, 33, 0),
];

/// From this version, events are maps that omit default values; before, arrays with all fields.
pub const MAPS_SINCE: Version = Version(0, 24, 0);

/// From this version, a replayed message includes its topic: four frames instead of three.
pub const REPLAY_TOPIC_SINCE: Version = Version(0, 26, 0);

/// The fields of `BlockStored` in array order, after the event's name.
pub const STORED: [FieldOrder; 15] = [
    field("block_hashes", OLDEST, true),
    field("parent_block_hash", OLDEST, true),
    field("token_ids", OLDEST, true),
    field("block_size", OLDEST, true),
    field("lora_id", OLDEST, true),
    field("medium", Version(0, 10, 2), true),
    field("lora_name", Version(0, 14, 1), true),
    field("extra_keys", Version(0, 19, 1), false),
    field("group_idx", Version(0, 22, 1), false),
    field("kv_cache_spec_kind", Version(0, 22, 1), false),
    field("kv_cache_spec_sliding_window", Version(0, 22, 1), false),
    field("locality", Version(0, 26, 0), false),
    field("ownership", Version(0, 29, 0), false),
    field("session_id", Version(0, 31, 0), false),
    field("lookahead_token_ids", Version(0, 33, 0), false),
];

/// The fields of `BlockRemoved`, in the same form.
pub const REMOVED: [FieldOrder; 5] = [
    field("block_hashes", OLDEST, true),
    field("medium", Version(0, 10, 2), true),
    field("group_idx", Version(0, 22, 1), false),
    field("locality", Version(0, 26, 0), false),
    field("ownership", Version(0, 29, 0), false),
];

const fn field(name: &'static str, since: Version, always: bool) -> FieldOrder {
    FieldOrder { name, since, always }
}

// === impl Version ===

impl Version {
    /// Parses a version such as `0.24.0`; a missing patch is 0, and text after the patch's digits is ignored.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split('.').map(|part| {
            let digits = part.bytes().take_while(u8::is_ascii_digit).count();
            part[..digits].parse().ok()
        });
        Some(Self(parts.next()??, parts.next()??, parts.next().flatten().unwrap_or(0)))
    }

    /// Whether its events are maps.
    pub fn writes_maps(self) -> bool {
        self >= MAPS_SINCE
    }

    /// Whether its replayed messages include the topic.
    pub fn replays_topic(self) -> bool {
        self >= REPLAY_TOPIC_SINCE
    }

    /// The fields in `fields` ([`STORED`], [`REMOVED`]) that it writes, in order.
    pub fn fields(self, fields: &'static [FieldOrder]) -> impl Iterator<Item = &'static FieldOrder> {
        fields.iter().filter(move |field| field.since <= self)
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}
