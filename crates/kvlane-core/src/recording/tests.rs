use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::encode::{ENDS, Memory};
use super::file::{Frame, Frames, Head, Shared, add, begin};
use super::*;
use crate::adapters::AdapterReport;
use crate::block::{BlockHash, ChainSeed};
use crate::cache_accuracy::{self, Feed, Prediction};
use crate::decision::Placement;
use crate::index::approx;
use crate::load;
use crate::policy::PolicyConfig;
use crate::rates::OwnMeasures;
use crate::request::{
    AdapterKey, Claims, IfMissed, RequestKey, SchedulingRequest, SessionKey, Slo, TenantKey,
};
use crate::rng::Rng;
use crate::router::{self, Router, Scratch};
use crate::scheduler::{Config, Scheduler, TOKENS_TOLD};

fn ids() -> impl Strategy<Value = RequestId> {
    prop_oneof![(0u64..300).prop_map(RequestId), any::<u64>().prop_map(RequestId)]
}

fn endpoints() -> impl Strategy<Value = EndpointId> {
    (0u16..300, prop_oneof![Just(0u16), 0u16..3])
        .prop_map(|(slot, generation)| EndpointId::new(slot, generation))
}

fn overlaps() -> impl Strategy<Value = Vec<(EndpointId, Prediction)>> {
    let prediction = (0u32..5, 0u32..5, 0u32..3).prop_map(|(exact, approximate, lower)| Prediction {
        exact,
        approximate,
        lower,
    });
    prop::collection::btree_map(endpoints(), prediction, 0..40).prop_map(|map| map.into_iter().collect())
}

fn requests() -> impl Strategy<Value = SchedulingRequest> {
    let keys = || prop::option::of(prop_oneof![0u64..5, any::<u64>()]);
    let numbers = (ids(), any::<u32>(), 0u32..3, any::<i8>(), prop::option::of(any::<u32>()));
    let hedge = prop::option::of(any::<u64>().prop_map(Nanos));
    let most = || prop::option::of(any::<u32>());
    let if_missed = prop::sample::select(vec![IfMissed::ByPriority, IfMissed::BestEffort, IfMissed::Refuse]);
    let slo = (most(), most(), if_missed);
    let slo = slo.prop_map(|(ttft_ms, tpot_ms, if_missed)| Slo { ttft_ms, tpot_ms, if_missed });
    let claims =
        (most(), any::<bool>()).prop_map(|(output_tokens, is_last)| Claims { output_tokens, is_last });
    let flags = (any::<bool>(), hedge, prop::collection::vec(endpoints(), 0..3), slo, claims);
    (numbers, (keys(), keys(), keys(), keys(), keys()), flags).prop_map(
        |(
            (id, tokens, attempt, priority, max),
            (session, tenant, head, name, adapter),
            (whole, hedge, excluded, slo, claims),
        )| {
            SchedulingRequest {
                attempt,
                priority,
                output_tokens_max: max,
                session: session.map(SessionKey),
                tenant: tenant.map(TenantKey),
                head: head.map(BlockHash),
                name: name.map(RequestKey),
                adapter: adapter.map(|key| AdapterKey::named(&key.to_le_bytes())),
                whole_answer: whole,
                hedge,
                slo,
                claims,
                excluded: excluded.into(),
                ..SchedulingRequest::new(id, tokens)
            }
        },
    )
}

fn inputs() -> impl Strategy<Value = Input> {
    let counts = prop_oneof![Just(TOKENS_TOLD), any::<u32>()];
    prop_oneof![
        (requests(), overlaps(), 1u32..70).prop_map(|(request, overlap, block_tokens)| Input::Arrived {
            request,
            overlap,
            block_tokens
        }),
        (endpoints(), prop::option::of(0u32..9)).prop_map(|(endpoint, slots)| Input::Adapters {
            endpoint,
            reported: AdapterReport {
                slots,
                running: vec![AdapterKey::named(b"sql")],
                ..AdapterReport::default()
            },
        }),
        ids().prop_map(|request| Input::FirstToken { request }),
        ids().prop_map(|request| Input::Begun { request }),
        (ids(), counts).prop_map(|(request, count)| Input::Tokens { request, count }),
        (ids(), any::<u32>()).prop_map(|(request, output_tokens)| Input::Wrote { request, output_tokens }),
        (ids(), 0usize..3).prop_map(|(request, end)| Input::Ended { request, end: ENDS[end] }),
        (ids(), any::<u32>(), any::<u32>()).prop_map(|(request, prompt_tokens, cached_tokens)| {
            Input::Answered {
                request,
                reported: cache_accuracy::ReportedReuse { prompt_tokens, cached_tokens },
            }
        }),
        ids().prop_map(|request| Input::Failed { request }),
        (ids(), any::<bool>())
            .prop_map(|(request, told)| Input::Busy { request, retry_after: told.then_some(Nanos(7)) }),
        ids().prop_map(|request| Input::Succeeded { request }),
        (ids(), overlaps()).prop_map(|(request, overlap)| Input::Refreshed { request, overlap }),
        ids().prop_map(|request| Input::Finished { request }),
        Just(Input::Tick),
        (endpoints(), any::<bool>()).prop_map(|(endpoint, healthy)| Input::Health { endpoint, healthy }),
        endpoints().prop_map(|endpoint| Input::Fed { endpoint, feed: Feed::Live }),
        endpoints().prop_map(|endpoint| Input::Left { endpoint }),
        endpoints().prop_map(|endpoint| Input::Blamed { endpoint }),
        (endpoints(), any::<bool>()).prop_map(|(endpoint, stalled)| Input::Stalled { endpoint, stalled }),
        endpoints().prop_map(|endpoint| Input::Joined {
            endpoint,
            name: "e".into(),
            healthy: true,
            draining: false
        }),
        (endpoints(), -1e9f64..1e9, 0.0f64..1.0, any::<u32>()).prop_map(
            |(endpoint, queries, hits, block_tokens)| Input::Counted {
                endpoint,
                queries,
                hits,
                block_tokens
            }
        ),
        (endpoints(), 0.0f64..1e9, 0.0f64..1e6, prop::option::of(0..u64::MAX)).prop_map(
            |(endpoint, intervals, seconds, computed_tokens)| Input::Measured {
                endpoint,
                own: OwnMeasures {
                    intervals,
                    seconds,
                    computed_tokens,
                    fetched_tokens: computed_tokens.unwrap_or(0) / 2
                },
            }
        ),
        (endpoints(), any::<u32>(), 0.0f32..1.0, prop::option::of(any::<u64>())).prop_map(
            |(endpoint, running, kv_usage_ratio, kv_capacity_tokens)| Input::Reported {
                endpoint,
                reported: load::LoadReport { running, waiting: 3, kv_usage_ratio, kv_capacity_tokens },
            }
        ),
    ]
}

/// Sorts predictions, whose order has no meaning.
fn sorted(mut input: Input) -> Input {
    if let Input::Arrived { overlap, .. } | Input::Refreshed { overlap, .. } = &mut input {
        overlap.sort_by_key(|(id, _)| *id);
    }
    input
}

proptest! {
    /// Invariant: A recording is read as it was written, and no bytes make its reader panic.
    ///
    /// Also held by `no_bytes_make_a_reader_panic`.
    ///
    /// For any inputs at any times, decoding returns what was encoded.
    #[test]
    fn what_was_written_is_read(
        told in prop::collection::vec((0u64..5_000_000, any::<bool>(), inputs()), 0..60),
    ) {
        let (mut bytes, mut memory, mut wanted) = (Vec::new(), Memory::default(), Vec::new());
        for (at, whole, input) in told {
            let at = Nanos(if whole { at / 1000 * 1000 } else { at });
            memory.input(&mut bytes, at, &input);
            wanted.push((at, Entry::Input(sorted(input))));
            let (request, endpoint) = (RequestId(at.0 % 7), EndpointId::new(3, 9));
            let prefill = Some(EndpointId::new(4, 8)).filter(|_| at.0.is_multiple_of(2));
            let reason = Reason::Affinity;
            memory.placed(&mut bytes, at, request, endpoint, reason, prefill);
            wanted.push((at, Entry::Placed { request, endpoint, reason, prefill }));
            memory.refused(&mut bytes, at, request, Rejection::BudgetSpent);
            wanted.push((at, Entry::Refused { request, why: Rejection::BudgetSpent }));
        }
        let read: Vec<_> = Entries::new(&bytes)
            .map(|entry| entry.expect("whole"))
            .map(|(at, entry)| match entry {
                Entry::Input(input) => (at, Entry::Input(sorted(input))),
                entry => (at, entry),
            })
            .collect();
        prop_assert_eq!(read, wanted);
    }

    /// For any bytes, the decoder neither panics nor loops.
    #[test]
    fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Entries::new(&bytes).count();
        let mut file = file::MAGIC.to_vec();
        file.extend(&bytes);
        prop_assert!(Frames::new(&file).expect("a recording").count() <= bytes.len());
        let mut replay = Replay::new(None);
        let _ = replay.segment(0, &bytes, |_| true, |_| true);
    }
}

/// Segments of a router after a few hundred requests in conversations, and where each request was placed.
fn recorded(policy: &str, seed: u64, handed_over_every: u64) -> (Vec<Segment>, Vec<(RequestId, Placement)>) {
    let segments = Arc::new(Mutex::new(Vec::new()));
    let router = Router::new(router::Config {
        scheduler: Config {
            max_concurrent_requests: 40,
            queue_size: 10,
            queue_timeout: Nanos::from_secs(1),
            seed,
            ..Config::new(PolicyConfig::by_name(policy).expect("a policy"))
        },
        index: approx::Config { memory_bytes_max: 1 << 20, ttl: Nanos::MAX },
        exact: None,
        block_tokens: 16,
    });
    let sink = Arc::clone(&segments);
    router.record(Some(Recorder::new(move |segment| sink.lock().expect("no panic").push(segment))));
    let (mut out, mut scratch, mut placed) = (Vec::new(), Scratch::default(), Vec::new());
    for n in 0..4 {
        router.join(Nanos(n), format!("e{n}").into(), true, false, &mut out).expect("room");
    }
    let (mut rng, mut running) = (Rng::new(seed), Vec::new());
    for n in 1..=400u64 {
        let now = Nanos::from_micros(n * 1500);
        let session = rng.below(12);
        let prompt = vec![session as u8; 16 * (8 + rng.below(40))];
        let mut chain = Vec::new();
        ChainSeed::new("m", None, None).chain(&prompt, 16, &mut chain);
        let id = RequestId(n);
        let request = SchedulingRequest {
            session: Some(SessionKey(session as u64)),
            ..SchedulingRequest::new(id, prompt.len() as u32)
        };
        router.arrive(now, request, &chain, &mut scratch, &mut out);
        running.push(id);
        router.progress(now, running[rng.below(running.len())], true, 16, &mut out);
        if running.len() > 30 {
            let request = running.swap_remove(rng.below(running.len()));
            router.step(now, Input::Wrote { request, output_tokens: 20 }, &mut out);
            router.step(now, Input::Finished { request }, &mut out);
        }
        if n % handed_over_every == 0 {
            router.flush_tape();
        }
        placed.extend(out.drain(..).filter_map(|output| match output {
            Output::Dispatch { request, placement } => Some((request, placement)),
            _ => None,
        }));
    }
    router.record(None);
    let segments = segments.lock().expect("no panic").clone();
    (segments, placed)
}

/// Invariant: Every policy decides again as it did when a recording is replayed, in the gateway too.
///
/// Also held by `a_recording_replays_to_the_same_placements_and_contains_no_text`.
#[test]
fn every_policy_decides_again_as_it_did() {
    for &policy in PolicyConfig::NAMES {
        let (segments, placed) = recorded(policy, 3, 50);
        assert!(segments.len() > 5 && placed.len() > 300, "{policy}");
        let mut replay = Replay::new(None);
        let mut seen = Vec::new();
        for segment in &segments {
            replay.segment(
                segment.number,
                &segment.bytes,
                |_| true,
                |step| {
                    if let Some((request, endpoint, reason)) = step.placed {
                        let receipt = step.receipt.expect("a receipt was requested");
                        assert_eq!((receipt.request, receipt.placement.endpoint), (request, endpoint));
                        assert_eq!(step.picked, Some((endpoint, reason)));
                        seen.push((request, receipt.placement));
                    }
                    true
                },
            );
        }
        assert_eq!(seen, placed, "{policy}");
        let tally = replay.tally();
        assert_eq!((tally.same, tally.other, tally.missed), (placed.len() as u64, 0, 0), "{policy}");
        assert_eq!((tally.resumed, tally.lost), (0, 0), "{policy}");
    }
}

/// Invariant: A replay can begin in the middle of a recording with correct ledgers; a lost segment loses only itself.
///
/// Also held by `a_segment_that_is_lost_is_counted_and_the_rest_goes_on`,
/// `a_file_is_read_as_it_was_written_and_as_far_as_it_is_whole`.
#[test]
fn from_the_middle_on_requests_go_where_they_went_and_ledgers_are_right_at_once() {
    let (segments, placed) = recorded("least_tokens", 5, 50);
    let whole = |from: usize| {
        let mut replay = Replay::new(None);
        let mut loads = Vec::new();
        for segment in &segments[from..] {
            replay.segment(
                segment.number,
                &segment.bytes,
                |_| false,
                |step| {
                    let load = |e: &crate::endpoint::Endpoint| e.load.in_flight.requests;
                    let waiting = step.scheduler.queued() == 0;
                    loads.push((
                        step.at,
                        waiting,
                        step.scheduler.pool().endpoints().map(load).collect::<Vec<_>>(),
                    ));
                    true
                },
            );
        }
        (replay.tally(), loads)
    };
    let ((all, of_all), (part, of_part)) = (whole(0), whole(3));
    assert_eq!(all.placed, placed.len() as u64);
    assert_eq!((part.resumed, part.lost, part.missed), (1, 0, 0));
    assert!(part.placed > 100 && part.same * 10 > part.placed * 9, "{part:?}");
    assert_eq!(of_part[..], of_all[of_all.len() - of_part.len()..]);
}

#[test]
fn a_segment_that_is_lost_is_counted_and_the_rest_goes_on() {
    let (segments, _) = recorded("least_load", 5, 40);
    let mut replay = Replay::new(None);
    for segment in segments.iter().filter(|segment| segment.number != 2) {
        replay.segment(segment.number, &segment.bytes, |_| false, |_| true);
    }
    let Tally { resumed, lost, placed, missed, .. } = replay.tally();
    assert_eq!((resumed, lost, missed), (1, 1, 0));
    assert!(placed > 300);
}

/// A file of all segments and their shared prefixes.
fn file_of(segments: &[Segment]) -> Vec<u8> {
    let head = Head {
        schema: "kvlane.recording/1".into(),
        model: "m".into(),
        version: "0".into(),
        origin_unix_s: 1.5,
        begun: Nanos(3),
    };
    let mut file = begin(&head);
    let mut sharing = Sharing::new(1000);
    for segment in segments {
        let mut hashes = &segment.hashes[..];
        let shared: Vec<_> = segment
            .prompts
            .iter()
            .map(|&(request, len)| {
                let (own, rest) = hashes.split_at(len as usize);
                hashes = rest;
                Shared { request, base: sharing.of(request, own) }
            })
            .collect();
        add(&mut file, segment, &shared);
    }
    file
}

#[test]
fn a_file_is_read_as_it_was_written_and_as_far_as_it_is_whole() {
    let (segments, _) = recorded("random", 5, 40);
    let file = file_of(&segments);
    let frames: Vec<_> = Frames::new(&file).expect("a recording").collect();
    assert!(matches!(&frames[0], Frame::Head(head) if head.model == "m"));
    let read: Vec<_> = frames
        .iter()
        .filter_map(|frame| match frame {
            Frame::Segment { number, bytes } => Some((*number, bytes.to_vec())),
            _ => None,
        })
        .collect();
    let written: Vec<_> = segments.iter().map(|segment| (segment.number, segment.bytes.clone())).collect();
    assert_eq!(read, written);
    let shared = |frame: &Frame<'_>| match frame {
        Frame::Prompts(shared) => shared.iter().filter(|one| one.base.is_some()).count(),
        _ => 0,
    };
    assert_eq!(
        frames.iter().map(shared).sum::<usize>(),
        388,
        "all requests except the first of twelve conversations"
    );
    for len in (file::MAGIC.len() + 1..file.len()).step_by(997) {
        let cut: Vec<_> = Frames::new(&file[..len]).expect("a recording").collect();
        let (last, before) = cut.split_last().expect("something");
        assert!(matches!(last, Frame::Torn(_)) || frames.contains(last));
        assert_eq!(before, &frames[..before.len()]);
    }
}

#[test]
fn a_byte_that_differs_costs_its_frame_and_a_torn_file_may_be_followed_by_another() {
    let (segments, _) = recorded("random", 5, 40);
    let mut file = file_of(&segments);
    let whole = Frames::new(&file).expect("a recording").count();
    let at = file.len() / 2;
    file[at] ^= 1;
    let frames: Vec<_> = Frames::new(&file).expect("a recording").collect();
    assert_eq!(frames.len(), whole);
    assert_eq!(frames.iter().filter(|frame| matches!(frame, Frame::Damaged(_))).count(), 1);
    let torn = [&file[..file.len() - 5], &file[..]].concat();
    let frames: Vec<_> = Frames::new(&torn).expect("two").collect();
    assert_eq!(frames.len(), 2 * whole);
    assert!(matches!(frames[whole - 1], Frame::Torn(_)));
    assert!(Frames::new(b"{\"scheduled_s\"").is_none());
}

#[test]
fn a_request_takes_few_bytes() {
    let (segments, placed) = recorded("fleet_cost", 5, 1000);
    let bytes: usize = segments.iter().map(|segment| segment.bytes.len()).sum();
    let synopses = segments.len() * 600;
    // Each of these requests has five inputs, with a session and a first block.
    assert!((bytes - synopses) / placed.len() < 50, "{} bytes for {}", bytes, placed.len());
}

/// Invariant: A shadow policy changes no decision.
#[test]
fn a_second_policy_changes_nothing_and_agrees_with_itself() {
    let live = |shadow: Option<&str>| {
        let mut config = Config { seed: 9, ..Config::new(PolicyConfig::by_name("random").expect("one")) };
        config.shadow_policy = shadow.map(|name| PolicyConfig::by_name(name).expect("one"));
        let mut scheduler = Scheduler::new(config);
        let mut out = Vec::new();
        for n in 0..3 {
            let endpoint = EndpointId::new(n, 0);
            let input = Input::Joined { endpoint, name: "e".into(), healthy: true, draining: false };
            scheduler.step(Nanos(1), input, &mut out);
        }
        for n in 0..50 {
            let request = SchedulingRequest::new(RequestId(n), 1000);
            let arrived = Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 };
            scheduler.step(Nanos(2 + n), arrived, &mut out);
        }
        (out, scheduler.shadowed())
    };
    let (alone, nobody) = live(None);
    assert_eq!(nobody, None);
    let (beside, shadowed) = live(Some("least_prefill"));
    assert_eq!(alone, beside);
    let of = shadowed.expect("a shadow policy is configured");
    let all = of.all();
    assert_eq!((of.policy, all.decisions), ("least_prefill", 50));
    assert!(all.agreed < 40 && all.gain_s > 0.0, "{all:?}");
    let (mean_s, error_s) = all.mean_gain_s();
    assert!(mean_s > 0.0 && error_s > 0.0 && error_s < mean_s, "{mean_s} {error_s}");

    let mut same = Scheduler::new(Config {
        shadow_policy: PolicyConfig::by_name("round_robin"),
        ..Config::new(PolicyConfig::by_name("round_robin").expect("one"))
    });
    let input =
        Input::Joined { endpoint: EndpointId::new(0, 0), name: "e".into(), healthy: true, draining: false };
    same.step(Nanos(1), input, &mut Vec::new());
    let request = SchedulingRequest::new(RequestId(1), 10);
    let arrived = Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 };
    same.step(Nanos(2), arrived, &mut Vec::new());
    assert_eq!(same.shadowed().expect("there").all().share(), 1.0);
}
