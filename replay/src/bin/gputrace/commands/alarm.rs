//! `gputrace alarm`: what `gputrace record --alert` starts beside its program, to look at the traces while they are written.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::process::{Child, ChildStderr, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{ArgMatches, Args};
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::parts::live::alert::{Alert, Crossing, Judge};
use super::parts::live::find::Which;
use super::parts::live::{Drivers, Scene};
use super::record::launch;
use crate::show::complain;

pub(super) const VERB: Verb = Verb::new::<AlarmArgs>(NAME, run);
const NAME: &str = "alarm";
/// Between two looks.
const STEP: Duration = Duration::from_millis(250);
/// Commands that run at once. One that does not end is no reason to start ever more of it.
const MOST_COMMANDS: usize = 16;
/// Bytes that are kept of what a command says.
const LONGEST_WORDS: usize = 1000;
/// What a command has started in turn may write for longer than it runs itself.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long commands may take when all has ended, before nobody hears of how they ended.
const GRACE: Duration = Duration::from_secs(1);
/// How long recorders may take to finish when the program has ended.
const ENDING: Duration = Duration::from_secs(12);

/// Watch the traces of a recorded program for conditions; started by gputrace record
#[derive(Args)]
#[command(hide = true)]
pub(super) struct AlarmArgs {
    /// Start of the job
    #[arg(long)]
    began: String,
    /// Condition
    #[arg(long)]
    alert: Vec<Alert>,
    /// Command to run when a condition becomes true
    #[arg(long)]
    on_alert: Option<OsString>,
    /// Run without a parent
    #[arg(long)]
    detach: bool,
}

impl AlarmArgs {
    fn words(&self) -> Vec<OsString> {
        let mut words = vec![OsString::from(NAME), format!("--began={}", self.began).into()];
        words.extend(self.alert.iter().map(|alert| format!("--alert={}", alert.text).into()));
        words.extend(self.on_alert.as_ref().map(|command| {
            let mut word = OsString::from("--on-alert=");
            word.push(command);
            word
        }));
        words
    }
}

/// Starts one for this process, whatever program it is by then.
///
/// # Errors
/// It cannot be started.
pub(super) fn start(began: &str, alerts: &[Alert], command: Option<&OsString>) -> anyhow::Result<()> {
    let (alert, on_alert) = (alerts.to_vec(), command.cloned());
    launch::start_witness(&AlarmArgs { began: began.to_owned(), alert, on_alert, detach: true }.words())
}

fn run(matches: &ArgMatches, _out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: AlarmArgs = super::parsed(matches)?;
    if args.detach {
        launch::detach(&args.words())?;
        return Ok(ExitCode::SUCCESS);
    }
    // What is sent to the job is for the program.
    let _ = rustix::process::setsid();
    let mut judge = Judge::new(args.alert);
    let mut scene = Scene::new(Which::Job(args.began), Drivers::NotAsked);
    if judge.wants_growth() {
        scene.watch_growth();
    }
    let mut commands = Commands { command: args.on_alert, running: Arc::default(), has_said: false };
    let mut ended: Option<Instant> = None;
    loop {
        let has_ended = launch::has_ended_by(STEP)?;
        while scene.advance(1024) {}
        let figures = scene.figures();
        for crossing in judge.judge(&figures, |process| scene.growth(&process.trace)) {
            commands.tell(&crossing);
        }
        if !has_ended {
            continue;
        }
        let since = *ended.get_or_insert_with(Instant::now);
        let runs_on = figures.processes.iter().any(|process| !process.has_ended());
        // Processes that the program left behind are watched as long as they are recorded.
        if !runs_on && (since.elapsed() > ENDING || !figures.processes.is_empty()) {
            break;
        }
        if figures.processes.is_empty() && since.elapsed() > ENDING / 6 {
            break;
        }
        std::thread::sleep(STEP);
    }
    let never: Vec<&str> = judge.never_judged().collect();
    if !never.is_empty() && scene.lives().next().is_some() {
        complain!(
            "{}: could not be evaluated, because its values were not known for any process",
            never.join(", ")
        );
    }
    commands.wait();
    Ok(ExitCode::SUCCESS)
}

/// The user's command, as often as it was run.
struct Commands {
    command: Option<OsString>,
    running: Arc<AtomicUsize>,
    /// That there are too many of them.
    has_said: bool,
}

impl Commands {
    /// Says it, or runs the command, whose end keeps nothing up.
    fn tell(&mut self, crossing: &Crossing) {
        let device = crossing.device.map(|device| format!(" on cuda:{device}")).unwrap_or_default();
        let Crossing { alert, value, pid, trace, .. } = crossing;
        let Some(command) = &self.command else {
            return complain!("alert {alert}: {value}{device}, process {pid}, {trace}");
        };
        let n = self.running.load(Ordering::Acquire);
        if n >= MOST_COMMANDS {
            if !std::mem::replace(&mut self.has_said, true) {
                complain!(
                    "alert {alert}: {value}{device}, process {pid}: {n} alert commands are still running; no more start until some have ended"
                );
            }
            return;
        }
        self.has_said = false;
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(command).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        shell
            .env("ALERT", alert)
            .env("ALERT_VALUE", value)
            .env("ALERT_PID", pid.to_string())
            .env("ALERT_TRACE", trace);
        shell.env("ALERT_RANK", crossing.rank.map(|rank| rank.to_string()).unwrap_or_default());
        shell.env("ALERT_DEVICE", crossing.device.map(|device| device.to_string()).unwrap_or_default());
        match shell.spawn() {
            Ok(child) => {
                self.running.fetch_add(1, Ordering::Release);
                let (alert, running) = (alert.clone(), Arc::clone(&self.running));
                std::thread::spawn(move || {
                    attend(&alert, child);
                    running.fetch_sub(1, Ordering::Release);
                });
            }
            Err(error) => complain!("alert {alert}: {value}, and the command cannot be run: {error}"),
        }
    }

    /// Until all have ended. Whoever reads what this job writes is not kept waiting by one that does not end.
    fn wait(&self) {
        let is_done = || self.running.load(Ordering::Acquire) == 0;
        let since = Instant::now();
        while !is_done() && since.elapsed() < GRACE {
            std::thread::sleep(STEP / 10);
        }
        if is_done() {
            return;
        }
        if let Ok(nowhere) = File::options().write(true).open("/dev/null") {
            let _ = rustix::stdio::dup2_stdout(&nowhere);
            let _ = rustix::stdio::dup2_stderr(&nowhere);
        }
        while !is_done() {
            std::thread::sleep(STEP);
        }
    }
}

/// Waits for a command; says what it says, and that it failed.
fn attend(alert: &str, mut child: Child) {
    let words: Arc<Mutex<Vec<u8>>> = Arc::default();
    let (has_heard, heard) = channel();
    if let Some(said) = child.stderr.take() {
        let words = Arc::clone(&words);
        std::thread::spawn(move || {
            listen(said, &words);
            has_heard.send(())
        });
    }
    let ended = child.wait();
    // What it wrote last is on its way.
    let _ = heard.recv_timeout(LAST_WORDS);
    let words = words.lock().unwrap_or_else(PoisonError::into_inner);
    let words = String::from_utf8_lossy(&words).trim().replace('\n', "; ");
    match ended {
        Ok(status) if status.success() && words.is_empty() => {}
        Ok(status) if status.success() => complain!("alert {alert}: its command printed: {words}"),
        Ok(status) if words.is_empty() => complain!("alert {alert}: its command failed ({status})"),
        Ok(status) => complain!("alert {alert}: its command failed ({status}): {words}"),
        Err(error) => complain!("alert {alert}: its command cannot be waited for: {error}"),
    }
}

/// Reads all of it, and keeps the beginning.
fn listen(mut said: ChildStderr, words: &Mutex<Vec<u8>>) {
    let mut buffer = [0; 4096];
    while let Ok(n @ 1..) = said.read(&mut buffer) {
        let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
        let room = LONGEST_WORDS.saturating_sub(words.len()).min(n);
        words.extend_from_slice(&buffer[..room]);
    }
}
