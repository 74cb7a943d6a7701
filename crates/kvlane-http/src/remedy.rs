//! What to do when a server cannot be asked: the remedy of each error of a connection.

use std::io;

use crate::client::AskError;
use crate::connections::UpstreamError;

/// What to do where a server may expect TLS.
pub const WRITE_HTTPS: &str = "if the port speaks TLS, write https://";

// === impl AskError ===

impl AskError {
    /// The error with its remedy, if one is known.
    pub fn with_remedy(&self) -> String {
        match self.remedy() {
            Some(remedy) => format!("{self}: {remedy}"),
            None => self.to_string(),
        }
    }

    fn remedy(&self) -> Option<&'static str> {
        let Self::Upstream { error, tls, .. } = self else { return None };
        match error {
            UpstreamError::Connect(error) => of_connecting(error),
            UpstreamError::ConnectTimeout(_) => Some("no reply; correct the address, or open the firewall"),
            // A server for TLS answers plain HTTP with an alert, or closes the connection.
            UpstreamError::Garbage(_) | UpstreamError::Broken(_) if !tls => Some(WRITE_HTTPS),
            UpstreamError::Garbage(_) => Some("it is no HTTP/1.1 server; correct the port"),
            UpstreamError::Broken(_) => Some("the server closed the connection; its log may say why"),
            UpstreamError::Stale(_) | UpstreamError::Silent(_) => None,
        }
    }
}

fn of_connecting(error: &io::Error) -> Option<&'static str> {
    if let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        return of_handshake(tls);
    }
    match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            Some("nothing listens there; start the server, or correct the port")
        }
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            Some("no network leads there; correct the address")
        }
        // Name resolution errors have no kind of their own.
        _ if error.raw_os_error().is_none() && error.to_string().contains("lookup address") => {
            Some("the host name cannot be resolved; correct it, or its DNS record")
        }
        // A server without TLS that ends the connection at the first bytes.
        io::ErrorKind::UnexpectedEof => Some("if the port speaks plain HTTP, write http://"),
        _ => None,
    }
}

fn of_handshake(error: &rustls::Error) -> Option<&'static str> {
    use rustls::CertificateError as Wrong;
    match error {
        rustls::Error::InvalidMessage(_) => Some("the port speaks plain HTTP; write http://"),
        rustls::Error::InvalidCertificate(Wrong::NotValidForName | Wrong::NotValidForNameContext { .. }) => {
            Some(
                "the certificate is for another name; use that name in the URL, or set the worker's tls_server_name",
            )
        }
        rustls::Error::InvalidCertificate(
            Wrong::Expired
            | Wrong::ExpiredContext { .. }
            | Wrong::NotValidYet
            | Wrong::NotValidYetContext { .. },
        ) => Some("renew the certificate, or set the clock"),
        rustls::Error::InvalidCertificate(_) => Some(
            "no authority that is trusted here has signed the certificate; set tls.upstream_ca (--upstream-ca) to the \
             file of its CA",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rustls::{CertificateError, InvalidMessage};

    use super::*;

    #[test]
    fn a_failed_handshake_says_what_to_do() {
        let said = |error: rustls::Error| {
            let error = UpstreamError::Connect(io::Error::new(io::ErrorKind::InvalidData, error));
            AskError::Upstream { method: http::Method::GET, path: "/health".into(), error, tls: true }
                .with_remedy()
        };
        for (error, remedy) in [
            (rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType), "write http://"),
            (rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer), "set tls.upstream_ca"),
            (rustls::Error::InvalidCertificate(CertificateError::NotValidForName), "tls_server_name"),
            (rustls::Error::InvalidCertificate(CertificateError::Expired), "renew the certificate"),
        ] {
            let said = said(error);
            assert!(said.contains(remedy), "{said}");
        }
    }

    #[test]
    fn https_is_advised_only_where_it_is_not_spoken() {
        let said = |tls: bool| {
            let error = UpstreamError::Broken(io::ErrorKind::ConnectionReset.into());
            AskError::Upstream { method: http::Method::GET, path: "/health".into(), error, tls }.with_remedy()
        };
        assert!(said(false).contains(WRITE_HTTPS));
        assert!(!said(true).contains("https") && said(true).contains("its log"), "{}", said(true));
    }
}
