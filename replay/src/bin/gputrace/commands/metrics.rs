//! `gputrace metrics`: the figures of `gputrace top` for Prometheus, OpenTelemetry, Pyroscope and Parca.

use std::cell::OnceCell;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use clap::{ArgMatches, Args};
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::parts::live::find::Which;
use super::parts::live::{Drivers, Scene};
use crate::http::{Answer, Guard, Host, Refusal, Request, Server, host};
use crate::show::complain;

mod client;
mod families;
mod openmetrics;
mod otlp;
mod push;

use push::{Push, Pusher};

pub(super) const VERB: Verb = Verb::new::<MetricsArgs>("metrics", run);

/// Where Prometheus looks, if nobody says otherwise: the port of OpenTelemetry's exporters.
const LISTEN: &str = "127.0.0.1:9464";
/// How often it is looked what has come into the traces.
const STEP: Duration = Duration::from_millis(500);

/// Serve current GPU memory to Prometheus, and push it to OpenTelemetry, Pyroscope and Parca
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace metrics                                      # http://127.0.0.1:9464/metrics
  gputrace metrics --listen 0.0.0.0:9464 job/           # readable by anyone who reaches the port
  gputrace metrics --listen 0.0.0.0:9464 --host trainer # if Prometheus calls this machine trainer
  gputrace metrics --push pprof http://pyroscope:4040   # profiles, every 15 seconds
  gputrace metrics --push otlp http://collector:4318 --every 60
  gputrace metrics --once                               # text, once

docs/LIVE.md lists the metrics: DCGM's (DCGM_FI_DEV_FB_USED), OpenTelemetry's (hw_gpu_memory_usage_bytes) and our own \
(gputrace_*). Requests must name this machine as their host: an address, localhost, its host name, or a --host name. Like `top`, \
`metrics` does not touch the processes.")]
pub(super) struct MetricsArgs {
    /// Process ID, folder of traces that are being written, or traces [default: all your recordings]
    #[arg(value_name = "PID|DIR|TRACE")]
    which: Vec<PathBuf>,

    /// Address to serve /metrics at [default: 127.0.0.1:9464, or none with --push]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,

    /// Another name that scrapers use for this machine (repeatable)
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,

    /// Push profiles (pprof: Pyroscope, or Parca if the URL ends in /profiles/writeraw) or metrics (otlp), over http:// only
    #[arg(long, num_args = 2, value_names = ["pprof|otlp", "URL"], action = clap::ArgAction::Append)]
    push: Vec<String>,

    /// Seconds between pushes
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    every: u64,

    /// Write the metrics, or push, once and exit
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
    let mut server = asked.map(|asked| Scraped::listen(asked, args.host)).transpose()?;
    if let Some(server) = &server {
        writeln!(out, "http://{}/metrics", server.server.address()?)?;
        out.flush()?;
    }
    let pushers = pushes.into_iter().map(Pusher::start).collect::<anyhow::Result<Vec<Pusher>>>()?;
    serve(&mut scene, server.as_mut(), pushers, Duration::from_secs(args.every))
}

/// Until it is ended.
fn serve(
    scene: &mut Scene,
    mut server: Option<&mut Scraped>,
    mut pushers: Vec<Pusher>,
    every: Duration,
) -> anyhow::Result<ExitCode> {
    let mut due = Instant::now() + every.min(STEP);
    loop {
        let is_behind = scene.advance(256);
        let patience = if is_behind { Duration::ZERO } else { STEP };
        match &mut server {
            Some(server) => server.turn(patience, scene)?,
            None => std::thread::sleep(patience),
        }
        if Instant::now() >= due {
            due = Instant::now() + every;
            pushers.iter_mut().for_each(|pusher| pusher.push(scene));
        }
    }
}

/// What Prometheus asks.
struct Scraped {
    server: Server,
    guard: Guard,
    /// Names that requests were refused for, which are reported once each.
    strangers: Vec<String>,
}

/// Names that are reported: anybody can make up more.
const MOST_STRANGERS: usize = 8;

impl Scraped {
    fn listen(asked: &str, mut names: Vec<String>) -> anyhow::Result<Scraped> {
        let addresses =
            asked.to_socket_addrs().map_err(|why| anyhow!("--listen {asked}: {why}; write ADDRESS:PORT"))?;
        let addresses: Vec<SocketAddr> = addresses.collect();
        if addresses.iter().any(|address| !address.ip().is_loopback()) {
            complain!(
                "{asked} is reachable from other machines: anyone who reaches it can read program names, owners of memory and sizes"
            );
        }
        let listener = TcpListener::bind(&*addresses).with_context(|| format!("cannot listen at {asked}"))?;
        names.extend(asked.rsplit_once(':').map(|(name, _)| name.to_owned()));
        let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        names.extend([own.trim(), own.trim().split('.').next().unwrap_or_default()].map(str::to_owned));
        let names = names.iter().map(|name| name.trim_end_matches('.').to_ascii_lowercase());
        let names = names.filter(|name| !name.is_empty()).collect();
        let server = Server::new(listener).with_context(|| format!("cannot listen at {asked}"))?;
        Ok(Scraped { server, guard: Guard::Machine(names), strangers: vec![] })
    }

    /// Waits for at most so long, and answers whoever has come meanwhile.
    fn turn(&mut self, patience: Duration, scene: &mut Scene) -> anyhow::Result<()> {
        // The same for all that ask at the same time.
        let made = OnceCell::new();
        let mut text = || {
            made.get_or_init(|| Arc::new(openmetrics::text(&families::of(&scene.figures())).into_bytes()))
                .clone()
        };
        let (guard, strangers) = (&self.guard, &mut self.strangers);
        let turned = self.server.turn(patience, &mut |_, request| {
            Some(match guard.admit(request) {
                Ok(()) => answer(request, &mut text),
                Err(Refusal::Host) => misdirected(request, strangers),
                Err(refusal) => refusal.into(),
            })
        });
        turned.context("cannot wait for requests")
    }
}

fn answer(request: &Request, text: &mut dyn FnMut() -> Arc<Vec<u8>>) -> Answer {
    match request.path() {
        "/metrics" => Answer::of(openmetrics::TYPE, text()),
        "/" => Answer::text("gputrace metrics: see /metrics\n"),
        _ => Answer::refused(Refusal::Unknown, "see /metrics\n"),
    }
}

/// Refuses a request for another host, and says how it is answered if that is a name of this machine.
fn misdirected(request: &Request, strangers: &mut Vec<String>) -> Answer {
    let named = request.authority.as_deref().or(request.header("host").ok().flatten()).and_then(host);
    if let Some((Host::Name(name), _)) = named
        && strangers.len() < MOST_STRANGERS
        && !strangers.contains(&name)
    {
        complain!("refused a request for the host {name}: if that is this machine, start with --host {name}");
        strangers.push(name);
    }
    Answer::refused(
        Refusal::Host,
        "this host name is not known to gputrace metrics: start it with --host NAME, or ask by address\n",
    )
}
