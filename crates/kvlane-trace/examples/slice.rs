//! Cuts a slice out of a trace: whole sessions drawn by a seeded lot, within a window of time.
//!
//! The slice that `kvlane demo` replays was made by
//! `cargo run -p kvlane-trace --example slice -- conversation_trace.jsonl.gz slice.jsonl.gz 2400 3000 0.3 1`.

use std::fs::File;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use kvlane_trace::format::{self, Jitter, Options, mooncake};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [from, to, start_s, end_s, share, seed] = &args[..] else {
        return Err("usage: slice IN OUT START_S END_S SESSION_SHARE SEED".into());
    };
    // The reader of the slice spreads quantised timestamps, as the reader of the whole trace would.
    let options = Options { jitter: Jitter::Off, ..Options::default() };
    let trace = format::open(Path::new(from), &options)?;
    let slice = trace.slice(start_s.parse()?..end_s.parse()?, share.parse()?, seed.parse()?);
    let mut out = GzEncoder::new(File::create(to)?, Compression::best());
    mooncake::write(&slice, &mut out)?;
    out.finish()?;
    Ok(())
}
