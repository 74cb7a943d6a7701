//! Forecast of answer lengths, learned from previous answers.
//!
//! Three averages, each weighted by its number of observations: of the pool, of answers to prompts of similar length
//! and limit, and of the conversation. Before any observation an answer is assumed to have [`USUAL_TOKENS`]. The
//! request's own limit bounds the result. What other routers have observed of the pool and of similar prompts counts
//! as observations here.
//!
//! A client may claim how long its answer will be. The claim and the forecast without it are then averaged with the
//! weights of two estimates of known error: each is weighted with the squared error of the other, as measured on that
//! tenant's earlier claims. The first claim of a tenant has no weight, and a tenant whose claims are wrong is treated as
//! one that claims nothing. A claim counts as no more than the longest answer that its tenant has had, so that a single
//! large one moves no other request away from an endpoint. Claims are never observations of the averages.

use std::hash::BuildHasher;

use foldhash::fast::FixedState;
use serde::{Deserialize, Serialize};

use crate::evidence::Evidence;
use crate::request::{SchedulingRequest, SessionKey, TenantKey};

/// Assumed output tokens before any observation: typical for chats (Mooncake's conversation trace, FAST'25, has a mean
/// of 343, Azure's of 2023 one of 211).
pub const USUAL_TOKENS: f64 = 200.0;

/// Answers after which the pool's average becomes an exponential moving average.
const POOL_MEMORY: f64 = 512.0;
/// The same for prompts of similar length.
const KIND_MEMORY: f64 = 256.0;
/// The same for a conversation, whose subject changes faster.
const SESSION_MEMORY: f64 = 8.0;
/// Weight of the prior, in answers: for a kind, for a conversation.
const KIND_DOUBT: f64 = 16.0;
const SESSION_DOUBT: f64 = 2.0;
/// The same for the errors of a tenant's claims, and the weight of the time before any was checked.
const CLAIM_MEMORY: f64 = 64.0;
const CLAIM_DOUBT: f64 = 2.0;
/// Most remembered tenants that make claims; a new one replaces the one in its slot.
const CLAIMANTS_MAX: usize = 1 << 12;
/// Most remembered conversations; a new one replaces the one in its slot.
const SESSIONS_MAX: usize = 1 << 14;
/// Classes of prompt lengths, by powers of two, and of limits, by powers of four.
const LENGTHS: usize = 24;
const LIMITS: usize = 12;

/// Observations of one pool's answers. Bounded.
#[derive(Clone, Debug)]
pub struct Forecast {
    pool: Average,
    kinds: Vec<Average>,
    sessions: Vec<(SessionKey, Average)>,
    /// What other routers have observed of the pool, then of each kind; empty as long as nothing was heard.
    heard: Vec<Evidence>,
    claimants: Vec<(Option<TenantKey>, ClaimErrors)>,
    hasher: FixedState,
}

/// Mean squared errors of a tenant's claims, and of the forecasts for the same answers without them.
#[derive(Clone, Copy, Debug, Default)]
struct ClaimErrors {
    claim: Average,
    forecast: Average,
    /// The longest of these answers.
    longest: u32,
}

/// A claimed answer length, to be compared with the answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Claim {
    tenant: Option<TenantKey>,
    tokens: u32,
    /// The forecast without the claim.
    forecast: u32,
}

/// A plain mean that becomes an exponential moving average.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Average {
    mean: f64,
    /// All observations so far; beyond the average's memory more of them make it no surer.
    seen: f64,
}

/// All observations except those of single conversations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Usual {
    pool: Average,
    kinds: Vec<(u16, Average)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    heard: Vec<Evidence>,
}

/// Number of classes of answers.
pub(crate) const KINDS: u16 = (LENGTHS * LIMITS) as u16;

/// The class that an answer is counted in.
#[derive(Clone, Copy, Debug)]
pub struct Kind(u16);

// === impl Kind ===

impl Kind {
    /// The class of an answer to this request.
    pub fn of(request: &SchedulingRequest) -> Self {
        let bits = |n: u32| (u32::BITS - n.leading_zeros()) as usize;
        let length = bits(request.prompt_tokens).min(LENGTHS - 1);
        let limit = request.output_tokens_max.map_or(0, |max| (1 + bits(max) / 2).min(LIMITS - 1));
        Self((limit * LENGTHS + length) as u16)
    }
}

// === impl Average ===

impl Average {
    fn add(&mut self, value: f64, memory: f64) {
        self.seen += 1.0;
        self.mean += (value - self.mean) / self.seen.min(memory);
    }

    fn evidence(&self, memory: f64) -> Evidence {
        Evidence { mean: self.mean, weight: self.seen.min(memory) }
    }
}

// === impl Evidence ===

impl Evidence {
    /// The mean, weighted with `prior` as if that had been observed `doubt` times.
    fn over(&self, prior: f64, doubt: f64) -> f64 {
        (self.mean * self.weight + prior * doubt) / (self.weight + doubt)
    }
}

// === impl Forecast ===

impl Default for Forecast {
    fn default() -> Self {
        Self {
            pool: Average::default(),
            kinds: vec![Average::default(); LENGTHS * LIMITS],
            sessions: Vec::new(),
            heard: Vec::new(),
            claimants: Vec::new(),
            hasher: FixedState::default(),
        }
    }
}

// === impl ClaimErrors ===

impl ClaimErrors {
    /// The weight of a claim, from 0 to 1.
    fn weight(&self) -> f64 {
        let (claim, forecast) = (self.claim.mean, self.forecast.mean);
        if claim + forecast <= 0.0 {
            return 0.0;
        }
        let checked = self.claim.seen.min(CLAIM_MEMORY);
        forecast / (claim + forecast) * checked / (checked + CLAIM_DOUBT)
    }
}

impl Forecast {
    /// Mean output tokens of the pool's answers.
    pub fn usual_tokens(&self) -> f64 {
        self.pool.evidence(POOL_MEMORY).filled_by(self.heard(None)).over(USUAL_TOKENS, 4.0)
    }

    /// Forecast output tokens of this request, at least 1.
    pub fn tokens(&self, request: &SchedulingRequest) -> u32 {
        let forecast = self.unclaimed_tokens(request);
        let Some(claimed) = request.claims.output_tokens else { return forecast };
        let errors = self.claim_errors(request.tenant);
        let claimed = f64::from(claimed.min(errors.longest));
        let tokens = f64::from(forecast) + errors.weight() * (claimed - f64::from(forecast));
        (tokens.round() as u32).clamp(1, request.output_tokens_max.unwrap_or(u32::MAX).max(1))
    }

    /// What is known about a tenant's claims.
    fn claim_errors(&self, tenant: Option<TenantKey>) -> ClaimErrors {
        let errors = self.claimants.get(self.claimant(tenant)).filter(|(of, _)| *of == tenant);
        errors.map_or_else(ClaimErrors::default, |(_, errors)| *errors)
    }

    /// The claim of a request, if it makes one, for [`Forecast::checked`].
    pub(crate) fn claim(&self, request: &SchedulingRequest) -> Option<Claim> {
        let tokens = request.claims.output_tokens?;
        Some(Claim { tenant: request.tenant, tokens, forecast: self.unclaimed_tokens(request) })
    }

    /// An answer for which a length was claimed has ended.
    pub(crate) fn checked(&mut self, claim: &Claim, output_tokens: u32) {
        if self.claimants.is_empty() {
            self.claimants.resize(CLAIMANTS_MAX, (None, ClaimErrors::default()));
        }
        let slot = self.claimant(claim.tenant);
        let (tenant, errors) = &mut self.claimants[slot];
        if *tenant != claim.tenant {
            (*tenant, *errors) = (claim.tenant, ClaimErrors::default());
        }
        let squared = |tokens: u32| {
            let error = f64::from(tokens) - f64::from(output_tokens);
            error * error
        };
        errors.longest = errors.longest.max(output_tokens);
        errors.claim.add(squared(claim.tokens), CLAIM_MEMORY);
        errors.forecast.add(squared(claim.forecast), CLAIM_MEMORY);
    }

    fn claimant(&self, tenant: Option<TenantKey>) -> usize {
        self.hasher.hash_one(tenant.map(|tenant| tenant.0)) as usize % CLAIMANTS_MAX
    }

    /// The forecast without what the client claims.
    fn unclaimed_tokens(&self, request: &SchedulingRequest) -> u32 {
        let pool = self.usual_tokens();
        let at = Kind::of(request).0;
        let kind = self.kinds[usize::from(at)].evidence(KIND_MEMORY).filled_by(self.heard(Some(at)));
        let kind = kind.over(pool, KIND_DOUBT);
        let session = request.session.and_then(|session| {
            let (key, average) = self.sessions.get(self.slot(session))?;
            (*key == session).then(|| average.evidence(SESSION_MEMORY).over(kind, SESSION_DOUBT))
        });
        let max = request.output_tokens_max.unwrap_or(u32::MAX).max(1);
        (session.unwrap_or(kind).round() as u32).clamp(1, max)
    }

    /// An answer has ended, by itself or because its client left: its length so far is what occupied the endpoint.
    pub fn answered(&mut self, kind: Kind, session: Option<SessionKey>, output_tokens: u32) {
        let tokens = f64::from(output_tokens);
        self.pool.add(tokens, POOL_MEMORY);
        self.kinds[usize::from(kind.0)].add(tokens, KIND_MEMORY);
        let Some(session) = session else { return };
        if self.sessions.is_empty() {
            self.sessions.resize(SESSIONS_MAX, (SessionKey(0), Average::default()));
        }
        let slot = self.slot(session);
        let (key, average) = &mut self.sessions[slot];
        if *key != session {
            (*key, *average) = (session, Average::default());
        }
        average.add(tokens, SESSION_MEMORY);
    }

    /// The mean output tokens that this router has observed itself, of the pool and of each kind, and how many answers.
    pub(crate) fn told(&self) -> impl Iterator<Item = (Option<u16>, f64, u32)> {
        let kinds = (0..).map(Some).zip(&self.kinds);
        let all = [(None, &self.pool)].into_iter().chain(kinds);
        // The cast saturates.
        all.map(|(kind, average)| (kind, average.mean, average.seen as u32))
    }

    /// What other routers have observed of the pool, or of a kind.
    pub(crate) fn hear(&mut self, kind: Option<u16>, heard: Evidence) {
        self.heard.resize(1 + usize::from(KINDS), Evidence::default());
        if let Some(place) = self.heard.get_mut(kind.map_or(0, |kind| 1 + usize::from(kind))) {
            *place = heard;
        }
    }

    fn heard(&self, kind: Option<u16>) -> Evidence {
        self.heard.get(kind.map_or(0, |kind| 1 + usize::from(kind))).copied().unwrap_or_default()
    }

    /// All observations except those of single conversations.
    pub(crate) fn usual(&self) -> Usual {
        let kinds = (0..).zip(&self.kinds).filter(|(_, kind)| kind.seen > 0.0);
        let kinds = kinds.map(|(at, kind)| (at, *kind)).collect();
        Usual { pool: self.pool, kinds, heard: self.heard.clone() }
    }

    /// Restores observations.
    pub(crate) fn resume(&mut self, usual: Usual) {
        (self.pool, self.heard) = (usual.pool, usual.heard);
        for (at, average) in usual.kinds {
            if let Some(kind) = self.kinds.get_mut(usize::from(at)) {
                *kind = average;
            }
        }
    }

    fn slot(&self, session: SessionKey) -> usize {
        self.hasher.hash_one(session.0) as usize % SESSIONS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Claims, RequestId};

    fn request(prompt_tokens: u32, session: Option<u64>, max: Option<u32>) -> SchedulingRequest {
        SchedulingRequest {
            session: session.map(SessionKey),
            output_tokens_max: max,
            ..SchedulingRequest::new(RequestId(1), prompt_tokens)
        }
    }

    #[test]
    fn before_anything_was_seen_an_answer_is_usual_and_within_its_limit() {
        let forecast = Forecast::default();
        assert_eq!(forecast.tokens(&request(1000, None, None)), 200);
        assert_eq!(forecast.tokens(&request(1000, Some(1), Some(30))), 30);
        assert_eq!(forecast.tokens(&request(0, None, Some(0))), 1);
    }

    #[test]
    fn a_conversation_answers_as_it_did() {
        let mut forecast = Forecast::default();
        for _ in 0..20 {
            for (session, tokens) in [(Some(1), 1000), (Some(2), 10)] {
                let request = request(1000, session, None);
                forecast.answered(Kind::of(&request), request.session, tokens);
            }
        }
        let expected = |session| forecast.tokens(&request(1000, session, None));
        assert!(expected(Some(1)) > 850 && expected(Some(2)) < 150);
        let other = expected(Some(3));
        assert!((400..600).contains(&other), "{other}");
        assert_eq!(expected(None), other);
    }

    #[test]
    fn prompts_of_another_length_have_answers_of_another_length() {
        let mut forecast = Forecast::default();
        for (prompt, tokens) in [(100, 20), (30_000, 900)].repeat(200) {
            let request = request(prompt, None, None);
            forecast.answered(Kind::of(&request), None, tokens);
        }
        assert!(forecast.tokens(&request(110, None, None)) < 70);
        assert!(forecast.tokens(&request(29_000, None, None)) > 850);
    }

    fn claimed(tenant: u64, tokens: u32) -> SchedulingRequest {
        let claims = Claims { output_tokens: Some(tokens), is_last: false };
        SchedulingRequest { tenant: Some(TenantKey(tenant)), claims, ..request(1000, None, None) }
    }

    /// An answer of this length to a request with this claim.
    fn answer(forecast: &mut Forecast, request: &SchedulingRequest, tokens: u32) {
        let claim = forecast.claim(request).expect("a claim");
        forecast.answered(Kind::of(request), None, tokens);
        forecast.checked(&claim, tokens);
    }

    #[test]
    fn a_claim_counts_as_much_as_its_tenants_earlier_claims_were_right() {
        let mut forecast = Forecast::default();
        assert_eq!(forecast.tokens(&claimed(1, 5000)), 200, "the first claim has no weight");
        for tokens in [20, 900, 40, 1500].repeat(20) {
            answer(&mut forecast, &claimed(1, tokens), tokens);
            answer(&mut forecast, &claimed(2, 1_000_000), tokens);
        }
        let [unclaimed, honest, liar, new] = [
            forecast.tokens(&request(1000, None, None)),
            forecast.tokens(&claimed(1, 1400)),
            forecast.tokens(&claimed(2, 2000)),
            forecast.tokens(&claimed(3, 2000)),
        ];
        assert!((1350..1450).contains(&honest), "{honest}");
        assert!(forecast.tokens(&claimed(1, u32::MAX)) <= 1500, "no more than its longest answer");
        assert!(liar.abs_diff(unclaimed) <= 1 && new == unclaimed, "{liar} {new} {unclaimed}");
        let limited = SchedulingRequest { output_tokens_max: Some(7), ..claimed(1, 2000) };
        assert_eq!(forecast.tokens(&limited), 7);
    }

    /// Invariant: Whatever a tenant claims about its requests, the forecasts for others stay the same.
    #[test]
    fn the_claims_of_a_tenant_change_no_forecast_for_another() {
        let [mut lied_to, mut told_nothing] = [Forecast::default(), Forecast::default()];
        for tokens in [20, 900, 40, 1500].repeat(20) {
            answer(&mut lied_to, &claimed(2, 1_000_000), tokens);
            told_nothing.answered(Kind::of(&claimed(2, 0)), None, tokens);
        }
        for other in [request(1000, None, None), claimed(3, 77)] {
            assert_eq!(lied_to.tokens(&other), told_nothing.tokens(&other));
        }
        assert_eq!(lied_to.usual_tokens(), told_nothing.usual_tokens());
    }

    #[test]
    fn no_number_of_conversations_takes_more_memory() {
        let mut forecast = Forecast::default();
        let kind = Kind::of(&request(1, None, None));
        for session in 0..100_000 {
            forecast.answered(kind, Some(SessionKey(session)), 5);
        }
        assert_eq!(forecast.sessions.len(), SESSIONS_MAX);
        for tenant in 0..10_000 {
            answer(&mut forecast, &claimed(tenant, 5), 5);
        }
        assert_eq!(forecast.claimants.len(), CLAIMANTS_MAX);
        forecast.answered(Kind::of(&request(u32::MAX, None, Some(u32::MAX))), None, u32::MAX);
        assert!(forecast.tokens(&request(u32::MAX, None, Some(u32::MAX))) > 1);
    }
}
