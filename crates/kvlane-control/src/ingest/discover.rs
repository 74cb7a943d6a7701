//! Discovers an engine's data-parallel ranks, and where each publishes its KV events.
//!
//! The configuration of a worker takes precedence. Otherwise the engine is queried: vLLM's `GET /kv_event_sources`,
//! then SGLang's `GET /server_info`. An engine that supports neither is assumed to publish at the configured default
//! port; without one it has no feed, which is not an error.

use kvlane_core::load::LoadReport;
use kvlane_http::network::leads_here;
use kvlane_wire::engine::{FeedSource, resolve};

use kvlane_fleet::feed::config::KvEvents;
use kvlane_fleet::feed::{FoundBy, Source};
use kvlane_fleet::worker::Rank;
use kvlane_fleet::worker::config::FeedSpec;

/// The engine's answer about its feeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FeedsAnswer {
    /// The query failed: the previous answer stays valid.
    Nothing,
    /// These feeds; empty if it has none.
    Feeds(Vec<FeedSource>),
}

/// The ranks of a worker on `host`, from the configuration, the engine's answer, and its load reports. `known` is the
/// previous result.
pub fn ranks(
    config: &KvEvents,
    host: &str,
    configured: &[FeedSpec],
    told: FeedsAnswer,
    reports: &[(u32, LoadReport)],
    known: &[Rank],
) -> Vec<Rank> {
    let told = match told {
        FeedsAnswer::Nothing if !known.is_empty() => return known.to_vec(),
        FeedsAnswer::Nothing => Vec::new(),
        FeedsAnswer::Feeds(feeds) => feeds,
    };
    let reported: Vec<u32> = match reports {
        // A page without load, or none: an engine that has just started reports nothing yet.
        [] if told.is_empty() => known.iter().map(|rank| rank.number).collect(),
        _ => reports.iter().map(|&(rank, _)| rank).collect(),
    };
    let mut numbers: Vec<u32> = match (configured.len(), told.is_empty()) {
        (0, true) => reported,
        (0, false) => told.iter().map(|feed| feed.rank).collect(),
        // One feed for an engine with one rank, whatever its number.
        (1, _) if reported.len() <= 1 => reported,
        (feeds, _) => (0..).take(feeds).chain(reported).collect(),
    };
    numbers.sort_unstable();
    numbers.dedup();
    if numbers.is_empty() {
        numbers.push(0);
    }
    let several = numbers.len() > 1;
    let source = |place: usize, number: u32| {
        if !config.enabled {
            return None;
        }
        // The n-th address is that of rank n.
        let place = if several { number as usize } else { place };
        if let Some(feed) = configured.get(place) {
            let replay = feed.replay.as_deref();
            return source(host, &feed.endpoint, replay, &feed.topic, FoundBy::Configuration);
        }
        if let Some(feed) = told.iter().find(|feed| feed.rank == number) {
            return source(host, &feed.endpoint, feed.replay.as_deref(), &feed.topic, FoundBy::Engine);
        }
        if !told.is_empty() || !configured.is_empty() {
            return None;
        }
        let of_rank = |port: u16| (port > 0).then(|| u32::from(port).checked_add(number)).flatten();
        let address = |port: u16| of_rank(port).map(|port| format!("tcp://*:{port}"));
        let replay = address(config.replay_port);
        source(host, &address(config.port)?, replay.as_deref(), "", FoundBy::Convention)
    };
    numbers
        .iter()
        .enumerate()
        .map(|(place, &number)| Rank { number, source: source(place, number) })
        .collect()
}

/// A source at these addresses, in the notations of engines and operators, if valid.
fn source(
    host: &str,
    endpoint: &str,
    replay: Option<&str>,
    topic: &str,
    found_by: FoundBy,
) -> Option<Source> {
    let reachable = |address: &str| {
        let address = resolve(address, host)?;
        // An engine that reports a loopback address means its own machine.
        let elsewhere = found_by == FoundBy::Engine && !is_loopback(host);
        let port = address.rsplit_once(':').filter(|(at, _)| elsewhere && is_loopback(at));
        port.map_or(Some(address.clone()), |(_, port)| resolve(&format!("tcp://*:{port}"), host))
    };
    Some(Source {
        address: reachable(endpoint)?,
        replay: replay.and_then(reachable),
        topic: topic.into(),
        found_by,
    })
}

/// Whether a host refers to the connecting program's own machine: a loopback address in any notation, or `localhost`.
pub(super) fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.eq_ignore_ascii_case("localhost") || bare.parse().is_ok_and(leads_here)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "10.0.0.7";

    fn reports(ranks: &[u32]) -> Vec<(u32, LoadReport)> {
        let idle = LoadReport { running: 0, waiting: 0, kv_usage_ratio: 0.0, kv_capacity_tokens: None };
        ranks.iter().map(|&rank| (rank, idle)).collect()
    }

    fn told(feeds: &[(u32, &str, Option<&str>)]) -> FeedsAnswer {
        let feed = |&(rank, endpoint, replay): &(u32, &str, Option<&str>)| FeedSource {
            rank,
            endpoint: endpoint.into(),
            replay: replay.map(Into::into),
            topic: "kv".into(),
            block_tokens: None,
        };
        FeedsAnswer::Feeds(feeds.iter().map(feed).collect())
    }

    /// Each rank with its address and its replay's, as `rank address replay`.
    fn check(config: &KvEvents, configured: &[&str], told: FeedsAnswer, reported: &[u32], expect: &[&str]) {
        let configured: Vec<FeedSpec> = configured.iter().map(|endpoint| FeedSpec::new(endpoint)).collect();
        let found = ranks(config, HOST, &configured, told, &reports(reported), &[]);
        let shown = |rank: &Rank| match &rank.source {
            None => format!("{} -", rank.number),
            Some(Source { address, replay, .. }) => {
                format!("{} {address} {}", rank.number, replay.as_deref().unwrap_or("-"))
            }
        };
        assert_eq!(found.iter().map(shown).collect::<Vec<_>>(), expect);
    }

    #[test]
    fn configuration_precedes_the_engines_answer_and_that_precedes_the_default_port() {
        let off = KvEvents::default();
        let by_port = KvEvents { port: 5557, replay_port: 5657, ..KvEvents::default() };
        let two = || told(&[(0, "tcp://*:1", Some("tcp://*:2")), (1, "tcp://0.0.0.0:3", None)]);
        check(&off, &[], told(&[]), &[0], &["0 -"]);
        check(&off, &[], two(), &[], &["0 10.0.0.7:1 10.0.0.7:2", "1 10.0.0.7:3 -"]);
        check(&off, &["tcp://x:9"], told(&[(0, "tcp://*:1", None)]), &[0], &["0 x:9 -"]);
        check(&off, &["tcp://x:8", "tcp://x:9"], two(), &[0, 1], &["0 x:8 -", "1 x:9 -"]);
        check(&by_port, &[], two(), &[0, 1], &["0 10.0.0.7:1 10.0.0.7:2", "1 10.0.0.7:3 -"]);
        check(
            &by_port,
            &[],
            told(&[]),
            &[0, 1],
            &["0 10.0.0.7:5557 10.0.0.7:5657", "1 10.0.0.7:5558 10.0.0.7:5658"],
        );
        check(&by_port, &[], FeedsAnswer::Nothing, &[], &["0 10.0.0.7:5557 10.0.0.7:5657"]);
    }

    #[test]
    fn a_rank_without_a_feed_of_its_own_has_none() {
        let off = KvEvents::default();
        check(&off, &["tcp://x:8"], told(&[]), &[0, 1], &["0 x:8 -", "1 -"]);
        check(&off, &["tcp://x:8"], told(&[]), &[3], &["3 x:8 -"]);
    }

    #[test]
    fn ranks_are_discovered_with_kv_events_off() {
        let off = KvEvents { enabled: false, port: 5557, ..KvEvents::default() };
        check(&off, &["tcp://x:8"], FeedsAnswer::Nothing, &[0, 1], &["0 -", "1 -"]);
    }

    #[test]
    fn an_unspecified_or_loopback_address_is_replaced_by_the_workers() {
        let off = KvEvents::default();
        for ours in ["127.0.0.1", "127.9.9.9", "[::1]", "[::ffff:127.0.0.1]", "LocalHost"] {
            let endpoint = format!("tcp://{ours}:1");
            check(&off, &[], told(&[(0, &endpoint, None)]), &[0], &["0 10.0.0.7:1 -"]);
        }
        check(&off, &["tcp://127.0.0.1:1"], told(&[]), &[0], &["0 127.0.0.1:1 -"]);
        check(&off, &[], told(&[(0, "ipc:///tmp/kv", None)]), &[0], &["0 -"]);
    }

    #[test]
    fn the_known_ranks_stay_while_an_engine_cannot_be_queried() {
        let config = KvEvents::default();
        let before =
            ranks(&config, HOST, &[], told(&[(0, "tcp://*:1", None), (1, "tcp://*:2", None)]), &[], &[]);
        assert_eq!(ranks(&config, HOST, &[], FeedsAnswer::Nothing, &reports(&[0]), &before), before);
        let numbers = |ranks: Vec<Rank>| ranks.iter().map(|rank| rank.number).collect::<Vec<_>>();
        assert_eq!(numbers(ranks(&config, HOST, &[], told(&[]), &[], &before)), [0, 1]);
        assert_eq!(numbers(ranks(&config, HOST, &[], told(&[]), &reports(&[0]), &before)), [0]);
    }
}
