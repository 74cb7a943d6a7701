//! Any series of what a stream's sockets may see: messages are applied in order, what waits is bounded, and it comes to rest.
#![no_main]

use kvlane_core::time::Nanos;
use kvlane_wire::sequence::{Config, Round, Sequence, Step};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, acts)) = bytes.split_first() else { return };
    let config = Config { replay: first & 1 == 1, held_max: 8, held_bytes_max: 64, ..Config::default() };
    let mut sequence = Sequence::new(config);
    let (mut now, mut round, mut last) = (Nanos::ZERO, Round(0), None);
    let out = |step: Step<'_>, round: &mut Round, last: &mut Option<u64>| match step {
        Step::Apply { seq, .. } => {
            assert!(last.is_none_or(|last| last + 1 == seq), "{seq} after {last:?}");
            *last = Some(seq);
        }
        Step::Replay { round: asked, .. } => {
            assert!(config.replay && asked > *round);
            *round = asked;
        }
        Step::Clear(_) => *last = None,
    };
    for act in acts.chunks_exact(3) {
        let (seq, payload) = (seq_of(act[1]), &act[2..]);
        let (asked, mut step) = (round, |step: Step<'_>| out(step, &mut round, &mut last));
        match act[0] % 9 {
            0 => sequence.connected(now, &mut step),
            1 => sequence.disconnected(),
            2 | 3 => sequence.live(now, seq, payload, &mut step),
            4 | 5 => sequence.replayed(now, asked, seq, payload, &mut step),
            6 => sequence.replay_ended(now, asked, &mut step),
            7 => sequence.overflowed(now, &mut step),
            _ => {
                now += Nanos::from_millis(100 * u64::from(act[1]));
                sequence.tick(now, &mut step);
            }
        }
    }
    for _ in 0..100 {
        let Some(deadline) = sequence.next_deadline() else { return };
        now = deadline.max(now);
        sequence.tick(now, &mut |step| out(step, &mut round, &mut last));
    }
    panic!("it never comes to rest");
});

/// Mostly small numbers, some beyond what is remembered, some at the end of all numbers.
fn seq_of(byte: u8) -> u64 {
    match byte {
        0..0xc0 => u64::from(byte % 16),
        0xc0..0xf0 => u64::from(byte) * 64,
        _ => u64::MAX - u64::from(0xff - byte),
    }
}
