//! `gputrace serve`: who has the address is shown the page and every detail; nobody else learns anything, and nothing that is sent
//! keeps it from answering.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

struct Served {
    program: Child,
    port: u16,
    token: String,
}

impl Served {
    fn new() -> Served {
        Served::of(&["kept-losses.gtr"], &std::env::temp_dir())
    }

    /// Golden traces, with what is kept of them in that folder.
    fn of(names: &[&str], temporary: &Path) -> Served {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
        let mut program = Command::new(env!("CARGO_BIN_EXE_gputrace"))
            .arg("serve")
            .args(names.iter().map(|name| golden.join(name)))
            .env("TMPDIR", temporary)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("gputrace");
        let mut address = String::new();
        let said = program.stdout.take().expect("a pipe");
        BufReader::new(said).read_line(&mut address).expect("an address");
        let rest =
            address.trim().strip_prefix("http://127.0.0.1:").expect("an address of this machine alone");
        let (port, token) = rest.strip_suffix('/').and_then(|rest| rest.split_once('/')).expect("a secret");
        Served { port: port.parse().expect("a port"), token: token.to_owned(), program }
    }

    fn connected(&self) -> TcpStream {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(300))).expect("a time limit");
        stream
    }

    /// Sends this as it is; the answer's status, head and body.
    fn sends(&self, request: &[u8]) -> (String, String, Vec<u8>) {
        let mut stream = self.connected();
        // Who is refused may be told so before all of it is sent.
        let _ = stream.write_all(request);
        answered(&mut stream)
    }

    fn gets(&self, path: &str) -> (String, String, Vec<u8>) {
        let (token, port) = (&self.token, self.port);
        self.sends(format!("GET /{token}/{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n").as_bytes())
    }
}

fn answered(stream: &mut TcpStream) -> (String, String, Vec<u8>) {
    let mut answer = vec![];
    // A connection may be reset behind an answer whose request was not read whole.
    let _ = stream.read_to_end(&mut answer);
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").map_or(answer.len(), |at| at + 4);
    let body = answer.split_off(end);
    let head = String::from_utf8(answer).expect("UTF-8");
    (head.split(' ').nth(1).unwrap_or("none").to_owned(), head, body)
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

#[test]
fn who_has_the_address_sees_the_page_and_its_details_and_no_other_site_does() {
    let served = Served::new();
    let (status, head, page) = served.gets("");
    assert_eq!(status, "200");
    let page = String::from_utf8(page).expect("a page");
    assert!(page.contains("connect-src 'self'") && page.contains("default-src 'none'"), "its policy");
    assert!(page.trim_end().ends_with("</html>"), "all of it");
    assert!(!head.to_lowercase().contains("access-control"), "{head}");
    for said in ["no-store", "nosniff", "same-origin", "no-referrer", "DENY"] {
        assert!(head.contains(said), "{said}: {head}");
    }
    let (status, _, details) = served.gets("details?trace=0&from=0&to=1000000000");
    assert_eq!(status, "200");
    let length = u32::from_le_bytes(details[..4].try_into().expect("four bytes")) as usize;
    let head: serde_json::Value = serde_json::from_slice(&details[4..4 + length]).expect("JSON");
    let device = &head["chapters"][0]["devices"][0];
    assert_eq!((&device["whole"][0], &device["stretch"]), (&0.into(), &1.into()));
    assert_eq!(served.gets("details?trace=7&from=0&to=1").0, "404", "there is no such trace");
    assert_eq!(served.gets("who?trace=7&address=10").0, "404", "there is no such trace");
}

#[test]
fn an_address_that_is_searched_for_is_answered_as_gputrace_who_does() {
    let served = Served::of(&["pools/graphs.gtr"], &std::env::temp_dir());
    let (status, head, body) = served.gets("who?trace=0&address=7f3ac5600100");
    assert_eq!(status, "200");
    assert!(head.contains("application/json"), "{head}");
    let section: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(section["name"], "owners_of_address");
    let table = section["items"].as_array().expect("items").iter().find(|item| item["table"] == "owners");
    let rows = table.expect("a table")["rows"].as_array().expect("rows");
    assert!(rows.iter().any(|row| row.to_string().contains("CUDA graph 1")), "{rows:?}");
}

#[test]
fn without_room_for_an_index_the_answers_are_the_same() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("serve");
    std::fs::create_dir_all(&folder).expect("a folder");
    let questions = ["trace=0&from=0&to=1000000000", "trace=0&from=2000000000&to=2100000000"];
    let answers = |served: &Served, question: &str| {
        let (status, _, details) = served.gets(&format!("details?{question}"));
        assert_eq!(status, "200", "{question}");
        details
    };
    for names in [&["kept-losses.gtr"][..], &["kept-losses.gtr", "snapshots/pinned-2.15.pickle.gz"]] {
        let (mut with, mut without) =
            (Served::of(names, &folder), Served::of(names, &folder.join("missing")));
        for question in questions {
            let (with, without) = (answers(&with, question), answers(&without, question));
            let chapters = |data: &[u8]| {
                let length = u32::from_le_bytes(data[..4].try_into().expect("four bytes")) as usize;
                let head: serde_json::Value = serde_json::from_slice(&data[4..4 + length]).expect("JSON");
                (head["chapters"].clone(), data[4 + length..].to_vec())
            };
            assert!(chapters(&with) == chapters(&without), "{question}");
        }
        assert_eq!(
            std::fs::read_dir(&folder).expect("a folder").count(),
            0,
            "nothing is left there, nor seen"
        );
        let said = |served: &mut Served| {
            served.program.kill().expect("it runs");
            let mut said = String::new();
            served.program.stderr.take().expect("a pipe").read_to_string(&mut said).expect("UTF-8");
            said
        };
        let (with, without) = (said(&mut with), said(&mut without));
        assert!(!with.contains("index"), "{with}");
        assert!(without.contains("cannot keep an index in") && without.contains("read again"), "{without}");
    }
}

#[test]
fn nobody_else_is_answered() {
    let served = Served::new();
    let (port, token) = (served.port, &served.token);
    let here = format!("Host: 127.0.0.1:{port}");
    let long = "x".repeat(1 << 20);
    for (request, status) in [
        (format!("GET / HTTP/1.1\r\n{here}\r\n\r\n"), "404"),
        (format!("GET /{}/ HTTP/1.1\r\n{here}\r\n\r\n", "0".repeat(32)), "404"),
        (format!("GET /{token}/../../etc/passwd HTTP/1.1\r\n{here}\r\n\r\n"), "404"),
        (format!("GET /{token}/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n{here}\r\n\r\n"), "404"),
        (format!("GET /{token}//etc/passwd HTTP/1.1\r\n{here}\r\n\r\n"), "404"),
        (format!("GET /{token}/ HTTP/1.1\r\nHost: evil.example\r\n\r\n"), "421"),
        (format!("GET /{token}/ HTTP/1.1\r\nHost: evil.example:{port}\r\n\r\n"), "421"),
        (format!("GET /{token}/ HTTP/1.1\r\n\r\n"), "400"),
        (format!("GET /{token}/ HTTP/1.1\r\n{here}\r\n{here}\r\n\r\n"), "400"),
        (format!("GET /{token}/ HTTP/1.1\r\n{here}\r\nOrigin: http://evil.example\r\n\r\n"), "403"),
        (format!("GET /{token}/ HTTP/1.1\r\n{here}\r\nSec-Fetch-Site: cross-site\r\n\r\n"), "403"),
        (format!("GET /{token}/ HTTP/1.1\r\n{here}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), "413"),
        (format!("OPTIONS /{token}/ HTTP/1.1\r\n{here}\r\n\r\n"), "405"),
        (format!("GET /{token}/\r\n"), "400"),
        (format!("POST /{token}/ HTTP/1.1\r\n{here}\r\nContent-Length: 1\r\n\r\nx"), "405"),
        (format!("GET http://evil.example/{token}/ HTTP/1.1\r\n{here}\r\n\r\n"), "421"),
        ("\u{16}\u{3}\u{1}\u{2}\r\n\r\n".to_owned(), "400"),
    ] {
        let (told, head, body) = served.sends(request.as_bytes());
        assert_eq!(told, status, "{request}");
        assert!(body.len() < 100 && !head.contains(token.as_str()), "{request}");
    }
    // Whether the refusal is read depends on when the connection is closed: it is not answered with the page.
    let (told, ..) =
        served.sends(format!("GET /{token}/ HTTP/1.1\r\n{here}\r\nX: {long}\r\n\r\n").as_bytes());
    assert!(["431", "none"].contains(&told.as_str()), "{told}");
    assert_eq!(served.gets("").0, "200", "and it goes on");
}

#[test]
fn who_says_nothing_is_not_waited_for() {
    let served = Served::new();
    // Each of these has a deadline, after which it is answered and the question again nobody's.
    let was_not_waited_for = || {
        let mut silent: Vec<TcpStream> = (0..40).map(|_| served.connected()).collect();
        for stream in &mut silent {
            stream.write_all(b"GET /").expect("a connection");
        }
        assert_eq!(served.gets("").0, "200");
        let last = silent.last().expect("forty");
        last.set_nonblocking(true).expect("a stream");
        let is_open = last.peek(&mut [0]).is_err_and(|it| it.kind() == std::io::ErrorKind::WouldBlock);
        last.set_nonblocking(false).expect("a stream");
        (is_open, silent)
    };
    // On a machine that stands still for seconds, the deadline may pass first.
    let mut silent = loop {
        if let (true, silent) = was_not_waited_for() {
            break silent;
        }
    };
    for stream in &mut silent {
        assert_eq!(answered(stream).0, "408");
    }
}
