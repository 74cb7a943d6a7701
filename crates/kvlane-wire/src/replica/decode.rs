//! Reads frames.

use std::sync::Arc;

use bytes::Bytes;
use kvlane_core::block::BlockHash;
use kvlane_core::limit;
use kvlane_core::load::InFlight;
use kvlane_core::replica::{Estimate, ReplicaId, Service, Share, Subject, Turn};
use kvlane_core::request::{SessionKey, TenantKey};
use kvlane_core::time::Nanos;

use super::frame::{
    FRAME_BYTES_MAX, Frame, Hello, Learned, MARKS_MAX, NAME_BYTES_MAX, NAMES_BYTES_MAX, NAMES_MAX, News,
    SHARES_MAX, USAGES_MAX,
};
use crate::grpc::{FrameError, Frames};
use crate::protobuf::{Field, Invalid, checked_fields};

/// Reads one stream.
#[derive(Debug, Default)]
pub struct Decoder {
    frames: Frames,
    names: Vec<Arc<str>>,
    names_bytes: usize,
}

/// A frame that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// It is compressed, or too large.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// It is not a message.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A name is not UTF-8, or longer than [`NAME_BYTES_MAX`].
    #[error("a name is longer than {NAME_BYTES_MAX} bytes, or not UTF-8")]
    Name,
    /// There are more names, shares or marks than allowed.
    #[error("a frame has more {0} than allowed")]
    TooMany(&'static str),
    /// A number is not one that can be told.
    #[error("{0} is out of range")]
    Number(&'static str),
    /// An endpoint is not in the list of names.
    #[error("a frame names endpoint {0}, which has no name")]
    NoName(u64),
}

// === impl Decoder ===

impl Decoder {
    /// Adds a piece of the stream. All frames of the piece before must have been taken.
    pub fn push(&mut self, piece: Bytes) {
        self.frames.push(piece);
    }

    /// The next complete frame.
    ///
    /// # Errors
    /// The frame cannot be read. The rest of the stream is of no use.
    pub fn frame(&mut self) -> Result<Option<Frame>, DecodeError> {
        let Some(message) = self.frames.next(FRAME_BYTES_MAX)? else { return Ok(None) };
        let mut frame = Frame::Unknown;
        for field in checked_fields(&message) {
            match field? {
                (1, Field::Bytes(hello)) => frame = Frame::Hello(read_hello(hello)?),
                (2, Field::Bytes(news)) => frame = Frame::News(self.read_news(news)?),
                (3, Field::Bytes(limit)) => frame = Frame::Limit(read_limit(limit)?),
                _ => {}
            }
        }
        Ok(Some(frame))
    }

    fn read_news(&mut self, message: &[u8]) -> Result<News, DecodeError> {
        let mut news = News::default();
        let mut marks_left = MARKS_MAX;
        for field in checked_fields(message) {
            match field? {
                (1, Field::Bytes(pool)) => news.pool = name(pool)?.into(),
                (2, Field::Number(number)) => news.number = number,
                (3, Field::Number(anew)) if anew != 0 => {
                    (self.names, self.names_bytes) = (Vec::new(), 0);
                }
                (4, Field::Bytes(bytes)) => self.add_name(name(bytes)?)?,
                (5, Field::Bytes(share)) => {
                    if news.shares.len() == SHARES_MAX {
                        return Err(DecodeError::TooMany("shares"));
                    }
                    news.shares.push(self.read_share(share)?);
                }
                (6, Field::Number(tokens)) => news.block_tokens = small("block_tokens", tokens)?,
                (7, Field::Bytes(prompt)) => {
                    let prompt = self.read_prompt(prompt)?;
                    let left =
                        marks_left.checked_sub(prompt.1.len()).filter(|_| news.prompts.len() < SHARES_MAX);
                    marks_left = left.ok_or(DecodeError::TooMany("marks"))?;
                    news.prompts.push(prompt);
                }
                (8, Field::Bytes(_)) if news.services.len() == USAGES_MAX => {
                    return Err(DecodeError::TooMany("services"));
                }
                (8, Field::Bytes(service)) => news.services.push(read_service(service)?),
                (9, Field::Bytes(_)) if news.learned.len() == SHARES_MAX => {
                    return Err(DecodeError::TooMany("estimates"));
                }
                (9, Field::Bytes(learned)) => news.learned.extend(self.read_learned(learned)?),
                (10, Field::Bytes(_)) if news.turns.len() == SHARES_MAX => {
                    return Err(DecodeError::TooMany("turns"));
                }
                (10, Field::Bytes(turn)) => news.turns.push(self.read_turn(turn)?),
                _ => {}
            }
        }
        Ok(news)
    }

    fn add_name(&mut self, name: &str) -> Result<(), DecodeError> {
        self.names_bytes += name.len();
        if self.names.len() == NAMES_MAX || self.names_bytes > NAMES_BYTES_MAX {
            return Err(DecodeError::TooMany("names"));
        }
        self.names.push(name.into());
        Ok(())
    }

    fn name_of(&self, endpoint: u64) -> Result<Arc<str>, DecodeError> {
        let named = usize::try_from(endpoint).ok().and_then(|place| self.names.get(place));
        named.cloned().ok_or(DecodeError::NoName(endpoint))
    }

    fn read_share(&self, message: &[u8]) -> Result<(Arc<str>, Share), DecodeError> {
        let (mut endpoint, mut placed_s, mut breaker_changes) = (0, 0.0, 0);
        let mut load = InFlight::default();
        for field in checked_fields(message) {
            let (field, Field::Number(value)) = field? else { continue };
            match field {
                1 => endpoint = value,
                2 => load.requests = small("requests", value)?,
                3 => load.prefilling = small("prefilling", value)?,
                4 => load.moving = small("moving", value)?,
                5 => load.prefill_tokens = value,
                6 => load.prefill_pairs = value,
                7 => load.context_tokens = value,
                8 => placed_s = f64::from_bits(value),
                9 => breaker_changes = small("breaker_changes", value)?,
                10 => load.lower_tokens = value,
                _ => {}
            }
        }
        if !(placed_s.is_finite() && placed_s >= 0.0) {
            return Err(DecodeError::Number("placed_s"));
        }
        Ok((self.name_of(endpoint)?, Share { in_flight: load, placed_s, breaker_changes }))
    }

    fn read_turn(&self, message: &[u8]) -> Result<(Arc<str>, Turn), DecodeError> {
        let (mut endpoint, mut turn) = (0, Turn { session: SessionKey(0), stamp: 0, prompt_tokens: 0 });
        for field in checked_fields(message) {
            let (field, Field::Number(value)) = field? else { continue };
            match field {
                1 => endpoint = value,
                2 => turn.session = SessionKey(value),
                3 => turn.stamp = value,
                4 => turn.prompt_tokens = small("prompt_tokens", value)?,
                _ => {}
            }
        }
        Ok((self.name_of(endpoint)?, turn))
    }

    /// An estimate; `None` if it is of something that only later versions know.
    fn read_learned(&self, message: &[u8]) -> Result<Option<Learned>, DecodeError> {
        let (mut of, mut endpoint, mut kind) = (0, 0_u64, 0_u64);
        let mut estimate = Estimate::default();
        for field in checked_fields(message) {
            let (field, Field::Number(value)) = field? else { continue };
            match field {
                1 => of = value,
                2 => endpoint = value,
                3 => kind = value,
                4 => estimate.value = f64::from_bits(value),
                5 => estimate.observations = small("observations", value)?,
                _ => {}
            }
        }
        if !(estimate.value.is_finite() && estimate.value >= 0.0) {
            return Err(DecodeError::Number("an estimate"));
        }
        let endpoint = endpoint.checked_sub(1).map(|place| self.name_of(place)).transpose()?;
        let kind = kind.checked_sub(1).map(u16::try_from).transpose();
        let subject = match of {
            0 => Subject::Prefill(endpoint),
            1 => Subject::Step(endpoint),
            2 => Subject::Answer(kind.map_err(|_| DecodeError::Number("kind"))?),
            _ => return Ok(None),
        };
        Ok(Some((subject, estimate)))
    }

    fn read_prompt(&self, message: &[u8]) -> Result<(Arc<str>, Vec<BlockHash>), DecodeError> {
        let (mut endpoint, mut marks) = (0, Vec::new());
        for field in checked_fields(message) {
            match field? {
                (1, Field::Number(value)) => endpoint = value,
                (2, Field::Bytes(bytes)) => {
                    let (whole, rest) = bytes.as_chunks::<8>();
                    if !rest.is_empty() {
                        return Err(Invalid.into());
                    }
                    marks.extend(whole.iter().map(|mark| BlockHash(u64::from_le_bytes(*mark))));
                }
                _ => {}
            }
        }
        Ok((self.name_of(endpoint)?, marks))
    }
}

fn read_hello(message: &[u8]) -> Result<Hello, DecodeError> {
    let mut hello =
        Hello { version: 0, readable_from: 0, replica: ReplicaId(0), cluster: String::new(), age_ms: 0 };
    for field in checked_fields(message) {
        match field? {
            (1, Field::Number(version)) => hello.version = version,
            (2, Field::Number(version)) => hello.readable_from = version,
            (3, Field::Number(replica)) => hello.replica = ReplicaId(replica),
            (4, Field::Bytes(cluster)) => hello.cluster = name(cluster)?.to_owned(),
            (5, Field::Number(age_ms)) => hello.age_ms = age_ms,
            _ => {}
        }
    }
    Ok(hello)
}

fn read_service(message: &[u8]) -> Result<Service, DecodeError> {
    let mut service = Service { priority: 0, lane: 0, tenant: None, since: 0, tokens: 0 };
    for field in checked_fields(message) {
        let (field, Field::Number(value)) = field? else { continue };
        let out_of_range = |what| move |_| DecodeError::Number(what);
        match field {
            1 => service.priority = signed(value).try_into().map_err(out_of_range("priority"))?,
            2 => service.lane = value.try_into().map_err(out_of_range("lane"))?,
            3 => service.tenant = Some(TenantKey(value)),
            4 => service.since = small("since", value)?,
            5 => service.tokens = signed(value),
            _ => {}
        }
    }
    Ok(service)
}

/// The number that was written with its sign in the last bit.
fn signed(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}

fn read_limit(message: &[u8]) -> Result<limit::News, DecodeError> {
    let mut news = limit::News::default();
    for field in checked_fields(message) {
        match field? {
            (1, Field::Bytes(key)) => news.subject.0 = name(key)?.to_owned(),
            (2, Field::Bytes(model)) => news.subject.1 = name(model)?.to_owned(),
            (3, Field::Number(number)) => news.number = number,
            (4, Field::Bytes(_)) if news.usages.len() == USAGES_MAX => {
                return Err(DecodeError::TooMany("usages"));
            }
            (4, Field::Bytes(usage)) => news.usages.push(read_usage(usage)?),
            _ => {}
        }
    }
    Ok(news)
}

fn read_usage(message: &[u8]) -> Result<(u64, limit::Usage), DecodeError> {
    let (mut key, mut usage) = (0, limit::Usage::default());
    for field in checked_fields(message) {
        let (field, Field::Number(value)) = field? else { continue };
        match field {
            1 => key = value,
            2 => usage.requests = Nanos(value),
            3 => usage.tokens = Nanos(value),
            4 => usage.requests_owed = Nanos(value),
            5 => usage.tokens_owed = Nanos(value),
            6 => usage.asked = value,
            7 => usage.in_flight = small("in_flight", value)?,
            8 => usage.age = Nanos(value),
            _ => {}
        }
    }
    Ok((key, usage))
}

fn name(bytes: &[u8]) -> Result<&str, DecodeError> {
    let short = Some(bytes).filter(|bytes| bytes.len() <= NAME_BYTES_MAX);
    short.and_then(|bytes| std::str::from_utf8(bytes).ok()).ok_or(DecodeError::Name)
}

fn small(what: &'static str, value: u64) -> Result<u32, DecodeError> {
    u32::try_from(value).map_err(|_| DecodeError::Number(what))
}
