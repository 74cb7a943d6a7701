//! SGLang (`sglang/srt/disaggregation`): both legs name the prefill engine's bootstrap server and a room of their own.

use super::connector::Split;
use crate::edit::quoted;

/// The members of both legs. A room is a signed 64-bit number, not negative.
pub(super) fn bootstrap(split: &Split<'_>) -> String {
    format!(
        "\"bootstrap_host\":{},\"bootstrap_port\":{},\"bootstrap_room\":{}",
        quoted(&split.source.host),
        split.source.port,
        split.room & (u64::MAX >> 1),
    )
}
