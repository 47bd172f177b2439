//! Makes a golden trace of a recorded one: the same events, without what tells where they were recorded.
//!
//! ```text
//! cargo run -p gputrace-tests --bin golden -- IN OUT FROM=TO ...
//! ```
//! Every path that begins with FROM begins with TO then. The host is named `gpu`, and variables of gputrace itself, which hold
//! paths of the build, are left out.

use std::fs::File;
use std::io::BufWriter;
use std::process::ExitCode;

use gputrace_schemas::event::{ApiId, CommId, Frame, FrameId, ModuleId, StackId, ThreadId};
use gputrace_schemas::reader::Trace;
use gputrace_schemas::writer::Writer;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [from, to, renames @ ..] = &arguments[..] else {
        eprintln!("usage: golden IN OUT FROM=TO ...");
        return ExitCode::from(2);
    };
    let renames: Vec<_> = renames.iter().filter_map(|rename| rename.split_once('=')).collect();
    match golden(from, to, &renames) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("golden: {from}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn golden(from: &str, to: &str, renames: &[(&str, &str)]) -> Result<(), Box<dyn std::error::Error>> {
    let trace = Trace::open(from)?;
    let renamed = |path: &str| -> String {
        let rename = renames.iter().find_map(|(from, to)| Some((to, path.strip_prefix(from)?)));
        rename.map_or_else(|| path.to_owned(), |(to, rest)| format!("{to}{rest}"))
    };
    let mut writer = Writer::new(BufWriter::new(File::create(to)?))?;
    let mut process = trace.process().clone();
    process.host = "gpu".into();
    process.boot = String::new();
    process.executable = renamed(&process.executable);
    process.command = process.command.iter().map(|argument| renamed(argument)).collect();
    process.environment.retain(|(name, _)| !name.starts_with("GPUTRACE"));
    writer.process(&process);
    for (module, id) in trace.modules().iter().zip(0..) {
        let mut module = module.clone();
        module.path = renamed(&module.path);
        writer.module(ModuleId(id), &module);
    }
    for (frame, id) in trace.frames().iter().zip(0..) {
        let mut frame = frame.clone();
        match &mut frame {
            Frame::Native { file, .. } | Frame::Python { file, .. } => *file = renamed(file),
        }
        writer.frame(FrameId(id), &frame);
    }
    for (stack, id) in trace.stacks().iter().zip(0..).skip(1) {
        writer.stack(StackId(id), stack);
    }
    for (thread, id) in trace.threads().iter().zip(0..) {
        writer.thread(ThreadId(id), thread);
    }
    trace.devices().iter().for_each(|device| writer.device(device));
    for (api, id) in trace.apis().iter().zip(0..) {
        writer.api(ApiId(id), api);
    }
    for (communicator, id) in trace.communicators().iter().zip(0..).skip(1) {
        writer.communicator(CommId(id), communicator);
    }
    for mappings in trace.mappings() {
        writer.mappings(&mappings)?;
    }
    for event in trace.events() {
        writer.event(&event)?;
    }
    writer.finish()?;
    Ok(())
}
