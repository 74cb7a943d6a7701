//! Where an engine is reached, as people write it.

/// Where an engine is reached: a checked `http://host[:port][/path]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Host name or IP address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// What stands in the `Host` header.
    pub authority: String,
    /// Put before every path; empty or beginning with '/'.
    pub base_path: String,
}

// === impl Address ===

impl Address {
    /// `host:port`, as sockets are told it.
    pub(crate) fn place(&self) -> String {
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
        match uri.scheme_str() {
            Some("http") => {}
            Some(scheme) => {
                return Err(format!("'{url}': {scheme} is not spoken to workers, write http://host:port"));
            }
            None => return Err(format!("'{url}' has no scheme, write http://host:port")),
        }
        let authority =
            uri.authority().ok_or_else(|| format!("'{url}' has no host, write http://host:port"))?;
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return Err(format!("'{url}' must name a host and no user, write http://host:port"));
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
            host: authority.host().trim_matches(['[', ']']).into(),
            port: port.unwrap_or(80),
            authority: authority.as_str().into(),
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
        assert_eq!(Address::parse("http://gpu-1").expect("right").port, 80);
    }

    #[test]
    fn any_other_address_is_refused_with_what_to_write() {
        for url in [
            "",
            "gpu-1:8000",
            "https://gpu-1",
            "ftp://x",
            "http://",
            "http://u@h:1",
            "http://h:1?x=1",
            "http://h:x",
            "http://h:",
            "http://[::1]:x",
            "http://h:80000",
        ] {
            let problem = Address::parse(url).expect_err(url);
            assert!(problem.contains(url), "{problem}");
        }
    }
}
