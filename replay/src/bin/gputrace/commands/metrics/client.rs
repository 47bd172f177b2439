//! Sends one request of HTTP/1.1, in plain text, and reads the answer, within a bounded time.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// How long one address may take to accept a connection.
const TO_CONNECT: Duration = Duration::from_secs(5);
/// How long all of it may take, however slowly the other side goes on.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most bytes that are read of an answer.
const MOST_ANSWER: usize = 8 << 10;

/// Where something is pushed to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Url {
    /// With its port.
    host: String,
    pub(super) path: String,
}

impl Url {
    /// With its port.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn parse(text: &str) -> anyhow::Result<Url> {
        let Some(rest) = text.strip_prefix("http://") else {
            bail!(
                "{text}: only http:// is supported; for TLS, push to an agent on this machine (Grafana Alloy, OpenTelemetry Collector)"
            );
        };
        let (host, path) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
        if host.is_empty()
            || host.contains(['@', ' '])
            || path.contains(|c: char| c.is_whitespace() || c.is_control())
        {
            bail!("{text} is not an address; write http://HOST:PORT/PATH");
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
    let until = Instant::now() + PATIENCE;
    let mut stream = connected(host)?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: gputrace/{}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        env!("CARGO_PKG_VERSION"),
        body.len()
    );
    let sent = send(&mut stream, head.as_bytes(), until).and_then(|()| send(&mut stream, body, until));
    sent.with_context(|| format!("cannot send to {host}"))?;
    let answer = received(&mut stream, until);
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.split(' ').nth(1).unwrap_or_default();
    if !status.starts_with('2') {
        let said = answer.split("\r\n\r\n").nth(1).unwrap_or_default().trim();
        let said: String = said.chars().take(200).collect();
        let status = if status.is_empty() { "no answer" } else { status };
        bail!("{host}{path} refused the push ({status}): {said}");
    }
    Ok(())
}

fn connected(host: &str) -> anyhow::Result<TcpStream> {
    let addresses = host.to_socket_addrs().with_context(|| format!("cannot find {host}"))?;
    let mut last = None;
    for address in addresses.take(4) {
        match TcpStream::connect_timeout(&address, TO_CONNECT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some(error),
        }
    }
    match last {
        Some(error) => Err(error).with_context(|| format!("cannot reach {host}")),
        None => bail!("{host} has no address"),
    }
}

/// What is left of the time; an error where nothing is.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn send(stream: &mut TcpStream, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(until)?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The answer, as far as it came: what was read before an error may be enough.
fn received(stream: &mut TcpStream, until: Instant) -> Vec<u8> {
    let (mut answer, mut piece) = (vec![], [0; 1024]);
    while answer.len() < MOST_ANSWER {
        let Ok(left) = left(until) else { break };
        if stream.set_read_timeout(Some(left)).is_err() {
            break;
        }
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => answer.extend_from_slice(&piece[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    answer
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
