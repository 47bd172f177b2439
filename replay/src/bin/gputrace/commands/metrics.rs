//! `gputrace metrics`: the figures of `gputrace top` for Prometheus, OpenTelemetry, Pyroscope and Parca.

use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{ArgMatches, Args};
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::parts::live::find::Which;
use super::parts::live::{Drivers, Scene};
use crate::show::complain;

mod families;
mod http;
mod openmetrics;
mod otlp;
mod push;
mod server;

use push::Push;
use server::Server;

pub(super) const VERB: Verb = Verb::new::<MetricsArgs>("metrics", run);

/// Where Prometheus looks, if nobody says otherwise: the port of OpenTelemetry's exporters.
const LISTEN: &str = "127.0.0.1:9464";
/// How often it is looked what has come into the traces.
const STEP: Duration = Duration::from_millis(500);

/// Serves who holds what on which GPU to Prometheus, and pushes it to OpenTelemetry, Pyroscope and Parca
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace metrics                                      # http://127.0.0.1:9464/metrics, of all that you are recording
  gputrace metrics --listen 0.0.0.0:9464 job/           # for others too: anybody who reaches the port can read it
  gputrace metrics --push pprof http://pyroscope:4040   # profiles of what is held, every 15 seconds
  gputrace metrics --push otlp http://collector:4318 --every 60
  gputrace metrics --once                               # the text, once

Names and labels are those of DCGM's exporter (DCGM_FI_DEV_FB_USED), OpenTelemetry's (hw_gpu_memory_usage_bytes) and our own \
(gputrace_*); docs/LIVE.md lists them. The traced processes are not touched: see `gputrace top --help`.")]
pub(super) struct MetricsArgs {
    /// A process by its number, a folder of traces that are being written, or traces [default: all of this user's]
    #[arg(value_name = "PID|DIR|TRACE")]
    which: Vec<PathBuf>,

    /// Address to serve /metrics at [default: 127.0.0.1:9464, where nothing is pushed]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,

    /// Push profiles (pprof: Pyroscope, or Parca where the URL ends in /profiles/writeraw) or metrics (otlp); plain http:// only
    #[arg(long, num_args = 2, value_names = ["pprof|otlp", "URL"], action = clap::ArgAction::Append)]
    push: Vec<String>,

    /// Seconds between two pushes
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    every: u64,

    /// Write the metrics, or push once, and end
    #[arg(long)]
    once: bool,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: MetricsArgs = super::parsed(matches)?;
    let which = Which::of(&args.which)?;
    let pushes = args.push.chunks(2).map(Push::parse).collect::<anyhow::Result<Vec<Push>>>()?;
    let mut scene = Scene::new(which, Drivers::Asked);
    if args.once {
        scene.catch_up();
        for push in &pushes {
            push.send(&mut scene)?;
        }
        if pushes.is_empty() {
            write!(out, "{}", openmetrics::text(&families::of(&scene.figures())))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let asked = args.listen.as_deref().or(pushes.is_empty().then_some(LISTEN));
    let server = asked.map(listen).transpose()?;
    if let Some(server) = &server {
        writeln!(out, "http://{}/metrics", server.address())?;
        out.flush()?;
    }
    serve(&mut scene, server.as_ref(), &pushes, Duration::from_secs(args.every))
}

fn listen(asked: &str) -> anyhow::Result<Server> {
    let addresses =
        asked.to_socket_addrs().with_context(|| format!("--listen {asked}: write ADDRESS:PORT"))?;
    let addresses: Vec<SocketAddr> = addresses.collect();
    if addresses.iter().any(|address| !address.ip().is_loopback()) {
        complain!(
            "{asked} is not this machine alone: whoever reaches it can read names of programs, call sites' owners and sizes"
        );
    }
    Server::bind(&addresses).with_context(|| format!("cannot listen at {asked}"))
}

/// Until it is ended.
fn serve(
    scene: &mut Scene,
    server: Option<&Server>,
    pushes: &[Push],
    every: Duration,
) -> anyhow::Result<ExitCode> {
    let mut due = Instant::now() + every.min(STEP);
    let mut failed: Vec<Option<String>> = vec![None; pushes.len()];
    loop {
        let is_behind = scene.advance(256);
        let patience = if is_behind { Duration::ZERO } else { STEP };
        match server {
            Some(server) => server.answer(patience, || openmetrics::text(&families::of(&scene.figures())))?,
            None => std::thread::sleep(patience),
        }
        if Instant::now() < due {
            continue;
        }
        due = Instant::now() + every;
        for (push, failed) in pushes.iter().zip(&mut failed) {
            let error = push.send(scene).err().map(|error| format!("{error:#}"));
            // Once for each way in which it fails; the next one may not.
            if let Some(error) = error.as_ref().filter(|_| error != *failed) {
                complain!("{error}");
            }
            *failed = error;
        }
    }
}
