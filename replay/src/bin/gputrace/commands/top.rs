//! `gputrace top`: who holds what on which GPU, now.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use std::io::{IsTerminal, Write};

use clap::{ArgMatches, Args};
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::parts::live::figures::Figures;
use super::parts::live::find::Which;
use super::parts::live::{Drivers, Scene};

mod keys;
mod terminal;
mod view;

#[cfg(test)]
mod tests;

use keys::Next;
use terminal::{Heard, Terminal};
use view::View;

/// Columns of a picture in text, where no terminal and no COLUMNS say otherwise: that of the widest table.
const WIDTH: usize = 160;

pub(super) const VERB: Verb = Verb::new::<TopArgs>("top", run);

/// Show the current GPU memory of recorded processes: owners, PyTorch's allocator, lines, NCCL
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace top                    # q ends it, ? shows the keys
  gputrace top job/               # processes whose traces are in a folder
  gputrace top 4711               # a process and what it started
  gputrace top --once             # one picture as text

`top` reads only the traces that recorders are writing, about a second behind. It never stops, asks or slows the processes. \
Processes that are not recorded appear with the driver's figure.")]
pub(super) struct TopArgs {
    /// Process ID, folder of traces that are being written, or traces [default: all your recordings]
    #[arg(value_name = "PID|DIR|TRACE")]
    which: Vec<PathBuf>,

    /// Show one picture and exit
    #[arg(long)]
    once: bool,

    /// Write JSON, one object per picture; without --once, one per line
    #[arg(long)]
    json: bool,

    /// Seconds between pictures
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.trim_end_matches('s').parse().map_err(|_| "write seconds: 0.5".to_owned())?;
    let is_wise = (0.1..=3600.0).contains(&seconds);
    if is_wise { Ok(Duration::from_secs_f64(seconds)) } else { Err("from 0.1 to 3600 seconds".to_owned()) }
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: TopArgs = super::parsed(matches)?;
    let which = Which::of(&args.which)?;
    let mut scene = Scene::new(which, Drivers::Asked);
    let is_screen = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if is_screen && !args.once && !args.json {
        let terminal = Terminal::take(out)?;
        let result = watch(&mut scene, &terminal, args.interval, out);
        terminal.leave(out)?;
        return result.map(|()| ExitCode::SUCCESS);
    }
    loop {
        scene.catch_up();
        if args.once {
            scene.find_hangs();
        }
        let figures = scene.figures();
        if args.json {
            write_json(&figures, args.once, out)?;
        } else {
            write_text(&figures, out)?;
        }
        if args.once {
            return Ok(ExitCode::SUCCESS);
        }
        out.flush()?;
        std::thread::sleep(args.interval);
    }
}

/// Blocks of a trace that are read between two looks at the keyboard: some tens of milliseconds.
const BLOCKS_AT_ONCE: usize = 64;

/// Shows pictures until the user has seen enough.
fn watch(scene: &mut Scene, terminal: &Terminal, interval: Duration, out: &mut Screen) -> anyhow::Result<()> {
    let has_colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut view = View::default();
    let mut is_behind = scene.advance(BLOCKS_AT_ONCE);
    let mut figures = scene.figures();
    let mut due = Instant::now() + interval;
    loop {
        let (width, height) = Terminal::size();
        terminal.show(&view::frame(&figures, &view, width, Some(height)), has_colours, out)?;
        let patience = if is_behind { Duration::ZERO } else { due.saturating_duration_since(Instant::now()) };
        match terminal.wait(patience)? {
            Heard::End => return Ok(()),
            Heard::StandStill => terminal.stand_still(out)?,
            Heard::Keys(bytes) => {
                for key in keys::keys(&bytes) {
                    match keys::press(&mut view, key, &figures) {
                        Next::Stay => {}
                        Next::StandStill => terminal.stand_still(out)?,
                        Next::End => return Ok(()),
                    }
                }
            }
            Heard::Nothing => {}
        }
        if is_behind || Instant::now() >= due {
            // Also while the picture is frozen: what is read late must be read all the same.
            is_behind = scene.advance(BLOCKS_AT_ONCE);
        }
        if Instant::now() >= due {
            due = Instant::now() + interval;
            let now = scene.figures();
            if !view.is_frozen {
                figures = now;
            }
        }
    }
}

/// Spread out for people who look at one, a line each for programs that read many.
fn write_json(figures: &Figures, is_one: bool, out: &mut Screen) -> anyhow::Result<()> {
    let mut out = out.json();
    if is_one {
        serde_json::to_writer_pretty(&mut out, figures)?;
    } else {
        serde_json::to_writer(&mut out, figures)?;
    }
    writeln!(out)?;
    Ok(())
}

fn write_text(figures: &Figures, out: &mut Screen) -> anyhow::Result<()> {
    let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    for line in view::frame(figures, &View::default(), columns.unwrap_or(WIDTH).max(60), None) {
        writeln!(out, "{}", line.text())?;
    }
    Ok(())
}
