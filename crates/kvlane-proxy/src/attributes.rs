//! Request attributes besides the prompt: the session, the tenant, the priority, and the longest answer.
//!
//! An unusable hint is ignored and never an error. Names become keys here and are not kept, so no name is in a log, a
//! receipt or a recording.
//!
//! A tenant's key is a keyed hash (SipHash), because a tenant's name may be its API key: API keys cannot be guessed from a
//! recording. Its secret is drawn when the process starts, or follows from the key of the salts where replicas have to
//! agree ([`AttributeReader::with_tenant_key`]). A session's key is the same at every gateway and after a restart, so that policies which hash sessions
//! agree. It includes the tenant's name: sessions of two tenants with the same name are two sessions.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue};
use kvlane_core::config::{ConfigError, within, wrong};
use kvlane_core::request::{Claims, SchedulingRequest, SessionKey, Slo, TenantKey};
use kvlane_core::section;
use kvlane_wire::openai::{AgentHints, ParsedRequest, SESSION_BYTES_MAX};
use siphasher::sip::SipHasher13;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::auth::{Identity, PRIORITY_MAX, is_credential};
use crate::engine_priority::EnginePriority;
use crate::salt::SaltKey;

/// Longer tenant names are ignored. API keys have some hundred bytes, signed tokens a few thousand.
const TENANT_BYTES_MAX: usize = 8 << 10;
/// Most headers in one list: each is looked for in every request.
const HEADERS_MAX: usize = 16;

section! {
    /// Which hints of clients are used. Session headers are those of llm-d's agent identity and of earlier routers,
    /// tenants are llm-d's fairness ids or the client's API key, priorities have the classes of SGLang's gateway.
    pub struct Config {
        /// Headers that name the conversation of a request; else it is read from the body.
        pub session_headers: Vec<String> = list(&[
            "x-session-id",
            "x-claude-code-session-id",
            "x-session-affinity",
            "session-id",
            "session_id",
            "x-dynamo-session-id",
        ]), in 0..=HEADERS_MAX;
        /// Headers that name the conversation whose agent has started the one of a request: the request then belongs to
        /// that conversation.
        pub parent_session_headers: Vec<String> = list(&["x-dynamo-parent-session-id"]), in 0..=HEADERS_MAX;
        /// Headers that are `true` on the last request of a conversation. Session admission then expects no other.
        pub last_request_headers: Vec<String> = list(&["x-dynamo-session-final"]), in 0..=HEADERS_MAX;
        /// Whether `nvext.agent_hints` in bodies is read: the expected output length and the priority.
        pub agent_hints: bool = true;
        /// Headers that name the tenant of a request, where several share the fleet. Only hashes are kept.
        pub tenant_headers: Vec<String> =
            list(&[
                "x-llm-d-inference-fairness-id",
                "x-gateway-inference-fairness-id",
                "authorization",
                "x-api-key",
            ]), in 0..=HEADERS_MAX;
        /// Headers with the priority: -100 to 100, higher first, a name of `hints.priorities`, or that of an
        /// InferenceObjective of the cluster.
        pub priority_headers: Vec<String> =
            list(&[
                "x-priority",
                "x-smg-priority",
                "x-llm-d-inference-objective",
                "x-gateway-inference-objective",
            ]), in 0..=HEADERS_MAX;
        /// Headers with the longest time to first token that a request should have, in milliseconds.
        pub ttft_slo_headers: Vec<String> = list(&["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"]), in 0..=HEADERS_MAX;
        /// Headers with the longest time per output token, in milliseconds.
        pub tpot_slo_headers: Vec<String> = list(&["x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"]), in 0..=HEADERS_MAX;
        /// How engines are told priorities, as `priority` in the body: `none`, `lowest_first` (vLLM) or `highest_first`
        /// (SGLang). A `priority` of the client is then removed. Engines without priority scheduling reject requests
        /// that have one.
        pub engine_priority: EnginePriority = EnginePriority::None;
        /// Priorities by name.
        pub priorities: BTreeMap<String, i8> =
            [("system", 100), ("interactive", 50), ("default", 0), ("bulk", -50)]
                .map(|(name, priority)| (name.to_owned(), priority))
                .into(), in 0..=64;
    }
}

fn list(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

// === impl Config ===

impl Config {
    /// Checks the names of headers and the range of priorities.
    ///
    /// # Errors
    /// The first invalid one.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let lists = [
            ("hints.session_headers", &self.session_headers),
            ("hints.parent_session_headers", &self.parent_session_headers),
            ("hints.last_request_headers", &self.last_request_headers),
            ("hints.tenant_headers", &self.tenant_headers),
            ("hints.priority_headers", &self.priority_headers),
            ("hints.ttft_slo_headers", &self.ttft_slo_headers),
            ("hints.tpot_slo_headers", &self.tpot_slo_headers),
        ];
        for (field, names) in lists {
            for name in names {
                if HeaderName::try_from(name).is_err() {
                    return wrong(field, format!("'{name}' is not a valid header name"));
                }
            }
        }
        for (name, priority) in &self.priorities {
            within(&format!("hints.priorities.{name}"), priority, -PRIORITY_MAX..=PRIORITY_MAX)?;
        }
        Ok(())
    }
}

/// Reads hints. One per gateway.
#[derive(Clone)]
pub struct AttributeReader {
    session_headers: Vec<HeaderName>,
    parent_headers: Vec<HeaderName>,
    last_headers: Vec<HeaderName>,
    agent_hints: bool,
    engine_priority: EnginePriority,
    tenant_headers: Vec<HeaderName>,
    priority_headers: Vec<HeaderName>,
    slo_headers: [Vec<HeaderName>; 2],
    priorities: BTreeMap<String, i8>,
    /// Priorities by the name of an objective.
    objectives: Arc<ArcSwap<BTreeMap<String, i8>>>,
    tenants: SipHasher13,
    salts: SaltKey,
}

/// The attributes of one request, the same for all its attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    session: Option<SessionKey>,
    tenant: Option<TenantKey>,
    priority: i8,
    output_tokens_max: Option<u32>,
    whole_answer: bool,
    slo: Slo,
    claims: Claims,
    /// The priority that its engine is told, if any.
    engine_priority: Option<i32>,
    /// Whether the session is the one of the agent that started its own.
    is_child: bool,
}

// === impl Attributes ===

impl Attributes {
    /// Whether the answer may be a stream.
    pub fn streams(&self) -> bool {
        !self.whole_answer
    }
}

// === impl AttributeReader ===

impl AttributeReader {
    /// Reads the attributes that `config` names; tenants' salts are made with `salts`.
    pub fn new(config: &Config, salts: SaltKey) -> Self {
        let headers = |names: &[String]| names.iter().filter_map(|name| name.try_into().ok()).collect();
        Self {
            session_headers: headers(&config.session_headers),
            parent_headers: headers(&config.parent_session_headers),
            last_headers: headers(&config.last_request_headers),
            agent_hints: config.agent_hints,
            engine_priority: config.engine_priority,
            tenant_headers: headers(&config.tenant_headers),
            priority_headers: headers(&config.priority_headers),
            slo_headers: [headers(&config.ttft_slo_headers), headers(&config.tpot_slo_headers)],
            objectives: Arc::default(),
            priorities: config.priorities.clone(),
            tenants: {
                let random = RandomState::new();
                SipHasher13::new_with_keys(random.hash_one(0), random.hash_one(1))
            },
            salts,
        }
    }

    /// The same reader, which also knows these objectives.
    #[must_use]
    pub fn with_objectives(self, objectives: Arc<ArcSwap<BTreeMap<String, i8>>>) -> Self {
        Self { objectives, ..self }
    }

    /// The same reader, whose tenant keys are those of every reader with this key. Replicas agree on them so.
    #[must_use]
    pub fn with_tenant_key(&self, key: &SaltKey) -> Self {
        let half = |n: u8| u64::from_str_radix(&key.salt(&[b"tenants", &[n]])[..16], 16).unwrap_or_default();
        let tenants = SipHasher13::new_with_keys(half(0), half(1));
        Self { tenants, ..self.clone() }
    }

    /// New settings with the same tenant keys. The cache salts stay the same unless there is another salt key.
    pub fn reset(&self, config: &Config, salts: Option<SaltKey>) -> Self {
        let salts = salts.unwrap_or_else(|| self.salts.clone());
        let objectives = Arc::clone(&self.objectives);
        Self { tenants: self.tenants, objectives, ..Self::new(config, salts) }
    }

    /// Reads the attributes from a request's head and, where its body is parsed, from the body.
    pub fn read(
        &self,
        headers: &HeaderMap,
        body: Option<&ParsedRequest<'_>>,
        identity: Option<&Arc<Identity>>,
    ) -> Attributes {
        let tenant = self.tenant(headers, identity.map(|identity| &**identity));
        let named_in = |list: &[HeaderName]| {
            list.iter().find_map(|name| {
                headers.get(name).map(HeaderValue::as_bytes).filter(|name| is_usable(name, SESSION_BYTES_MAX))
            })
        };
        let parent = named_in(&self.parent_headers);
        let session = parent.or_else(|| named_in(&self.session_headers));
        let hints = body.filter(|_| self.agent_hints).map(|body| body.agent_hints).unwrap_or_default();
        let priority = self.priority(headers).or_else(|| said(hints)).unwrap_or_default();
        let highest = identity.map_or(PRIORITY_MAX, |identity| identity.priority_max);
        let priority = priority.min(highest);
        let session = session.or_else(|| Some(body?.session.as_ref()?.as_bytes()));
        Attributes {
            session: session.map(|name| session_key(tenant, name)),
            tenant: tenant.map(|tenant| self.tenant_key(tenant)),
            priority,
            engine_priority: self.engine_priority.told(priority),
            output_tokens_max: body.and_then(|body| body.output_tokens_max),
            whole_answer: body.is_some_and(|body| !body.stream),
            slo: self.slo(headers),
            claims: Claims {
                output_tokens: hints.output_tokens,
                // The end of a child is not that of its parent's conversation.
                is_last: parent.is_none() && self.is_last(headers),
            },
            is_child: parent.is_some(),
        }
    }

    /// Whether its client says that it is the last request of its conversation.
    fn is_last(&self, headers: &HeaderMap) -> bool {
        let is_true =
            |name| headers.get(name).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"));
        self.last_headers.iter().any(is_true)
    }

    /// The cache salt of a request's tenant: the same for the same tenant at every gateway with the same key, and
    /// different from any `cache_salt` that another tenant can send.
    pub fn salt(
        &self,
        headers: &HeaderMap,
        identity: Option<&Arc<Identity>>,
        theirs: Option<&str>,
    ) -> String {
        let (kind, name): (&[u8], _) = match self.tenant(headers, identity.map(|identity| &**identity)) {
            None => (b"0", &b""[..]),
            Some(Tenant::Named(name)) => (b"1", name),
            Some(Tenant::Holder(key)) => (b"2", key),
            Some(Tenant::Known(name)) => (b"3", name),
            Some(Tenant::Credentials(said)) => (b"4", said),
        };
        let own = [kind, name];
        match theirs {
            None => self.salts.salt(&own),
            Some(theirs) => self.salts.salt(&[own[0], own[1], theirs.as_bytes()]),
        }
    }

    /// The tenant of a request. A client with a key cannot name another tenant, unless the key is trusted to.
    fn tenant<'a>(&self, headers: &'a HeaderMap, identity: Option<&'a Identity>) -> Option<Tenant<'a>> {
        let believed = identity.is_none_or(|identity| identity.trusted);
        let named = self.tenant_headers.iter().filter(|name| {
            // The key has been verified: it is a gateway key, and not a tenant's name.
            believed && !(identity.is_some() && is_credential(name))
        });
        let named = named.map(|name| tenant(name, headers.get(name)?)).find_map(|tenant| tenant);
        named.or_else(|| identity.map(|identity| Tenant::Known(identity.name.as_bytes())))
    }

    /// The tenants with this name: the holder of a key of that name, and a tenant that is named so in a trusted
    /// header.
    pub fn tenants_called(&self, name: &str) -> [TenantKey; 2] {
        let name = name.as_bytes();
        [Tenant::Known(name), Tenant::Named(name)].map(|tenant| self.tenant_key(tenant))
    }

    fn tenant_key(&self, tenant: Tenant<'_>) -> TenantKey {
        let mut hasher = self.tenants;
        tenant.hash(&mut hasher);
        TenantKey(hasher.finish())
    }

    fn slo(&self, headers: &HeaderMap) -> Slo {
        let [ttft_ms, tpot_ms] = self
            .slo_headers
            .each_ref()
            .map(|names| names.iter().find_map(|name| headers.get(name)?.to_str().ok()?.trim().parse().ok()));
        Slo { ttft_ms, tpot_ms, ..Slo::default() }
    }

    fn priority(&self, headers: &HeaderMap) -> Option<i8> {
        self.priority_headers.iter().find_map(|name| {
            let said = headers.get(name)?.to_str().ok()?.trim();
            match said.parse() {
                Ok(priority) => (-PRIORITY_MAX..=PRIORITY_MAX).contains(&priority).then_some(priority),
                Err(_) => {
                    self.priorities.get(said).copied().or_else(|| self.objectives.load().get(said).copied())
                }
            }
        })
    }
}

// === impl Attributes ===

impl Attributes {
    /// Its tenant.
    pub fn tenant(&self) -> Option<TenantKey> {
        self.tenant
    }

    /// Its conversation, if it names one.
    pub(crate) fn session(&self) -> Option<SessionKey> {
        self.session
    }

    /// The longest answer it asks for.
    pub fn output_tokens_max(&self) -> Option<u32> {
        self.output_tokens_max
    }

    /// Its latency objectives.
    pub(crate) fn slo(&self) -> Slo {
        self.slo
    }

    /// Its queue priority.
    pub(crate) fn priority(&self) -> i8 {
        self.priority
    }

    /// The same attributes with other objectives.
    pub(crate) fn with_slo(self, slo: Slo) -> Self {
        Self { slo, ..self }
    }

    /// The same attributes where the answer does not pass through here: its first token is not seen, as if it came whole.
    pub(crate) fn unseen(self) -> Self {
        Self { whole_answer: true, ..self }
    }

    /// Adds them to a scheduling request.
    pub fn apply(self, request: SchedulingRequest) -> SchedulingRequest {
        let Self { session, tenant, priority, output_tokens_max, whole_answer, slo, claims, .. } = self;
        SchedulingRequest {
            session,
            tenant,
            priority,
            output_tokens_max,
            whole_answer,
            slo,
            claims,
            ..request
        }
    }

    /// The priority that its engine is told, if any.
    pub(crate) fn engine_priority(&self) -> Option<i32> {
        self.engine_priority
    }

    /// The hints that were taken, for the client: `session, priority=50, output=1024`; nothing if there are none.
    pub(crate) fn taken(&self) -> Option<HeaderValue> {
        let Self { session, priority, slo, claims, is_child, .. } = *self;
        let session = session.map(|_| if is_child { "parent" } else { "session" });
        if priority == 0 && slo == Slo::default() && claims == Claims::default() {
            return session.map(HeaderValue::from_static);
        }
        let number = |name: &str, number: Option<i64>| number.map(|number| format!("{name}={number}"));
        let hints = [
            session.map(str::to_owned),
            number("priority", Some(priority.into()).filter(|priority| *priority != 0)),
            number("ttft_ms", slo.ttft_ms.map(i64::from)),
            number("tpot_ms", slo.tpot_ms.map(i64::from)),
            number("output", claims.output_tokens.map(i64::from)),
            claims.is_last.then(|| "last".to_owned()),
        ];
        let hints: Vec<String> = hints.into_iter().flatten().collect();
        HeaderValue::try_from(hints.join(", ")).ok()
    }
}

/// The ways to determine a tenant, which must not be confused with each other.
#[derive(Clone, Copy, Hash, PartialEq, Eq)]
enum Tenant<'a> {
    /// Named by a header.
    Named(&'a [u8]),
    /// The holder of an API key that is not one of the gateway's.
    Holder(&'a [u8]),
    /// The holder of credentials of another scheme than `Bearer`, scheme included. An API key cannot have the same
    /// text.
    Credentials(&'a [u8]),
    /// An authenticated client.
    Known(&'a [u8]),
}

/// The tenant that a header names.
fn tenant<'a>(name: &HeaderName, value: &'a HeaderValue) -> Option<Tenant<'a>> {
    let value = value.as_bytes();
    let tenant = if name == header::AUTHORIZATION {
        let (scheme, key) =
            value.split_at(value.iter().position(|&byte| byte == b' ').unwrap_or(value.len()));
        if scheme.eq_ignore_ascii_case(b"bearer") {
            Tenant::Holder(key.trim_ascii())
        } else {
            Tenant::Credentials(value)
        }
    } else if name == API_KEY {
        Tenant::Holder(value)
    } else {
        Tenant::Named(value)
    };
    let (Tenant::Named(said) | Tenant::Holder(said) | Tenant::Credentials(said) | Tenant::Known(said)) =
        tenant;
    is_usable(said, TENANT_BYTES_MAX).then_some(tenant)
}

/// The priority that an agent's body asks for, within the range of priorities.
fn said(hints: AgentHints) -> Option<i8> {
    let range = i32::from(-PRIORITY_MAX)..=i32::from(PRIORITY_MAX);
    hints.priority.map(|priority| priority.clamp(*range.start(), *range.end()) as i8)
}

/// The header in which Anthropic clients send their key.
const API_KEY: &str = "x-api-key";

fn is_usable(name: &[u8], bytes_max: usize) -> bool {
    (1..=bytes_max).contains(&name.len())
}

/// The key of a session with this name, of that tenant or of no tenant.
fn session_key(tenant: Option<Tenant<'_>>, name: &[u8]) -> SessionKey {
    // A different constant for each way, so that one cannot imitate another.
    let seed = match tenant {
        None => 0,
        Some(Tenant::Named(tenant)) => xxh3_64_with_seed(tenant, 0x5E55_1040_0000_0002),
        Some(Tenant::Holder(key)) => xxh3_64_with_seed(key, 0x5E55_1040_0000_0003),
        Some(Tenant::Known(name)) => xxh3_64_with_seed(name, 0x5E55_1040_0000_0004),
        Some(Tenant::Credentials(said)) => xxh3_64_with_seed(said, 0x5E55_1040_0000_0005),
    };
    SessionKey::named(name, seed)
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use proptest::prelude::*;

    use super::*;
    use crate::auth::Role;

    fn headers(fields: &[(&str, &[u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            let name = HeaderName::try_from(*name).expect("a name");
            headers.append(name, HeaderValue::from_bytes(value).expect("a value"));
        }
        headers
    }

    fn read(reader: &AttributeReader, fields: &[(&str, &str)]) -> Attributes {
        let fields: Vec<_> = fields.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
        reader.read(&headers(&fields), None, None)
    }

    #[test]
    fn a_request_without_hints_has_no_session_and_no_tenant() {
        let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
        let body = ParsedRequest::default();
        assert_eq!(read(&reader, &[("accept", "*/*")]), Attributes::default());
        let whole = Attributes { whole_answer: true, ..Attributes::default() };
        assert_eq!(reader.read(&HeaderMap::new(), Some(&body), None), whole);
    }

    #[test]
    fn a_session_is_named_by_the_first_header_then_by_the_body() {
        let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
        let body = ParsedRequest { session: Some(Cow::Borrowed("a")), ..ParsedRequest::default() };
        let named_by = |fields: &[(&str, &[u8])]| reader.read(&headers(fields), Some(&body), None).session;
        let a = named_by(&[]);
        assert!(a.is_some());
        for name in &Config::default().session_headers {
            assert_eq!(named_by(&[(name, b"a")]), a, "{name}");
            assert_ne!(named_by(&[(name, b"b")]), a, "{name}");
        }
        assert_eq!(
            named_by(&[("session_id", b"b"), ("x-session-id", b"a")]),
            a,
            "the order of the list counts"
        );
        assert_eq!(named_by(&[("x-session-id", b"a"), ("x-session-id", b"b")]), a, "the first of several");
        for useless in [&b""[..], &[b'x'; SESSION_BYTES_MAX + 1]] {
            assert_eq!(named_by(&[("x-session-id", useless)]), a, "an unusable value is ignored");
        }
        assert_ne!(named_by(&[("x-session-id", b"\xff\xfe")]), a, "any bytes are a name");
    }

    #[test]
    fn sessions_with_one_name_differ_by_tenant() {
        let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
        let tenants = [
            vec![],
            vec![("x-llm-d-inference-fairness-id", "t")],
            vec![("x-llm-d-inference-fairness-id", "u")],
            vec![("authorization", "Bearer t")],
            vec![("x-api-key", "u")],
        ];
        let attributes = tenants.map(|mut fields| {
            fields.push(("x-session-id", "s"));
            read(&reader, &fields)
        });
        for (n, one) in attributes.iter().enumerate() {
            for other in &attributes[..n] {
                assert_ne!(one.session, other.session);
                assert_ne!(one.tenant, other.tenant);
            }
        }
    }

    #[test]
    fn a_session_key_is_the_same_at_every_gateway_and_a_tenant_key_is_not() {
        let fields = [("x-session-id", "s"), ("authorization", "Bearer sk-1")];
        let read = || read(&AttributeReader::new(&Config::default(), SaltKey::generate()), &fields);
        let (one, other) = (read(), read());
        assert_eq!(one.session, other.session);
        assert_ne!(one.tenant, other.tenant);
    }

    #[test]
    fn an_api_key_is_one_tenant_in_every_header() {
        let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
        let tenant = |fields: &[(&str, &str)]| read(&reader, fields).tenant;
        let holder = tenant(&[("authorization", "Bearer sk-1")]);
        assert!(holder.is_some());
        assert_eq!(tenant(&[("authorization", "bearer   sk-1")]), holder);
        assert_eq!(tenant(&[("x-api-key", "sk-1")]), holder);
        assert_ne!(tenant(&[("authorization", "Basic sk-1")]), holder);
        let basic = tenant(&[("authorization", "Basic sk-1")]);
        assert!(basic.is_some());
        for imitation in [("x-api-key", "Basic sk-1"), ("authorization", "Bearer Basic sk-1")] {
            assert_ne!(tenant(&[imitation]), basic, "a key that is written as other credentials");
        }
        assert_eq!(tenant(&[("authorization", "Bearer ")]), None);
        assert_eq!(tenant(&[("authorization", "Bearer")]), None);
        let named = ("x-llm-d-inference-fairness-id", "sk-1");
        assert_ne!(tenant(&[named]), holder, "a tenant's name is not an API key");
        assert_eq!(tenant(&[named, ("authorization", "Bearer sk-2")]), tenant(&[named]));
        let without_tenants = AttributeReader::new(
            &Config { tenant_headers: Vec::new(), ..Config::default() },
            SaltKey::generate(),
        );
        assert_eq!(read(&without_tenants, &[named, ("authorization", "Bearer sk-1")]).tenant, None);
    }

    #[test]
    fn a_client_with_a_key_is_the_tenant_of_that_key() {
        let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
        let known = |name: &str, trusted| {
            Arc::new(Identity { name: name.into(), role: Role::User, trusted, priority_max: PRIORITY_MAX })
        };
        let read =
            |fields: &[(&str, &[u8])], who: &Arc<Identity>| reader.read(&headers(fields), None, Some(who));
        let (ann, bob, edge) = (known("ann", false), known("bob", false), known("edge", true));
        let named: (&str, &[u8]) = ("x-llm-d-inference-fairness-id", b"bob");
        let key: (&str, &[u8]) = ("authorization", b"Bearer sk");
        let anns = read(&[key], &ann);
        assert!(anns.tenant.is_some());
        assert_eq!(read(&[named, key], &ann), anns, "a header cannot name the tenant");
        assert_ne!(read(&[key], &bob).tenant, anns.tenant);
        let edges = read(&[key], &edge).tenant;
        assert_eq!(
            read(&[("authorization", b"Bearer other")], &edge).tenant,
            edges,
            "the header names no tenant"
        );
        let for_bob = read(&[named, key], &edge).tenant;
        assert_eq!(
            for_bob,
            reader.read(&headers(&[named]), None, None).tenant,
            "a trusted key may name tenants"
        );
        assert_ne!(
            for_bob,
            read(&[], &bob).tenant,
            "a tenant named in a header differs from the holder of a key with that name"
        );
        let in_session = |who| read(&[("x-session-id", b"s")], who).session;
        assert_ne!(in_session(&ann), in_session(&bob));
    }

    #[test]
    fn no_two_tenants_have_the_same_salt() {
        let known = |name: &str| {
            Some(Arc::new(Identity {
                name: name.into(),
                role: Role::User,
                trusted: false,
                priority_max: PRIORITY_MAX,
            }))
        };
        let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
        let salt = |who: &Option<Arc<Identity>>, theirs: Option<&str>| {
            reader.salt(&HeaderMap::new(), who.as_ref(), theirs)
        };
        let (ann, bob) = (known("ann"), known("bob"));
        let own = salt(&ann, None);
        let all = [
            own.clone(),
            salt(&ann, Some("")),
            salt(&ann, Some("x")),
            salt(&bob, None),
            salt(&bob, Some("x")),
            salt(&bob, Some(&own)),
            salt(&known("annx"), None),
            salt(&None, None),
            salt(&None, Some("ann")),
            reader.salt(&headers(&[("x-llm-d-inference-fairness-id", b"ann")]), None, None),
            reader.salt(&headers(&[("x-api-key", b"ann")]), None, None),
        ];
        let apart: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(apart.len(), all.len(), "{all:?}");
        let again = reader.reset(&Config::default(), None);
        assert_eq!(again.salt(&HeaderMap::new(), ann.as_ref(), None), own, "the same under the same key");
        let rotated = reader.reset(&Config::default(), Some(SaltKey::generate()));
        assert_ne!(rotated.salt(&HeaderMap::new(), ann.as_ref(), None), own, "another under another key");
    }

    #[test]
    fn a_priority_is_a_number_in_range_or_a_known_name() {
        let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
        let priority = |fields: &[(&str, &str)]| read(&reader, fields).priority;
        for (said, expect) in [
            ("7", 7),
            (" -100 ", -100),
            ("101", 0),
            ("99999999999999999999", 0),
            ("1.5", 0),
            ("", 0),
            ("interactive", 50),
            ("bulk", -50),
            ("unheard-of", 0),
        ] {
            for header in &Config::default().priority_headers {
                assert_eq!(priority(&[(header, said)]), expect, "{header}: {said}");
            }
        }
        assert_eq!(priority(&[("x-smg-priority", "bulk"), ("x-priority", "3")]), 3);
        assert_eq!(
            priority(&[("x-smg-priority", "bulk"), ("x-priority", "?")]),
            -50,
            "the next header with a usable value"
        );
    }

    #[test]
    fn an_agents_hints_in_the_body_are_taken_and_a_header_comes_first() {
        let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
        let agent_hints = AgentHints { output_tokens: Some(1024), priority: Some(1000) };
        let body = ParsedRequest { agent_hints, stream: true, ..ParsedRequest::default() };
        let read = |fields: &[(&str, &[u8])]| reader.read(&headers(fields), Some(&body), None);
        let taken =
            |attributes: Attributes| attributes.taken().map(|taken| taken.to_str().expect("text").to_owned());
        assert_eq!(taken(read(&[])).as_deref(), Some("priority=100, output=1024"));
        let said = read(&[("x-priority", b"-7"), ("x-slo-ttft-ms", b"900")]);
        assert_eq!(taken(said).as_deref(), Some("priority=-7, ttft_ms=900, output=1024"));
        let deaf =
            AttributeReader::new(&Config { agent_hints: false, ..Config::default() }, SaltKey::generate());
        assert_eq!(taken(deaf.read(&HeaderMap::new(), Some(&body), None)), None);
    }

    /// Invariant: No request has a higher priority than its client's key allows.
    #[test]
    fn a_key_bounds_the_priority_of_its_requests() {
        let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
        let who = Identity { name: "ann".into(), role: Role::User, trusted: false, priority_max: 10 };
        let who = Some(Arc::new(who));
        for (said, expect) in [("100", 10), ("interactive", 10), ("9", 9), ("-50", -50), ("bulk", -50)] {
            let fields = headers(&[("x-priority", said.as_bytes())]);
            assert_eq!(reader.read(&fields, None, who.as_ref()).priority, expect, "{said}");
        }
        let agent_hints = AgentHints { priority: Some(i32::MAX), ..AgentHints::default() };
        let body = ParsedRequest { agent_hints, ..ParsedRequest::default() };
        assert_eq!(reader.read(&HeaderMap::new(), Some(&body), who.as_ref()).priority, 10);
    }

    #[test]
    fn an_agent_that_another_started_belongs_to_the_conversation_of_that() {
        let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
        let parent = read(&reader, &[("x-dynamo-session-id", "p"), ("x-dynamo-session-final", "true")]);
        let child = read(
            &reader,
            &[
                ("x-dynamo-session-id", "c"),
                ("x-dynamo-parent-session-id", "p"),
                ("x-dynamo-session-final", "true"),
            ],
        );
        assert_eq!(child.session, parent.session);
        assert_eq!((parent.claims.is_last, child.claims.is_last), (true, false), "its parent goes on");
        assert_eq!(child.taken(), Some(HeaderValue::from_static("parent")));
    }

    #[test]
    fn invalid_headers_and_priorities_are_named_in_the_error() {
        let mut config = Config::default();
        config.tenant_headers.push("not a header".into());
        let error = config.validate().expect_err("a space").to_string();
        assert!(error.contains("hints.tenant_headers") && error.contains("'not a header'"), "{error}");
        let mut config = Config::default();
        config.priorities.insert("urgent".into(), 101);
        let error = config.validate().expect_err("out of range").to_string();
        assert!(error.contains("hints.priorities.urgent"), "{error}");
        assert_eq!(Config::default().validate(), Ok(()));
    }

    /// Requests of different principals that share one name.
    fn principals(name: &str) -> Vec<(HeaderMap, Option<Arc<Identity>>)> {
        let known = |trusted| {
            Some(Arc::new(Identity {
                name: name.into(),
                role: Role::User,
                trusted,
                priority_max: PRIORITY_MAX,
            }))
        };
        let header = |field: &str, value: &str| headers(&[(field, value.as_bytes())]);
        vec![
            (HeaderMap::new(), known(false)),
            (header("x-llm-d-inference-fairness-id", name), None),
            (header("x-api-key", name), None),
            (header("authorization", &format!("Basic {name}")), None),
            (header("authorization", &format!("Bearer Basic {name}")), None),
        ]
    }

    proptest! {
        /// Whatever their names, no two principals share a tenant, a bucket of a limit, a session or a salt.
        #[test]
        fn principals_with_one_name_in_different_forms_stay_separate(one in "[!-~]{1,40}", other in "[!-~]{1,40}") {
            let reader = AttributeReader::new(&Config::default(), SaltKey::generate());
            let mut all = principals(&one);
            if other != one {
                all.extend(principals(&other));
            }
            all.push((HeaderMap::new(), None));
            let seen = |(mut head, who): (HeaderMap, Option<Arc<Identity>>)| {
                let salt = reader.salt(&head, who.as_ref(), None);
                head.insert("x-session-id", HeaderValue::from_static("s"));
                let attributes = reader.read(&head, None, who.as_ref());
                (attributes.tenant, attributes.session, salt)
            };
            let all: Vec<_> = all.into_iter().map(seen).collect();
            for (n, (tenant, session, salt)) in all.iter().enumerate() {
                for (other_tenant, other_session, other_salt) in &all[..n] {
                    prop_assert!(tenant != other_tenant && session != other_session && salt != other_salt);
                }
            }
        }

        #[test]
        fn reading_hints_is_deterministic_for_any_bytes(
            fields in prop::collection::vec(
                (0usize..12, prop::collection::vec(any::<u8>(), 0..600)),
                0..8,
            ),
        ) {
            let config = Config::default();
            let names: Vec<&String> =
                [&config.session_headers, &config.tenant_headers, &config.priority_headers]
                    .into_iter()
                    .flatten()
                    .collect();
            let mut headers = HeaderMap::new();
            for (name, value) in fields {
                if let Ok(value) = HeaderValue::from_bytes(&value) {
                    headers.append(HeaderName::try_from(names[name % names.len()]).expect("a name"), value);
                }
            }
            let reader = AttributeReader::new(&config, SaltKey::generate());
            let attributes = reader.read(&headers, None, None);
            prop_assert_eq!(attributes, reader.read(&headers, None, None));
            prop_assert!((-PRIORITY_MAX..=PRIORITY_MAX).contains(&attributes.priority));
        }
    }
}
