//! Stores and web servers that are hostile, and hostile files beside a trace that is uploaded: an error that says what is wrong, in
//! bounded memory and time, and nothing of the user's is touched.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Method and target of a request; its body has been read.
type Answering = dyn Fn(&str, &str, &mut TcpStream) + Send + Sync;

/// A server that answers by this function, until the tests end; its address.
fn server(answer: impl Fn(&str, &str, &mut TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    let answer: Arc<Answering> = Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let answer = answer.clone();
            std::thread::spawn(move || answered(stream.expect("a connection"), &*answer));
        }
    });
    address
}

fn answered(stream: TcpStream, answer: &Answering) {
    let mut stream = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    let Ok(1..) = stream.read_line(&mut first) else { return };
    loop {
        let mut line = String::new();
        let Ok(1..) = stream.read_line(&mut line) else { return };
        if let Some(bytes) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = bytes.trim().parse().expect("a length");
        }
        if line.trim().is_empty() {
            break;
        }
    }
    stream.read_exact(&mut vec![0; length]).expect("a body");
    let mut words = first.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    answer(method, target, stream.get_mut());
}

/// One whole answer. The client may have enough before its end.
fn say(stream: &mut TcpStream, status: &str, headers: &str, body: &str) {
    let length = body.len();
    let _ = write!(
        stream,
        "HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
}

fn gputrace(base: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    command.args(arguments);
    for (name, value) in [
        ("AWS_ENDPOINT_URL", base),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "here"),
        ("no_proxy", "127.0.0.1"),
    ] {
        command.env(name, value);
    }
    command.output().expect("gputrace runs")
}

/// What it says where it fails as it should.
fn fails(base: &str, arguments: &[&str]) -> String {
    let output = gputrace(base, arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code().is_some_and(|code| code != 0), "{arguments:?}: {:?} {said}", output.status);
    assert!(!said.contains("panicked"), "{said}");
    said
}

fn page(token: &str, objects: &[(&str, &str)]) -> String {
    let objects: String = objects
        .iter()
        .map(|(key, size)| {
            format!(
                "<Contents><Key>{key}</Key><Size>{size}</Size><ETag>\"1\"</ETag>\
                 <LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        })
        .collect();
    let more = match token {
        "" => String::new(),
        token => format!("<NextContinuationToken>{token}</NextContinuationToken>"),
    };
    format!(
        "<ListBucketResult><IsTruncated>{}</IsTruncated>{more}{objects}</ListBucketResult>",
        !token.is_empty()
    )
}

#[test]
fn a_listing_that_never_ends_or_lies_is_an_error() {
    let listed = |body: String| {
        let base = server(move |_, _, stream| say(stream, "200 OK", "", &body));
        fails(&base, &["report", "s3://bucket/job/"])
    };
    let said = listed(page("again", &[("job/a.gtr", "5")]));
    assert!(said.contains("s3://bucket/job/") && said.contains("listing does not end"), "{said}");
    for size in ["-1", "18446744073709551616", "x"] {
        assert!(listed(page("", &[("job/a.gtr", size)])).contains("s3://bucket/job/"), "{size}");
    }
    // A name that would lead elsewhere.
    let said = listed(page("", &[("job/a.gtr", "5"), ("job/..", "5")]));
    assert!(said.contains("s3://bucket/job/") && said.contains("\"..\""), "{said}");
    assert!(listed("no XML".to_owned()).contains("s3://bucket/job/"));
}

#[test]
fn an_answer_that_does_not_end_is_not_kept() {
    let endless = |head: &'static str| {
        server(move |_, _, stream| {
            let piece = vec![b' '; 1 << 20];
            let _ = stream.write_all(head.as_bytes());
            // Until the client has had enough.
            while stream.write_all(&piece).is_ok() {}
        })
    };
    let base = endless("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
    let said = fails(&base, &["report", "s3://bucket/job/"]);
    assert!(said.contains("longer than"), "{said}");
    // Of an error as well.
    let base = endless("HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n");
    for url in ["s3://bucket/a.gtr".to_owned(), format!("{base}/a.gtr")] {
        fails(&base, &["report", &url]);
    }
}

#[test]
fn a_length_that_is_not_true_is_an_error() {
    // Memory for so much is not there.
    let base = server(|_, _, stream| {
        let _ = stream.write_all(
            b"HTTP/1.1 200 OK\r\nContent-Length: 9000000000000000000\r\nConnection: close\r\n\r\n<a>",
        );
        let _ = stream.flush();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let _ = stream.write_all(b"<b>");
    });
    fails(&base, &["report", "s3://bucket/job/"]);
    let sized = |size: &'static str| {
        server(move |method, _, stream| match method {
            "HEAD" => {
                let dated = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: \"1\"\r\n";
                let _ = write!(
                    stream,
                    "HTTP/1.1 200 OK\r\n{dated}Content-Length: {size}\r\nConnection: close\r\n\r\n"
                );
            }
            _ => {
                let headers = "Content-Range: bytes 0-8388607/100000000\r\nETag: \"1\"\r\n\
                               Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n";
                say(stream, "206 Partial Content", headers, "x");
            }
        })
    };
    let said = fails(&sized("9223372036854775807"), &["report", "s3://bucket/a.gtr"]);
    assert!(said.contains("more than any object can have"), "{said}");
    let said = fails(&sized("100000000"), &["report", "s3://bucket/a.gtr"]);
    assert!(said.contains("s3://bucket/a.gtr") || said.contains("a.gtr"), "{said}");
}

#[test]
fn a_server_that_leads_on_for_ever_is_not_followed() {
    let base = server(|_, target, stream| {
        say(stream, "302 Found", &format!("Location: {target}x\r\n"), "");
    });
    for name in ["a.gtr", "a.gtr?signature=1"] {
        let said = fails(&base, &["report", &format!("{base}/{name}")]);
        assert!(said.contains("a.gtr"), "{said}");
    }
}

/// A store that takes everything: what is sent last has this many bytes.
fn store(bytes: u64) -> (String, Arc<AtomicU64>) {
    let n_completed = Arc::new(AtomicU64::new(0));
    let completed = n_completed.clone();
    let base = server(move |method, target, stream| match method {
        "HEAD" if completed.load(Ordering::SeqCst) == 0 => {
            let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n");
        }
        "HEAD" => {
            let dated = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: \"1\"\r\n";
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\n{dated}Content-Length: {bytes}\r\nConnection: close\r\n\r\n"
            );
        }
        "POST" if target.contains("uploads") => say(
            stream,
            "200 OK",
            "",
            "<InitiateMultipartUploadResult><UploadId>mine</UploadId></InitiateMultipartUploadResult>",
        ),
        "POST" => {
            completed.fetch_add(1, Ordering::SeqCst);
            say(
                stream,
                "200 OK",
                "",
                "<CompleteMultipartUploadResult><ETag>\"1\"</ETag></CompleteMultipartUploadResult>",
            );
        }
        "PUT" => {
            if !target.contains("partNumber") {
                completed.fetch_add(1, Ordering::SeqCst);
            }
            say(stream, "200 OK", "ETag: \"1\"\r\n", "");
        }
        _ => say(stream, "500 No", "", ""),
    });
    (base, n_completed)
}

/// An empty folder.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stores-{name}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// A file of this many bytes is uploaded with whatever `prepare` put beside it; what was said. It arrives.
fn uploaded(name: &str, bytes: u64, prepare: impl Fn(&Path, &Path)) -> String {
    let folder = folder(name);
    let trace = folder.join("a.gtr");
    std::fs::File::create(&trace).and_then(|file| file.set_len(bytes)).expect("a file");
    prepare(&folder.join("a.gtr.upload"), &folder.join("a.gtr.upload.part"));
    let (base, n_completed) = store(bytes);
    let output = gputrace(&base, &["upload", "-o", "s3://bucket/a.gtr", &trace.to_string_lossy()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {:?} {said}", output.status);
    assert_eq!(n_completed.load(Ordering::SeqCst), 1, "{name}");
    said
}

fn state(part_bytes: &str, parts: &str) -> String {
    format!(
        r#"{{"schema":"gputrace.upload/1","url":"s3://bucket/a.gtr","id":"theirs","part_bytes":{part_bytes},"parts":[{parts}]}}"#
    )
}

#[test]
fn what_lies_beside_a_trace_is_not_believed() {
    let huge = r#"["a",1],"#.repeat(20_000) + r#"["a",1]"#;
    for (name, part_bytes, parts) in [
        ("endless-part", "18446744073709551615", r#"["a",1],["b",2]"#),
        ("long-part", "1099511627776", r#"["a",1]"#),
        ("no-part", "0", r#"["a",1]"#),
        ("negative", "-8388608", r#"["a",1]"#),
        ("many-parts", "8388608", &huge),
    ] {
        let said =
            uploaded(name, 1000, |kept, _| std::fs::write(kept, state(part_bytes, parts)).expect("a file"));
        assert!(said.contains("a.gtr.upload is not used: ") && said.contains("is sent"), "{name}: {said}");
    }
    let said = uploaded("folder", 1000, |kept, _| std::fs::create_dir(kept).expect("a folder"));
    assert!(said.contains("not a regular file"), "{said}");
    let said = uploaded("fifo", 1000, |kept, _| {
        let made = Command::new("mkfifo").arg(kept).status().expect("mkfifo runs");
        assert!(made.success());
    });
    assert!(said.contains("not a regular file"), "{said}");
    let said = uploaded("link", 1000, |kept, _| symlink("/dev/zero", kept).expect("a link"));
    assert!(said.contains("symbolic link"), "{said}");
    let said = uploaded("sparse", 1000, |kept, _| {
        std::fs::File::create(kept).and_then(|file| file.set_len(1 << 40)).expect("a file");
    });
    assert!(said.contains("longer than"), "{said}");
    // More parts than the file has: it was cut since.
    let said = uploaded("cut", 1000, |kept, _| {
        std::fs::write(kept, state("8388608", r#"["a",1],["b",2]"#)).expect("a file");
    });
    assert_eq!(said, "");
}

#[test]
fn what_others_have_put_beside_a_trace_is_neither_used_nor_followed() {
    let folder = folder("victim");
    let victim = folder.join("victim");
    std::fs::write(&victim, "precious").expect("a file");
    // Two parts, so that something is kept on the way.
    uploaded("part-link", 17 << 20, |_, part| symlink(&victim, part).expect("a link"));
    assert_eq!(std::fs::read_to_string(&victim).expect("a file"), "precious");
    // Only root can give a file to another user.
    if std::fs::metadata("/proc/self").is_ok_and(|data| data.uid() == 0) {
        let said = uploaded("foreign", 17 << 20, |kept, _| {
            std::fs::write(kept, state("8388608", r#"["a",1]"#)).expect("a file");
            std::os::unix::fs::chown(kept, Some(65_534), None).expect("it is given away");
        });
        assert!(said.contains("belongs to user 65534"), "{said}");
    }
}
