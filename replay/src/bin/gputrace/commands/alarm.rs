//! `gputrace alarm`: what `gputrace record --alert` starts beside its program, to look at the traces while they are written.

use std::ffi::OsString;
use std::process::{Command, ExitCode, Stdio};
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
/// How long recorders may take to finish when the program has ended.
const ENDING: Duration = Duration::from_secs(12);

/// Watches the traces of a recorded program for conditions; started by gputrace record
#[derive(Args)]
#[command(hide = true)]
pub(super) struct AlarmArgs {
    /// When the job began
    #[arg(long)]
    began: String,
    /// A condition
    #[arg(long)]
    alert: Vec<Alert>,
    /// What to run when one comes true
    #[arg(long)]
    on_alert: Option<OsString>,
    /// Do it as nobody's child
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
    let mut ended: Option<Instant> = None;
    loop {
        let has_ended = launch::has_ended_by(STEP)?;
        while scene.advance(1024) {}
        let figures = scene.figures();
        for crossing in judge.judge(&figures, |process| scene.growth(&process.trace)) {
            tell(&crossing, args.on_alert.as_ref());
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
        complain!("{}: could not be judged, as nothing of it was known of any process", never.join(", "));
    }
    Ok(ExitCode::SUCCESS)
}

/// Says it, and runs the user's command, whose end nobody waits for.
fn tell(crossing: &Crossing, command: Option<&OsString>) {
    let device = crossing.device.map(|device| format!(" on cuda:{device}")).unwrap_or_default();
    let Crossing { alert, value, pid, trace, .. } = crossing;
    let Some(command) = command else {
        return complain!("alert {alert}: {value}{device}, process {pid}, {trace}");
    };
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command).stdin(Stdio::null()).stdout(Stdio::null());
    shell
        .env("ALERT", alert)
        .env("ALERT_VALUE", value)
        .env("ALERT_PID", pid.to_string())
        .env("ALERT_TRACE", trace);
    shell.env("ALERT_RANK", crossing.rank.map(|rank| rank.to_string()).unwrap_or_default());
    shell.env("ALERT_DEVICE", crossing.device.map(|device| device.to_string()).unwrap_or_default());
    match shell.spawn() {
        // It is waited for elsewhere, so that a slow one keeps nothing up and none is left as a zombie.
        Ok(mut child) => drop(std::thread::spawn(move || child.wait())),
        Err(error) => complain!("alert {alert}: {value}, and the command cannot be run: {error}"),
    }
}
