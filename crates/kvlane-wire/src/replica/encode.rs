//! Writes frames.

use std::collections::HashMap;
use std::sync::Arc;

use kvlane_core::block::BlockHash;
use kvlane_core::limit;
use kvlane_core::replica::{Estimate, Service, Share, Subject, Turn};

use super::frame::{
    FRAME_NAMES_BYTES_MAX, Hello, MARKS_MAX, NAME_BYTES_MAX, NAMES_BYTES_MAX, NAMES_MAX, News, SHARES_MAX,
    USAGES_MAX,
};
use crate::grpc::frame;
use crate::protobuf::Message;

/// Writes the news of one stream.
#[derive(Debug, Default)]
pub struct Encoder {
    /// The place of each name in the list.
    names: HashMap<Arc<str>, u64>,
    names_bytes: usize,
}

/// News in the making, which fits into one frame.
#[derive(Default)]
struct Part<'a> {
    names_anew: bool,
    names: Vec<Arc<str>>,
    names_bytes: usize,
    shares: Vec<(u64, &'a Share)>,
    prompts: Vec<(u64, &'a [BlockHash])>,
    services: &'a [Service],
    learned: Vec<(Subject<u64>, &'a Estimate)>,
    turns: Vec<(u64, &'a Turn)>,
    marks: usize,
}

/// Appends a hello.
pub fn hello(out: &mut Vec<u8>, hello: &Hello) {
    frame(out, |message| {
        message.message(1, |message| {
            message.number(1, hello.version);
            message.number(2, hello.readable_from);
            message.fixed64(3, hello.replica.0);
            message.bytes(4, hello.cluster.as_bytes());
            message.number(5, hello.age_ms);
        });
    });
}

/// Appends the usage under one entry of `limits`. One with longer names than [`NAME_BYTES_MAX`] is left out.
pub fn limit(out: &mut Vec<u8>, news: &limit::News) {
    let (key, model) = &news.subject;
    if key.len().max(model.len()) > NAME_BYTES_MAX {
        return;
    }
    for usages in news.usages.chunks(USAGES_MAX) {
        frame(out, |message| {
            message.message(3, |message| {
                message.bytes(1, key.as_bytes());
                message.bytes(2, model.as_bytes());
                number(message, 3, news.number);
                for (key, usage) in usages {
                    message.message(4, |message| write_usage(message, *key, usage));
                }
            });
        });
    }
}

// === impl Encoder ===

impl Encoder {
    /// Appends news, in one frame at least. Endpoints with names longer than [`NAME_BYTES_MAX`] are left out.
    pub fn news(&mut self, news: &News, out: &mut Vec<u8>) {
        let mut part = Part::default();
        for (name, share) in news.shares.iter().filter(|(name, _)| name.len() <= NAME_BYTES_MAX) {
            if part.shares.len() == SHARES_MAX || part.names_bytes + name.len() > FRAME_NAMES_BYTES_MAX {
                std::mem::take(&mut part).write(news, out);
            }
            let endpoint = self.place(name, news, &mut part, out);
            part.shares.push((endpoint, share));
        }
        let mut services = news.services.chunks(USAGES_MAX);
        part.services = services.next().unwrap_or_default();
        for services in services {
            Part { services, ..Part::default() }.write(news, out);
        }
        for (subject, estimate) in &news.learned {
            let name = subject.endpoint().filter(|name| name.len() <= NAME_BYTES_MAX);
            let bytes = name.map_or(0, |name| name.len());
            if part.learned.len() == SHARES_MAX || part.names_bytes + bytes > FRAME_NAMES_BYTES_MAX {
                std::mem::take(&mut part).write(news, out);
            }
            let place = name.map(|name| self.place(name, news, &mut part, out));
            part.learned.extend(subject.clone().named(|_| place).map(|subject| (subject, estimate)));
        }
        for (name, turn) in news.turns.iter().filter(|(name, _)| name.len() <= NAME_BYTES_MAX) {
            if part.turns.len() == SHARES_MAX || part.names_bytes + name.len() > FRAME_NAMES_BYTES_MAX {
                std::mem::take(&mut part).write(news, out);
            }
            let endpoint = self.place(name, news, &mut part, out);
            part.turns.push((endpoint, turn));
        }
        for (name, marks) in news.prompts.iter().filter(|(name, _)| name.len() <= NAME_BYTES_MAX) {
            for marks in marks.chunks(MARKS_MAX / 2) {
                let is_full = part.marks + marks.len() > MARKS_MAX || part.prompts.len() == SHARES_MAX;
                if is_full || part.names_bytes + name.len() > FRAME_NAMES_BYTES_MAX {
                    std::mem::take(&mut part).write(news, out);
                }
                let endpoint = self.place(name, news, &mut part, out);
                part.marks += marks.len();
                part.prompts.push((endpoint, marks));
            }
        }
        part.write(news, out);
    }

    /// The place of a name in the list, to which it is added if it is not there. A full list begins anew, in a frame
    /// of its own.
    fn place<'a>(&mut self, name: &Arc<str>, news: &News, part: &mut Part<'a>, out: &mut Vec<u8>) -> u64 {
        if let Some(place) = self.names.get(name) {
            return *place;
        }
        if self.names.len() == NAMES_MAX || self.names_bytes + name.len() > NAMES_BYTES_MAX {
            std::mem::replace(part, Part { names_anew: true, ..Part::default() }).write(news, out);
            *self = Self::default();
        }
        let place = self.names.len() as u64;
        self.names.insert(Arc::clone(name), place);
        self.names_bytes += name.len();
        part.names.push(Arc::clone(name));
        part.names_bytes += name.len();
        place
    }
}

// === impl Part ===

impl Part<'_> {
    fn write(self, news: &News, out: &mut Vec<u8>) {
        frame(out, |message| {
            message.message(2, |message| {
                message.bytes(1, news.pool.as_bytes());
                number(message, 2, news.number);
                number(message, 3, self.names_anew.into());
                self.names.iter().for_each(|name| message.bytes(4, name.as_bytes()));
                for (endpoint, share) in &self.shares {
                    message.message(5, |message| write_share(message, *endpoint, share));
                }
                if !self.prompts.is_empty() {
                    number(message, 6, news.block_tokens.into());
                }
                for service in self.services {
                    message.message(8, |message| write_service(message, service));
                }
                for (subject, estimate) in &self.learned {
                    message.message(9, |message| write_learned(message, subject, estimate));
                }
                for (endpoint, turn) in &self.turns {
                    message.message(10, |message| write_turn(message, *endpoint, turn));
                }
                for (endpoint, marks) in &self.prompts {
                    message.message(7, |message| {
                        number(message, 1, *endpoint);
                        let marks: Vec<u8> = marks.iter().flat_map(|mark| mark.0.to_le_bytes()).collect();
                        message.bytes(2, &marks);
                    });
                }
            });
        });
    }
}

fn write_share(message: &mut Message, endpoint: u64, share: &Share) {
    let load = &share.in_flight;
    number(message, 1, endpoint);
    number(message, 2, load.requests.into());
    number(message, 3, load.prefilling.into());
    number(message, 4, load.moving.into());
    number(message, 5, load.prefill_tokens);
    number(message, 6, load.prefill_pairs);
    number(message, 7, load.context_tokens);
    if share.placed_s != 0.0 {
        message.fixed64(8, share.placed_s.to_bits());
    }
    number(message, 9, share.breaker_changes.into());
    number(message, 10, load.lower_tokens);
}

fn write_turn(message: &mut Message, endpoint: u64, turn: &Turn) {
    number(message, 1, endpoint);
    message.fixed64(2, turn.session.0);
    message.fixed64(3, turn.stamp);
    number(message, 4, turn.prompt_tokens.into());
}

fn write_service(message: &mut Message, service: &Service) {
    signed(message, 1, service.priority.into());
    number(message, 2, service.lane.into());
    if let Some(tenant) = service.tenant {
        message.fixed64(3, tenant.0);
    }
    number(message, 4, service.since.into());
    signed(message, 5, service.tokens);
}

fn write_learned(message: &mut Message, subject: &Subject<u64>, estimate: &Estimate) {
    let (of, kind) = match subject {
        Subject::Prefill(_) => (0, None),
        Subject::Step(_) => (1, None),
        Subject::Answer(kind) => (2, *kind),
    };
    number(message, 1, of);
    number(message, 2, subject.endpoint().map_or(0, |endpoint| endpoint + 1));
    number(message, 3, kind.map_or(0, |kind| 1 + u64::from(kind)));
    message.fixed64(4, estimate.value.to_bits());
    number(message, 5, estimate.observations.into());
}

/// Small numbers of either sign become small ones without.
fn signed(message: &mut Message, field: u64, value: i64) {
    number(message, field, ((value << 1) ^ (value >> 63)).cast_unsigned());
}

fn write_usage(message: &mut Message, key: u64, usage: &limit::Usage) {
    message.fixed64(1, key);
    number(message, 2, usage.requests.0);
    number(message, 3, usage.tokens.0);
    number(message, 4, usage.requests_owed.0);
    number(message, 5, usage.tokens_owed.0);
    number(message, 6, usage.asked);
    number(message, 7, usage.in_flight.into());
    number(message, 8, usage.age.0);
}

fn number(message: &mut Message, field: u64, value: u64) {
    if value != 0 {
        message.number(field, value);
    }
}
