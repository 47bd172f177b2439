//! A line on the terminal while something takes long: what, and for how many seconds.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::show::{say_shown, shown};

/// What is done sooner than this needs no word.
const LONG: Duration = Duration::from_secs(2);

/// Says what is being done, from two seconds on, until it is dropped. Nothing where the standard error is no terminal.
pub(crate) struct Working(Option<(Sender<()>, JoinHandle<()>)>);

impl Working {
    /// On a file.
    pub(crate) fn on(path: &Path) -> Working {
        let is_plain = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        if is_plain || !std::io::stderr().is_terminal() {
            return Working(None);
        }
        let (sender, done) = channel::<()>();
        let (what, start) = (shown(path), Instant::now());
        let tell = move || {
            let mut wait = LONG;
            while done.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                wait = Duration::from_secs(1);
                say_shown(format!("\r\x1b[K{what}: {} s", start.elapsed().as_secs()).as_bytes());
            }
            if wait < LONG {
                say_shown(b"\r\x1b[K");
            }
        };
        let thread = std::thread::Builder::new().name("working".into()).spawn(tell);
        Working(thread.ok().map(|thread| (sender, thread)))
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.0.take() {
            drop(sender);
            // It only writes.
            let _ = thread.join();
        }
    }
}
