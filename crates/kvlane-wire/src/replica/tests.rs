//! Tests of frames: both directions.

use std::sync::Arc;

use bytes::Bytes;
use kvlane_core::block::BlockHash;
use kvlane_core::limit::{self, Usage};
use kvlane_core::load::InFlight;
use kvlane_core::replica::{Estimate, ReplicaId, Service, Share, Subject, Turn};
use kvlane_core::request::{SessionKey, TenantKey};
use kvlane_core::time::Nanos;
use proptest::prelude::*;

use super::frame::{SHARES_MAX, USAGES_MAX};
use super::*;
use crate::grpc::frame;
use crate::protobuf::{Invalid, Message};

fn decoded(wire: Vec<u8>) -> Vec<Frame> {
    let mut decoder = Decoder::default();
    decoder.push(wire.into());
    std::iter::from_fn(|| decoder.frame().expect("a valid frame")).collect()
}

/// What all news together say, whatever frames they came in.
fn told(frames: Vec<Frame>) -> News {
    let mut whole = News::default();
    for frame in frames {
        let Frame::News(news) = frame else { panic!("{frame:?}") };
        (whole.pool, whole.number) = (news.pool, news.number);
        whole.block_tokens = whole.block_tokens.max(news.block_tokens);
        whole.shares.extend(news.shares);
        whole.services.extend(news.services);
        whole.learned.extend(news.learned);
        whole.turns.extend(news.turns);
        for (name, marks) in news.prompts {
            match whole.prompts.last_mut() {
                Some((last, before)) if *last == name => before.extend(marks),
                _ => whole.prompts.push((name, marks)),
            }
        }
    }
    whole
}

fn shares() -> impl Strategy<Value = Vec<(Arc<str>, Share)>> {
    let load = any::<(u32, u32, u32, u64, u64, u64, u64)>().prop_map(
        |(requests, prefilling, moving, prefill_tokens, prefill_pairs, lower_tokens, context_tokens)| {
            InFlight {
                requests,
                prefilling,
                moving,
                prefill_tokens,
                prefill_pairs,
                lower_tokens,
                context_tokens,
            }
        },
    );
    let share = ("[a-f]{1,3}", load, 0.0f64..1e12, any::<u32>());
    let share = share.prop_map(|(name, in_flight, placed_s, breaker_changes)| {
        (name.into(), Share { in_flight, placed_s, breaker_changes })
    });
    prop::collection::vec(share, 0..20)
}

fn services() -> impl Strategy<Value = Vec<Service>> {
    let service =
        any::<(i8, u8, Option<u64>, u32, i64)>().prop_map(|(priority, lane, tenant, since, tokens)| {
            Service { priority, lane, tenant: tenant.map(TenantKey), since, tokens }
        });
    prop::collection::vec(service, 0..10)
}

fn learned() -> impl Strategy<Value = Vec<Learned>> {
    let endpoint = || prop::option::of("[a-f]{1,3}".prop_map(Arc::from));
    let subject = prop_oneof![
        endpoint().prop_map(Subject::Prefill),
        endpoint().prop_map(Subject::Step),
        any::<Option<u16>>().prop_map(Subject::Answer),
    ];
    let estimate = (0.0f64..1e12, any::<u32>());
    let estimate = estimate.prop_map(|(value, observations)| Estimate { value, observations });
    prop::collection::vec((subject, estimate), 0..10)
}

fn turns() -> impl Strategy<Value = Vec<(Arc<str>, Turn)>> {
    let turn =
        ("[a-f]{1,3}", any::<(u64, u64, u32)>()).prop_map(|(name, (session, stamp, prompt_tokens))| {
            (name.into(), Turn { session: SessionKey(session), stamp, prompt_tokens })
        });
    prop::collection::vec(turn, 0..10)
}

fn news() -> impl Strategy<Value = News> {
    let marks = prop::collection::vec(any::<u64>().prop_map(BlockHash), 1..50);
    let prompts = prop::collection::btree_map("[a-f]{1,3}", marks, 0..6);
    ("[a-z/]{0,9}", any::<u64>(), shares(), services(), learned(), turns(), 1u32.., prompts).prop_map(
        |(pool, number, shares, services, learned, turns, tokens, prompts)| {
            let prompts: Vec<_> = prompts.into_iter().map(|(name, marks)| (name.into(), marks)).collect();
            let block_tokens = if prompts.is_empty() { 0 } else { tokens };
            News { pool: pool.into(), number, shares, services, learned, turns, block_tokens, prompts }
        },
    )
}

proptest! {
    #[test]
    fn news_are_read_as_written_in_whatever_pieces_they_arrive(
        all in prop::collection::vec(news(), 1..6),
        cut in 1usize..200,
    ) {
        let (mut encoder, mut decoder, mut read) = (Encoder::default(), Decoder::default(), Vec::new());
        for news in &all {
            let mut wire = Vec::new();
            encoder.news(news, &mut wire);
            let mut frames = Vec::new();
            for piece in wire.chunks(cut) {
                decoder.push(Bytes::copy_from_slice(piece));
                while let Some(frame) = decoder.frame().expect("valid") {
                    frames.push(frame);
                }
            }
            read.push(told(frames));
        }
        prop_assert_eq!(read, all);
    }

    /// Invariant: No bytes from another replica make the reader of its frames panic.
    #[test]
    fn any_bytes_are_frames_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut decoder = Decoder::default();
        decoder.push(bytes.clone().into());
        while let Ok(Some(_)) = decoder.frame() {}
        // As the content of a frame, of news, of a share, of a prompt and so on: random bytes seldom get that far.
        for path in [&[][..], &[1], &[2], &[2, 5], &[2, 7], &[2, 8], &[2, 9], &[2, 10], &[3], &[3, 4]] {
            let mut wire = Vec::new();
            frame(&mut wire, |message| nested(message, path, &bytes));
            let mut decoder = Decoder::default();
            decoder.push(wire.into());
            while let Ok(Some(_)) = decoder.frame() {}
        }
    }

    #[test]
    fn a_changed_byte_is_another_frame_or_an_error(news in news(), at: prop::sample::Index, to: u8) {
        let mut wire = Vec::new();
        Encoder::default().news(&news, &mut wire);
        let at = at.index(wire.len());
        wire[at] = to;
        let mut decoder = Decoder::default();
        decoder.push(wire.into());
        while let Ok(Some(_)) = decoder.frame() {}
    }
}

fn nested(message: &mut Message, path: &[u64], bytes: &[u8]) {
    match path {
        [] => message.0.extend_from_slice(bytes),
        [first, rest @ ..] => message.message(*first, |inner| nested(inner, rest, bytes)),
    }
}

#[test]
fn usage_of_limits_is_read_as_written_in_as_many_frames_as_it_takes() {
    let usage = |key: u64| {
        let [requests, tokens, requests_owed, tokens_owed, age] = [1, 2, 3, 4, 5].map(|n| Nanos(key * n));
        Usage { requests, tokens, requests_owed, tokens_owed, asked: key * 6, in_flight: key as u32 * 7, age }
    };
    let usages: Vec<_> = (0..USAGES_MAX as u64 + 10).map(|key| (key << 40, usage(key))).collect();
    let news = limit::News { subject: ("key".into(), "model".into()), number: 9, usages };
    let mut wire = Vec::new();
    limit(&mut wire, &news);
    let frames = decoded(wire);
    assert_eq!(frames.len(), 2);
    let mut read = limit::News::default();
    for frame in frames {
        let Frame::Limit(part) = frame else { panic!("{frame:?}") };
        (read.subject, read.number) = (part.subject, part.number);
        read.usages.extend(part.usages);
    }
    assert_eq!(read, news);
    let mut wire = Vec::new();
    limit(&mut wire, &limit::News { subject: ("k".repeat(NAME_BYTES_MAX + 1), String::new()), ..news });
    assert!(wire.is_empty(), "a name that no reader would take");
}

#[test]
fn a_name_is_written_once() {
    let share = Share { in_flight: InFlight { requests: 3, ..InFlight::default() }, ..Share::default() };
    let name: Arc<str> = "http://a-long-name-of-an-endpoint:8000".into();
    let news = News { pool: "m".into(), number: 7, shares: vec![(name, share)], ..News::default() };
    let (mut encoder, mut wire) = (Encoder::default(), Vec::new());
    encoder.news(&news, &mut wire);
    let first = wire.len();
    encoder.news(&news, &mut wire);
    let second = wire.len() - first;
    // Its prefix and tags, the pool, a number, and the share with its two.
    assert!(second <= 20, "{second} bytes");
    assert_eq!(decoded(wire), [Frame::News(news.clone()), Frame::News(news)]);
}

#[test]
fn much_news_is_written_in_several_frames_and_a_full_list_of_names_begins_anew() {
    let endpoint = |n: usize| -> Arc<str> { format!("http://{n:0>200}").into() };
    let shares = (0..NAMES_MAX + 10).map(|n| (endpoint(n % (NAMES_MAX + 5)), Share::default())).collect();
    let marks = |n: u64| (0..20_000).map(|mark| BlockHash(n << 32 | mark)).collect();
    let prompts = vec![(endpoint(3), marks(1)), (endpoint(4), marks(2))];
    let news = News { pool: "m".into(), number: 1, shares, block_tokens: 16, prompts, ..News::default() };
    let mut wire = Vec::new();
    Encoder::default().news(&news, &mut wire);
    assert_eq!(told(decoded(wire)), news);
}

#[test]
fn an_endpoint_whose_name_is_too_long_is_left_out() {
    let long: Arc<str> = "x".repeat(NAME_BYTES_MAX + 1).into();
    let prompts = vec![(Arc::clone(&long), vec![BlockHash(1)])];
    let learned = vec![(Subject::Step(Some(Arc::clone(&long))), Estimate::default())];
    let news = News { shares: vec![(long, Share::default())], learned, prompts, ..News::default() };
    let mut wire = Vec::new();
    Encoder::default().news(&news, &mut wire);
    assert_eq!(decoded(wire), [Frame::News(News::default())]);
}

#[test]
fn a_hello_is_read_as_written() {
    let written = Hello::new(ReplicaId(u64::MAX), "prod", 7);
    let mut wire = Vec::new();
    hello(&mut wire, &written);
    assert!(written.is_readable());
    assert_eq!(decoded(wire), [Frame::Hello(written)]);
}

/// Invariant: A replica understands the frames of a later version that adds fields and frames.
#[test]
fn fields_and_frames_of_a_later_version_are_skipped() {
    let mut wire = Vec::new();
    frame(&mut wire, |message| {
        message.message(1, |hello| {
            hello.number(1, 2);
            hello.number(2, 1);
            hello.fixed64(3, 5);
            hello.bytes(4, b"prod");
            hello.message(9, |more| more.bytes(1, b"breakers"));
        });
        message.number(77, 1);
    });
    frame(&mut wire, |message| message.message(31, |budgets| budgets.number(1, 500)));
    frame(&mut wire, |message| {
        message.message(2, |news| {
            news.bytes(1, b"m");
            news.number(2, 4);
            news.bytes(4, b"http://a");
            news.message(5, |share| {
                share.number(2, 3);
                share.fixed32(21, 7);
                share.bytes(22, b"by tenant");
            });
            news.message(19, |more| more.number(1, 1));
            news.message(9, |learned| {
                learned.number(1, 3);
                learned.fixed64(4, 0.5_f64.to_bits());
            });
            news.message(9, |learned| {
                learned.number(2, 1);
                learned.fixed64(4, 0.5_f64.to_bits());
                learned.number(5, 8);
                learned.number(24, 1);
            });
            news.number(6, 16);
            news.message(7, |prompt| {
                prompt.bytes(2, &9u64.to_le_bytes());
                prompt.number(23, 1);
            });
        });
    });
    let hello =
        Hello { version: 2, readable_from: 1, replica: ReplicaId(5), cluster: "prod".into(), age_ms: 0 };
    assert!(hello.is_readable());
    assert!(!Hello { version: 3, readable_from: 2, ..hello.clone() }.is_readable());
    let share = Share { in_flight: InFlight { requests: 3, ..InFlight::default() }, ..Share::default() };
    let news = News {
        pool: "m".into(),
        number: 4,
        shares: vec![("http://a".into(), share)],
        learned: vec![(Subject::Prefill(Some("http://a".into())), Estimate { value: 0.5, observations: 8 })],
        block_tokens: 16,
        prompts: vec![("http://a".into(), vec![BlockHash(9)])],
        ..News::default()
    };
    assert_eq!(decoded(wire), [Frame::Hello(hello), Frame::Unknown, Frame::News(news)]);
}

fn error(write: impl FnOnce(&mut Message)) -> DecodeError {
    let mut wire = Vec::new();
    frame(&mut wire, |message| message.message(2, write));
    let mut decoder = Decoder::default();
    decoder.push(wire.into());
    decoder.frame().expect_err("an error")
}

#[test]
fn what_cannot_be_true_is_an_error() {
    assert_eq!(error(|news| news.message(5, |share| share.number(1, 8))), DecodeError::NoName(8));
    let named = |news: &mut Message, field: u64, value: u64| {
        news.bytes(4, b"a");
        news.message(5, |share| share.fixed64(field, value));
    };
    for placed_s in [f64::NAN, f64::INFINITY, -1.0] {
        assert_eq!(error(|news| named(news, 8, placed_s.to_bits())), DecodeError::Number("placed_s"));
    }
    assert_eq!(error(|news| named(news, 2, 1 << 32)), DecodeError::Number("requests"));
    let learned = |field, value| error(|news| news.message(9, |learned| learned.fixed64(field, value)));
    for value in [f64::NAN, f64::INFINITY, -1.0] {
        assert_eq!(learned(4, value.to_bits()), DecodeError::Number("an estimate"));
    }
    assert_eq!(learned(2, 9), DecodeError::NoName(8));
    assert_eq!(learned(5, 1 << 32), DecodeError::Number("observations"));
    let kind =
        |learned: &mut Message| [(1, 2), (3, 70_000)].map(|(field, value)| learned.number(field, value));
    assert_eq!(error(|news| news.message(9, |learned| _ = kind(learned))), DecodeError::Number("kind"));
    assert_eq!(error(|news| news.bytes(1, &[0xff])), DecodeError::Name);
    assert_eq!(error(|news| news.bytes(4, &[b'x'; NAME_BYTES_MAX + 1])), DecodeError::Name);
    let many = |news: &mut Message| {
        news.bytes(4, b"a");
        (0..=SHARES_MAX).for_each(|_| news.message(5, |_| ()));
    };
    assert_eq!(error(many), DecodeError::TooMany("shares"));
    let many = |news: &mut Message| (0..=SHARES_MAX).for_each(|_| news.message(9, |_| ()));
    assert_eq!(error(many), DecodeError::TooMany("estimates"));
    let names = |news: &mut Message| (0..=NAMES_MAX).for_each(|_| news.bytes(4, b""));
    assert_eq!(error(names), DecodeError::TooMany("names"));
    assert_eq!(
        error(|news| {
            news.bytes(4, b"a");
            news.message(7, |prompt| prompt.bytes(2, b"seven b"));
        }),
        DecodeError::Invalid(Invalid)
    );
}
