//! One door: what is gathered in one pass is what is gathered alone, of every kind of trace, and is read once.

use std::path::{Path, PathBuf};

use gputrace_schemas::event::{Event, Nanos};
use gputrace_trace::import::{self, Requests};
use gputrace_trace::ledger::{Ledger, Unwatched, Watch};
use gputrace_trace::source::Source;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn traces(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => traces(&path, found),
            false if path.extension().is_some_and(|it| it == "gtr" || it == "gz") => found.push(path),
            false => {}
        }
    }
}

/// How often it began, and how many events it saw.
#[derive(Default)]
struct Counter {
    passes: u64,
    events: u64,
}

impl Watch for Counter {
    fn begin(&mut self, _ledger: &mut Ledger) {
        self.passes += 1;
        self.events = 0;
    }

    fn event(&mut self, _ledger: &mut Ledger, _event: &Event) {
        self.events += 1;
    }
}

#[test]
fn requests_gathered_with_the_books_are_those_gathered_alone_and_the_books_are_the_same() {
    let mut found = vec![];
    traces(&golden(), &mut found);
    assert!(found.len() > 40, "{}", found.len());
    for path in found {
        let (together, alone) =
            (Source::open(&path).expect("a trace"), Source::open(&path).expect("a trace"));
        let mut counter = Counter::default();
        let books = together.books_and_requests(&mut counter);
        let plain = alone.books((Nanos(0), Nanos(u64::MAX)), &mut Unwatched);
        let shown = |of: &Source| format!("{:?}", of.requests().expect("requests"));
        let name = path.display();
        assert_eq!(shown(&together), shown(&alone), "{name}");
        assert_eq!(shown(&together), format!("{:?}", import::load(&path).expect("requests")), "{name}");
        assert_eq!((counter.passes, counter.events), (1, plain.run.n_events), "{name}");
        assert_eq!(format!("{:?}", books.devices()), format!("{:?}", plain.devices()), "{name}");
        assert_eq!(format!("{:?}", books.training()), format!("{:?}", plain.training()), "{name}");
    }
}

#[test]
fn requests_are_read_once_and_a_file_that_is_gone_meanwhile_does_not_matter() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("one-door");
    std::fs::create_dir_all(&folder).expect("a folder");
    for name in ["kept-losses.gtr", "snapshots/pinned-2.15.pickle.gz"] {
        let copy = folder.join(Path::new(name).file_name().expect("a name"));
        std::fs::copy(golden().join(name), &copy).expect("a copy");
        let source = Source::open(&copy).expect("a trace");
        // An open trace is read on; nothing is opened by its name again.
        std::fs::remove_file(&copy).expect("it is there");
        let first = source.requests().expect("requests");
        assert!(std::ptr::eq(first, source.requests().expect("requests")), "{name}");
        assert!(!first.devices.is_empty(), "{name}");
    }
}
