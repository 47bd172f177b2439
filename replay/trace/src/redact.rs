//! A trace that may be shown to others: no path, file name, argument, host name or identifier of the machine is left.
//!
//! Definitions are rewritten before anybody reads them, so that no report and no export can forget to hide something.
//! Files get numbers, each the same one everywhere. What stays: names of functions and their lines; libraries that
//! everybody has (`libnccl`, `libtorch`), because they show whose memory it is; files inside of public Python packages and
//! of Python itself; allocator options; sizes, times and addresses.

use std::collections::HashMap;

use gputrace_schemas::event::{
    Alive, CommConfig, Communicator, Device, Event, EventKind, Frame, Module, Process, StackRead, Thread,
};
use gputrace_sim::policies::torch::VARIABLES;
use gputrace_sim::stacks::python_package;

use crate::Recording;
use crate::owners::{self, file_name};

/// What the program is called.
const PROGRAM: &str = "program";

/// The definitions of a trace with everything private renamed; its events are left out.
#[must_use]
pub fn definitions(of: &Recording) -> Recording {
    let mut names = Names::default();
    let process = process(&of.process, &mut names);
    let mut frames: Vec<_> = of.frames.iter().collect();
    frames.sort_by_key(|(id, _)| **id);
    let mut modules: Vec<_> = of.modules.iter().collect();
    modules.sort_by_key(|(id, _)| **id);
    Recording {
        process,
        devices: of.devices.iter().map(device).collect(),
        apis: of.apis.clone(),
        stacks: of.stacks.clone(),
        frames: frames.into_iter().map(|(id, it)| (*id, names.frame(it))).collect(),
        modules: modules.into_iter().map(|(id, it)| (*id, names.module(it))).collect(),
        threads: of.threads.iter().map(|(id, it)| (*id, thread(it))).collect(),
        communicators: of.communicators.iter().map(|(id, it)| (*id, communicator(it))).collect(),
        texts: of.texts.keys().map(|id| (*id, format!("mark {}", id.0))).collect(),
        events: vec![],
    }
}

/// The event without the program's own words.
#[must_use]
pub fn event(event: &Event) -> Event {
    match event.kind {
        EventKind::Note(ref note) => {
            // A heartbeat is numbers.
            let kept = Alive::parse(note).map(|alive| alive.to_string());
            let kept =
                kept.or_else(|| StackRead::parse(note).map(|read| read.to_string())).unwrap_or_default();
            Event { kind: EventKind::Note(kept), ..event.clone() }
        }
        _ => event.clone(),
    }
}

fn process(process: &Process, names: &mut Names) -> Process {
    let is_public = owners::public_library(&process.executable).is_some();
    if !is_public {
        names.known.insert(process.executable.clone(), PROGRAM.to_owned());
        if let Some(command) = process.command.first() {
            names.known.insert(command.clone(), PROGRAM.to_owned());
        }
    }
    let options = process.environment.iter().filter(|(name, _)| VARIABLES.contains(&name.as_str()));
    Process {
        host: String::new(),
        boot: String::new(),
        executable: names.library(&process.executable),
        command: vec![PROGRAM.to_owned()],
        ancestors: vec![],
        environment: options.cloned().collect(),
        ..process.clone()
    }
}

fn device(device: &Device) -> Device {
    Device { uuid: String::new(), ..device.clone() }
}

fn thread(thread: &Thread) -> Thread {
    let is_public = owners::is_nccl_thread(&thread.name);
    // NCCL's threads are recognised by this beginning.
    Thread { name: if is_public { "NCCL thread".into() } else { String::new() }, ..thread.clone() }
}

/// Without what the program calls it and its network.
fn communicator(communicator: &Communicator) -> Communicator {
    let config = CommConfig { name: String::new(), net_name: String::new(), ..communicator.config.clone() };
    Communicator { config, ..communicator.clone() }
}

/// What each path is called from now on.
#[derive(Default)]
struct Names {
    known: HashMap<String, String>,
    n_files: usize,
    n_packages: usize,
}

impl Names {
    fn frame(&mut self, frame: &Frame) -> Frame {
        match frame {
            Frame::Python { function, file, line } => {
                Frame::Python { function: function.clone(), file: self.python(file), line: *line }
            }
            Frame::Native { address, module, function, file, line, inlined } => Frame::Native {
                address: *address,
                module: *module,
                function: function.clone(),
                file: self.native(file),
                line: *line,
                inlined: *inlined,
            },
        }
    }

    fn module(&mut self, module: &Module) -> Module {
        Module { path: self.library(&module.path), build_id: String::new(), ..module.clone() }
    }

    /// A loaded file. What identified its owner still does.
    fn library(&mut self, path: &str) -> String {
        match owners::public_library(path) {
            Some(public) => public,
            None => self.renamed(path, "library", ".so"),
        }
    }

    /// A file that Python runs, or what Python calls a file.
    fn python(&mut self, path: &str) -> String {
        if let Some(public) = owners::public_python(path) {
            return public;
        }
        match python_package(path).filter(|package| *package != "Python") {
            Some(package) => {
                let package = self.package(package);
                let file = self.renamed(path, "file", ".py");
                format!("/site-packages/{package}/{file}")
            }
            None => self.renamed(path, "file", ".py"),
        }
    }

    /// A source file, by the debug information of a library.
    fn native(&mut self, path: &str) -> String {
        if path.is_empty() { String::new() } else { self.renamed(path, "source", "") }
    }

    fn package(&mut self, name: &str) -> String {
        let n_packages = &mut self.n_packages;
        // No path is the same as this key: paths have no line breaks.
        let package = self.known.entry(format!("\n{name}")).or_insert_with(|| {
            *n_packages += 1;
            format!("package{n_packages}")
        });
        package.clone()
    }

    fn renamed(&mut self, path: &str, kind: &str, extension: &str) -> String {
        if file_name(path).is_empty() {
            return String::new();
        }
        let n_files = &mut self.n_files;
        let name = self.known.entry(path.to_owned()).or_insert_with(|| {
            *n_files += 1;
            format!("{kind}{n_files}{extension}")
        });
        name.clone()
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::ledger::{Ledger, SiteId};
    use crate::scene::recording;

    const SCENE: &str = "
        Create handle=n bytes=2M by=/x/nvidia/nccl/lib/libnccl.so.2
        Alloc addr=a bytes=20M by=/x/site-packages/torch/lib/libc10_cuda.so
        block addr=a bytes=8M requested=8M allocated=8M reserved=20M by=f@/v/site-packages/torch/nn/linear.py:1,g@/job/model.py:3
        block addr=b bytes=8M requested=8M allocated=16M reserved=20M by=h@/v/site-packages/acme/secret.py:4,g@/job/model.py:5
        Alloc addr=c bytes=3M by=main@/job/train
        Alloc addr=d bytes=4M by=solve@/opt/acme/libsolver.so.4
        Alloc addr=e bytes=5M by=/x/libcublas_acme.so
        note the host is node7";

    #[test]
    fn who_owns_what_is_told_as_before_and_nothing_else() {
        let original = recording(SCENE);
        let redacted = definitions(&original);
        let mut shown = String::new();
        for definitions in [&original, &redacted] {
            let mut ledger = Ledger::default();
            for event in &original.events {
                ledger.event(definitions, event);
            }
            for id in 0.. {
                let Some(site) = ledger.sites.site(SiteId(id)) else { break };
                shown += &format!("{}: {site}\n", ledger.sites.owner(site.owner));
            }
            shown += "\n";
        }
        expect![[r#"
            NCCL: libnccl.so.2+0x10
            PyTorch: libc10_cuda.so+0x10
            PyTorch, not its allocator: g (/job/model.py:3) in f
            acme: g (/job/model.py:5) in h
            application: main (train)
            libsolver: solve (libsolver.so.4)
            libcublas_acme: libcublas_acme.so+0x10

            NCCL: libnccl.so+0x10
            PyTorch: libc10_cuda.so+0x10
            PyTorch, not its allocator: g (file1.py:3) in f
            package1: g (file1.py:5) in h
            application: main (program)
            library3: solve (library3.so)
            library4: library4.so+0x10

        "#]]
        .assert_eq(&shown);
    }

    #[test]
    fn notes_and_names_of_machines_are_gone() {
        let mut original = recording(SCENE);
        original.process.host = "node7".into();
        original.process.environment =
            vec![("NCCL_SOCKET_IFNAME".into(), "eth7".into()), (VARIABLES[0].into(), "a:b".into())];
        let mut redacted = definitions(&original);
        redacted.events = original.events.iter().map(event).collect();
        let shown = format!("{:?} {:?} {:?}", redacted.process, redacted.events, redacted.devices);
        for secret in ["node7", "eth7", "--big", "/job", "./train", "GPU-"] {
            assert!(!shown.contains(secret), "{secret}: {shown}");
        }
        assert_eq!(redacted.process.environment, [(VARIABLES[0].to_owned(), "a:b".to_owned())]);
    }
}
