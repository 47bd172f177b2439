//! `gputrace record`: runs a program with the library preloaded. It becomes the program, so that exit codes, signals and
//! job control are the program's own.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, anyhow, bail};
use clap::{ArgMatches, Args, ValueEnum};
use gputrace_recorder::{Job, Overwrite, segments, variable, variables};
use gputrace_schemas::printable::Screen;
use gputrace_sim::bytes;

use super::parts::live::alert::Alert;
use super::upload::sending::{Grows, Sending};
use super::{Verb, alarm, upload, witness};
use crate::elf::{self, Elf};
use crate::show::{complain, shown};

pub(super) mod closing;
pub(super) mod launch;

pub(super) const VERB: Verb = Verb::new::<RecordArgs>("record", run).with_status_of_its_own();

/// `env(1)`: it could not do its own part.
pub(super) const CANNOT_TRACE: u8 = 125;
/// `env(1)`: the command was found but cannot be run.
const CANNOT_RUN: u8 = 126;
/// `env(1)`: the command was not found.
const NOT_FOUND: u8 = 127;

/// Run a program and record its GPU memory
///
/// The program is not changed: exit code and signals are its own. Nothing is written until the program or a child of it uses
/// CUDA; then each such process gets one trace. At the end, one line says where the traces are, or why there are none.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace record -- python train.py
  gputrace record -o 'job/%h.r%r.gtr' -- torchrun --nproc-per-node 8 train.py
  gputrace record --keep 30m --max-size 2GiB -o server.gtr -- python serve.py
  gputrace record --nccl-timing -o 'job/%r.gtr' -- torchrun --nproc-per-node 8 train.py

Exit status: the program's own; 125 if it cannot be traced (and is not started), 126 if it cannot run, 127 if it is not found.
Without this command: LD_PRELOAD=$(gputrace library) GPUTRACE_OUTPUT=... python train.py")]
pub(super) struct RecordArgs {
    /// Folder for traces, or name with %e executable, %h host, %p pid, %r rank, %l local rank, %n counter, %t time,
    /// %q{ENV}, %%
    /// [default: gputrace-%e.%h.r%r.%p.gtr]
    #[arg(short, long, value_name = "PATTERN")]
    output: Option<OsString>,
    /// Overwrite existing files
    #[arg(short = 'F', long, short_alias = 'f')]
    force: bool,
    /// Call stacks to record [default: python]
    #[arg(long, value_enum, value_name = "KIND")]
    stacks: Option<Stacks>,
    /// Record no stacks for smaller PyTorch blocks: 512, 1M [default: 0]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    min_size: Option<u64>,
    /// Memory per process for events that are not yet written: 64M, 1GiB
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    ring_size: Option<u64>,
    /// Measure the GPU time of each NCCL call with two events around it, except in graphs
    #[arg(long)]
    nccl_timing: bool,
    /// Keep at least the last 90s, 30m, 12h or 7d, and remove older parts; see docs/KEEP.md
    #[arg(long, value_name = "TIME", value_parser = kept_time)]
    keep: Option<String>,
    /// Keep the recording of each process within this size, and remove the oldest parts: 512M, 2GiB
    #[arg(long, value_name = "BYTES", value_parser = kept_bytes)]
    max_size: Option<u64>,
    /// Record the stacks of a process that is silent for this long, in jobs of several ranks; 0 for never [default: 60]
    #[arg(long, value_name = "SECONDS")]
    hang_after: Option<u64>,
    /// Do not explain on the program's stderr why it ran out of memory
    #[arg(long)]
    no_oom_report: bool,
    /// Print nothing at the end, and leave no process that waits for it
    #[arg(short, long)]
    quiet: bool,
    /// Warn when a figure exceeds a bound: used>90%, reserved>60GiB, growth>10MiB/step; see docs/LIVE.md
    #[arg(long, value_name = "CONDITION")]
    alert: Vec<String>,
    /// Run this with `sh -c` instead of each warning, with ALERT, ALERT_VALUE, ALERT_PID and ALERT_TRACE set
    #[arg(long, value_name = "COMMAND", requires = "alert")]
    on_alert: Option<OsString>,
    /// Send traces to object storage, during the run and before this command ends: s3://bucket/folder/; see
    /// docs/OBJECT-STORAGE.md
    #[arg(long, value_name = "URL", value_parser = upload::url)]
    upload: Option<PathBuf>,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stacks {
    /// None, only the calling library
    None,
    /// Python lines, and native functions of threads without Python
    Python,
    /// Python lines and native functions
    All,
}

impl Stacks {
    fn name(self) -> &'static str {
        match self {
            Stacks::None => "none",
            Stacks::Python => "python",
            Stacks::All => "all",
        }
    }
}

fn run(matches: &ArgMatches, _out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: RecordArgs = super::parsed(matches)?;
    let (program, arguments) = args.command.split_first().context("no command")?;
    if program.is_empty() {
        complain!("the command is empty: name a program after `--`");
        return Ok(ExitCode::from(NOT_FOUND));
    }
    let path = match find(program) {
        Found::Program(path) => path,
        Found::NotExecutable(path) => {
            complain!("{} is not executable: chmod +x it, or name its interpreter", path.display());
            return Ok(ExitCode::from(CANNOT_RUN));
        }
        Found::Nothing => {
            complain!("{}: no such command", program.display());
            return Ok(ExitCode::from(NOT_FOUND));
        }
    };
    let command = match prepare(&args, &path, program, arguments) {
        Ok(command) => command,
        Err(error) => {
            complain!("{error:#}");
            return Ok(ExitCode::from(CANNOT_TRACE));
        }
    };
    let began = gputrace_recorder::job_begins();
    if let Err(error) = watch(&args, &began) {
        complain!("{error:#}");
        return Ok(ExitCode::from(CANNOT_TRACE));
    }
    let error = match start(&args, &began, command, program) {
        Ok(status) => return Ok(status),
        Err(error) => error,
    };
    complain!("cannot run {}: {error}", path.display());
    Ok(ExitCode::from(CANNOT_RUN))
}

/// Starts who watches for conditions, where there are any.
fn watch(args: &RecordArgs, began: &str) -> anyhow::Result<()> {
    let alerts = args.alert.iter().map(|text| text.parse::<Alert>().map_err(|why| anyhow!("--alert {why}")));
    let alerts = alerts.collect::<anyhow::Result<Vec<Alert>>>()?;
    if alerts.is_empty() {
        return Ok(());
    }
    alarm::start(began, &alerts, args.on_alert.as_ref()).context("no process can watch for --alert")
}

/// Starts the program, and sees to it that somebody says at its end what was recorded.
fn start(args: &RecordArgs, began: &str, mut command: Command, program: &OsStr) -> std::io::Result<ExitCode> {
    command.env(variable(variables::JOB_BEGAN), began);
    let is_told = !args.quiet || args.upload.is_some();
    let Some(job) = Some(()).filter(|()| is_told).and_then(|()| Job::make(began)) else {
        return Err(command.exec());
    };
    let program = shown(Path::new(program));
    if let Some(url) = &args.upload {
        // What is sent at the end is sent before the job's container or step ends with this process.
        let sending = Sending::start(url, args.force, began, grows(args));
        let result = launch::run(command, |pid, gives_up| {
            let traces = closing::wait_and_say(&job, pid, (!args.quiet).then_some(&program));
            sending.finish(&traces, gives_up);
        });
        job.end();
        return result;
    }
    if launch::is_started_by_hand() {
        let result = launch::run(command, |pid, _| drop(closing::wait_and_say(&job, pid, Some(&program))));
        job.end();
        return result;
    }
    // Without it there is no line at the end, and nothing else is missing.
    if witness::start(began, &program).is_err() {
        job.end();
    }
    let error = command.exec();
    job.end();
    Err(error)
}

fn prepare(
    args: &RecordArgs,
    path: &Path,
    program: &OsStr,
    arguments: &[OsString],
) -> anyhow::Result<Command> {
    let library = library()?;
    check_program(path, &library)?;
    check_output(args)?;
    for sentence in gputrace_recorder::misspelt(std::env::vars_os()) {
        complain!("{sentence}");
    }
    let mut command = Command::new(path);
    command.arg0(program).args(arguments).env("LD_PRELOAD", preload(&library)?);
    // Only one tool receives a program's NVTX marks: the first.
    if std::env::var_os("NVTX_INJECTION64_PATH").is_none_or(|named| named.is_empty()) {
        command.env("NVTX_INJECTION64_PATH", &library);
    }
    let mut set = |name, value: &OsStr| {
        command.env(variable(name), value);
    };
    let program = std::env::current_exe().context("cannot find gputrace itself")?;
    set(variables::RECORDER, program.as_os_str());
    if let Some(output) = &args.output {
        set(variables::OUTPUT, output);
    }
    if args.force {
        set(variables::FORCE, "1".as_ref());
    }
    if let Some(stacks) = args.stacks {
        set(variables::STACKS, stacks.name().as_ref());
    }
    if let Some(bytes) = args.min_size {
        set(variables::STACKS_MIN_SIZE, bytes.to_string().as_ref());
    }
    if args.nccl_timing {
        set(variables::NCCL_TIMING, "1".as_ref());
    }
    if let Some(seconds) = args.hang_after {
        set(variables::HANG_AFTER, seconds.to_string().as_ref());
    }
    if let Some(time) = &args.keep {
        set(variables::KEEP, time.as_ref());
    }
    if let Some(bytes) = args.max_size {
        set(variables::MAX_SIZE, bytes.to_string().as_ref());
    }
    if args.no_oom_report {
        set(variables::OOM, "0".as_ref());
    }
    if let Some(bytes) = args.ring_size {
        set(variables::RING_BYTES, bytes.to_string().as_ref());
    }
    Ok(command)
}

/// Whether recordings are kept within bounds, as the recorder finds it in its environment.
fn grows(args: &RecordArgs) -> Grows {
    let is_set = |name| std::env::var_os(variable(name)).is_some_and(|value| !value.is_empty());
    let is_bounded = args.keep.is_some()
        || args.max_size.is_some()
        || is_set(variables::KEEP)
        || is_set(variables::MAX_SIZE);
    if is_bounded { Grows::InSegments } else { Grows::InOneFile }
}

/// A length of time that the recorder understands.
fn kept_time(text: &str) -> Result<String, String> {
    segments::parse_time(text).map(|_| text.to_owned())
}

/// Bytes that leave room for a recording.
fn kept_bytes(text: &str) -> Result<u64, String> {
    let bytes = bytes::parse(text)?;
    if bytes < segments::LEAST_SIZE {
        return Err(format!("{bytes} bytes are too few for a recording; the minimum is 1MiB"));
    }
    Ok(bytes)
}

/// Refuses names of traces that would leave the run without one.
fn check_output(args: &RecordArgs) -> anyhow::Result<()> {
    let inherited = |name| std::env::var_os(variable(name)).filter(|value| !value.is_empty());
    let asked = args.output.clone().or_else(|| inherited(variables::OUTPUT));
    let asked = match asked.as_deref().map(OsStr::to_str) {
        Some(None) => bail!("the output pattern is not UTF-8: choose another with -o"),
        Some(Some(asked)) => Some(asked),
        None => None,
    };
    let is_forced = args.force || inherited(variables::FORCE).is_some_and(|value| value != "0");
    let overwrite = if is_forced { Overwrite::Replace } else { Overwrite::Refuse };
    for warning in gputrace_recorder::check_output(asked, overwrite)? {
        complain!("{warning}");
    }
    Ok(())
}

/// What a command's name leads to.
pub(super) enum Found {
    /// A file that can be run.
    Program(PathBuf),
    /// A file that cannot.
    NotExecutable(PathBuf),
    /// No file.
    Nothing,
}

/// Looks for a command as `execvp` does.
pub(super) fn find(program: &OsStr) -> Found {
    let named = Path::new(program);
    if named.components().count() > 1 || program.to_string_lossy().contains('/') {
        return look(named);
    }
    let mut best = Found::Nothing;
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    for folder in std::env::split_paths(&path) {
        match look(&folder.join(named)) {
            Found::Program(path) => return Found::Program(path),
            Found::NotExecutable(path) => best = Found::NotExecutable(path),
            Found::Nothing => {}
        }
    }
    best
}

fn look(path: &Path) -> Found {
    match std::fs::metadata(path) {
        Ok(file) if file.is_file() && file.permissions().mode() & 0o111 != 0 => {
            Found::Program(path.to_owned())
        }
        Ok(_) => Found::NotExecutable(path.to_owned()),
        Err(_) => Found::Nothing,
    }
}

/// Where `libgputrace.so` is: GPUTRACE_LIBRARY, beside this program, in ../lib, or in a folder of that.
pub(super) fn library() -> anyhow::Result<PathBuf> {
    const NAME: &str = "libgputrace.so";
    if let Some(named) = std::env::var_os(variable(variables::LIBRARY)).filter(|named| !named.is_empty()) {
        let path = PathBuf::from(named);
        let path = std::path::absolute(&path).unwrap_or(path);
        anyhow::ensure!(path.is_file(), "GPUTRACE_LIBRARY names {}, which is not a file", path.display());
        return Ok(path);
    }
    let program = std::env::current_exe().context("cannot find gputrace itself")?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    // The last is Debian's for each processor.
    let shared = format!("../lib/{}-linux-gnu", std::env::consts::ARCH);
    let places = ["", "../lib", "../lib/gputrace", &shared].map(|place| folder.join(place).join(NAME));
    match places.iter().find(|place| place.is_file()) {
        Some(place) => Ok(place.canonicalize().unwrap_or_else(|_| place.clone())),
        None => bail!(
            "{NAME} is neither in {} nor in ../lib of it: install it there, or set GPUTRACE_LIBRARY to its path",
            folder.display()
        ),
    }
}

/// The library before what is preloaded already.
pub(super) fn preload(library: &Path) -> anyhow::Result<OsString> {
    let name = library.as_os_str();
    // The loader splits at these, and there is no way to escape them.
    if name.to_string_lossy().contains([' ', ':']) {
        bail!(
            "{} has a space or a colon in it, and LD_PRELOAD cannot name such a file: move it",
            library.display()
        );
    }
    let mut entries = name.to_owned();
    if let Some(before) = std::env::var_os("LD_PRELOAD").filter(|before| !before.is_empty()) {
        let is_there = before.to_string_lossy().split([' ', ':']).any(|entry| OsStr::new(entry) == name);
        if is_there {
            return Ok(before);
        }
        entries.push(":");
        entries.push(before);
    }
    Ok(entries)
}

/// Refuses what the loader would silently run without the library.
pub(super) fn check_program(path: &Path, library: &Path) -> anyhow::Result<()> {
    let mut path = path.to_owned();
    // A script's interpreter is what runs; interpreters may be scripts.
    for _ in 0..4 {
        check_privileges(&path)?;
        match interpreter(&path) {
            Some(interpreter) => path = interpreter,
            None => break,
        }
    }
    let ours = Elf::open(library)?.with_context(|| format!("{} is not an ELF library", library.display()))?;
    if let (Some(needs), Some(has)) = (ours.glibc, elf::system_glibc())
        && needs > has
    {
        let (needs, has) = (format!("{}.{}", needs.0, needs.1), format!("{}.{}", has.0, has.1));
        bail!(
            "{} needs C library {needs}, and this system has {has}: use an older build of gputrace",
            library.display()
        );
    }
    let Some(program) = Elf::open(&path)? else { return Ok(()) };
    if program.machine != ours.machine {
        bail!(
            "{} is for a different processor than {}: use the matching build of gputrace",
            path.display(),
            library.display()
        );
    }
    if !program.has_interpreter {
        bail!(
            "{} is statically linked, so nothing can be preloaded into it: link it dynamically",
            path.display()
        );
    }
    Ok(())
}

/// The loader ignores `LD_PRELOAD` for programs that run with more rights than their user.
fn check_privileges(path: &Path) -> anyhow::Result<()> {
    let file = std::fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mode = file.permissions().mode();
    let is_other_user = mode & 0o4000 != 0 && file.uid() != rustix::process::getuid().as_raw();
    let is_other_group = mode & 0o2000 != 0 && file.gid() != rustix::process::getgid().as_raw();
    let has_capabilities = rustix::fs::getxattr(path, "security.capability", &mut [0u8; 64]).is_ok();
    let why = match (is_other_user, is_other_group, has_capabilities) {
        (true, _, _) => "is set-user-ID",
        (_, true, _) => "is set-group-ID",
        (_, _, true) if !rustix::process::getuid().is_root() => "has file capabilities",
        _ => return Ok(()),
    };
    bail!(
        "{} {why}, and the system preloads nothing into such programs: run a copy without it",
        path.display()
    )
}

/// The interpreter of a script that begins with `#!`; through `env`, the one that `env` will find.
fn interpreter(path: &Path) -> Option<PathBuf> {
    use std::io::Read;
    let mut line = Vec::new();
    std::fs::File::open(path).ok()?.take(512).read_to_end(&mut line).ok()?;
    let line = line.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let line = String::from_utf8_lossy(line).into_owned();
    let mut words = line.split_whitespace();
    let interpreter = Path::new(words.next()?).to_owned();
    if interpreter.file_name() != Some(OsStr::new("env")) {
        return Some(interpreter);
    }
    let program = words.find(|word| !word.starts_with('-') && !word.contains('='))?;
    match find(OsStr::new(program)) {
        Found::Program(path) => Some(path),
        Found::NotExecutable(_) | Found::Nothing => None,
    }
}
