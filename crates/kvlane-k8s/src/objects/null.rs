//! Fields that the API server may write as null.

use serde::{Deserialize, Deserializer};

/// The default for null, which Go writes for an empty list or map.
pub(super) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
