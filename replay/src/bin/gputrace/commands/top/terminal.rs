//! The terminal while a picture is on it: its own screen, keys as they are pressed, and everything as before at the end.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gputrace_schemas::printable::Screen;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::low_level::emulate_default_handler;

use super::view::{Line, Look};
use crate::show::{paint, say_shown};

/// The terminal's other screen, without a cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

pub(super) struct Terminal {
    before: Termios,
    asked_to_end: Arc<AtomicBool>,
    asked_to_stand_still: Arc<AtomicBool>,
}

/// What became of waiting.
pub(super) enum Heard {
    Keys(Vec<u8>),
    /// Nothing, or the window has another size.
    Nothing,
    /// Somebody asked us to stand still.
    StandStill,
    /// Somebody asked us to end, or the terminal is gone.
    End,
}

impl Terminal {
    /// Takes the terminal of the standard input over.
    pub(super) fn take(out: &mut Screen) -> io::Result<Terminal> {
        let asked_to_end = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&asked_to_end))?;
        }
        let asked_to_stand_still = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGTSTP, Arc::clone(&asked_to_stand_still))?;
        // Caught, it ends a wait for keys.
        signal_hook::flag::register(SIGWINCH, Arc::default())?;
        let before = tcgetattr(io::stdin())?;
        // What a fault of ours says must be read on the terminal as it was.
        let (told, at_fault) = (std::panic::take_hook(), before.clone());
        std::panic::set_hook(Box::new(move |panic| {
            say_shown(LEAVE.as_bytes());
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &at_fault);
            told(panic);
        }));
        let terminal = Terminal { before, asked_to_end, asked_to_stand_still };
        terminal.enter(out)?;
        Ok(terminal)
    }

    fn enter(&self, out: &mut Screen) -> io::Result<()> {
        let mut raw = self.before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        paint(out, ENTER)
    }

    /// Gives it back as it was.
    pub(super) fn leave(&self, out: &mut Screen) -> io::Result<()> {
        paint(out, LEAVE)?;
        tcsetattr(io::stdin(), OptionalActions::Now, &self.before)?;
        Ok(())
    }

    /// Gives the terminal back while the program stands still, as Ctrl-Z asks, and takes it again when it goes on.
    pub(super) fn stand_still(&self, out: &mut Screen) -> io::Result<()> {
        self.leave(out)?;
        emulate_default_handler(SIGTSTP)?;
        self.enter(out)
    }

    /// Columns and rows.
    pub(super) fn size() -> (usize, usize) {
        let size = terminal_size::terminal_size_of(io::stdin());
        size.map_or((80, 24), |(width, height)| (usize::from(width.0).max(20), usize::from(height.0).max(3)))
    }

    /// Shows a picture in the place of the one before.
    pub(super) fn show(&self, lines: &[Line], has_colours: bool, out: &mut Screen) -> io::Result<()> {
        let mut picture = String::from("\x1b[H");
        for (n, line) in lines.iter().enumerate() {
            if n > 0 {
                picture.push_str("\r\n");
            }
            for (text, look) in &line.0 {
                let code = code(*look, has_colours);
                picture.push_str(code);
                picture.push_str(text);
                if !code.is_empty() {
                    picture.push_str("\x1b[0m");
                }
            }
            picture.push_str("\x1b[K");
        }
        picture.push_str("\x1b[J");
        paint(out, &picture)
    }

    /// Waits for keys, so long at most.
    pub(super) fn wait(&self, patience: Duration) -> io::Result<Heard> {
        if self.asked_to_end.load(Ordering::Relaxed) {
            return Ok(Heard::End);
        }
        if self.asked_to_stand_still.swap(false, Ordering::Relaxed) {
            return Ok(Heard::StandStill);
        }
        let input = io::stdin();
        let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
        match poll(&mut [PollFd::from_borrowed_fd(input.as_fd(), PollFlags::IN)], Some(&patience)) {
            Err(rustix::io::Errno::INTR) | Ok(0) => return Ok(Heard::Nothing),
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        let mut bytes = [0; 256];
        match rustix::io::read(&input, &mut bytes) {
            Ok(0) | Err(rustix::io::Errno::IO) => Ok(Heard::End),
            Ok(n) => Ok(Heard::Keys(bytes[..n].to_vec())),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Ok(Heard::Nothing),
            Err(error) => Err(error.into()),
        }
    }
}

/// Colours that differ for people who see no difference of red and green too (Okabe and Ito), of the 256 of terminals.
fn code(look: Look, has_colours: bool) -> &'static str {
    match look {
        Look::Plain => "",
        Look::Bold => "\x1b[1m",
        Look::Dim => "\x1b[2m",
        Look::Chosen => "\x1b[7m",
        Look::Warning if has_colours => "\x1b[33m",
        Look::Warning => "\x1b[1m",
        Look::Part(_) if !has_colours => "",
        Look::Part(part) => [
            "\x1b[38;5;32m",
            "\x1b[38;5;214m",
            "\x1b[38;5;36m",
            "\x1b[38;5;175m",
            "\x1b[38;5;227m",
            "\x1b[38;5;166m",
            "\x1b[38;5;75m",
            "\x1b[38;5;246m",
        ][part % 8],
    }
}
