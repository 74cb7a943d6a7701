//! Runs the targets of `fuzz/` over what fuzzing has found and is kept there, and over mutations of it: in a few seconds,
//! and without libFuzzer.

// The targets ask for `libfuzzer_sys::fuzz_target`, which is this crate's here.
extern crate self as libfuzzer_sys;

use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use flate2::read::GzDecoder;
use kvlane_core::rng::Rng;

/// Mutated inputs for each target.
const MUTATIONS: u64 = 1000;
/// Longest mutated input, as in libFuzzer's default.
const BYTES_MAX: usize = 4096;
/// The blocks of a tar archive.
const BLOCK: usize = 512;

macro_rules! targets {
    ($($target:ident $path:tt)*) => {$(
        #[path = $path]
        #[allow(unused_attributes, reason = "`no_main` is for the program of its own that each target is")]
        mod $target;

        #[test]
        fn $target() {
            check(stringify!($target), $target::run);
        }
    )*};
}

targets! {
    answers "../../../fuzz/fuzz_targets/answers.rs"
    body "../../../fuzz/fuzz_targets/body.rs"
    ext_proc "../../../fuzz/fuzz_targets/ext_proc.rs"
    files "../../../fuzz/fuzz_targets/files.rs"
    identity "../../../fuzz/fuzz_targets/identity.rs"
    kv_events "../../../fuzz/fuzz_targets/kv_events.rs"
    metrics "../../../fuzz/fuzz_targets/metrics.rs"
    prompts "../../../fuzz/fuzz_targets/prompts.rs"
    recordings "../../../fuzz/fuzz_targets/recordings.rs"
    records "../../../fuzz/fuzz_targets/records.rs"
    requests "../../../fuzz/fuzz_targets/requests.rs"
    resume "../../../fuzz/fuzz_targets/resume.rs"
    sequence "../../../fuzz/fuzz_targets/sequence.rs"
    snapshot "../../../fuzz/fuzz_targets/snapshot.rs"
    sse "../../../fuzz/fuzz_targets/sse.rs"
    telemetry "../../../fuzz/fuzz_targets/telemetry.rs"
    templates "../../../fuzz/fuzz_targets/templates.rs"
    texts "../../../fuzz/fuzz_targets/texts.rs"
    tokenizer_files "../../../fuzz/fuzz_targets/tokenizer_files.rs"
    traces "../../../fuzz/fuzz_targets/traces.rs"
    upstream "../../../fuzz/fuzz_targets/upstream.rs"
    zmtp "../../../fuzz/fuzz_targets/zmtp.rs"
}

/// What a target does with one input. Defined after the targets: they import it by its path.
#[macro_export]
macro_rules! fuzz_target {
    (|$bytes:ident: &[u8]| $body:block) => {
        pub(crate) fn run($bytes: &[u8]) {
            $body
        }
    };
    (|$text:ident: &str| $body:block) => {
        pub(crate) fn run(bytes: &[u8]) {
            let $text = bytes.utf8_chunks().next().map_or("", |chunk| chunk.valid());
            $body
        }
    };
}

#[test]
fn every_target_is_here_and_has_kept_inputs() {
    let targets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/fuzz_targets");
    let here = include_str!("fuzz.rs");
    for file in std::fs::read_dir(targets).expect("a folder") {
        let name = file.expect("a file").file_name().into_string().expect("a name");
        assert!(here.contains(&format!("fuzz_targets/{name}\"")), "{name} is missing in `targets!`");
        assert!(!kept(name.trim_end_matches(".rs")).is_empty(), "{name}");
    }
}

fn check(target: &str, run: impl Fn(&[u8])) {
    let seeds = kept(target);
    let one = |what: &str, input: &[u8]| {
        if catch_unwind(AssertUnwindSafe(|| run(input))).is_err() {
            panic!("{target} fails at {what}: b\"{}\"", input.escape_ascii());
        }
    };
    for (n, input) in seeds.iter().enumerate() {
        one(&format!("kept-{n}"), input);
    }
    for seed in 0..MUTATIONS {
        one(&format!("the mutation of seed {seed}"), &mutated(&seeds, seed));
    }
}

/// The kept inputs of a target.
fn kept(target: &str) -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../fuzz/kept/{target}.tar.gz"));
    let mut archive = Vec::new();
    GzDecoder::new(std::fs::File::open(path).expect("an archive")).read_to_end(&mut archive).expect("gzip");
    let (mut rest, mut inputs) = (&archive[..], Vec::new());
    // A header has its size in octal digits; an empty one ends the archive.
    while rest.first().is_some_and(|&byte| byte != 0) {
        let (header, after) = rest.split_at(BLOCK);
        let size = std::str::from_utf8(&header[124..135]).expect("digits");
        let size = usize::from_str_radix(size, 8).expect("a size");
        inputs.push(after[..size].to_vec());
        rest = &after[size.next_multiple_of(BLOCK)..];
    }
    inputs
}

/// One of the seeds after a few random changes.
fn mutated(seeds: &[Vec<u8>], seed: u64) -> Vec<u8> {
    let mut random = Rng::new(seed);
    let mut input = seeds[random.below(seeds.len())].clone();
    input.truncate(BYTES_MAX);
    for _ in 0..=random.below(4) {
        let at = random.below(input.len() + 1);
        let end = (at + random.below(16)).min(input.len());
        match random.below(6) {
            0 if at < input.len() => input[at] ^= 1 << random.below(8),
            1 if at < input.len() => input[at] = [0, 1, 0x7f, 0x80, 0xff, b'"', b'\n', b'9'][random.below(8)],
            2 => drop(input.drain(at..end)),
            3 => {
                let piece = input[at..end].to_vec();
                drop(input.splice(at..at, piece));
            }
            4 => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..other.len().min(from + BYTES_MAX - at)]);
            }
            _ => input.insert(at, random.below(256) as u8),
        }
    }
    input
}
