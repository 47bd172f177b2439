//! As much of HTTP/1.1 as a page on this machine needs that is served to one person: GET, and who may not ask.
//!
//! Any program here can reach the port, and any web page that its user looks at can make the browser ask it. So the first part
//! of the path is a secret, and what is asked must be addressed to this machine by its own name: a page of a domain whose name
//! was made to lead here (DNS rebinding) says its own domain. No header lets another origin read an answer.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Longest request that is read; browsers send less than two thousand bytes.
const LONGEST_REQUEST: usize = 16 << 10;
/// A request must be there after this long, however slowly it comes.
const PATIENCE: Duration = Duration::from_secs(5);
/// For one piece of an answer.
const TO_SEND: Duration = Duration::from_secs(20);

/// What may be asked, and by whom.
#[derive(Debug)]
pub(crate) struct Door {
    token: String,
    port: u16,
}

/// Why something is not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// It is not HTTP, or not complete.
    Malformed,
    /// It did not come in time.
    Slow,
    /// It is longer than any that we answer.
    Long,
    /// Another verb than GET.
    Method,
    /// It is addressed to another host.
    Host,
    /// Without the secret, or to what there is not: the same, so that nothing is learned.
    Unknown,
    /// As much is asked at once as is answered.
    Busy,
    /// It could not be made.
    Failed,
}

impl Refusal {
    fn status(self) -> &'static str {
        match self {
            Refusal::Malformed => "400 Bad Request",
            Refusal::Slow => "408 Request Timeout",
            Refusal::Long => "431 Request Header Fields Too Large",
            Refusal::Method => "405 Method Not Allowed",
            Refusal::Host => "421 Misdirected Request",
            Refusal::Unknown => "404 Not Found",
            Refusal::Busy => "503 Service Unavailable",
            Refusal::Failed => "500 Internal Server Error",
        }
    }
}

impl Door {
    /// With a new secret, from the kernel.
    pub(crate) fn new(port: u16) -> std::io::Result<Door> {
        let mut secret = [0u8; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut secret)?;
        Ok(Door { token: secret.iter().map(|byte| format!("{byte:02x}")).collect(), port })
    }

    /// The address that lets in.
    pub(crate) fn address(&self) -> String {
        format!("http://127.0.0.1:{}/{}/", self.port, self.token)
    }

    /// What a request asks for, behind the secret: `details?from=0`.
    pub(crate) fn asked<'a>(&self, head: &'a [u8]) -> Result<&'a str, Refusal> {
        let head = std::str::from_utf8(head).map_err(|_| Refusal::Malformed)?;
        let mut lines = head.split("\r\n");
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(Refusal::Malformed);
        };
        if !version.starts_with("HTTP/1.") {
            return Err(Refusal::Malformed);
        }
        if method != "GET" {
            return Err(Refusal::Method);
        }
        let hosts: Vec<&str> = lines
            .filter_map(|line| line.split_once(':'))
            .filter(|(name, _)| name.eq_ignore_ascii_case("host"))
            .map(|(_, host)| host.trim())
            .collect();
        let is_ours = |host: &str| {
            [format!("127.0.0.1:{}", self.port), format!("localhost:{}", self.port)]
                .iter()
                .any(|it| it == host)
        };
        if !matches!(hosts[..], [host] if is_ours(host)) {
            return Err(Refusal::Host);
        }
        let (token, rest) =
            target.strip_prefix('/').and_then(|path| path.split_once('/')).ok_or(Refusal::Unknown)?;
        if is_same(token.as_bytes(), self.token.as_bytes()) { Ok(rest) } else { Err(Refusal::Unknown) }
    }
}

/// How long it takes says nothing of where they differ.
fn is_same(asked: &[u8], secret: &[u8]) -> bool {
    let difference = asked.iter().zip(secret).fold(0, |difference, (a, b)| difference | (a ^ b));
    std::hint::black_box(difference) == 0 && asked.len() == secret.len()
}

/// Reads the head of a request, up to the empty line.
pub(crate) fn head(stream: &mut TcpStream) -> Result<Vec<u8>, Refusal> {
    let (until, mut head, mut piece) = (Instant::now() + PATIENCE, vec![], [0u8; 2048]);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
            return Err(Refusal::Slow);
        }
        let n = match stream.read(&mut piece) {
            Ok(0) => return Err(Refusal::Malformed),
            Ok(n) => n,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(Refusal::Slow);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => return Err(Refusal::Malformed),
        };
        head.extend_from_slice(&piece[..n]);
        if let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") {
            head.truncate(end);
            return Ok(head);
        }
        if head.len() > LONGEST_REQUEST {
            return Err(Refusal::Long);
        }
    }
}

/// Sends an answer. Who has gone away misses it.
pub(crate) fn answer(stream: &mut TcpStream, answer: Result<(&str, &[u8]), Refusal>) {
    let (status, kind, body) = match answer {
        Ok((kind, body)) => ("200 OK", kind, body),
        Err(refusal) => (refusal.status(), "text/plain; charset=utf-8", refusal.status().as_bytes()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
         X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n\
         Cross-Origin-Resource-Policy: same-origin\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.set_write_timeout(Some(TO_SEND));
    let sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    if sent.is_ok() {
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn asked(request: &str) -> Result<&str, Refusal> {
        Door { token: TOKEN.to_owned(), port: 4000 }.asked(request.as_bytes())
    }

    #[test]
    fn who_has_the_secret_and_comes_from_here_is_let_in() {
        for host in ["127.0.0.1:4000", "localhost:4000"] {
            let request = format!("GET /{TOKEN}/details?from=1 HTTP/1.1\r\nAccept: */*\r\nhost: {host}");
            assert_eq!(asked(&request), Ok("details?from=1"));
        }
        assert_eq!(asked(&format!("GET /{TOKEN}/ HTTP/1.1\r\nHost: localhost:4000")), Ok(""));
    }

    #[test]
    fn nobody_else_is() {
        let here = "Host: 127.0.0.1:4000";
        let short = &TOKEN[1..];
        for (request, why) in [
            (format!("GET / HTTP/1.1\r\n{here}"), Refusal::Unknown),
            (format!("GET /{TOKEN} HTTP/1.1\r\n{here}"), Refusal::Unknown),
            (format!("GET /{short}/ HTTP/1.1\r\n{here}"), Refusal::Unknown),
            (format!("GET /{TOKEN}0/ HTTP/1.1\r\n{here}"), Refusal::Unknown),
            (format!("GET // HTTP/1.1\r\n{here}"), Refusal::Unknown),
            (format!("GET /../{TOKEN}/ HTTP/1.1\r\n{here}"), Refusal::Unknown),
            (format!("POST /{TOKEN}/ HTTP/1.1\r\n{here}"), Refusal::Method),
            (format!("OPTIONS /{TOKEN}/ HTTP/1.1\r\n{here}"), Refusal::Method),
            (format!("GET /{TOKEN}/ HTTP/1.1\r\nHost: evil.example:4000"), Refusal::Host),
            (format!("GET /{TOKEN}/ HTTP/1.1\r\nHost: 127.0.0.1:4001"), Refusal::Host),
            (format!("GET /{TOKEN}/ HTTP/1.1\r\n{here}\r\nHost: evil.example"), Refusal::Host),
            (format!("GET /{TOKEN}/ HTTP/1.1"), Refusal::Host),
            (format!("GET /{TOKEN}/ SPDY/3\r\n{here}"), Refusal::Malformed),
            (format!("GET /{TOKEN}/"), Refusal::Malformed),
            (String::new(), Refusal::Malformed),
        ] {
            assert_eq!(asked(&request), Err(why), "{request}");
        }
    }

    #[test]
    fn every_door_has_a_secret_of_its_own() {
        let [one, other] = [Door::new(1), Door::new(1)].map(|door| door.unwrap().token);
        assert!(one != other && one.len() == 32, "{one} {other}");
    }
}
