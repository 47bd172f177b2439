//! The programs in `tests/programs`, how they are built and run, and what each says about itself.
//!
//! A program's `//#` lines are its contract:
//!
//! ```text
//! //# Link: cudart | cuda | nccl | torch | none   which route to the driver it takes (cudart: every release, shared and static)
//! //# Args: cudart-12 cudart-13                   arguments; these two words become the path of a shared runtime
//! //# Env: FAKE_CUDA_MEMORY=1GiB                  may be repeated
//! //# Exit: 7        //# Signal: 9                how it ends, unless with 0
//! //# Processes: 2                                how many processes allocate or try to
//! //# Expect: cudaMalloc 65536 freed x900         function, bytes, freed | leaked | failed:CODE, how often (default once)
//! ```
//!
//! The expectations are complete: a request that none of them names is an error.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::calls::{self, Call, Census, Fate};
use crate::wheels::{self, Major};

/// How a program reaches the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Linked to the shared runtime of this release.
    Shared(Major),
    /// The static runtime of this release inside the program.
    Static(Major),
    /// Linked to `libcuda.so.1`.
    Driver,
    /// Linked to `libnccl.so.2` and `libcuda.so.1`.
    Nccl,
    /// Linked to the stand-in for PyTorch's libraries.
    Torch,
    /// By itself, with `dlopen`, or not at all.
    Loader,
}

/// One file of `tests/programs` and its contract.
#[derive(Clone, Debug)]
pub struct Program {
    /// The file's name without `.c`.
    pub name: String,
    /// Every route that it is to be tried on.
    pub routes: Vec<Route>,
    /// What the call log must hold.
    pub expected: Census,
    args: Vec<String>,
    env: Vec<(String, String)>,
    exit: Ending,
    processes: Option<usize>,
    source: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Exit(i32),
    Signal(i32),
}

/// A finished run.
#[derive(Debug)]
pub struct Run {
    /// What the program printed, and how it ended.
    pub output: Output,
    /// What the fake driver saw.
    pub calls: Vec<Call>,
}

/// All programs, by name.
///
/// # Panics
/// If a contract cannot be read; the message names file and line.
pub fn all() -> Vec<Program> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
    let entries = fs::read_dir(&directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "c"));
    paths.sort();
    paths.into_iter().map(|path| Program::read(&path).unwrap_or_else(|problem| panic!("{problem}"))).collect()
}

/// The program of this name.
///
/// # Panics
/// If there is none.
pub fn named(name: &str) -> Program {
    all()
        .into_iter()
        .find(|program| program.name == name)
        .unwrap_or_else(|| panic!("no tests/programs/{name}.c"))
}

impl Program {
    fn read(path: &Path) -> Result<Program, String> {
        let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let mut program = Program {
            name: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            routes: Vec::new(),
            expected: Census::new(),
            args: Vec::new(),
            env: Vec::new(),
            exit: Ending::Exit(0),
            processes: None,
            source: path.to_owned(),
        };
        for (number, line) in text.lines().enumerate() {
            let Some(directive) = line.strip_prefix("//# ") else { continue };
            program
                .obey(directive)
                .ok_or_else(|| format!("{}:{}: cannot understand `{line}`", path.display(), number + 1))?;
        }
        if program.routes.is_empty() {
            Err(format!("{}: no `//# Link:`", path.display()))
        } else {
            Ok(program)
        }
    }

    fn obey(&mut self, directive: &str) -> Option<()> {
        let (key, value) = directive.split_once(": ")?;
        let value = value.trim();
        match key {
            "Link" => self.routes = routes(value)?,
            "Args" => self.args = value.split_whitespace().map(str::to_owned).collect(),
            "Env" => self.env.push(value.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned()))?),
            "Exit" => self.exit = Ending::Exit(value.parse().ok()?),
            "Signal" => self.exit = Ending::Signal(value.parse().ok()?),
            "Processes" => self.processes = Some(value.parse().ok()?),
            "Expect" => {
                let mut words = value.split_whitespace();
                let (function, bytes, fate) =
                    (words.next()?, words.next()?.parse().ok()?, fate(words.next()?)?);
                let count: usize =
                    words.next().map_or(Some(1), |word| word.strip_prefix('x')?.parse().ok())?;
                *self.expected.entry((driver_function(function).to_owned(), bytes, fate)).or_default() +=
                    count;
            }
            _ => return None,
        }
        Some(())
    }

    /// Compiles the program for a route; the executable lands in `directory`.
    ///
    /// # Errors
    /// Why this route cannot be had here (no wheel, no compiler): a reason to skip, not to fail.
    ///
    /// # Panics
    /// If the program does not compile.
    pub fn build(&self, route: Route, directory: &Path) -> Result<PathBuf, String> {
        static BUILDS: AtomicU32 = AtomicU32::new(0);
        let fake = fake_cuda::library_dir();
        let link = match route {
            Route::Shared(major) => {
                let library = wheels::shared(major)?;
                let directory = library.parent().unwrap_or(Path::new("/")).display().to_string();
                vec![library.display().to_string(), format!("-Wl,-rpath,{directory}")]
            }
            Route::Static(major) => {
                vec![wheels::fixed(major)?.display().to_string(), "-lrt".into(), "-lm".into()]
            }
            Route::Driver => vec![fake.join("libcuda.so.1").display().to_string()],
            Route::Nccl => {
                ["libnccl.so.2", "libcuda.so.1"].map(|file| fake.join(file).display().to_string()).into()
            }
            Route::Torch => {
                let torch = fake_cuda::torch_dir();
                if !torch.join("libc10_cuda.so").exists() {
                    return Err("no C++ compiler was there to build the stand-in for PyTorch".into());
                }
                let path = |file| torch.join(file).display().to_string();
                let search =
                    [format!("-Wl,-rpath-link,{}", fake.display()), format!("-Wl,-rpath,{}", path(""))];
                [path("libc10_cuda.so"), path("libc10.so")].into_iter().chain(search).collect()
            }
            Route::Loader => Vec::new(),
        };
        fs::create_dir_all(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        // Unique, because tests of one process and of several run at the same time.
        let unique =
            format!("{}.{}.{}", self.name, std::process::id(), BUILDS.fetch_add(1, Ordering::Relaxed));
        let executable = directory.join(unique);
        let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .args(["-std=gnu11", "-O1", "-g", "-Wall", "-fno-builtin-malloc", "-pthread", "-o"])
            .arg(&executable)
            .arg(&self.source)
            .args(link)
            .arg("-ldl")
            .output()
            .map_err(|e| format!("no C compiler: {e}"))?;
        let problems = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{} for {route:?} does not compile:\n{problems}", self.name);
        Ok(executable)
    }

    /// A command that runs the executable on the fake driver. Add `LD_PRELOAD` and whatever else is to be tried.
    ///
    /// # Errors
    /// A runtime named by `Args` that is not there.
    pub fn command(&self, executable: &Path, call_log: &Path) -> Result<Command, String> {
        let mut command = Command::new(executable);
        for arg in &self.args {
            match arg.as_str() {
                "cudart-11" => command.arg(wheels::shared(Major::Cuda11)?),
                "cudart-12" => command.arg(wheels::shared(Major::Cuda12)?),
                "cudart-13" => command.arg(wheels::shared(Major::Cuda13)?),
                other => command.arg(other),
            };
        }
        command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("FAKE_CUDA_LOG", call_log);
        command.envs(self.env.iter().map(|(key, value)| (key, value)));
        Ok(command)
    }

    /// Builds the program, runs it with `change` applied to its command, and reads the call log.
    ///
    /// # Errors
    /// As [`Program::build`].
    ///
    /// # Panics
    /// If it cannot be started or its log cannot be read.
    pub fn run(
        &self,
        route: Route,
        directory: &Path,
        change: impl FnOnce(&mut Command),
    ) -> Result<Run, String> {
        let executable = self.build(route, directory)?;
        let call_log = PathBuf::from(format!("{}.calls", executable.display()));
        let mut command = self.command(&executable, &call_log)?;
        change(&mut command);
        let output = command.output().unwrap_or_else(|e| panic!("{}: {e}", executable.display()));
        let text = fs::read_to_string(&call_log).unwrap_or_default();
        let calls = calls::parse_log(&text).unwrap_or_else(|problem| panic!("{}: {problem}", self.name));
        for leftover in [&executable, &call_log] {
            let _ = fs::remove_file(leftover);
        }
        Ok(Run { output, calls })
    }

    /// Compares a run with the contract.
    ///
    /// # Panics
    /// With everything that differs.
    pub fn check(&self, run: &Run, route: Route) {
        let context =
            || format!("{} on {route:?}\n{}", self.name, String::from_utf8_lossy(&run.output.stderr));
        assert_eq!(ending(run.output.status), self.exit, "how it ended: {}", context());
        let census = calls::census(&run.calls);
        let lines = |census: &Census| -> Vec<_> {
            census
                .iter()
                .map(|((function, bytes, fate), n)| format!("{function} {bytes} {fate} x{n}"))
                .collect()
        };
        assert_eq!(lines(&census), lines(&self.expected), "requests, seen and expected: {}", context());
        if let Some(processes) = self.processes {
            let pids: BTreeSet<_> =
                run.calls.iter().filter(|call| call.bytes() > 0).map(|call| call.pid).collect();
            assert_eq!(pids.len(), processes, "processes: {}", context());
        }
    }
}

fn ending(status: ExitStatus) -> Ending {
    status.code().map_or_else(|| Ending::Signal(status.signal().unwrap_or(0)), Ending::Exit)
}

fn routes(link: &str) -> Option<Vec<Route>> {
    Some(match link {
        "cudart" => {
            let fixed = [Major::Cuda12, Major::Cuda13].map(Route::Static);
            Major::ALL.map(Route::Shared).into_iter().chain(fixed).collect()
        }
        "cuda" => vec![Route::Driver],
        "nccl" => vec![Route::Nccl],
        "torch" => vec![Route::Torch],
        "none" => vec![Route::Loader],
        _ => return None,
    })
}

fn fate(word: &str) -> Option<Fate> {
    match word {
        "freed" => Some(Fate::Freed),
        "leaked" => Some(Fate::Leaked),
        _ => word.strip_prefix("failed:")?.parse().ok().map(Fate::Failed),
    }
}

/// The driver function behind a runtime function, as seen with 11.8, 12.9 and 13.5; driver functions are their own.
fn driver_function(function: &str) -> &str {
    match function {
        "cudaMalloc" => "cuMemAlloc_v2",
        "cudaMallocPitch" | "cudaMalloc3D" => "cuMemAllocPitch_v2",
        "cudaMallocArray" | "cudaMalloc3DArray" => "cuArray3DCreate_v2",
        "cudaMallocMipmappedArray" => "cuMipmappedArrayCreate",
        "cudaMallocHost" | "cudaHostAlloc" => "cuMemHostAlloc",
        "cudaHostRegister" => "cuMemHostRegister_v2",
        "cudaMallocManaged" => "cuMemAllocManaged",
        "cudaMallocAsync" => "cuMemAllocAsync",
        "cudaMallocAsync_ptsz" => "cuMemAllocAsync_ptsz",
        "cudaMallocFromPoolAsync" => "cuMemAllocFromPoolAsync",
        other => other,
    }
}
