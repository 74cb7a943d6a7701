//! Subjects and messages at a broker.
//!
//! A message can be read without any other one: it begins with a hello, and the names in it are written anew.

use bytes::Bytes;
use kvlane_core::replica::ReplicaId;
use kvlane_fleet::replicas::shown;
use kvlane_wire::replica::{Decoder, Encoder, Frame, Hello, hello, limit};
use tokio::time::Instant;

use super::super::outbox::Taken;
use super::super::stream::Ended;
use super::super::{Shared, listen};

/// Largest message, unless one entry is larger. A NATS server allows 1 MiB if it is not told otherwise.
pub(super) const BYTES_MAX: usize = 256 << 10;

/// The subjects of one replica.
pub(super) struct Subjects {
    /// What the subjects of all replicas of the cluster begin with.
    prefix: String,
    own: String,
    news: String,
    greeting: String,
    ping: String,
}

// === impl Subjects ===

impl Subjects {
    pub(super) fn new(cluster: &str, own: ReplicaId) -> Self {
        let (prefix, own) = (format!("kvlane.{}", token(cluster)), shown(own));
        Self {
            news: format!("{prefix}.news.{own}"),
            greeting: format!("{prefix}.greeting"),
            ping: format!("{prefix}.ping.{own}"),
            prefix,
            own,
        }
    }

    /// Where this replica publishes its news.
    pub(super) fn news(&self) -> &str {
        &self.news
    }

    /// Where all replicas do.
    pub(super) fn all_news(&self) -> String {
        format!("{}.news.*", self.prefix)
    }

    /// Where a replica says that it has connected, and has to be told everything.
    pub(super) fn greeting(&self) -> &str {
        &self.greeting
    }

    /// A subject without subscribers, which the broker answers at once.
    pub(super) fn ping(&self) -> &str {
        &self.ping
    }

    /// Where a replica is asked for a snapshot.
    pub(super) fn snapshot(&self, replica: ReplicaId) -> String {
        format!("{}.snapshot.{}", self.prefix, shown(replica))
    }

    /// Where this replica waits for answers.
    pub(super) fn inbox(&self, what: &str) -> String {
        format!("{}.inbox.{}.{what}", self.prefix, self.own)
    }

    /// Whether a replica of the cluster waits there for answers.
    pub(super) fn is_inbox(&self, subject: &str) -> bool {
        let rest = subject.strip_prefix(&self.prefix).and_then(|rest| rest.strip_prefix(".inbox."));
        rest.is_some_and(|rest| rest.split('.').all(|token| !token.is_empty() && !token.contains(['*', '>'])))
    }
}

/// A name as one token of a subject: letters, digits, `-` and `_` stay, other bytes are written as `%2E`.
fn token(name: &str) -> String {
    let written = |byte: u8| match byte {
        b'-' | b'_' => char::from(byte).to_string(),
        byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    name.bytes().map(written).collect()
}

/// Messages with all that was taken, each of at most `bytes_max` if it can be divided. Nothing makes a hello alone.
pub(super) fn pack(sender: &Hello, taken: Taken, bytes_max: usize) -> Vec<Bytes> {
    let mut bytes = Vec::new();
    hello(&mut bytes, sender);
    let mut encoder = Encoder::default();
    taken.news.iter().for_each(|news| encoder.news(news, &mut bytes));
    taken.limits.iter().for_each(|news| limit(&mut bytes, news));
    if bytes.len() <= bytes_max {
        return vec![bytes.into()];
    }
    match halves(taken) {
        Some((one, other)) => [pack(sender, one, bytes_max), pack(sender, other, bytes_max)].concat(),
        None => vec![bytes.into()],
    }
}

/// Divides news in two; none if it is one entry.
fn halves(taken: Taken) -> Option<(Taken, Taken)> {
    let Taken { mut news, mut limits } = taken;
    if news.len() + limits.len() > 1 {
        let mut kept = (news.len() + limits.len()) / 2;
        let rest = Taken { news: cut(&mut news, &mut kept), limits: cut(&mut limits, &mut kept) };
        return Some((Taken { news, limits }, rest));
    }
    if let Some(mut one) = limits.pop() {
        let mut kept = one.usages.len() / 2;
        let usages = cut(&mut one.usages, &mut kept);
        let (subject, number) = (one.subject.clone(), one.number);
        let other = kvlane_core::limit::News { subject, number, usages };
        let of = |limits| Taken { limits: vec![limits], ..Taken::default() };
        return (!one.usages.is_empty()).then(|| (of(one), of(other)));
    }
    let mut one = news.pop()?;
    let mut other = one.clone();
    let entries =
        one.shares.len() + one.services.len() + one.learned.len() + one.turns.len() + one.prompts.len();
    if let ([(name, marks)], 1) = (&mut one.prompts[..], entries) {
        let mut kept = marks.len() / 2;
        other.prompts = vec![(name.clone(), cut(marks, &mut kept))];
        if marks.is_empty() {
            return None;
        }
    } else {
        let mut kept = entries / 2;
        other.shares = cut(&mut one.shares, &mut kept);
        other.services = cut(&mut one.services, &mut kept);
        other.learned = cut(&mut one.learned, &mut kept);
        other.turns = cut(&mut one.turns, &mut kept);
        other.prompts = cut(&mut one.prompts, &mut kept);
        if entries < 2 {
            return None;
        }
    }
    let of = |news| Taken { news: vec![news], ..Taken::default() };
    Some((of(one), of(other)))
}

/// Keeps as many entries as `left` says, and returns the others.
fn cut<T>(entries: &mut Vec<T>, left: &mut usize) -> Vec<T> {
    let kept = entries.len().min(*left);
    *left -= kept;
    entries.split_off(kept)
}

/// Reads who has sent a message; its other frames follow.
pub(super) fn read(message: Bytes) -> Result<(Hello, Decoder), Ended> {
    let mut decoder = Decoder::default();
    decoder.push(message);
    match decoder.frame()? {
        Some(Frame::Hello(sender)) => Ok((sender, decoder)),
        _ => Err(Ended::NoHello),
    }
}

/// Reads who has sent a message, another replica that may take part; its other frames follow. Logs, now and then, what is none.
pub(super) fn opened(shared: &Shared, message: Bytes) -> Option<(Hello, Decoder)> {
    let (peer, frames) = read(message).inspect_err(|problem| complain(shared, problem)).ok()?;
    if peer.replica == shared.own {
        return None;
    }
    if let Err(problem) = listen::admit(shared, &peer) {
        if let Some(not_logged) = shared.refused.due(Instant::now()) {
            tracing::warn!(problem, not_logged, "replica at the broker refused");
        }
        return None;
    }
    Some((peer, frames))
}

/// Logs, now and then, a message that is none of a replica.
pub(super) fn complain(shared: &Shared, problem: &Ended) {
    if let Some(not_logged) = shared.broken.due(Instant::now()) {
        tracing::warn!(%problem, not_logged, "message at the broker is none of a replica");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};
    use std::sync::Arc;

    use kvlane_core::block::BlockHash;
    use kvlane_core::limit::{self, Usage};
    use kvlane_core::load::InFlight;
    use kvlane_core::replica::Share;
    use kvlane_wire::replica::News;

    use super::*;

    const OWN: ReplicaId = ReplicaId(0xa7);

    #[test]
    fn the_name_of_a_cluster_is_one_token_of_its_own() {
        assert_eq!(Subjects::new("kvlane", OWN).news(), "kvlane.kvlane.news.00000000000000a7");
        let names = ["a", "a.b", "a b", "a*", ">", "a%2Eb", "ä", "\r\n", "$a", "a-b_c", "A"];
        let written: HashSet<String> = names.iter().map(|name| token(name)).collect();
        assert_eq!(written.len(), names.len());
        for token in written {
            assert!(
                token.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"%-_".contains(&byte)),
                "{token}"
            );
        }
    }

    #[test]
    fn answers_go_only_to_inboxes_of_the_cluster() {
        let subjects = Subjects::new("c", OWN);
        assert!(subjects.is_inbox(&subjects.inbox("7")));
        assert!(subjects.is_inbox(&Subjects::new("c", ReplicaId(1)).inbox("7")));
        for other in [
            &Subjects::new("d", OWN).inbox("7"),
            subjects.news(),
            "kvlane.c.inbox.",
            "kvlane.c.inbox.a..b",
            "kvlane.c.inbox.>",
        ] {
            assert!(!subjects.is_inbox(other), "{other}");
        }
    }

    fn share(requests: u32) -> Share {
        Share { in_flight: InFlight { requests, ..InFlight::default() }, ..Share::default() }
    }

    fn news(pool: &str, shares: usize, prompts: usize) -> News {
        let name = |n| -> Arc<str> { format!("http://10.0.0.{n}:8000").into() };
        News {
            pool: pool.into(),
            number: 7,
            shares: (0..shares).map(|n| (name(n), share(n as u32))).collect(),
            block_tokens: 16,
            prompts: (0..prompts).map(|n| (name(n), vec![BlockHash(n as u64); 300])).collect(),
            ..News::default()
        }
    }

    /// What readers of these messages have, in the end.
    fn heard(messages: Vec<Bytes>) -> (BTreeMap<String, u32>, usize, usize) {
        let (mut loads, mut marks, mut usages) = (BTreeMap::new(), 0, 0);
        for message in messages {
            let (sender, mut frames) = read(message).expect("a message");
            assert_eq!(sender.replica, OWN);
            while let Some(frame) = frames.frame().expect("a frame") {
                match frame {
                    Frame::News(news) => {
                        assert_eq!((news.number, news.block_tokens == 0), (7, news.prompts.is_empty()));
                        marks += news.prompts.iter().map(|(_, marks)| marks.len()).sum::<usize>();
                        let pool = &news.pool;
                        let told = news.shares.iter();
                        loads.extend(
                            told.map(|(name, share)| (format!("{pool} {name}"), share.in_flight.requests)),
                        );
                    }
                    Frame::Limit(news) => usages += news.usages.len(),
                    other => panic!("{other:?}"),
                }
            }
        }
        (loads, marks, usages)
    }

    /// Invariant: A message at a broker can be read without any other, and is no larger than the broker takes.
    #[test]
    fn each_message_can_be_read_alone_and_is_small_enough() {
        let sender = Hello::new(OWN, "kvlane", 1);
        let usages = (0..500).map(|key| (key, Usage { asked: 1, ..Usage::default() })).collect();
        let limits = limit::News { subject: ("*".into(), "m".into()), number: 7, usages };
        let taken =
            || Taken { news: vec![news("a", 200, 3), news("b", 100, 7)], limits: vec![limits.clone()] };
        let whole = pack(&sender, taken(), usize::MAX);
        assert_eq!(whole.len(), 1);
        let (loads, marks, usages) = heard(whole);
        assert_eq!((loads.len(), marks, usages), (300, 3000, 500));
        for bytes_max in [10_000, 1000, 200] {
            let messages = pack(&sender, taken(), bytes_max);
            assert!(messages.iter().all(|message| message.len() <= bytes_max));
            let turned = messages.into_iter().rev().collect();
            assert_eq!(heard(turned), (loads.clone(), marks, usages), "{bytes_max}");
        }
    }

    #[test]
    fn what_cannot_be_divided_is_one_message() {
        let sender = Hello::new(OWN, "kvlane", 1);
        let one = |news| Taken { news: vec![news], ..Taken::default() };
        assert_eq!(pack(&sender, Taken::default(), 1).len(), 1);
        assert_eq!(pack(&sender, one(news("a", 1, 0)), 1).len(), 1);
        assert_eq!(pack(&sender, one(news("a", 0, 1)), 1).len(), 300);
        assert_eq!(pack(&sender, one(News::default()), 1).len(), 1);
    }

    #[test]
    fn what_does_not_begin_with_a_hello_is_refused() {
        let mut headless = Vec::new();
        Encoder::default().news(&news("a", 1, 0), &mut headless);
        for garbage in [&b""[..], b"{}", &[0xff; 100], &headless] {
            assert!(read(Bytes::copy_from_slice(garbage)).is_err(), "{garbage:?}");
        }
    }
}
