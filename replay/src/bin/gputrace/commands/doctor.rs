//! `gputrace doctor`: whether recording can work here, and what is wrong with a trace.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_recorder::left::Left;
use gputrace_replay::ledger::books_audit::BooksAudit;
use gputrace_replay::report::model::{Mood, Part, Report, Section, Table, Value};
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Error;
use gputrace_replay::trace::source::Source;
use gputrace_replay::trace::words::bytes;
use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::Screen;
use gputrace_schemas::reader;

use super::Verb;
use super::parts::left;
use super::record::{self, Found};
use crate::elf::{self, Elf};
use crate::show::{FILES, Gate, Named, ShowArgs};
use crate::working::Working;

pub(super) const VERB: Verb = Verb::new::<DoctorArgs>("doctor", run);

/// Less than this in /dev/shm, and a ring may not fit.
const SMALL_SHM: u64 = 256 << 20;

/// Check whether recording works here or with a given program, or what is wrong with a trace
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace doctor
  gputrace doctor ./my_program train.gtr")]
pub(super) struct DoctorArgs {
    /// Traces to check, and programs to record
    #[arg(value_name = "TRACE|PROGRAM", value_hint = FILES)]
    subjects: Vec<Named>,
    /// List every hooked function
    #[arg(long)]
    hooks: bool,
    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: DoctorArgs = super::parsed(matches)?;
    let mut parts = vec![];
    let mut programs = vec![];
    let mut unknown = false;
    for subject in &args.subjects {
        let _working = Working::on(subject);
        match Source::open(subject) {
            Ok(source) => {
                let mut audit = BooksAudit::default();
                let story = Story::watched(&source, &mut audit);
                unknown |= story.doubts().is_some() || story.ledger.run.n_events == 0;
                parts.push(trace(&story, audit));
            }
            Err(Error::Trace(reader::Error::NotATrace { .. } | reader::Error::Io { .. }))
                if !is_named_a_trace(subject) =>
            {
                programs.push(program(subject))
            }
            Err(
                error @ (Error::Trace(
                    reader::Error::Version { .. }
                    | reader::Error::NoEvents { .. }
                    | reader::Error::NotBegun { .. }
                    | reader::Error::NotATrace { .. }
                    | reader::Error::Io { .. },
                )
                | Error::Snapshot(_)),
            ) => {
                unknown = true;
                let section = Section::new("trace", subject.display().to_string());
                let sections = vec![section.line(Mood::Warning, error.to_string())];
                parts.push(Part { sections, ..Part::default() });
            }
        }
    }
    // Somebody who asks about traces only does not ask about this machine.
    if parts.is_empty() || !programs.is_empty() {
        let mut sections = vec![environment(args.hooks)];
        sections.append(&mut programs);
        parts.insert(0, Part { sections, ..Part::default() });
    }
    let report = Report { verb: "doctor", parts };
    args.show.write(&report, out)?;
    let lines = report.parts.iter().flat_map(|part| &part.sections).flat_map(|section| &section.items);
    let is_bad = |item| matches!(item, &gputrace_replay::report::model::Item::Line(Mood::Bad, _));
    let gate = match (lines.into_iter().any(is_bad), unknown) {
        (true, _) => Gate::Refuses,
        (false, true) => Gate::CannotKnow,
        (false, false) => Gate::Passes,
    };
    Ok(gate.exit_code(true))
}

fn is_named_a_trace(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gtr")
}

fn environment(list_hooks: bool) -> Section {
    let mut section = Section::new("environment", "This machine")
        .fact("version", "gputrace", Value::text(env!("CARGO_PKG_VERSION")))
        .fact("kernel", "kernel", Value::text(first_line("/proc/sys/kernel/osrelease").unwrap_or_default()));
    let glibc = elf::system_glibc();
    let show = |version: (u32, u32)| format!("{}.{}", version.0, version.1);
    section = section.fact(
        "glibc",
        "C library",
        glibc.map_or(Value::Missing, |version| Value::text(show(version))),
    );
    section = processor(section);
    section = library(section, glibc, list_hooks);
    section = shared_memory(section);
    section = driver(section);
    section = left_behind(section);
    for sentence in gputrace_recorder::misspelt(std::env::vars_os()) {
        section = section.line(Mood::Warning, sentence);
    }
    if let Some(preload) = std::env::var_os("LD_PRELOAD").filter(|preload| !preload.is_empty()) {
        section = section.remark(
            "ld_preload",
            "LD_PRELOAD",
            Value::text(preload.to_string_lossy()),
            "kept; libgputrace.so comes first",
        );
    }
    section
}

/// What is missing on this processor.
fn processor(section: Section) -> Section {
    let section = section.fact("processor", "processor", Value::text(std::env::consts::ARCH));
    match gputrace_recorder::MISSING_HERE {
        Some(missing) => section.line(Mood::Warning, missing.to_owned()),
        None => section,
    }
}

fn library(section: Section, glibc: Option<(u32, u32)>, list_hooks: bool) -> Section {
    let path = match record::library() {
        Ok(path) => path,
        Err(error) => return section.line(Mood::Bad, format!("{error:#}")),
    };
    let section = section.fact("library", "library", Value::text(path.display().to_string()));
    let library = match Elf::open(&path) {
        Ok(Some(library)) => library,
        Ok(None) => return section.line(Mood::Bad, format!("{} is not an ELF library", path.display())),
        Err(error) => return section.line(Mood::Bad, format!("{error:#}")),
    };
    let mut section = match (library.glibc, glibc) {
        (Some(needs), Some(has)) if needs > has => {
            let text = format!("it needs C library {}.{}: use an older build of gputrace", needs.0, needs.1);
            section.line(Mood::Bad, text)
        }
        _ => section,
    };
    let mut hooks =
        Table::new("hooks", &[("library", "hooks into"), ("count", "functions"), ("functions", "which")]);
    for kind in ["CUDA driver", "NCCL", "PyTorch", "loader"] {
        let names: Vec<&str> =
            library.exports.iter().map(String::as_str).filter(|name| hooked_into(name) == kind).collect();
        if !names.is_empty() {
            let which = if list_hooks { names.join(" ") } else { "see --hooks".into() };
            hooks.rows.push(vec![Value::text(kind), Value::Count(names.len() as u64), Value::text(which)]);
        }
    }
    if !library.exports.iter().any(|name| name == "cuGetProcAddress_v2") {
        section = section.line(
            Mood::Bad,
            format!("{} hooks no CUDA function: it does not belong to gputrace", path.display()),
        );
    }
    section.table(hooks)
}

/// The library whose function an exported one stands in for.
fn hooked_into(name: &str) -> &'static str {
    let is_function_of = |prefix| {
        name.strip_prefix(prefix).is_some_and(|rest: &str| rest.starts_with(|c: char| c.is_ascii_uppercase()))
    };
    if is_function_of("cu") {
        "CUDA driver"
    } else if is_function_of("nccl") || is_function_of("pnccl") {
        "NCCL"
    } else if ["_ZN3c10", "_ZN2at", "_ZN5torch"].iter().any(|space| name.starts_with(space)) {
        "PyTorch"
    } else {
        "loader"
    }
}

fn shared_memory(section: Section) -> Section {
    let Ok(shm) = rustix::fs::statvfs("/dev/shm") else {
        let text =
            "/dev/shm does not exist: events wait in the process's memory and are lost if it is killed";
        return section.line(Mood::Warning, text);
    };
    let free = shm.f_bavail.saturating_mul(shm.f_frsize);
    let section = section.fact("shm_free_bytes", "/dev/shm free", Value::Bytes(Bytes(free)));
    if free >= SMALL_SHM {
        return section;
    }
    let text = format!(
        "/dev/shm has only {} free: start the container with --shm-size=1g (--ipc=host), or record with a smaller --ring-size",
        bytes(Bytes(free))
    );
    section.line(Mood::Warning, text)
}

/// Rings that no recorder drains: they take memory until somebody makes traces of them.
fn left_behind(section: Section) -> Section {
    let lines = left::lines(&Left::find());
    lines.into_iter().fold(section, |section, line| section.line(Mood::Warning, line))
}

fn driver(section: Section) -> Section {
    let version =
        first_line("/proc/driver/nvidia/version").or_else(|| first_line("/sys/module/nvidia/version"));
    let section = match &version {
        Some(version) => section.fact("driver", "NVIDIA driver", Value::text(version.trim())),
        None => section,
    };
    match libcuda() {
        Some(path) => section.fact("libcuda", "libcuda.so.1", Value::text(path)),
        None if version.is_some() => {
            let text = "libcuda.so.1 was not found: start the container with --gpus all (NVIDIA_DRIVER_CAPABILITIES=compute,utility)";
            section.line(Mood::Bad, text)
        }
        None => {
            let text =
                "no NVIDIA driver and no libcuda.so.1 on this machine: traces can be read here, not recorded";
            section.line(Mood::Bad, text)
        }
    }
}

/// Where the loader would find the driver's library.
pub(crate) fn libcuda() -> Option<String> {
    const NAME: &str = "libcuda.so.1";
    let named = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let usual = ["/usr/lib/wsl/lib", "/usr/local/nvidia/lib64"].map(PathBuf::from);
    let folders: Vec<PathBuf> = std::env::split_paths(&named).chain(usual).collect();
    let direct = folders.iter().map(|folder| folder.join(NAME)).find(|path| path.is_file());
    direct.map(|path| path.display().to_string()).or_else(|| {
        // The cache is a table of strings behind a header: paths end with a zero byte.
        let cache = std::fs::read("/etc/ld.so.cache").ok()?;
        let mut strings = cache.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
        strings.find(|text| text.starts_with('/') && text.ends_with(NAME)).map(str::to_owned)
    })
}

fn program(named: &Path) -> Section {
    let section = Section::new("program", named.display().to_string());
    let path = match record::find(named.as_os_str()) {
        Found::Program(path) => path,
        Found::NotExecutable(path) => {
            return section.line(Mood::Bad, format!("{} is neither a trace nor executable", path.display()));
        }
        Found::Nothing => return section.line(Mood::Bad, "no such trace or program"),
    };
    let section = section.fact("path", "path", Value::text(path.display().to_string()));
    let library = match record::library() {
        Ok(library) => library,
        Err(error) => return section.line(Mood::Bad, format!("{error:#}")),
    };
    if let Err(error) = record::check_program(&path, &library) {
        return section.line(Mood::Bad, format!("{error:#}"));
    }
    let mut section = section.line(Mood::Good, "libgputrace.so will be loaded into it");
    if let Ok(Some(elf)) = Elf::open(&path) {
        section = section.fact("needed", "needs", Value::text(elf.needed.join(" ")));
        if elf.imports.contains("dlmopen") {
            let text = "it uses dlmopen: libraries in other namespaces are not seen";
            section = section.line(Mood::Warning, text);
        }
        section = own_driver(section, &elf);
    }
    let text = "libraries loaded with RTLD_DEEPBIND bypass libgputrace.so, which cannot be known in advance: a note loader.bypassed in the trace names them";
    section.line(Mood::Note, text)
}

/// A program that has the driver's functions inside calls them without asking the loader.
fn own_driver(section: Section, elf: &Elf) -> Section {
    let own = ["cuInit", "cuMemAlloc_v2", "cuMemCreate", "cuGetProcAddress_v2"];
    let own: Vec<&str> = own.into_iter().filter(|name| elf.exports.contains(*name)).collect();
    if own.is_empty() {
        return section;
    }
    let text = format!(
        "it defines CUDA driver functions itself ({}): its own calls to them are not seen",
        own.join(", ")
    );
    section.line(Mood::Warning, text)
}

fn trace(story: &Story, audit: BooksAudit) -> Part {
    let process = &story.process;
    let mut section = Section::new("trace", "The trace")
        .fact("recorder", "recorded by gputrace", Value::text(&*process.recorder))
        .fact("host", "on host", Value::text(&*process.host))
        .fact("executable", "executable", Value::text(&*process.executable))
        .fact("torch_version", "PyTorch", process.torch_version.as_ref().map_or(Value::Missing, Value::text))
        .fact("events", "events", Value::Count(story.ledger.run.n_events));
    for (name, value) in &process.environment {
        section = section.line(Mood::Note, format!("{name}={value}"));
    }
    let mut notes = Section::new("notes", "Messages of the recording");
    for (time, note) in &story.ledger.health.notes {
        let time = gputrace_replay::trace::words::time(story.since_start(*time));
        notes = notes.line(Mood::Note, format!("{time}: {note}"));
    }
    let mut damage = Section::new("damage", "Losses and damage");
    for (cause, events) in &story.ledger.health.lost {
        damage = damage.line(Mood::Warning, format!("{events} events were lost: {cause}"));
    }
    for one in &story.damages {
        damage = damage.line(Mood::Warning, one.to_string());
    }
    if !story.complete {
        damage =
            damage.line(Mood::Warning, "the trace has no end: its recorder was killed, or is still writing");
    }
    if story.ledger.run.n_events == 0 {
        damage = damage.line(Mood::Warning, "the trace has no events: there is nothing to check");
    }
    if damage.items.is_empty() {
        damage = damage.line(Mood::Good, "nothing was lost, and everything can be read");
    }
    if let Some(text) = story.ledger.gpu_timed().text() {
        section = section.line(Mood::Note, text);
    }
    let mut findings = Section::new("findings", "Inconsistencies");
    for found in story.ledger.findings.iter() {
        let text = format!("{} times: {}", found.count, found.first.text());
        findings = findings.line(Mood::Warning, text);
    }
    let sections = [section, damage, findings, audited(story, audit), notes]
        .into_iter()
        .filter(|section| !section.items.is_empty());
    Part {
        title: story.path.clone(),
        trace: Some(story.path.clone()),
        pid: Some(process.pid),
        rank: process.rank,
        command: process.command.clone(),
        sections: sections.collect(),
        ..Part::default()
    }
}

/// The ledger, counted again by a checker that knows nothing of it.
fn audited(story: &Story, audit: BooksAudit) -> Section {
    let section = Section::new("audit", "The accounts, checked independently");
    let n_live = audit.n_live() as u64;
    let (n_found, words) = audit.finish(&story.ledger);
    let section = section.fact("live_objects", "objects alive at the end", Value::Count(n_live)).fact(
        "discrepancies",
        "discrepancies",
        Value::Count(n_found),
    );
    if n_found == 0 {
        return section.line(Mood::Good, "every total, range and block is consistent");
    }
    section.warn(words)
}

fn first_line(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()?.lines().next().map(str::to_owned)
}
