//! Addresses of engines: parsing and checking of `http://host[:port][/path]` and `grpc://host[:port]`.

use std::net::Ipv6Addr;

/// What an engine speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1, with or without TLS.
    #[default]
    Http,
    /// gRPC over HTTP/2, without TLS.
    Grpc,
}

/// The address of an engine: a checked `http://host[:port][/path]`, `https` or `grpc`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Host name or IP address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Whether the port was given; otherwise it is the scheme's.
    pub has_port: bool,
    /// The value of the `Host` header.
    pub authority: String,
    /// What the engine speaks there.
    pub protocol: Protocol,
    /// Whether it uses TLS.
    pub tls: bool,
    /// Prefix of every path; empty or beginning with '/'.
    pub base_path: String,
}

/// A worker's URL in its canonical form: without a '/' at its end, and without the `/v1` of base URLs of OpenAI clients,
/// which is part of the requests' paths.
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
    /// `host:port`, as sockets take it.
    pub fn place(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// The scheme of its URL.
    pub fn scheme(&self) -> &'static str {
        match self.protocol {
            Protocol::Http if self.tls => "https",
            Protocol::Http => "http",
            Protocol::Grpc => "grpc",
        }
    }

    /// Parses `http://host[:port][/path]`, `https` or `grpc`.
    ///
    /// # Errors
    /// What is wrong with it, and what to write.
    pub fn parse(url: &str) -> Result<Self, String> {
        let uri: http::Uri = url.parse().map_err(|error| format!("'{url}' is not a URL ({error})"))?;
        let (protocol, tls) = match uri.scheme_str() {
            Some("http") => (Protocol::Http, false),
            Some("https") => (Protocol::Http, true),
            Some("grpc") => (Protocol::Grpc, false),
            Some(scheme) => {
                return Err(format!(
                    "'{url}': the scheme {scheme} is not supported, write http://host:port, or grpc://host:port"
                ));
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
            return Err(format!("'{url}': brackets must hold an IPv6 address, write http://[::1]:port"));
        }
        let port = authority.port_u16();
        if port.is_none() && authority.as_str() != authority.host() {
            return Err(format!(
                "'{url}': the port must be a number from 1 to 65535, write http://host:port"
            ));
        }
        if port == Some(0) {
            return Err(format!("'{url}': port 0 is not valid, write http://host:port"));
        }
        if uri.query().is_some() {
            return Err(format!("'{url}' has a query, write http://host:port"));
        }
        let base_path = uri.path().trim_end_matches('/');
        if protocol == Protocol::Grpc && !base_path.is_empty() {
            return Err(format!("'{url}': a gRPC server has no path, write grpc://host:port"));
        }
        Ok(Self {
            host: inside.unwrap_or(host).into(),
            port: port.unwrap_or(match protocol {
                Protocol::Http if tls => 443,
                Protocol::Http => 80,
                // That of vLLM's gRPC server.
                Protocol::Grpc => 50051,
            }),
            has_port: port.is_some(),
            authority: authority.as_str().into(),
            protocol,
            tls,
            base_path: base_path.into(),
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
        assert_eq!(port("grpc://gpu-1"), Ok((50051, false)));
        let protocol = |url: &str| Address::parse(url).map(|address| address.protocol);
        assert_eq!(protocol("grpc://gpu-1:8001/"), Ok(Protocol::Grpc));
        assert_eq!(protocol("http://gpu-1:8001"), Ok(Protocol::Http));
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
            "grpc://gpu-1:8001/v1/models",
            "grpcs://gpu-1:8001",
        ] {
            let problem = Address::parse(url).expect_err(url);
            assert!(problem.contains(url), "{problem}");
        }
    }
}
