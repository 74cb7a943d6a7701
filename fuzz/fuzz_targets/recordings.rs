//! Any bytes as a recording: as a file, as the content of one frame of it, as a segment. Reading ends, tells of every byte
//! once, and what is written is read back.
#![no_main]

use kvlane_core::recording::file::{Frame, Frames, MAGIC, add};
use kvlane_core::recording::{Entries, Segment};
use libfuzzer_sys::fuzz_target;
use xxhash_rust::xxh3::xxh3_64;

const KINDS: [u8; 3] = [b'H', b'S', b'P'];

fn read(file: &[u8]) -> Vec<Frame<'_>> {
    let frames: Vec<_> = Frames::new(file).expect("it begins as one").collect();
    assert!(frames.len() <= file.len());
    frames
}

fuzz_target!(|bytes: &[u8]| {
    let file = [MAGIC, bytes].concat();
    read(&file);
    let entries: Vec<_> = Entries::new(bytes).collect();
    let damaged = entries.iter().filter(|entry| entry.is_err()).count();
    assert!(damaged <= 1 && entries.last().is_none_or(|last| last.is_err() == (damaged == 1)));
    assert!(entries.len() <= bytes.len());

    let Some((&which, content)) = bytes.split_first() else { return };
    let mut file = MAGIC.to_vec();
    file.push(KINDS[usize::from(which) % KINDS.len()]);
    file.extend((content.len() as u32).to_le_bytes());
    file.extend(xxh3_64(content).to_le_bytes());
    file.extend(content);
    match &read(&file)[..] {
        [Frame::Prompts(shared)] if !shared.is_empty() => {
            let mut again = MAGIC.to_vec();
            add(&mut again, &Segment::default(), shared);
            assert_eq!(read(&again).last(), Some(&Frame::Prompts(shared.clone())));
        }
        [_] => {}
        frames => panic!("one frame is read as {}", frames.len()),
    }
});
