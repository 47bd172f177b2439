//! The loop over `poll`: accepts, reads requests, has them answered, and sends the answers, all without waiting for any one client.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::request::{LONGEST_HEAD, Refusal, Request, parse};

/// How long clients may take, and how many there may be.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Connections at a time. One more takes the place of the one whose request has been arriving for longest.
    connections: usize,
    /// For a request to arrive.
    head: Duration,
    /// For the command to answer one that it was not ready to answer at once; browsers give up at about this time as well.
    answer: Duration,
    /// For the client to take in anything at all of an answer.
    progress: Duration,
    /// Least bytes per second of an answer, beside `progress`.
    rate: u64,
    /// For the client to close, once it has its answer.
    farewell: Duration,
}

const LIMITS: Limits = Limits {
    connections: 256,
    head: Duration::from_secs(5),
    answer: Duration::from_secs(120),
    progress: Duration::from_secs(20),
    rate: 16 << 10,
    farewell: Duration::from_secs(2),
};

/// Connections at a time where the process may open few files. More than requests that the commands answer later, which keep their
/// place.
const FEWEST: usize = 16;
/// Connections that are accepted in one turn.
const AT_ONCE: usize = 64;
/// Before it accepts again where it could not.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes behind a request that are read and thrown away. A connection that is closed with bytes unread is reset, and its client may lose
/// the answer.
const MOST_IGNORED: usize = 256 << 10;

/// What a request is answered with.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    status: &'static str,
    kind: &'static str,
    body: Arc<Vec<u8>>,
}

impl Answer {
    pub(crate) fn of(kind: &'static str, body: Arc<Vec<u8>>) -> Answer {
        Answer { status: "200 OK", kind, body }
    }

    pub(crate) fn text(text: &str) -> Answer {
        Answer::of("text/plain; charset=utf-8", Arc::new(text.as_bytes().to_vec()))
    }

    /// A refusal with a sentence for the person who reads it.
    pub(crate) fn refused(refusal: Refusal, why: &str) -> Answer {
        Answer { status: refusal.status(), ..Answer::text(why) }
    }

    fn head(&self) -> String {
        let allow = if self.status == Refusal::Method.status() { "Allow: GET, HEAD\r\n" } else { "" };
        format!(
            "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{allow}Cache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n\
             Cross-Origin-Resource-Policy: same-origin\r\nConnection: close\r\n\r\n",
            self.status,
            self.kind,
            self.body.len()
        )
    }
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Answer {
        Answer::refused(refusal, &format!("{}\n", refusal.status()))
    }
}

/// The connection that an answer is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket(u64);

/// Ends a turn of the server, from any thread.
#[derive(Debug)]
pub(crate) struct Waker(UnixStream);

impl Waker {
    pub(crate) fn wake(&self) {
        // Where its buffer is full, the server has enough to wake it.
        let _ = (&self.0).write(&[0]);
    }
}

/// Listens, and answers.
pub(crate) struct Server {
    listener: TcpListener,
    connections: Vec<Connection>,
    n_accepted: u64,
    limits: Limits,
    woken: UnixStream,
    waker: UnixStream,
    /// No connection is accepted before this: there was no room.
    full_until: Option<Instant>,
}

struct Connection {
    ticket: Ticket,
    stream: TcpStream,
    stage: Stage,
    /// It is over when this has passed.
    until: Instant,
}

enum Stage {
    /// The request arrives.
    Reads(Vec<u8>),
    /// The command works on the answer.
    Waits { is_head: bool },
    /// The answer leaves: its head, its body, and the bytes of both that have left.
    Writes { head: Vec<u8>, body: Arc<Vec<u8>>, n_sent: usize, began: Instant },
    /// The answer has left. The client closes, and what else it sends is ignored, so many bytes of it.
    Ends(usize),
    /// It is to be closed.
    Over,
}

impl Server {
    pub(crate) fn new(listener: TcpListener) -> io::Result<Server> {
        Server::with(listener, LIMITS)
    }

    fn with(listener: TcpListener, limits: Limits) -> io::Result<Server> {
        listener.set_nonblocking(true)?;
        let (woken, waker) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        waker.set_nonblocking(true)?;
        // The program needs descriptors for other things.
        let most =
            rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX) / 4;
        let connections = limits.connections.min(usize::try_from(most).unwrap_or(usize::MAX)).max(FEWEST);
        let limits = Limits { connections, ..limits };
        Ok(Server { listener, connections: vec![], n_accepted: 0, limits, woken, waker, full_until: None })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    pub(crate) fn waker(&self) -> io::Result<Waker> {
        self.waker.try_clone().map(Waker)
    }

    /// Waits for at most `patience`, and does what can be done at once for every client. `ask` answers requests, or returns `None` and
    /// the answer follows by [`Server::reply`].
    ///
    /// # Errors
    /// The system cannot wait.
    pub(crate) fn turn(
        &mut self,
        patience: Duration,
        ask: &mut dyn FnMut(Ticket, &Request) -> Option<Answer>,
    ) -> io::Result<()> {
        let ready = self.wait(patience)?;
        let limits = self.limits;
        for (connection, ready) in self.connections.iter_mut().zip(ready.connections) {
            if ready {
                connection.advance(&limits, ask);
            }
        }
        if ready.is_woken {
            while matches!((&self.woken).read(&mut [0; 64]), Ok(n) if n > 0) {}
        }
        self.give_up(&limits);
        if ready.has_callers {
            self.accept(&limits, ask);
        }
        self.connections.retain(|connection| !matches!(connection.stage, Stage::Over));
        Ok(())
    }

    /// Answers a request that was to be answered later. A client that has gone meanwhile misses it.
    pub(crate) fn reply(&mut self, ticket: Ticket, answer: &Answer) {
        let limits = self.limits;
        let asked = self.connections.iter_mut().find(|connection| connection.ticket == ticket);
        if let Some(connection) = asked
            && let Stage::Waits { is_head } = connection.stage
        {
            connection.answer(answer, is_head, &limits);
        }
    }

    fn wait(&mut self, patience: Duration) -> io::Result<Ready> {
        let now = Instant::now();
        let is_full = self.full_until.is_some_and(|until| until > now);
        let next = self
            .connections
            .iter()
            .map(|connection| connection.until)
            .chain(self.full_until.filter(|_| is_full))
            .min();
        let patience = next.map_or(patience, |next| patience.min(next.saturating_duration_since(now)));
        // Rounded up, so that a deadline has passed when it ends.
        let patience = Timespec::try_from(patience + Duration::from_millis(1)).map_err(io::Error::other)?;
        let own = if is_full { PollFlags::empty() } else { PollFlags::IN };
        let mut polled = vec![
            PollFd::from_borrowed_fd(self.listener.as_fd(), own),
            PollFd::from_borrowed_fd(self.woken.as_fd(), PollFlags::IN),
        ];
        polled.extend(self.connections.iter().map(|connection| {
            let events = match connection.stage {
                Stage::Reads(_) | Stage::Ends(_) => PollFlags::IN,
                Stage::Writes { .. } => PollFlags::OUT,
                // That it hung up is reported in any case.
                Stage::Waits { .. } | Stage::Over => PollFlags::empty(),
            };
            PollFd::from_borrowed_fd(connection.stream.as_fd(), events)
        }));
        match poll(&mut polled, Some(&patience)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            Err(error) => return Err(error.into()),
        }
        let mut ready = polled.iter().map(|polled| !polled.revents().is_empty());
        let (has_callers, is_woken) = (ready.next() == Some(true), ready.next() == Some(true));
        Ok(Ready { has_callers, is_woken, connections: ready.collect() })
    }

    /// Ends what has taken too long.
    fn give_up(&mut self, limits: &Limits) {
        let now = Instant::now();
        for connection in self.connections.iter_mut().filter(|connection| connection.until <= now) {
            match connection.stage {
                Stage::Reads(_) => connection.answer(&Refusal::Slow.into(), false, limits),
                Stage::Waits { is_head } => connection.answer(&Refusal::Failed.into(), is_head, limits),
                Stage::Writes { .. } | Stage::Ends(_) | Stage::Over => connection.stage = Stage::Over,
            }
        }
    }

    fn accept(&mut self, limits: &Limits, ask: &mut dyn FnMut(Ticket, &Request) -> Option<Answer>) {
        self.full_until = None;
        for _ in 0..AT_ONCE {
            if !self.has_room(limits) {
                self.full_until = Some(Instant::now() + PAUSE);
                return;
            }
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_err() {
                        continue;
                    }
                    let ticket = Ticket(self.n_accepted);
                    self.n_accepted += 1;
                    let (stage, until) = (Stage::Reads(vec![]), Instant::now() + limits.head);
                    let mut connection = Connection { ticket, stream, stage, until };
                    // Most requests are there already, and are answered in this turn.
                    connection.advance(limits, ask);
                    self.connections.push(connection);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if is_exhausted(&error) => {
                    self.full_until = Some(Instant::now() + PAUSE);
                    return;
                }
                // It hung up before it was accepted.
                Err(_) => {}
            }
        }
    }

    /// Makes room for one more: in place of one that has its answer, else of the one whose request has been arriving for longest, else of
    /// the one whose answer has been leaving for longest. An honest client is done with either at once.
    fn has_room(&mut self, limits: &Limits) -> bool {
        self.connections.retain(|connection| !matches!(connection.stage, Stage::Over));
        if self.connections.len() < limits.connections {
            return true;
        }
        let stages: [fn(&Stage) -> bool; 3] = [
            |stage| matches!(stage, Stage::Ends(_)),
            |stage| matches!(stage, Stage::Reads(_)),
            |stage| matches!(stage, Stage::Writes { .. }),
        ];
        // In the order in which they came.
        let oldest = |is: &fn(&Stage) -> bool| self.connections.iter().position(|it| is(&it.stage));
        let found = stages.iter().find_map(oldest);
        found.map(|oldest| self.connections.remove(oldest)).is_some()
    }
}

/// No descriptor or memory is left. That passes; meanwhile clients wait in the kernel.
fn is_exhausted(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let exhausted = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|error| exhausted.contains(&error))
}

#[derive(Default)]
struct Ready {
    has_callers: bool,
    is_woken: bool,
    connections: Vec<bool>,
}

impl Connection {
    /// Does what can be done without waiting.
    fn advance(&mut self, limits: &Limits, ask: &mut dyn FnMut(Ticket, &Request) -> Option<Answer>) {
        match &mut self.stage {
            Stage::Reads(bytes) => match read(&mut self.stream, bytes) {
                Ok(None) => {}
                Ok(Some(request)) => {
                    let is_head = request.is_head;
                    self.stage = Stage::Waits { is_head };
                    self.until = Instant::now() + limits.answer;
                    if let Some(answer) = ask(self.ticket, &request) {
                        self.answer(&answer, is_head, limits);
                    }
                }
                Err(Some(refusal)) => self.answer(&refusal.into(), false, limits),
                Err(None) => self.stage = Stage::Over,
            },
            Stage::Writes { .. } => self.write(limits),
            Stage::Ends(ignored) => match self.stream.read(&mut [0; 4096]) {
                Ok(0) => self.stage = Stage::Over,
                Ok(n) if *ignored + n > MOST_IGNORED => self.stage = Stage::Over,
                Ok(n) => *ignored += n,
                Err(error) if is_passing(&error) => {}
                Err(_) => self.stage = Stage::Over,
            },
            // Nothing is polled for: it hung up.
            Stage::Waits { .. } | Stage::Over => self.stage = Stage::Over,
        }
    }

    fn answer(&mut self, answer: &Answer, is_head: bool, limits: &Limits) {
        let body = if is_head { Arc::default() } else { answer.body.clone() };
        let now = Instant::now();
        self.stage = Stage::Writes { head: answer.head().into_bytes(), body, n_sent: 0, began: now };
        self.until = now + limits.progress;
        self.write(limits);
    }

    fn write(&mut self, limits: &Limits) {
        let Stage::Writes { head, body, n_sent, began } = &mut self.stage else { return };
        // So much in a turn: a client that takes in a lot at once delays the others no more than one that takes in little.
        let mut left = 1 << 20;
        while left > 0 {
            let piece = match head.get(*n_sent..) {
                Some(rest) if !rest.is_empty() => rest,
                _ => &body[*n_sent - head.len()..],
            };
            if piece.is_empty() {
                let is_shut = self.stream.shutdown(std::net::Shutdown::Write).is_ok();
                self.stage = if is_shut { Stage::Ends(0) } else { Stage::Over };
                self.until = Instant::now() + limits.farewell;
                return;
            }
            match self.stream.write(&piece[..piece.len().min(left)]) {
                Ok(n) if n > 0 => {
                    *n_sent += n;
                    left -= n;
                    // A byte now and then is no progress.
                    let slowest = Duration::from_secs(*n_sent as u64 / limits.rate);
                    self.until = (*began + limits.progress + slowest).min(Instant::now() + limits.progress);
                }
                Err(error) if is_passing(&error) => return,
                Ok(_) | Err(_) => {
                    self.stage = Stage::Over;
                    return;
                }
            }
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Reads what is there of a request. An error without a refusal is a client that has gone.
fn read(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Result<Option<Request>, Option<Refusal>> {
    let mut piece = [0; 4096];
    // One byte more than a head may have, by which it is known to be too long.
    while bytes.len() <= LONGEST_HEAD {
        match stream.read(&mut piece) {
            Ok(0) if bytes.is_empty() => return Err(None),
            Ok(0) => return Err(Some(Refusal::Malformed)),
            Ok(n) => bytes.extend_from_slice(&piece[..n]),
            Err(error) if is_passing(&error) => return Ok(None),
            Err(_) => return Err(None),
        }
        if let Some(request) = parse(bytes).map_err(Some)? {
            return Ok(Some(request));
        }
    }
    Err(Some(Refusal::Long))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread::JoinHandle;

    /// Large enough that no socket takes all of it in.
    const LARGE: usize = 64 << 20;

    /// A server of its own thread, with these limits. `/later` is answered by the next turn, `/large` is [`LARGE`], `/never` is not.
    struct Running {
        address: SocketAddr,
        is_over: Arc<AtomicBool>,
        waker: Waker,
        thread: Option<JoinHandle<()>>,
    }

    impl Running {
        fn with(limits: Limits) -> Running {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let mut server = Server::with(listener, limits).expect("a server");
            let (address, waker) = (server.address().expect("an address"), server.waker().expect("a waker"));
            let is_over = Arc::new(AtomicBool::new(false));
            let over = is_over.clone();
            let large = Arc::new(vec![b'x'; LARGE]);
            let run = move || {
                let mut later = vec![];
                while !over.load(Ordering::Relaxed) {
                    let turned =
                        server.turn(Duration::from_secs(600), &mut |ticket, request| match request.path() {
                            "/later" => {
                                later.push(ticket);
                                None
                            }
                            "/never" => None,
                            "/large" => Some(Answer::of("text/plain", large.clone())),
                            path => Some(Answer::text(path)),
                        });
                    turned.expect("it waits");
                    later.drain(..).for_each(|ticket| server.reply(ticket, &Answer::text("later")));
                }
            };
            Running { address, is_over, waker, thread: Some(std::thread::spawn(run)) }
        }

        fn connected(&self) -> TcpStream {
            TcpStream::connect(self.address).expect("a connection")
        }

        fn sent(&self, bytes: &[u8]) -> TcpStream {
            let mut stream = self.connected();
            stream.write_all(bytes).expect("it reads");
            stream
        }

        fn asked(&self, bytes: &str) -> String {
            let mut stream = self.connected();
            // A refusal may come before all of it has been sent.
            let _ = stream.write_all(bytes.as_bytes());
            all_of(&mut stream)
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            self.is_over.store(true, Ordering::Relaxed);
            self.waker.wake();
            self.thread.take().map(JoinHandle::join);
        }
    }

    fn all_of(stream: &mut TcpStream) -> String {
        let mut answer = vec![];
        stream.read_to_end(&mut answer).expect("an end");
        String::from_utf8(answer).expect("text")
    }

    /// How much of an answer comes before the connection ends, however it ends.
    fn length(stream: &mut TcpStream) -> usize {
        let mut answer = vec![];
        let _ = stream.read_to_end(&mut answer);
        answer.len()
    }

    /// Nothing ends by itself.
    const PATIENT: Limits = Limits {
        connections: 256,
        head: Duration::from_secs(600),
        answer: Duration::from_secs(600),
        progress: Duration::from_secs(600),
        rate: 1,
        farewell: Duration::from_secs(600),
    };

    #[test]
    fn each_connection_has_one_request_and_one_answer() {
        let server = Running::with(PATIENT);
        let (head, body) = {
            let answer = server.asked("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
            let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
            (head.to_owned(), body.to_owned())
        };
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("Content-Length: 2\r\n"), "{head}");
        assert_eq!(body, "/a");
        let answer = server.asked("HEAD /abc HTTP/1.1\r\nHost: a\r\n\r\n");
        assert!(answer.contains("Content-Length: 4\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
        let answer = server.asked(&"GET /a HTTP/1.1\r\nHost: a\r\n\r\n".repeat(3));
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
        assert!(server.asked("GET /later HTTP/1.1\r\nHost: a\r\n\r\n").ends_with("\r\n\r\nlater"));
        let answer = server.asked("OPTIONS / HTTP/1.1\r\nHost: a\r\n\r\n");
        assert!(
            answer.starts_with("HTTP/1.1 405 ") && answer.contains("\r\nAllow: GET, HEAD\r\n"),
            "{answer}"
        );
        let body = "x".repeat(100_000);
        let answer =
            server.asked(&format!("GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n{body}"));
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
        let answer = server.asked(&format!("GET / HTTP/1.1\r\nHost: a\r\nX: {body}\r\n\r\n"));
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    }

    #[test]
    fn nobody_waits_for_those_who_are_silent_or_slow_or_have_gone() {
        let server = Running::with(PATIENT);
        let silent: Vec<TcpStream> = (0..50).map(|_| server.sent(b"GET /")).collect();
        let slow: Vec<TcpStream> =
            (0..50).map(|_| server.sent(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")).collect();
        let waiting: Vec<TcpStream> =
            (0..50).map(|_| server.sent(b"GET /never HTTP/1.1\r\nHost: a\r\n\r\n")).collect();
        drop(server.sent(b"GET /never HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert!(server.asked("GET /a HTTP/1.1\r\nHost: a\r\n\r\n").ends_with("/a"));
        // And those are not harmed: the slow get all of it once they read.
        let [mut slow, ..] = <[TcpStream; 50]>::try_from(slow).expect("fifty");
        assert!(length(&mut slow) > LARGE);
        let [mut silent, ..] = <[TcpStream; 50]>::try_from(silent).expect("fifty");
        silent.write_all(b"late HTTP/1.1\r\nHost: a\r\n\r\n").expect("it reads");
        assert!(all_of(&mut silent).ends_with("/late"));
        drop(waiting);
    }

    #[test]
    fn where_there_are_too_many_the_one_that_has_come_first_makes_room() {
        let server = Running::with(Limits { connections: 20, ..PATIENT });
        let mut silent: Vec<TcpStream> = (0..100).map(|_| server.sent(b"GET /")).collect();
        assert!(server.asked("GET /a HTTP/1.1\r\nHost: a\r\n\r\n").ends_with("/a"));
        for stream in &mut silent[..79] {
            assert_eq!(length(stream), 0, "it was closed without an answer");
        }
        let last = silent.last_mut().expect("a hundred");
        last.write_all(b"last HTTP/1.1\r\nHost: a\r\n\r\n").expect("it reads");
        assert!(all_of(last).ends_with("/last"));
        // Those who do not take their answers make room as well.
        let mut slow: Vec<TcpStream> =
            (0..100).map(|_| server.sent(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")).collect();
        assert!(server.asked("GET /a HTTP/1.1\r\nHost: a\r\n\r\n").ends_with("/a"));
        assert!(length(&mut slow[0]) < LARGE);
    }

    #[test]
    fn every_stage_of_a_connection_has_an_end() {
        let short = Duration::from_millis(20);
        let server = Running::with(Limits { head: short, ..PATIENT });
        assert!(all_of(&mut server.sent(b"GET /")).starts_with("HTTP/1.1 408 "));
        assert!(all_of(&mut server.connected()).starts_with("HTTP/1.1 408 "));
        let server = Running::with(Limits { answer: short, ..PATIENT });
        assert!(server.asked("GET /never HTTP/1.1\r\nHost: a\r\n\r\n").starts_with("HTTP/1.1 500 "));
        let server = Running::with(Limits { progress: short, ..PATIENT });
        let mut slow = server.sent(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n");
        until_closed(&mut slow);
        assert!(length(&mut slow) < LARGE, "it was given up");
        let server = Running::with(Limits { farewell: short, ..PATIENT });
        let mut lingering = server.sent(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
        assert!(all_of(&mut lingering).ends_with("/a"));
        until_closed(&mut lingering);
    }

    /// Waits until the server has closed a connection that its client keeps open: then writing fails.
    fn until_closed(stream: &mut TcpStream) {
        while stream.write_all(b"more").is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
