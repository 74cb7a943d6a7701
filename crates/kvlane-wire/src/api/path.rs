//! Request paths: rejects ambiguous ones, and compares the others with patterns.
//!
//! A gateway matches bytes, while servers behind it resolve them: FastAPI decodes `%63`, others drop `;x`, merge `//`
//! or resolve `..`. A path that a server may resolve to another one is rejected before it is matched.

/// Longest accepted path, in bytes.
pub const PATH_BYTES_MAX: usize = 1024;

/// Whether a list in the format of `Allow` contains `method`.
pub fn allows(methods: &str, method: &str) -> bool {
    methods.split(", ").any(|allowed| allowed == method)
}

/// Whether `path` matches `pattern`, in which `{}` stands for any one segment.
pub fn matches(pattern: &str, path: &str) -> bool {
    if !pattern.contains('{') {
        return pattern == path;
    }
    let (mut pattern, mut path) = (pattern.split('/'), path.split('/'));
    loop {
        match (pattern.next(), path.next()) {
            (None, None) => return true,
            (Some("{}"), Some(segment)) if !segment.is_empty() => {}
            (Some(wanted), Some(segment)) if wanted == segment => {}
            _ => return false,
        }
    }
}

/// Whether every server interprets `path` identically: visible ASCII without encoding or parameters, and without empty
/// or dot segments.
pub fn is_plain(path: &str) -> bool {
    let Some(rest) = path.strip_prefix('/') else { return false };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~!$&'()*+,=:@".contains(&byte);
    let named = |segment: &str| !matches!(segment, "" | "." | "..");
    path.len() <= PATH_BYTES_MAX
        && path.bytes().all(plain)
        && (rest.is_empty() || rest.strip_suffix('/').unwrap_or(rest).split('/').all(named))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::api::{ENGINE_PATHS, EnginePath};

    #[test]
    fn a_path_that_two_servers_may_read_differently_is_not_plain() {
        for path in [
            "",
            "v1/files",
            "*",
            "//v1/files",
            "/v1//files",
            "/v1/files//",
            "/v1/./files",
            "/v1/../files",
            "/v1/..",
            "/v1/.",
            "/v1/%63hat/completions",
            "/v1/chat%2fcompletions",
            "/v1/chat/completions;x",
            "/v1;/chat/completions",
            "/v1\\chat",
            "/v1/chat completions",
            "/v1/chat\u{0}",
            "/v1/ch\u{e4}t",
            "/v1/files?",
            "/v1/#",
        ] {
            assert!(!is_plain(path), "{path}");
        }
        assert!(!is_plain(&format!("/{}", "x".repeat(PATH_BYTES_MAX))));
        for path in ["/", "/v1/files/", "/v1/files/a..b", "/v1/files/.hidden", "/v1/models/org:m@1+x,y=(z)!"]
        {
            assert!(is_plain(path), "{path}");
        }
    }

    #[test]
    fn a_braced_segment_is_any_one_segment() {
        assert!(matches("/v1/files/{}", "/v1/files/a"));
        assert!(matches("/v1/files/{}/content", "/v1/files/a/content"));
        for path in ["/v1/files", "/v1/files/", "/v1/files/a/b", "/v1/files/a/", "/v1/file/a"] {
            assert!(!matches("/v1/files/{}", path), "{path}");
        }
    }

    /// A transformation that a lenient server applies to a path.
    type Step = fn(&[u8]) -> Vec<u8>;

    /// All paths that a lenient server may read `path` as: decoded once or twice, without parameters, with slashes
    /// merged and dots resolved, in lower case, without a trailing slash.
    fn readings(path: &[u8]) -> BTreeSet<Vec<u8>> {
        let mut all = BTreeSet::from([path.to_vec()]);
        let steps: [Step; 8] =
            [decoded, without_parameters, merged, resolved, lower, unslashed, forward, cut_at_nul];
        for _ in 0..3 {
            let more: Vec<_> = all.iter().flat_map(|path| steps.iter().map(move |step| step(path))).collect();
            all.extend(more);
        }
        all
    }

    fn decoded(path: &[u8]) -> Vec<u8> {
        let (mut out, mut at) = (Vec::new(), 0);
        while at < path.len() {
            let digits = path.get(at + 1..at + 3).and_then(|digits| std::str::from_utf8(digits).ok());
            match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()).filter(|_| path[at] == b'%') {
                Some(byte) => {
                    out.push(byte);
                    at += 3;
                }
                None => {
                    out.push(path[at]);
                    at += 1;
                }
            }
        }
        out
    }

    fn without_parameters(path: &[u8]) -> Vec<u8> {
        let segments = path.split(|&byte| byte == b'/');
        let bare = segments.map(|segment| segment.split(|&byte| byte == b';').next().unwrap_or_default());
        bare.collect::<Vec<_>>().join(&b'/')
    }

    fn merged(path: &[u8]) -> Vec<u8> {
        let mut out = path.to_vec();
        out.dedup_by(|a, b| *a == b'/' && *b == b'/');
        out
    }

    fn resolved(path: &[u8]) -> Vec<u8> {
        let mut out: Vec<&[u8]> = Vec::new();
        for segment in path.split(|&byte| byte == b'/') {
            match segment {
                b"." => {}
                b".." => _ = out.pop(),
                segment => out.push(segment),
            }
        }
        out.join(&b'/')
    }

    fn lower(path: &[u8]) -> Vec<u8> {
        path.to_ascii_lowercase()
    }

    fn unslashed(path: &[u8]) -> Vec<u8> {
        path.strip_suffix(b"/").unwrap_or(path).to_vec()
    }

    fn forward(path: &[u8]) -> Vec<u8> {
        path.iter().map(|&byte| if byte == b'\\' { b'/' } else { byte }).collect()
    }

    fn cut_at_nul(path: &[u8]) -> Vec<u8> {
        path.split(|&byte| byte == 0).next().unwrap_or_default().to_vec()
    }

    fn paths() -> impl Strategy<Value = String> {
        let known: Vec<&'static str> = ENGINE_PATHS.iter().map(|row| row.path).collect();
        let oddity = proptest::sample::select(vec![
            "%63", "%2f", "%2e%2e", "..", ".", "//", "/", ";x", "\\", "%00", "%25", "C", "\u{0}", "é", "?",
            "{}",
        ]);
        (
            proptest::sample::select(known),
            proptest::collection::vec((any::<prop::sample::Index>(), oddity), 0..4),
        )
            .prop_map(|(path, oddities)| {
                let mut path = path.to_owned();
                for (at, oddity) in oddities {
                    let mut at = at.index(path.len() + 1);
                    while !path.is_char_boundary(at) {
                        at -= 1;
                    }
                    path.insert_str(at, oddity);
                }
                path
            })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        /// Invariant: A path is relayed only if no server can parse it as another target.
        ///
        /// Also held by `a_path_that_a_server_may_parse_differently_reaches_no_engine`.
        #[test]
        fn no_server_takes_a_relayed_path_for_another_target(path in paths()) {
            let row = |path: &str| EnginePath::of(path).map(|(row, _)| row.path);
            if let Some(found) = row(&path).filter(|_| is_plain(&path)) {
                for reading in readings(path.as_bytes()) {
                    let read = std::str::from_utf8(&reading).ok().and_then(row);
                    prop_assert!(read.is_none_or(|read| read == found), "{path} may be read as {reading:?}");
                }
            }
        }
    }
}
