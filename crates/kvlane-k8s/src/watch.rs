//! Lists the objects of a collection, then watches them, for ever.
//!
//! A watch that the server ends in time goes on from where it was. After anything else, which may have lost an event,
//! all objects are listed again: a connection that breaks, an API server that restarts or is silent, a version that is
//! too old, an event that cannot be understood. Objects that are known are kept until a whole list is there.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use kube::client::Body;
use kvlane_core::retry::Backoff;
use kvlane_core::time::Nanos;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::access::Access;
use crate::collection::Collection;
use crate::objects::{Any, Bookmark, EventKind, EventObject, Happened, Object, Page, Status};
use crate::refusal::{Cause, Failure, Verb};

/// How long the server may take to begin an answer.
const HEAD: Duration = Duration::from_secs(10);
/// How long a page of a list may take.
const PAGE: Duration = Duration::from_secs(30);
/// After how many seconds the server ends a watch. Each end is a sign of life: servers send bookmarks once a minute.
const WATCH_S: u64 = 20;
/// How much longer than that a watch may be silent before it counts as dead.
const SILENCE: Duration = Duration::from_secs(WATCH_S + 5);
/// A watch that ends sooner than this is repeated after a pause.
const STEADY: Duration = Duration::from_secs(1);
/// Pauses between attempts to reach the server. One that restarts is away for some seconds, and is asked soon after.
const UNREACHABLE: Backoff =
    Backoff { initial: Nanos::from_millis(100), max: Nanos::from_secs(2), multiplier: 1.6, jitter: 0.2 };
/// Pauses between requests that it answers and cannot do.
const REFUSED: Backoff = Backoff { max: Nanos::from_secs(5), ..UNREACHABLE };
/// Pauses before something that need not be there is looked for again.
const OPTIONAL: Backoff =
    Backoff { initial: Nanos::from_secs(2), max: Nanos::from_secs(60), multiplier: 2.0, jitter: 0.2 };
/// Objects of a page.
const PAGE_OBJECTS: usize = 250;
/// The most pages of a list.
const PAGES_MAX: u32 = 1000;
/// The most objects of a collection.
pub(crate) const OBJECTS_MAX: usize = 20_000;
/// The most bytes of a page: a pod may have a megabyte, and has ten kilobytes.
const PAGE_BYTES_MAX: usize = 128 << 20;
/// The most bytes of a watch event. The API server stores no larger objects than 1.5 MiB.
const EVENT_BYTES_MAX: usize = 8 << 20;
/// The most bytes of an error's answer.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// What a watch reports.
#[derive(Debug)]
pub(crate) enum Report {
    /// These are all objects.
    Listed(Vec<Any>),
    /// An object is new, or another than before.
    Changed(Any),
    /// The object of this name is gone.
    Gone(String),
    /// Nothing has changed, and the server is in contact.
    Contact,
    /// It cannot be watched at present, and why.
    Failed(String),
    /// It need not be there, and is not, and why.
    Absent(String),
}

/// Watches one collection.
pub(crate) struct Watch<F> {
    /// How the API server is reached.
    pub(crate) access: Arc<Access>,
    /// What is watched.
    pub(crate) collection: Collection,
    /// The kind of object, or the right to it, need not be there.
    pub(crate) optional: bool,
    /// Makes a message from a report.
    pub(crate) message: F,
}

// === impl Watch ===

impl<F> Watch<F> {
    /// Watches until the receiver of its reports is gone.
    pub(crate) async fn run<T: Object, M>(self, sender: mpsc::Sender<M>)
    where
        F: Fn(Report) -> M,
    {
        let (mut failures, mut listed) = (0, false);
        while !sender.is_closed() {
            let Err(failure) = self.list_and_watch::<T, M>(&sender, &mut failures, &mut listed).await else {
                return;
            };
            tracing::debug!(collection = self.collection.said(), problem = failure.problem, "listing again");
            let cause = failure.cause;
            // What was there is not given up for a refusal: an API server that starts knows neither roles nor definitions.
            let absent = self.optional && !listed && matches!(cause, Cause::Denied | Cause::Missing);
            let report = match cause {
                _ if absent => Report::Absent(failure.problem),
                // Not a fault: the list that follows settles it.
                Cause::Expired => Report::Contact,
                _ => Report::Failed(failure.problem),
            };
            // The first connection that breaks is no news either, unless the next one does, too.
            let is_told = cause != Cause::Cut || failures > 0;
            if is_told && sender.send((self.message)(report)).await.is_err() {
                return;
            }
            let backoff = match cause {
                _ if absent => OPTIONAL,
                Cause::Cut | Cause::Unreachable => UNREACHABLE,
                Cause::Answered | Cause::Denied | Cause::Expired | Cause::Missing => REFUSED,
            };
            sleep(pause(backoff, failures)).await;
            failures += 1;
        }
    }

    /// Lists, then watches until all must be listed again. Without an error, the receiver of its reports is gone.
    async fn list_and_watch<T: Object, M>(
        &self,
        sender: &mpsc::Sender<M>,
        failures: &mut u32,
        listed: &mut bool,
    ) -> Result<(), Failure>
    where
        F: Fn(Report) -> M,
    {
        let (objects, mut version) = self.list::<T>().await?;
        *listed = true;
        if sender.send((self.message)(Report::Listed(objects))).await.is_err() {
            return Ok(());
        }
        loop {
            let began = Instant::now();
            let followed = self.follow::<T, M>(&mut version, sender).await;
            let is_steady = began.elapsed() >= STEADY;
            if is_steady {
                *failures = 0;
            }
            if !followed? {
                return Ok(());
            }
            if !is_steady {
                // A server, or something before it, that ends each watch at once.
                sleep(pause(REFUSED, *failures)).await;
                *failures += 1;
            }
        }
    }

    /// All objects, and the version of the list.
    async fn list<T: Object>(&self) -> Result<(Vec<Any>, String), Failure> {
        let (mut objects, mut from, mut pages) = (Vec::new(), String::new(), 0);
        let verb = Verb::List;
        loop {
            let until = Instant::now() + PAGE;
            let response = self.ask(verb, self.collection.list_path(PAGE_OBJECTS, &from)).await?;
            let bytes = self.read(verb, response, PAGE_BYTES_MAX, until).await?;
            let page: Page<T> = serde_json::from_slice(&bytes).map_err(|error| self.garbled(verb, &error))?;
            drop(bytes);
            // Anything that looks like an empty list would end all workers.
            if page.metadata.resource_version.is_empty()
                || page.items.iter().any(|item| item.name().is_empty())
            {
                return Err(self.garbled(verb, &"it has no version, or objects without names"));
            }
            objects.extend(page.items.into_iter().map(T::into_any));
            if objects.len() > OBJECTS_MAX {
                return Err(Failure::answered(format!(
                    "there are more than {OBJECTS_MAX} {}: choose fewer by labels",
                    self.collection.said()
                )));
            }
            if page.metadata.r#continue.is_empty() {
                return Ok((objects, page.metadata.resource_version));
            }
            pages += 1;
            if pages > PAGES_MAX {
                return Err(Failure::answered(format!(
                    "cannot list {}: the API server's list has no end",
                    self.collection.said()
                )));
            }
            from = page.metadata.r#continue;
        }
    }

    /// Watches from `version`, which follows the events, until the server ends the watch in time; false if no one
    /// receives what it reports.
    async fn follow<T: Object, M>(
        &self,
        version: &mut String,
        sender: &mpsc::Sender<M>,
    ) -> Result<bool, Failure>
    where
        F: Fn(Report) -> M,
    {
        let verb = Verb::Watch;
        let mut body = self.ask(verb, self.collection.watch_path(version, WATCH_S)).await?.into_body();
        let mut report = Some(Report::Contact);
        let mut lines = Lines::default();
        loop {
            if let Some(report) = report.take()
                && sender.send((self.message)(report)).await.is_err()
            {
                return Ok(false);
            }
            if let Some(line) = lines.next() {
                report = Some(self.event::<T>(line, version)?);
                continue;
            }
            let Ok(frame) = timeout(SILENCE, body.frame()).await else {
                return Err(self.silent(verb, SILENCE));
            };
            let frame = match frame {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => {
                    return Err(Failure {
                        cause: Cause::Cut,
                        ..Failure::broken(verb, &self.collection, &error)
                    });
                }
                // A part of an event at the end is sent again from this version.
                None => return Ok(true),
            };
            let Ok(data) = frame.into_data() else { continue };
            lines.add(&data);
            if lines.waiting() > EVENT_BYTES_MAX {
                return Err(Failure::answered(format!(
                    "cannot watch {}: an event is longer than {EVENT_BYTES_MAX} bytes",
                    self.collection.said()
                )));
            }
        }
    }

    /// What an event reports.
    fn event<T: Object>(&self, line: &[u8], version: &mut String) -> Result<Report, Failure> {
        let garbled = |error: serde_json::Error| self.garbled(Verb::Watch, &error);
        let EventKind { r#type } = serde_json::from_slice(line).map_err(garbled)?;
        match r#type {
            Happened::Bookmark => {
                let EventObject { object: Bookmark { metadata } } =
                    serde_json::from_slice(line).map_err(garbled)?;
                advance(version, &metadata.resource_version);
                Ok(Report::Contact)
            }
            Happened::Error => {
                let EventObject::<Status> { object } = serde_json::from_slice(line).map_err(garbled)?;
                let status = StatusCode::from_u16(object.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                Err(Failure::refused(Verb::Watch, &self.collection, status, &object))
            }
            happened @ (Happened::Added | Happened::Modified | Happened::Deleted) => {
                let EventObject::<T> { object } = serde_json::from_slice(line).map_err(garbled)?;
                if object.name().is_empty() {
                    return Err(self.garbled(Verb::Watch, &"it has an object without a name"));
                }
                advance(version, object.version());
                Ok(match happened {
                    Happened::Deleted => Report::Gone(object.name().to_owned()),
                    _ => Report::Changed(object.into_any()),
                })
            }
        }
    }

    /// Asks, and returns an answer whose status is 200.
    async fn ask(&self, verb: Verb, path: String) -> Result<Response<Body>, Failure> {
        let (client, number) = self.access.client().await.map_err(Failure::unreachable)?;
        let answered = self.ask_of(&client, verb, path).await;
        if answered.as_ref().is_err_and(|failure| failure.cause == Cause::Unreachable) {
            self.access.renew(number).await;
        }
        answered
    }

    async fn ask_of(
        &self,
        client: &kube::Client,
        verb: Verb,
        path: String,
    ) -> Result<Response<Body>, Failure> {
        let request = Request::get(path).header(http::header::ACCEPT, "application/json").body(Body::empty());
        let request = request.map_err(|error| Failure::broken(verb, &self.collection, &error))?;
        let until = Instant::now() + HEAD;
        let Ok(answered) = timeout_at(until, client.send(request)).await else {
            return Err(self.silent(verb, HEAD));
        };
        let response = answered.map_err(|error| Failure::broken(verb, &self.collection, &error))?;
        let status = response.status();
        if status == StatusCode::OK {
            return Ok(response);
        }
        // An answer that is no `Status` comes from something else than an API server, or is about a path.
        let bytes = self.read(verb, response, ERROR_BYTES_MAX, until).await.unwrap_or_default();
        let said = serde_json::from_slice(&bytes).unwrap_or_default();
        Err(Failure::refused(verb, &self.collection, status, &said))
    }

    /// The whole body of an answer.
    async fn read(
        &self,
        verb: Verb,
        response: Response<Body>,
        bytes_max: usize,
        until: Instant,
    ) -> Result<Vec<u8>, Failure> {
        let (mut bytes, mut body) = (Vec::new(), response.into_body());
        loop {
            let Ok(frame) = timeout_at(until, body.frame()).await else {
                return Err(Failure::unreachable(format!(
                    "cannot {} {}: the API server's answer did not end in time",
                    verb.name(),
                    self.collection.said()
                )));
            };
            match frame {
                None => return Ok(bytes),
                Some(Err(error)) => return Err(Failure::broken(verb, &self.collection, &error)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        bytes.extend_from_slice(&data);
                    }
                }
            }
            if bytes.len() > bytes_max {
                return Err(Failure::answered(format!(
                    "cannot {} {}: the API server's answer is longer than {bytes_max} bytes",
                    verb.name(),
                    self.collection.said()
                )));
            }
        }
    }

    fn silent(&self, verb: Verb, span: Duration) -> Failure {
        Failure::unreachable(format!(
            "cannot {} {}: the API server was silent for {} s",
            verb.name(),
            self.collection.said(),
            span.as_secs()
        ))
    }

    fn garbled(&self, verb: Verb, error: &dyn std::fmt::Display) -> Failure {
        Failure::answered(format!(
            "cannot {} {}: the API server's answer cannot be understood ({error}): is something between it and kvlane?",
            verb.name(),
            self.collection.said()
        ))
    }
}

/// The lines of a body that arrives in pieces.
#[derive(Default)]
struct Lines {
    bytes: Vec<u8>,
    /// Where the first line that was not taken begins.
    start: usize,
    /// Up to where there is no end of it.
    searched: usize,
}

// === impl Lines ===

impl Lines {
    fn add(&mut self, data: &[u8]) {
        self.bytes.drain(..self.start);
        self.searched -= self.start;
        self.start = 0;
        self.bytes.extend_from_slice(data);
    }

    /// The next whole line that is not empty.
    fn next(&mut self) -> Option<&[u8]> {
        loop {
            let Some(length) = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n') else {
                self.searched = self.bytes.len();
                return None;
            };
            let (start, end) = (self.start, self.searched + length);
            (self.start, self.searched) = (end + 1, end + 1);
            if !self.bytes[start..end].trim_ascii().is_empty() {
                return Some(&self.bytes[start..end]);
            }
        }
    }

    /// Bytes of a line that has no end yet.
    fn waiting(&self) -> usize {
        self.bytes.len() - self.start
    }
}

/// Versions go forward, except in objects of servers that leave them out.
fn advance(version: &mut String, to: &str) {
    if !to.is_empty() {
        to.clone_into(version);
    }
}

/// The pause before the API server is looked for again, after so many failures in a row to do so.
pub(crate) fn pause_unreachable(failures: u32) -> Duration {
    pause(UNREACHABLE, failures)
}

fn pause(backoff: Backoff, failures: u32) -> Duration {
    let unit = (RandomState::new().hash_one(failures) >> 11) as f64 / (1_u64 << 53) as f64;
    Duration::from_nanos(backoff.pause(failures, unit).0)
}
