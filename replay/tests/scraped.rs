//! `gputrace metrics` as a server: whom it answers, and that neither scrapes nor pushes wait for anybody else.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

struct Scraped {
    program: Child,
    address: String,
}

impl Scraped {
    fn with(arguments: &[&str]) -> Scraped {
        let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/varying-lengths.gtr");
        let mut program = Command::new(env!("CARGO_BIN_EXE_gputrace"));
        program.args(["metrics", "--listen", "127.0.0.1:0"]).args(arguments).arg(trace);
        let mut program = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gputrace");
        let mut line = String::new();
        BufReader::new(program.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("http://").and_then(|it| it.strip_suffix("/metrics"));
        Scraped { address: address.expect("an address").to_owned(), program }
    }

    fn sent(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.write_all(bytes).expect("it reads");
        stream
    }

    /// The status of what these lines are answered with.
    fn asked(&self, lines: &str) -> String {
        let mut answer = String::new();
        self.sent(format!("{lines}\r\n\r\n").as_bytes()).read_to_string(&mut answer).expect("an answer");
        answer.split(' ').nth(1).unwrap_or("none").to_owned()
    }

    fn scraped(&self) -> String {
        self.asked("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1")
    }

    /// What it has written to standard error, once it has ended.
    fn said(mut self) -> String {
        self.program.kill().expect("it runs");
        let mut said = String::new();
        self.program.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
        said
    }
}

impl Drop for Scraped {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// Whether the other side has neither sent anything nor closed.
fn is_silent(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a stream");
    stream.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn only_those_are_answered_who_name_this_machine_and_whom_no_other_site_sent() {
    let served = Scraped::with(&["--host", "Trainer.example"]);
    let own = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
    for host in ["127.0.0.1", "10.1.2.3:80", "[::1]:1", "localhost", "trainer.example:9464", own.trim()] {
        assert_eq!(served.asked(&format!("GET /metrics HTTP/1.1\r\nHost: {host}")), "200", "{host}");
    }
    let here = "Host: 127.0.0.1";
    for (lines, status) in [
        ("GET /metrics HTTP/1.1\r\nHost: evil.example".to_owned(), "421"),
        ("GET /metrics HTTP/1.1\r\nHost: evil.example:9464".to_owned(), "421"),
        (format!("GET /metrics HTTP/1.1\r\nHost: {}.evil.example", own.trim()), "421"),
        (format!("GET http://evil.example/metrics HTTP/1.1\r\n{here}"), "421"),
        ("GET /metrics HTTP/1.1".to_owned(), "400"),
        (format!("GET /metrics HTTP/1.1\r\n{here}\r\nHost: evil.example"), "400"),
        (format!("GET /metrics HTTP/1.1\r\n{here}\r\nOrigin: http://evil.example"), "403"),
        (format!("GET /metrics HTTP/1.1\r\n{here}\r\nOrigin: null"), "403"),
        (
            format!(
                "GET /metrics HTTP/1.1\r\n{here}\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors"
            ),
            "403",
        ),
        (format!("GET /other HTTP/1.1\r\n{here}"), "404"),
        (format!("POST /metrics HTTP/1.1\r\n{here}"), "405"),
        (format!("OPTIONS /metrics HTTP/1.1\r\n{here}\r\nOrigin: http://evil.example"), "405"),
        (format!("GET /metrics HTTP/1.1\r\n{here}\r\nTransfer-Encoding: chunked"), "413"),
        (format!("GET /metrics HTTP/2.0\r\n{here}"), "505"),
    ] {
        assert_eq!(served.asked(&lines), status, "{lines}");
    }
    let said = served.said();
    let named = |host: &str| said.matches(&format!("for the host {host}:")).count();
    assert_eq!((named("evil.example"), named("127.0.0.1")), (1, 0), "{said}");
    assert!(said.contains("--host evil.example"), "{said}");
}

#[test]
fn a_scrape_does_not_wait_for_those_who_are_silent() {
    let served = Scraped::with(&[]);
    // Each has a deadline, which may pass first on a machine that stands still for seconds.
    loop {
        let silent: Vec<TcpStream> = (0..400).map(|_| served.sent(b"GET /")).collect();
        assert_eq!(served.scraped(), "200");
        if silent.last().is_some_and(is_silent) {
            return;
        }
    }
}

#[test]
fn a_scrape_does_not_wait_for_a_push_nor_a_push_for_those_who_are_silent() {
    let collector = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", collector.local_addr().expect("an address"));
    let served = Scraped::with(&["--push", "otlp", &url, "--every", "1"]);
    let push = || {
        let mut stream = collector.accept().expect("a push").0;
        stream.read_exact(&mut [0]).expect("it begins");
        stream
    };
    loop {
        // A collector that takes long with its answer.
        let mut slow = push();
        let silent: Vec<TcpStream> = (0..20).map(|_| served.sent(b"GET /")).collect();
        assert_eq!(served.scraped(), "200");
        let is_scraped_first = slow.set_nonblocking(true).is_ok() && is_waited_for(&mut slow);
        drop(slow);
        let next = push();
        let is_pushed_first = silent.last().is_some_and(is_silent);
        drop(next);
        // Deadlines may have passed on a machine that stands still.
        if is_scraped_first && is_pushed_first {
            return;
        }
    }
}

/// Whether whoever pushes still waits for its answer.
fn is_waited_for(stream: &mut TcpStream) -> bool {
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
    }
}
