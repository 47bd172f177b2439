//! The little of HTTP/1.1 that is needed: one request, one answer, plain text, and an end to waiting.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// How long the other side may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of a request's head, and of what is shown of an answer.
const MOST_HEAD: usize = 8 << 10;

/// Where something is pushed to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Url {
    /// With its port.
    host: String,
    pub(super) path: String,
}

impl Url {
    pub(super) fn parse(text: &str) -> anyhow::Result<Url> {
        let Some(rest) = text.strip_prefix("http://") else {
            bail!(
                "{text}: only http:// is spoken; for TLS push to an agent on this machine (Grafana Alloy, OpenTelemetry's collector)"
            );
        };
        let (host, path) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
        if host.is_empty()
            || host.contains(['@', ' '])
            || path.contains(|c: char| c.is_whitespace() || c.is_control())
        {
            bail!("{text} is no address; write http://HOST:PORT/PATH");
        }
        // A colon inside of [] belongs to the address.
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let host = if has_port { host.to_owned() } else { format!("{host}:80") };
        Ok(Url { host, path: format!("/{path}") })
    }
}

/// Sends a body; anything but success is an error.
pub(super) fn post(url: &Url, path: &str, content_type: &str, body: &[u8]) -> anyhow::Result<()> {
    let host = &url.host;
    let mut addresses = host.to_socket_addrs().with_context(|| format!("cannot find {host}"))?;
    let address = addresses.next().with_context(|| format!("{host} has no address"))?;
    let mut stream =
        TcpStream::connect_timeout(&address, PATIENCE).with_context(|| format!("cannot reach {host}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: gputrace/{}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        env!("CARGO_PKG_VERSION"),
        body.len()
    );
    let sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    sent.with_context(|| format!("cannot send to {host}"))?;
    let mut answer = Vec::new();
    // What was read before an error may be the answer all the same.
    let _ = stream.take(MOST_HEAD as u64).read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.split(' ').nth(1).unwrap_or_default();
    if !status.starts_with('2') {
        let said = answer.split("\r\n\r\n").nth(1).unwrap_or_default().trim();
        let said: String = said.chars().take(200).collect();
        let status = if status.is_empty() { "no answer" } else { status };
        bail!("{host}{path} refused what was pushed ({status}): {said}");
    }
    Ok(())
}

/// The first line of a request, once its head has come.
pub(super) fn request(stream: &mut TcpStream) -> io::Result<String> {
    let until = Instant::now() + PATIENCE;
    let mut head = Vec::new();
    let mut bytes = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || head.len() > MOST_HEAD {
            return Err(io::Error::other("no request"));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => head.extend_from_slice(&bytes[..n]),
        }
    }
    let head = String::from_utf8_lossy(&head);
    Ok(head.lines().next().unwrap_or_default().to_owned())
}

/// Answers one.
pub(super) fn respond(
    stream: &mut TcpStream,
    status: &str,
    content_type: &str,
    body: &str,
) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)
}

/// As a part of a query.
pub(super) fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(char::from(byte))
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_plain_http_with_a_host() {
        let told = |text: &str| match Url::parse(text) {
            Ok(url) => format!("{} {}", url.host, url.path),
            Err(error) => error.to_string().split(':').next().unwrap_or_default().to_owned(),
        };
        assert_eq!(told("http://pyroscope:4040"), "pyroscope:4040 /");
        assert_eq!(told("http://a/v1/metrics?x=1"), "a:80 /v1/metrics?x=1");
        assert_eq!(told("http://[::1]:4318/"), "[::1]:4318 /");
        assert_eq!(told("http://[::1]"), "[::1]:80 /");
        assert!(Url::parse("https://a").unwrap_err().to_string().contains("only http://"));
        for wrong in ["http://", "http://u@h/", "http://h/a b", "http://h/\r\nX: y"] {
            assert!(Url::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(encoded("a{b=\"ü\"}"), "a%7Bb%3D%22%C3%BC%22%7D");
    }
}
