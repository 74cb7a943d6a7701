//! Where an engine is reached, as people write it.

use std::net::Ipv6Addr;

/// Where an engine is reached: a checked `http://host[:port][/path]`, or `https`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Host name or IP address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// What stands in the `Host` header.
    pub authority: String,
    /// Whether it is spoken to under TLS.
    pub tls: bool,
    /// Put before every path; empty or beginning with '/'.
    pub base_path: String,
}

/// A worker's URL as it is called everywhere: without a '/' at its end, and without the `/v1` that clients of OpenAI's API
/// write there. Paths of requests have it.
pub fn worker_name(url: &str) -> &str {
    let url = url.trim_end_matches('/');
    match url.strip_suffix("/v1") {
        // `http://v1` is a host.
        Some(rest) if !rest.ends_with('/') => rest.trim_end_matches('/'),
        _ => url,
    }
}

// === impl Address ===

impl Address {
    /// `host:port`, as sockets are told it.
    pub fn place(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Reads `http://host[:port][/path]`.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    pub fn parse(url: &str) -> Result<Self, String> {
        let uri: http::Uri = url.parse().map_err(|error| format!("'{url}' is no URL ({error})"))?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            Some(scheme) => {
                return Err(format!("'{url}': {scheme} is not spoken to workers, write http://host:port"));
            }
            None => return Err(format!("'{url}' has no scheme, write http://host:port")),
        };
        let authority =
            uri.authority().ok_or_else(|| format!("'{url}' has no host, write http://host:port"))?;
        let host = authority.host();
        let inside = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        if authority.as_str().contains('@') || host.is_empty() {
            return Err(format!("'{url}' must name a host and no user, write http://host:port"));
        }
        if host.contains(['[', ']']) && inside.is_none_or(|inside| inside.parse::<Ipv6Addr>().is_err()) {
            return Err(format!("'{url}': in brackets stands an IPv6 address, write http://[::1]:port"));
        }
        let port = authority.port_u16();
        if port.is_none() && authority.as_str() != authority.host() {
            return Err(format!("'{url}': its port is no number up to 65535, write http://host:port"));
        }
        if port == Some(0) {
            return Err(format!("'{url}': nobody listens on port 0, write http://host:port"));
        }
        if uri.query().is_some() {
            return Err(format!("'{url}' has a query, write http://host:port"));
        }
        Ok(Self {
            host: inside.unwrap_or(host).into(),
            port: port.unwrap_or(if tls { 443 } else { 80 }),
            authority: authority.as_str().into(),
            tls,
            base_path: uri.path().trim_end_matches('/').into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_address_is_http_with_a_host() {
        let address = Address::parse("http://[::1]:8000/engines/a/").expect("right");
        assert_eq!(
            (address.host.as_str(), address.port, address.authority.as_str(), address.base_path.as_str()),
            ("::1", 8000, "[::1]:8000", "/engines/a")
        );
        let port = |url: &str| Address::parse(url).map(|address| (address.port, address.tls));
        assert_eq!(port("http://gpu-1"), Ok((80, false)));
        assert_eq!(port("https://gpu-1"), Ok((443, true)));
        assert_eq!(port("https://gpu-1:8443/v"), Ok((8443, true)));
    }

    #[test]
    fn a_worker_is_called_without_the_v1_of_its_clients() {
        for (url, name) in [
            ("http://gpu:8000", "http://gpu:8000"),
            ("http://gpu:8000/", "http://gpu:8000"),
            ("http://gpu:8000/v1", "http://gpu:8000"),
            ("http://gpu:8000/v1/", "http://gpu:8000"),
            ("http://gpu:8000/a/v1", "http://gpu:8000/a"),
            ("http://gpu:8000/av1", "http://gpu:8000/av1"),
            ("http://v1", "http://v1"),
            ("http://v1/v1", "http://v1"),
        ] {
            assert_eq!(worker_name(url), name, "{url}");
        }
    }

    #[test]
    fn any_other_address_is_refused_with_what_to_write() {
        for url in [
            "",
            "gpu-1:8000",
            "ftp://x",
            "http://",
            "http://u@h:1",
            "http://h:1?x=1",
            "http://h:x",
            "http://h:",
            "http://[::1]:x",
            "http://h:80000",
            "http://[]",
            "http://[]:80",
            "http://[gpu]:80",
        ] {
            let problem = Address::parse(url).expect_err(url);
            assert!(problem.contains(url), "{problem}");
        }
    }
}
