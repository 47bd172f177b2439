//! `gputrace serve`: the page of `html`, and behind it the traces themselves, for the browser of whoever started it.
//!
//! ```text
//! browser ── /SECRET/ ─────────────> the page, made once
//!         ── /SECRET/details?... ──> a thread ──> another, which has an index of the trace that was asked about last
//!         ── /SECRET/who?... ──────> the same, which reads the trace again
//! ```
//! The index is a file without a name that nobody else can open: what changed when, and what lay where. It is made while the page is, or
//! where there are several traces when one is first asked about. Where it cannot be, a trace is read again for each answer.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

use anyhow::Context;
use clap::{ArgMatches, Args};
use gputrace_replay::answers::who::Who;
use gputrace_replay::page::{Chapter, Store, section as section_for_page};
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::html::{Understood, chapter, page};
use crate::http::{Answer, Refusal, Request, Server, Ticket, Waker};
use crate::show::{self, TraceArgs, complain};

mod door;

use door::Door;

pub(super) const VERB: Verb = Verb::new::<ServeArgs>("serve", run).of_replays();

/// Questions that wait while one is answered.
const MOST_WAITING: usize = 8;

/// Serve the page of `html` on this machine, with full detail of any part of a trace
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace serve train.gtr          # prints an address for your browser; Ctrl-C ends it
  gputrace serve job/ --port 8080   # from another machine: ssh -L 8080:127.0.0.1:8080 HOST

Only programs on this machine can reach the page, and only with the secret in its address. It needs no more memory than \
`gputrace html`, and an unnamed file in TMPDIR with about 32 bytes per event.")]
pub(super) struct ServeArgs {
    #[command(flatten)]
    traces: TraceArgs,

    /// Port of 127.0.0.1 [default: any free port]
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    port: u16,

    /// Hide paths, arguments, host names and machine identifiers
    #[arg(long)]
    redact: bool,
}

/// What a page asks about a trace.
struct Question {
    /// Who waits for the answer.
    ticket: Ticket,
    trace: usize,
    wanted: Wanted,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wanted {
    /// All of a part, in nanoseconds since the trace began.
    Part((u64, u64)),
    /// Who had an address.
    Owners(u64),
}

impl Wanted {
    fn content_type(self) -> &'static str {
        match self {
            Wanted::Part(_) => "application/octet-stream",
            Wanted::Owners(_) => "application/json",
        }
    }
}

/// What the page is given; `None` where it cannot be.
type Given = (Ticket, &'static str, Option<Vec<u8>>);

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ServeArgs = super::parsed(matches)?;
    let paths = args.traces.paths()?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port))
        .with_context(|| format!("cannot listen at 127.0.0.1:{}", args.port))?;
    let door = Door::new(listener.local_addr()?.port()).context("cannot create a secret")?;
    let n_traces = paths.len();
    // Where there is one trace it is the next that is asked about.
    let store = || {
        if n_traces == 1 { Index::make().ok().map(|index| Box::new(index) as Box<dyn Store>) } else { None }
    };
    let (read, _) = show::read_all(&paths, |path| {
        chapter(path, args.redact, n_traces, store()).map(|it| (path.to_owned(), it))
    });
    if read.is_empty() {
        return Ok(ExitCode::from(2));
    }
    let (served, read): (Vec<PathBuf>, Vec<Understood>) = read.into_iter().unzip();
    let mut page = page(read, args.redact);
    let html = page.served().context("cannot create the page")?;
    let first = page.into_chapters().pop().filter(|_| served.len() == 1);
    let first = first.filter(|chapter| chapter.is_indexed().unwrap_or(false));
    std::io::Write::write_fmt(out, format_args!("{}\n", door.address()))?;
    std::io::Write::flush(out)?;
    complain!("open this address in a browser on this machine; Ctrl-C ends it");
    let server = Server::new(listener).context("cannot listen")?;
    let (ask, asked) = sync_channel(MOST_WAITING);
    let (reply, replies) = channel();
    let answers = Answers { reply, waker: server.waker()? };
    let visit = Visit { door, html: Arc::new(html), ask };
    std::thread::Builder::new().name("door".into()).spawn(move || keep_door(server, &visit, &replies))?;
    explain(&served, first, args.redact, &asked, &answers);
    Ok(ExitCode::SUCCESS)
}

/// What every visitor is shown.
struct Visit {
    door: Door,
    html: Arc<Vec<u8>>,
    ask: SyncSender<Question>,
}

/// Where answers to questions go.
struct Answers {
    reply: Sender<Given>,
    waker: Waker,
}

impl Answers {
    fn send(&self, question: &Question, given: Option<Vec<u8>>) {
        let _ = self.reply.send((question.ticket, question.wanted.content_type(), given));
        self.waker.wake();
    }
}

/// Answers requests, and sends on what is answered later.
fn keep_door(mut server: Server, visit: &Visit, replies: &Receiver<Given>) {
    loop {
        let turned =
            server.turn(Duration::from_secs(60), &mut |ticket, request| visit.receive(ticket, request));
        if let Err(error) = turned {
            complain!("cannot wait for requests: {error}");
            std::thread::sleep(Duration::from_secs(1));
        }
        for (ticket, content_type, given) in replies.try_iter() {
            let answer = match given {
                Some(given) => Answer::of(content_type, Arc::new(given)),
                None => Refusal::Unknown.into(),
            };
            server.reply(ticket, &answer);
        }
    }
}

impl Visit {
    fn receive(&self, ticket: Ticket, request: &Request) -> Option<Answer> {
        match self.door.asked(request) {
            Ok("") => Some(Answer::of("text/html; charset=utf-8", self.html.clone())),
            Ok(path) => match wanted(path) {
                Some((trace, wanted)) => {
                    let asked = self.ask.try_send(Question { ticket, trace, wanted });
                    asked.is_err().then(|| Refusal::Busy.into())
                }
                None => Some(Refusal::Unknown.into()),
            },
            Err(refusal) => Some(refusal.into()),
        }
    }
}

/// `details?trace=0&from=100&to=200` or `who?trace=0&address=7f5c40000200`, and nothing else.
fn wanted(path: &str) -> Option<(usize, Wanted)> {
    let (verb, question) = path.split_once('?')?;
    let mut words = question.split('&');
    let mut number = |name: &str, radix: u32| -> Option<u64> {
        let digits = words.next()?.strip_prefix(name)?.strip_prefix('=')?;
        let is_number = digits.bytes().all(|digit| char::from(digit).is_digit(radix));
        is_number.then(|| u64::from_str_radix(digits, radix).ok())?
    };
    let trace = usize::try_from(number("trace", 10)?).ok()?;
    let wanted = match verb {
        "details" => Wanted::Part((number("from", 10)?, number("to", 10)?)),
        "who" => Wanted::Owners(number("address", 16)?),
        _ => return None,
    };
    let is_backwards = matches!(wanted, Wanted::Part((from, to)) if from > to);
    (words.next().is_none() && !is_backwards).then_some((trace, wanted))
}

/// Every owner of an address, as the page shows sections.
fn owners(path: &Path, is_redacted: bool, address: u64) -> anyhow::Result<Vec<u8>> {
    let source = super::html::open(path, is_redacted)?;
    let section = Who::of(&source, address).section(source.definitions());
    Ok(section_for_page(&section).to_string().into_bytes())
}

/// A file without a name.
struct Index(File);

impl Index {
    fn make() -> io::Result<Index> {
        let folder = std::env::temp_dir();
        for n in 0..100 {
            let path = folder.join(format!("gputrace-serve.{}.{n}", std::process::id()));
            match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => {
                    std::fs::remove_file(&path)?;
                    return Ok(Index(file));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }
}

impl Store for Index {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.0.read_exact_at(bytes, at)
    }
}

/// What answers come from.
enum Known {
    Indexed(Box<Chapter>),
    /// Its books, not its events: these are read again.
    Read(Box<(Source, Story)>),
}

impl Known {
    fn of(path: &Path, is_redacted: bool) -> anyhow::Result<Known> {
        let source = super::html::open(path, is_redacted)?;
        let story =
            Story::with_lifetimes(&source, &gputrace_replay::analyse::categories::Categories::default());
        let indexed = Index::make().and_then(|index| Chapter::indexed(&story, &source, Box::new(index)));
        Ok(match indexed {
            Ok(chapter) => Known::Indexed(Box::new(chapter)),
            Err(error) => {
                let folder = std::env::temp_dir();
                complain!(
                    "cannot keep an index in {} ({error}): the trace is read again for each answer; TMPDIR=FOLDER names another",
                    folder.display()
                );
                Known::Read(Box::new((source, story)))
            }
        })
    }

    fn part(&self, part: (u64, u64)) -> io::Result<Vec<u8>> {
        match self {
            Known::Indexed(chapter) => chapter.part(part),
            Known::Read(read) => Chapter::detail(&read.1, &read.0, part),
        }
    }
}

/// Answers questions, one after the other.
fn explain(
    paths: &[PathBuf],
    first: Option<Chapter>,
    is_redacted: bool,
    asked: &Receiver<Question>,
    answers: &Answers,
) {
    // The trace that was asked about last.
    let mut last = first.map(|chapter| (0, Known::Indexed(Box::new(chapter))));
    // Where there is one trace, somebody looks at the page while this is made.
    if let ([only], None) = (paths, &last) {
        last = Known::of(only, is_redacted).ok().map(|known| (0, known));
    }
    while let Ok(question) = asked.recv() {
        let Some(path) = paths.get(question.trace) else {
            answers.send(&question, None);
            continue;
        };
        let part = match question.wanted {
            Wanted::Part(part) => part,
            Wanted::Owners(address) => {
                let found = owners(path, is_redacted, address);
                let found = found.map_err(|error| complain!("{}: {error:#}", path.display()));
                answers.send(&question, found.ok());
                continue;
            }
        };
        if last.as_ref().is_none_or(|(trace, _)| *trace != question.trace) {
            last = None;
            match Known::of(path, is_redacted) {
                Ok(known) => last = Some((question.trace, known)),
                Err(error) => complain!("{error:#}"),
            }
        }
        let details = last.as_ref().map(|(_, known)| known.part(part));
        if let Some(Err(error)) = &details {
            complain!("{}: {error}", path.display());
            last = None;
        }
        answers.send(&question, details.and_then(Result::ok));
    }
}

#[cfg(test)]
mod tests {
    use super::{Wanted, wanted};

    #[test]
    fn only_what_the_page_asks_is_a_question() {
        assert_eq!(wanted("details?trace=1&from=2&to=30"), Some((1, Wanted::Part((2, 30)))));
        assert_eq!(wanted("who?trace=0&address=7f5c40000200"), Some((0, Wanted::Owners(0x7f5c_4000_0200))));
        for wrong in [
            "",
            "details",
            "details?trace=1&from=2",
            "details?trace=1&from=30&to=2",
            "details?trace=1&from=2&to=30&to=4",
            "details?trace=-1&from=2&to=30",
            "details?trace=+1&from=2&to=30",
            "details?from=2&to=30&trace=1",
            "details?trace=1&from=2&to=99999999999999999999999",
            "who?trace=0",
            "who?trace=0&address=",
            "who?trace=0&address=0x7f",
            "who?trace=0&address=7f&to=1",
            "who?trace=0&address=12345678901234567",
            "../../etc/passwd",
            "details/../?trace=1&from=2&to=30",
        ] {
            assert_eq!(wanted(wrong), None, "{wrong}");
        }
    }
}
