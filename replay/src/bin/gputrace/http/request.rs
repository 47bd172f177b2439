//! Reads the head of an HTTP/1.1 request (RFC 9112), strictly: what two readers could understand differently is refused.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Longest head of a request, in bytes. Browsers send less than 2,000, Prometheus less than 500.
pub(crate) const LONGEST_HEAD: usize = 16 << 10;
/// Most header lines of a request. Browsers send about 20.
const MOST_HEADERS: usize = 100;

/// The head of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    /// HEAD: the answer has no body.
    pub(crate) is_head: bool,
    /// Path and query, from the first slash.
    pub(crate) target: String,
    /// What the target names as the host, where it is a whole URL: the `Host` header is in `headers`.
    pub(crate) authority: Option<String>,
    /// Names in lower case, and values without the spaces around them.
    headers: Vec<(String, String)>,
}

/// Why a request is not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// It is not HTTP/1.1, or not complete.
    Malformed,
    /// It came with a body, which no GET of ours has.
    Body,
    /// It did not arrive in time.
    Slow,
    /// It is longer than any that we answer.
    Long,
    /// A method other than GET and HEAD.
    Method,
    /// Another version of HTTP.
    Version,
    /// It is addressed to a host that we do not go by.
    Host,
    /// A page of another site made a browser send it.
    Browser,
    /// There is nothing there. Without the secret of `serve` all paths look like this, so that nothing is learned.
    Unknown,
    /// Too many requests wait already.
    Busy,
    /// The answer could not be made.
    Failed,
}

impl Refusal {
    /// Status code and reason.
    pub(crate) fn status(self) -> &'static str {
        match self {
            Refusal::Malformed => "400 Bad Request",
            Refusal::Body => "413 Content Too Large",
            Refusal::Slow => "408 Request Timeout",
            Refusal::Long => "431 Request Header Fields Too Large",
            Refusal::Method => "405 Method Not Allowed",
            Refusal::Version => "505 HTTP Version Not Supported",
            Refusal::Host => "421 Misdirected Request",
            Refusal::Browser => "403 Forbidden",
            Refusal::Unknown => "404 Not Found",
            Refusal::Busy => "503 Service Unavailable",
            Refusal::Failed => "500 Internal Server Error",
        }
    }
}

impl Request {
    /// The value of a header, if it is there once. The name is in lower case.
    ///
    /// # Errors
    /// It is there more than once.
    pub(crate) fn header(&self, name: &str) -> Result<Option<&str>, Refusal> {
        let mut values = self.headers.iter().filter(|(it, _)| it == name).map(|(_, value)| value.as_str());
        let value = values.next();
        if values.next().is_some() { Err(Refusal::Malformed) } else { Ok(value) }
    }

    /// The path without its query.
    pub(crate) fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }
}

/// Reads what has arrived of a request: `None` until the head is complete. What follows the head is not looked at: it would be a body,
/// or a second request, and the connection ends with the first answer.
///
/// # Errors
/// It cannot become a request that we answer, whatever arrives next.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<Request>, Refusal> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    if end.unwrap_or(bytes.len()) > LONGEST_HEAD {
        return Err(Refusal::Long);
    }
    let Some(end) = end else {
        // Refused as soon as that is clear: TLS, HTTP/0.9, a terminal.
        return match split_line(bytes) {
            (line, Some(_)) => request_line(line).map(|_| None),
            _ if bytes.iter().all(|byte| is_of_a_line(*byte) || *byte == b'\r') => Ok(None),
            _ => Err(Refusal::Malformed),
        };
    };
    let (first, mut rest) = split_line(&bytes[..end]);
    let mut request = request_line(first)?;
    while let Some(lines) = rest {
        let (line, left) = split_line(lines);
        request.headers.push(header(line)?);
        if request.headers.len() > MOST_HEADERS {
            return Err(Refusal::Long);
        }
        rest = left;
    }
    // Whoever reads a length and whoever reads chunks would see different ends.
    let has_body = request.header("content-length")?.is_some_and(|length| length != "0")
        || request.header("transfer-encoding")?.is_some();
    if has_body { Err(Refusal::Body) } else { Ok(Some(request)) }
}

/// The first line, and those behind it. A bare line feed or carriage return ends none, and is allowed in none.
fn split_line(lines: &[u8]) -> (&[u8], Option<&[u8]>) {
    match lines.windows(2).position(|two| two == b"\r\n") {
        Some(end) => (&lines[..end], Some(&lines[end + 2..])),
        None => (lines, None),
    }
}

fn is_of_a_line(byte: u8) -> bool {
    byte == b' ' || byte.is_ascii_graphic()
}

/// A character of names and methods (RFC 9110, 5.6.2).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

fn request_line(line: &[u8]) -> Result<Request, Refusal> {
    let line = std::str::from_utf8(line).map_err(|_| Refusal::Malformed)?;
    if !line.bytes().all(is_of_a_line) {
        return Err(Refusal::Malformed);
    }
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Refusal::Malformed);
    };
    if method.is_empty() || !method.bytes().all(is_token) {
        return Err(Refusal::Malformed);
    }
    match version.strip_prefix("HTTP/").map(str::as_bytes) {
        Some([b'1', b'.', minor]) if minor.is_ascii_digit() => {}
        Some([major, b'.', minor]) if major.is_ascii_digit() && minor.is_ascii_digit() => {
            return Err(Refusal::Version);
        }
        _ => return Err(Refusal::Malformed),
    }
    let is_head = match method {
        "GET" => false,
        "HEAD" => true,
        _ => return Err(Refusal::Method),
    };
    // A whole URL is what clients send to a proxy, and every server has to take it (RFC 9112, 3.2.2).
    let whole = target.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://")).map(|_| &target[7..]);
    let (authority, target) =
        match whole.map(|rest| rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()))) {
            Some((authority, path)) if path.starts_with('/') => (Some(authority.to_owned()), path.to_owned()),
            Some((authority, query)) => (Some(authority.to_owned()), format!("/{query}")),
            None if target.starts_with('/') => (None, target.to_owned()),
            None => return Err(Refusal::Malformed),
        };
    Ok(Request { is_head, target, authority, headers: vec![] })
}

fn header(line: &[u8]) -> Result<(String, String), Refusal> {
    let colon = line.iter().position(|byte| *byte == b':').ok_or(Refusal::Malformed)?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    // A name that begins or ends with a space is how lines are continued, or smuggled.
    let is_value = |byte: &u8| *byte == b'\t' || *byte == b' ' || byte.is_ascii_graphic() || *byte >= 0x80;
    if name.is_empty() || !name.iter().all(|byte| is_token(*byte)) || !value.iter().all(is_value) {
        return Err(Refusal::Malformed);
    }
    let name = String::from_utf8_lossy(name).to_ascii_lowercase();
    Ok((name, String::from_utf8_lossy(value).trim_matches([' ', '\t']).to_owned()))
}

/// Whom a request is addressed to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Host {
    /// An address, which no resolver can lead elsewhere.
    Address(std::net::IpAddr),
    /// A name, in lower case and without the dot at its end.
    Name(String),
}

/// Host and port of `HOST`, `HOST:PORT` or `[ADDRESS]:PORT`; `None` where it is neither.
pub(crate) fn host(authority: &str) -> Option<(Host, Option<u16>)> {
    let (name, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            rest.split_once(']').map(|(address, port)| (address, (!port.is_empty()).then_some(port)))?
        }
        None => match authority.find(':') {
            Some(colon) => (&authority[..colon], Some(&authority[colon..])),
            None => (authority, None),
        },
    };
    let port = match port {
        Some(port) => {
            Some(port.strip_prefix(':').filter(|it| it.bytes().all(|it| it.is_ascii_digit()))?.parse().ok()?)
        }
        None => None,
    };
    if authority.starts_with('[') {
        return Some((Host::Address(name.parse::<Ipv6Addr>().ok()?.into()), port));
    }
    if let Ok(address) = name.parse::<Ipv4Addr>() {
        return Some((Host::Address(address.into()), port));
    }
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_name =
        !name.is_empty() && name.bytes().all(|it| it.is_ascii_alphanumeric() || b"-._".contains(&it));
    is_name.then(|| (Host::Name(name.to_ascii_lowercase()), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(lines: &str) -> Result<Request, Refusal> {
        parse(format!("{lines}\r\n\r\n").as_bytes()).map(|request| request.expect("all of it"))
    }

    #[test]
    fn a_request_is_its_target_and_its_headers() {
        let request =
            whole("GET /metrics?x=1 HTTP/1.1\r\nHost: a:1\r\nX-Odd:\t b\u{fc} \r\nContent-Length: 0")
                .unwrap();
        assert_eq!((request.is_head, &*request.target, request.path()), (false, "/metrics?x=1", "/metrics"));
        assert_eq!(request.header("host"), Ok(Some("a:1")));
        assert_eq!(request.header("x-odd"), Ok(Some("b\u{fc}")));
        assert_eq!(request.header("origin"), Ok(None));
        assert!(whole("HEAD / HTTP/1.0").unwrap().is_head);
        for (target, authority, path) in
            [("http://[::1]:4/a?b", "[::1]:4", "/a?b"), ("HTTP://h", "h", "/"), ("http://h?q", "h", "/?q")]
        {
            let request = whole(&format!("GET {target} HTTP/1.1")).unwrap();
            assert_eq!((request.authority.as_deref(), &*request.target), (Some(authority), path), "{target}");
        }
    }

    #[test]
    fn what_can_be_understood_in_two_ways_is_refused() {
        use Refusal::*;
        for (lines, why) in [
            ("GET / HTTP/1.1\nHost: a", Malformed),
            ("GET / HTTP/1.1\r\nHost: a\nX: b", Malformed),
            ("GET / HTTP/1.1\r\nHost: a\r\n continued", Malformed),
            ("GET / HTTP/1.1\r\nHost : a", Malformed),
            ("GET / HTTP/1.1\r\n: a", Malformed),
            ("GET / HTTP/1.1\r\nno colon", Malformed),
            ("GET / HTTP/1.1\r\nX: a\0b", Malformed),
            ("GET / HTTP/1.1\r\nX: a\rb", Malformed),
            ("GET  / HTTP/1.1", Malformed),
            ("GET /\t HTTP/1.1", Malformed),
            ("GET /\u{fc} HTTP/1.1", Malformed),
            (" GET / HTTP/1.1", Malformed),
            ("GET / HTTP/1.1 ", Malformed),
            ("GET / HTTP/1.11", Malformed),
            ("GET / http/1.1", Malformed),
            ("GET / SPDY/3", Malformed),
            ("GET /", Malformed),
            ("GET metrics HTTP/1.1", Malformed),
            ("GET ftp://a/ HTTP/1.1", Malformed),
            ("", Malformed),
            ("GET / HTTP/2.0", Version),
            ("POST / HTTP/1.1", Method),
            ("OPTIONS * HTTP/1.1", Method),
            ("CONNECT a:1 HTTP/1.1", Method),
            ("get / HTTP/1.1", Method),
            ("GET / HTTP/1.1\r\nContent-Length: 1", Body),
            ("GET / HTTP/1.1\r\nContent-Length: -1", Body),
            ("GET / HTTP/1.1\r\nTransfer-Encoding: chunked", Body),
            ("GET / HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 0", Malformed),
        ] {
            assert_eq!(whole(lines), Err(why), "{lines:?}");
        }
        let many = "\r\nA: b".repeat(MOST_HEADERS + 1);
        assert_eq!(whole(&format!("GET / HTTP/1.1{many}")), Err(Long));
        assert_eq!(whole(&format!("GET / HTTP/1.1\r\nA: {}", "x".repeat(LONGEST_HEAD))), Err(Long));
        assert_eq!(parse(&vec![b'x'; LONGEST_HEAD + 1]), Err(Long));
    }

    #[test]
    fn what_is_not_complete_is_waited_for_only_while_it_may_become_a_request() {
        for early in ["", "G", "GET / HT", "GET / HTTP/1.1\r", "GET / HTTP/1.1\r\nHost: a\r\n"] {
            assert_eq!(parse(early.as_bytes()), Ok(None), "{early:?}");
        }
        for (early, why) in [
            ("\u{16}\u{3}\u{1}", Refusal::Malformed),
            ("GET /\r\n", Refusal::Malformed),
            ("GET /\n", Refusal::Malformed),
            ("PRI * HTTP/2.0\r\n", Refusal::Version),
            ("POST / HTTP/1.1\r\n", Refusal::Method),
        ] {
            assert_eq!(parse(early.as_bytes()), Err(why), "{early:?}");
        }
    }

    #[test]
    fn a_second_request_behind_the_first_is_not_read() {
        let two = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\nPOST /b HTTP/9\r\n\r\n";
        assert_eq!(parse(two).map(|it| it.map(|it| it.target)), Ok(Some("/a".to_owned())));
    }

    #[test]
    fn a_host_is_an_address_or_a_name_with_or_without_a_port() {
        let told = |text: &str| match host(text) {
            Some((Host::Address(address), port)) => format!("{address} {port:?}"),
            Some((Host::Name(name), port)) => format!("name {name} {port:?}"),
            None => "none".to_owned(),
        };
        for (text, is) in [
            ("127.0.0.1:80", "127.0.0.1 Some(80)"),
            ("10.0.0.1", "10.0.0.1 None"),
            ("[::1]:80", "::1 Some(80)"),
            ("[::1]", "::1 None"),
            ("LocalHost.:1", "name localhost Some(1)"),
            ("node_17.a-b", "name node_17.a-b None"),
            ("127.1", "name 127.1 None"),
            ("::1", "none"),
            ("[::1", "none"),
            ("[::1]80", "none"),
            ("[localhost]", "none"),
            ("a:", "none"),
            ("a:+1", "none"),
            ("a:70000", "none"),
            ("a:1:2", "none"),
            ("u@localhost", "none"),
            ("localhost/", "none"),
            ("", "none"),
            (".", "none"),
        ] {
            assert_eq!(told(text), is, "{text}");
        }
    }
}
