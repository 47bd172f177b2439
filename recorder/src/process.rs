//! What `/proc` tells about the traced process. Everything here may be gone or forbidden at any moment, which gives
//! `None` and never an error.

use crate::opened::{self, Access, Expected, Links};
use crate::pages::Headers;
use crate::patient::{self, Answered};
use crate::ticks::Moment;
use gputrace_schemas::event::{Ancestor, Mapping, Mappings, Module, Nanos, Process};
use object::read::ReadRef;
use object::{Object, ObjectSegment, SegmentFlags};
use std::collections::HashSet;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Variables that are kept: those that change what allocators or NCCL do, and those that name the rank. A name that
/// ends in `*` stands for all that begin so. Nothing else of the environment enters a trace: it may hold secrets.
const KEPT: &[&str] = &[
    "CUDA_*",
    "GPUTRACE*",
    "NCCL_*",
    "NVIDIA_VISIBLE_DEVICES",
    "NVTX_INJECTION64_PATH",
    "PYTORCH_*",
    "TORCH_NCCL_*",
    "TF_GPU_ALLOCATOR",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "XLA_PYTHON_CLIENT_*",
    "XLA_FLAGS",
    "MALLOC_*",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
];
/// Which of them is the rank; the first that is set wins.
const RANKS: &[&str] =
    &["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"];
const LOCAL_RANKS: &[&str] =
    &["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"];
/// Longest command line and variable that is kept.
const MOST_TEXT: usize = 4096;
/// Bytes of PyTorch's `version.py`, at most: it has some hundred.
const MOST_VERSION: u64 = 64 << 10;
/// Most ancestors that are kept.
const MOST_ANCESTORS: usize = 16;
/// Most words of a command line that are kept.
const MOST_WORDS: usize = 1024;

/// A process, by its number and when it began.
pub(crate) struct Target {
    /// As it numbers itself.
    pid: u32,
    /// Its number in the `/proc` that we see; `None` where it is not to be seen there.
    in_proc: Option<u32>,
    /// Field 22 of `/proc/PID/stat`; 0 unknown.
    start_time: u64,
    /// Starts of modules whose files do not respond.
    silent: HashSet<u64>,
}

impl Target {
    pub(crate) fn new(pid: u32, in_proc: Option<u32>, start_time: u64) -> Target {
        Target { pid, in_proc, start_time, silent: HashSet::new() }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Its number in the `/proc` that we see.
    pub(crate) fn in_proc(&self) -> Option<u32> {
        self.in_proc
    }

    /// It is no more, and its number may be somebody else's next.
    pub(crate) fn is_gone(&mut self) {
        self.in_proc = None;
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        Some(PathBuf::from(format!("/proc/{}/{name}", self.in_proc?)))
    }

    fn bytes(&self, name: &str) -> Option<Vec<u8>> {
        opened::of_proc(self.file(name)?).ok()
    }

    fn text(&self, name: &str) -> Option<String> {
        self.bytes(name).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// What is at its root, as it sees it.
    pub(crate) fn root(&self) -> Option<PathBuf> {
        self.file("root")
    }

    /// A thread's name.
    pub(crate) fn thread_name(&self, tid: u32) -> Option<String> {
        // In the `/proc` of another namespace, threads have other numbers too.
        if self.in_proc != Some(self.pid) {
            return None;
        }
        Some(self.text(&format!("task/{tid}/comm"))?.trim_end_matches('\n').to_owned())
    }

    /// The facts that a trace begins with. `environ` is the environment as the process had it when it started us;
    /// without it, the one that it began with, which lacks what programs set for themselves (ranks, often).
    pub(crate) fn facts(&self, start: Nanos, start_realtime: u64, environ: Option<Vec<u8>>) -> Process {
        let environ = environ.or_else(|| self.bytes("environ")).unwrap_or_default();
        let environment = kept_environment(&environ);
        Process {
            pid: self.pid,
            parent: self.parent().unwrap_or_default(),
            host: host(),
            boot: read_line("/proc/sys/kernel/random/boot_id"),
            executable: self.executable(),
            command: self.command(),
            rank: rank(&environment),
            environment,
            start,
            start_realtime,
            recorder: env!("CARGO_PKG_VERSION").to_owned(),
            torch_version: None,
            began: self.start_time,
            ancestors: self.ancestors(),
            segment: 0,
            since: Nanos(0),
            after_gap: false,
        }
    }

    fn command(&self) -> Vec<String> {
        words(&self.bytes("cmdline").unwrap_or_default())
    }

    /// The processes between this one and who had them all recorded, its parent first. Whoever has us not in its
    /// environment is none of ours: its command line is nobody's business.
    fn ancestors(&self) -> Vec<Ancestor> {
        let above = |of: &Target| {
            let parent = of.parent().filter(|pid| *pid > 1)?;
            let parent = Target::new(parent, Some(parent), 0);
            let preloads = parent.bytes("environ")?.split(|byte| *byte == 0).any(preloads_us);
            let stat = preloads.then(|| parse_stat(&parent.text("stat")?))??;
            Some(Target::new(parent.pid, parent.in_proc, stat.start_time))
        };
        let chain = std::iter::successors(above(self), above).take(MOST_ANCESTORS);
        chain.map(|it| Ancestor { pid: it.pid, began: it.start_time, command: it.command() }).collect()
    }

    /// When the process began: before any trace of its own. It may be gone by now, if the ring says when that was.
    pub(crate) fn began(&self) -> Option<Moment> {
        let start_time = match self.start_time {
            0 => parse_stat(&self.text("stat")?)?.start_time,
            known => known,
        };
        began(start_time, || fs::read_to_string("/proc/uptime").ok()?.split(' ').next()?.parse().ok())
    }

    fn executable(&self) -> String {
        let link = self.file("exe").and_then(|link| fs::read_link(link).ok());
        link.map(|path| String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned()).unwrap_or_default()
    }

    fn parent(&self) -> Option<u32> {
        let stat = self.text("stat")?;
        stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
    }

    /// The address space, and the modules in it. `ring` is the inode of the ring's file; `false` if it is mapped no
    /// more, which is how a process that has become another program by `exec` looks.
    pub(crate) fn address_space(&self, ring: u64) -> Option<AddressSpace> {
        let time = Nanos(crate::ticks::monotonic());
        let maps = self.text("maps")?;
        // Empty for a process that is ending.
        if maps.is_empty() { None } else { Some(parse_maps(&maps, time, ring)) }
    }

    /// A module's file as this process sees it, and whether its path will lead us there when the process is gone: the
    /// process may live in another root, or its file may be deleted, and another one be at its path.
    pub(crate) fn open(&self, module: &Module, fate: Fate) -> Option<(fs::File, Reach)> {
        if self.silent.contains(&module.start) {
            return None;
        }
        if fate == Fate::Deleted {
            return Some((self.running_file(module).or_else(|| self.mapped_file(module))?, Reach::Astray));
        }
        let at_path = || open(Path::new(&module.path));
        let inside = self.root().map(|root| root.join(module.path.trim_start_matches('/')));
        let inside = inside.and_then(|inside| open(&inside));
        let file = inside.or_else(|| self.mapped_file(module)).or_else(at_path)?;
        let is_at_path = at_path().is_some_and(|found| is_same(&found, &file));
        Some((file, if is_at_path { Reach::ByPath } else { Reach::Astray }))
    }

    /// Looks whether the modules' files respond, for so long. Those that do not are not opened any more.
    pub(crate) fn leave_out_silent(&mut self, space: &AddressSpace, patience: Duration) {
        let (pid, in_proc, start_time) = (self.pid, self.in_proc, self.start_time);
        let of = |module: &Module| (module.clone(), space.fate(module));
        let responds = move |(module, fate): (Module, Fate)| {
            let opened = Target::new(pid, in_proc, start_time).open(&module, fate);
            // Its headers are the first that is read of it, and in the same file system as the rest.
            if let Some((file, _)) = opened {
                read_module(&mut module.clone(), &file);
            }
        };
        let answers = patient::ask(space.modules.iter().map(of).collect(), patience, responds);
        let silent = space.modules.iter().zip(answers).filter(|(_, answer)| *answer != Answered::Here(()));
        self.silent = silent.map(|(module, _)| module.start).collect();
    }

    /// Whether this module's file does not respond.
    pub(crate) fn is_silent(&self, module: &Module) -> bool {
        self.silent.contains(&module.start)
    }

    /// The program's own file, if that is what the module is.
    fn running_file(&self, module: &Module) -> Option<fs::File> {
        let is_it = self.executable().trim_end_matches(DELETED) == module.path;
        if is_it { open(&self.file("exe")?) } else { None }
    }

    /// The file whose mapping begins at the module's start (proc(5), `map_files`; for the privileged).
    fn mapped_file(&self, module: &Module) -> Option<fs::File> {
        let begin = format!("{:x}-", module.start);
        let mut links = fs::read_dir(self.file("map_files")?).ok()?.flatten();
        let link = links.find(|link| link.file_name().to_string_lossy().starts_with(&begin))?;
        open(&link.path())
    }

    /// PyTorch's version, by the `version.py` beside the `lib` folder of a mapped `libc10.so`.
    pub(crate) fn torch_version(&self, modules: &[Module]) -> Option<String> {
        let library = modules.iter().find(|module| module.path.ends_with("/torch/lib/libc10.so"))?;
        let folder = Path::new(&library.path).parent()?.parent()?;
        let inside = folder.strip_prefix("/").ok().and_then(|folder| Some(self.root()?.join(folder)));
        let read = |folder: &Path| {
            let expected = Expected::regular().with_bytes(0..=MOST_VERSION);
            opened::read(&folder.join("version.py"), Links::Followed, &expected).ok()
        };
        let text = inside.as_deref().and_then(read).or_else(|| read(folder))?;
        parse_torch_version(&String::from_utf8_lossy(&text))
    }
}

/// A file at a path that the process chose. Another may be there by now, of any kind.
fn open(path: &Path) -> Option<fs::File> {
    opened::opened(path, Links::Followed, Access::Read, &Expected::regular()).ok()
}

/// What became of a file since it was mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    There,
    Deleted,
}

/// Whether a file's path leads to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reach {
    ByPath,
    Astray,
}

fn is_same(a: &fs::File, b: &fs::File) -> bool {
    let id = |file: &fs::File| file.metadata().map(|data| (data.dev(), data.ino())).ok();
    id(a).is_some() && id(a) == id(b)
}

/// What the kernel adds to the path of a file that is gone (proc(5)).
const DELETED: &str = " (deleted)";

/// One reading of `/proc/PID/maps`.
#[derive(Debug, PartialEq)]
pub(crate) struct AddressSpace {
    pub(crate) mappings: Mappings,
    /// Without build id and bias, which need the file.
    pub(crate) modules: Vec<Module>,
    /// Starts of those whose file is gone.
    pub(crate) deleted: HashSet<u64>,
    pub(crate) has_ring: bool,
}

impl AddressSpace {
    pub(crate) fn fate(&self, module: &Module) -> Fate {
        if self.deleted.contains(&module.start) { Fate::Deleted } else { Fate::There }
    }
}

fn parse_maps(maps: &str, time: Nanos, ring: u64) -> AddressSpace {
    let mut mapped: Vec<Mapping> = Vec::new();
    let mut modules: Vec<Module> = Vec::new();
    let mut deleted = HashSet::new();
    let mut has_ring = false;
    // First address and offset of the run of mappings of one file.
    let mut run: Option<(&str, u64)> = None;
    let is_emulated = is_emulated(maps);
    for line in maps.lines() {
        let Some(line) = MapsLine::parse(line) else { continue };
        has_ring |= line.inode == ring && ring != 0;
        match mapped.last_mut() {
            Some(last) if last.end == line.start => last.end = line.end,
            _ => mapped.push(Mapping { start: line.start, end: line.end }),
        }
        if !line.path.starts_with('/') {
            // The memory between a library's segments, or its .bss: the run goes on.
            continue;
        }
        let first = match run {
            Some((path, first)) if path == line.path && line.offset != 0 => first,
            _ => line.start,
        };
        run = Some((line.path, first));
        let is_code = line.executable || (is_emulated && line.constant);
        if !is_code || line.path.starts_with("/dev/") {
            continue;
        }
        let path = line.path.trim_end_matches(DELETED);
        if path != line.path {
            deleted.insert(first);
        }
        match modules.last_mut() {
            Some(last) if last.path == path && last.start == first => last.end = line.end,
            _ => modules.push(Module {
                path: path.to_owned(),
                start: first,
                end: line.end,
                // Until the file is read: right for libraries whose first segment begins at 0.
                bias: first,
                ..Module::default()
            }),
        }
    }
    AddressSpace { mappings: Mappings { time, mapped }, modules, deleted, has_ring }
}

/// Whether QEMU runs the program on another processor: it reads the program's code, and maps it as what is only read. Addresses are
/// the program's own (`linux-user`, both of 64 bits).
fn is_emulated(maps: &str) -> bool {
    let mut code = maps.lines().filter_map(MapsLine::parse).filter(|line| line.executable);
    code.any(|line| line.path.rsplit('/').next().is_some_and(|name| name.starts_with("qemu-")))
}

struct MapsLine<'a> {
    start: u64,
    end: u64,
    executable: bool,
    /// Can be read, and neither written to nor run.
    constant: bool,
    offset: u64,
    inode: u64,
    path: &'a str,
}

impl MapsLine<'_> {
    /// `start-end perms offset major:minor inode path`, proc(5).
    fn parse(line: &str) -> Option<MapsLine<'_>> {
        let mut rest = line;
        let mut word = || {
            let (word, after) = rest.split_once(' ').unwrap_or((rest, ""));
            rest = after.trim_start_matches(' ');
            word
        };
        let (range, permissions, offset, _device, inode) = (word(), word(), word(), word(), word());
        let (start, end) = range.split_once('-')?;
        Some(MapsLine {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            executable: permissions.as_bytes().get(2) == Some(&b'x'),
            constant: permissions.starts_with("r--"),
            offset: u64::from_str_radix(offset, 16).ok()?,
            inode: inode.parse().ok()?,
            path: rest,
        })
    }
}

/// Build id and bias of a module, from its file.
pub(crate) fn read_module(module: &mut Module, file: &fs::File) {
    // Reads the few pages that hold the answer, however long the file is.
    let headers = Headers::of(file);
    let Ok(elf) = object::File::parse(&headers) else { return };
    module.build_id = build_id(&elf);
    // `start` is where the first page of the file is mapped, so the first loadable segment says what its address was.
    let first = elf.segments().filter(|segment| matches!(segment.flags(), SegmentFlags::Elf { .. }));
    if let Some(first) = first.min_by_key(object::ObjectSegment::address) {
        let (offset, _) = first.file_range();
        module.bias = module.start.wrapping_sub(first.address().wrapping_sub(offset));
    }
}

/// Hexadecimal; empty if there is none.
pub(crate) fn build_id<'data>(elf: &object::File<'data, impl ReadRef<'data>>) -> String {
    elf.build_id().ok().flatten().map(hex).unwrap_or_default()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Our own environment, as `/proc/PID/environ` has it.
pub(crate) fn own_environment() -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in std::env::vars_os() {
        bytes.extend_from_slice(name.as_bytes());
        bytes.push(b'=');
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
    }
    bytes
}

/// A variable of the environment that has our library loaded.
fn preloads_us(variable: &[u8]) -> bool {
    let text = String::from_utf8_lossy(variable);
    text.strip_prefix("LD_PRELOAD=").is_some_and(|libraries| libraries.contains("libgputrace"))
}

/// What `/proc/PID/stat` says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stat {
    pub(crate) state: char,
    pub(crate) n_threads: u64,
    /// In clock ticks since boot.
    pub(crate) start_time: u64,
    /// As `waitpid(2)` gives it, of a process that has ended; 0 also where we may not know.
    pub(crate) exit_code: i32,
}

/// Of a process, by its number in the `/proc` that we see. `None` says nothing of it: it may be hidden from us, or we
/// may have no descriptor or memory left to read it.
pub(crate) fn stat(in_proc: u32) -> Option<Stat> {
    parse_stat(&opened::text_of_proc(format!("/proc/{in_proc}/stat")).ok()?)
}

/// Whether we are under a filter of system calls (seccomp), which we then have from the program.
pub(crate) fn is_filtered() -> bool {
    let status = opened::text_of_proc("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() != "0"))
}

/// Whether the process of a trace runs here; in doubt it does.
pub(crate) fn is_running(process: &Process) -> bool {
    let is_here = process.boot == read_line("/proc/sys/kernel/random/boot_id") && proc_is_ours();
    let is_it = |stat: Stat| {
        (process.began == 0 || stat.start_time == process.began)
            && (!matches!(stat.state, 'Z' | 'X' | 'x') || stat.n_threads > 1)
    };
    !is_here || stat(process.pid).is_some_and(is_it)
}

/// Whether a thread is gone, or will run no line of its program again.
pub(crate) fn is_going(thread: u32) -> bool {
    crate::opened::text_of_proc(format!("/proc/{thread}/stat")).map_or(true, |stat| is_ending(&stat))
}

/// Whether the kernel is taking the process or thread of this `stat` down: by the flags of proc(5), `PF_EXITING` of the kernel's
/// sched.h, which is 4 in every Linux.
pub(crate) fn is_ending(stat: &str) -> bool {
    const PF_EXITING: u32 = 4;
    let flags = stat.rsplit_once(')').and_then(|(_, after)| after.split_ascii_whitespace().nth(9 - 3));
    flags.and_then(|flags| flags.parse::<u32>().ok()).is_some_and(|flags| flags & PF_EXITING != 0)
}

/// The name in parentheses may hold anything.
fn parse_stat(stat: &str) -> Option<Stat> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    // The state is field 3 (proc(5)).
    let field = |number: usize| fields.get(number - 3).copied();
    Some(Stat {
        state: field(3)?.chars().next()?,
        n_threads: field(20)?.parse().ok()?,
        start_time: field(22)?.parse().ok()?,
        exit_code: field(52).and_then(|code| code.parse().ok()).unwrap_or_default(),
    })
}

/// When a process began whose `/proc/PID/stat` has this start time, by what says how many seconds ago the machine was started.
///
/// The clock is read first: a recorder that has to wait for a processor after that takes its process for older than it is. The other way
/// round it would take the process for younger than what the process has recorded, as another program (`exec`), under the same name, and
/// refuse to record it again.
fn began(start_time: u64, uptime: impl FnOnce() -> Option<f64>) -> Option<Moment> {
    let now = Moment::now();
    // Both count from boot, sleep included; a tick is 10 ms on every Linux (proc(5), USER_HZ).
    let age = Duration::try_from_secs_f64(uptime()? - start_time as f64 / 100.0).ok()?;
    now.before(age)
}

/// Clock ticks on a processor, in `/proc/PID/stat`: of the process and of the children that it has waited for.
pub(crate) fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(14 - 3);
    (0..4).try_fold(0_u64, |sum, _| Some(sum.saturating_add(fields.next()?.parse().ok()?)))
}

/// Whether processes have the numbers in `/proc` that they have for us: a container may see the `/proc` of its host, or
/// none. From there on inwards, a process has a number in each namespace (`NSpid`, since Linux 4.1).
pub(crate) fn proc_is_ours() -> bool {
    let status = opened::text_of_proc("/proc/self/status").unwrap_or_default();
    match numbers(&status) {
        Some(numbers) => numbers.len() == 1,
        None => {
            fs::read_link("/proc/self").is_ok_and(|link| link == Path::new(&std::process::id().to_string()))
        }
    }
}

/// `NSpid` of `/proc/PID/status`: a process's numbers, from the namespace of that `/proc` inwards to its own.
pub(crate) fn numbers(status: &str) -> Option<Vec<u32>> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().map(|number| number.parse().ok()).collect()
}

/// The numbers of a process, from those of the outermost namespace that we can see to its own.
pub(crate) fn numbers_of(in_proc: u32) -> Option<Vec<u32>> {
    numbers(&opened::text_of_proc(format!("/proc/{in_proc}/status")).ok()?)
}

/// The number, in the `/proc` that we see, of the process that a descriptor stands for.
pub(crate) fn number_of_descriptor(descriptor: &impl AsRawFd) -> Option<u32> {
    let info = opened::text_of_proc(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd())).ok()?;
    // -1 when it has ended, 0 where it is not to be seen (`kernel/pid.c`, pidfd_show_fdinfo).
    let number = info.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
    (number > 0).then_some(number)
}

fn kept_environment(environ: &[u8]) -> Vec<(String, String)> {
    let pairs = environ.split(|byte| *byte == 0).filter_map(|pair| {
        let at = pair.iter().position(|byte| *byte == b'=')?;
        let name = std::str::from_utf8(&pair[..at]).ok()?;
        let kept = KEPT.iter().any(|kept| match kept.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == *kept,
        });
        kept.then(|| (name.to_owned(), shorten(&pair[at + 1..])))
    });
    let mut pairs: Vec<_> = pairs.collect();
    pairs.sort();
    pairs
}

/// The first of the variables that is a number.
fn first_number(environment: &[(String, String)], names: &[&str]) -> Option<u32> {
    names.iter().find_map(|wanted| {
        environment.iter().find(|(name, _)| name == wanted).and_then(|(_, value)| value.trim().parse().ok())
    })
}

/// The rank in the job.
pub(crate) fn rank(environment: &[(String, String)]) -> Option<u32> {
    first_number(environment, RANKS)
}

/// The rank on the host.
pub(crate) fn local_rank(environment: &[(String, String)]) -> Option<u32> {
    first_number(environment, LOCAL_RANKS)
}

/// Blank bytes at the end of a command line from which on they are what a title of the program's own has left over.
const LEFT_OVER: usize = 8;

/// The words of a command line, each of which ends with a zero. A program that gives itself a title leaves the rest of it blank.
fn words(line: &[u8]) -> Vec<String> {
    if line.is_empty() {
        return vec![];
    }
    let n_said = line.iter().rposition(|byte| !matches!(byte, 0 | b' ')).map_or(0, |last| last + 1);
    let said = match line.len() - n_said {
        LEFT_OVER.. => &line[..n_said],
        _ => line.strip_suffix(b"\0").unwrap_or(line),
    };
    said.split(|byte| *byte == 0).map(shorten).take(MOST_WORDS).collect()
}

fn shorten(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.get(..MOST_TEXT).unwrap_or(bytes)).into_owned()
}

pub(crate) fn read_line(path: &str) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// This host's name.
pub(crate) fn host() -> String {
    read_line("/proc/sys/kernel/hostname")
}

/// `__version__ = '2.11.0+cu130'`
fn parse_torch_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("__version__"))?;
    let value = line.split_once('=')?.1.trim();
    Some(value.trim_matches(['\'', '"']).to_owned()).filter(|version| !version.is_empty())
}

/// `GPU-`, or `MIG-` for a part of a card, and the usual groups of a `CUuuid`. Only the name says that it is a part:
/// `NVIDIA A100-SXM4-40GB MIG 1g.5gb` (MIG user guide, device names).
pub(crate) fn gpu_uuid(name: &str, bytes: [u8; 16]) -> String {
    let mut text = if name.contains(" MIG ") { "MIG" } else { "GPU" }.to_owned();
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_that_a_program_gives_itself_is_its_command() {
        assert_eq!(words(b"python\0train.py\0--name\0\0"), ["python", "train.py", "--name", ""]);
        assert_eq!(words(b"python\0"), ["python"]);
        assert_eq!(words(b"nginx: worker process"), ["nginx: worker process"]);
        assert!(words(b"").is_empty());
        for padding in [&b" "[..], b"\0"] {
            let line = [b"ray::Worker.train".to_vec(), padding.repeat(200), b"\0".to_vec()].concat();
            assert_eq!(words(&line), ["ray::Worker.train"]);
        }
        assert_eq!(words(b"sshd: me [priv]\0\0\0\0\0\0\0\0\0"), ["sshd: me [priv]"]);
        assert!(words(&[0; 30]).concat().is_empty());
    }

    #[test]
    fn a_recorder_that_waits_for_a_processor_takes_its_process_for_no_younger() {
        use std::process::{Command, Stdio};

        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat");
        let has_begun = Moment::now();
        let start_time = stat(child.id()).expect("it waits").start_time;
        let began = began(start_time, || {
            let wait = || std::thread::sleep(Duration::from_millis(300));
            wait();
            let uptime = fs::read_to_string("/proc/uptime").ok()?.split(' ').next()?.parse().ok();
            wait();
            uptime
        });
        drop(child.stdin.take());
        child.wait().expect("ours");
        let tick = Duration::from_millis(10);
        assert!(began.and_then(|began| began.before(tick)).expect("known").monotonic <= has_begun.monotonic);
    }

    #[test]
    fn maps_become_joined_ranges_and_modules_with_code() {
        let maps = "\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 11 /usr/bin/a b
55d0c0001000-55d0c0002000 r-xp 00001000 08:01 11 /usr/bin/a b
55d0c0003000-55d0c0004000 rw-p 00003000 08:01 11 /usr/bin/a b
55d0c0004000-55d0c0009000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000200000 ---p 00000000 00:00 0
7f0000200000-7f0000300000 r-xp 00000000 08:01 12 /lib/x.so (deleted)
7f0000300000-7f0000400000 rw-s 00000000 00:19 77 /dev/shm/gputrace.1.2.ring
";
        let space = parse_maps(maps, Nanos(5), 77);
        let range = |start, end| Mapping { start, end };
        let mapped = vec![
            range(0x55d0_c000_0000, 0x55d0_c000_2000),
            range(0x55d0_c000_3000, 0x55d0_c000_9000),
            range(0x7f00_0000_0000, 0x7f00_0040_0000),
        ];
        assert_eq!(space.mappings, Mappings { time: Nanos(5), mapped });
        let module = |path: &str, start, end| Module {
            path: path.to_owned(),
            start,
            end,
            bias: start,
            ..Module::default()
        };
        assert_eq!(
            space.modules,
            [
                module("/usr/bin/a b", 0x55d0_c000_0000, 0x55d0_c000_2000),
                module("/lib/x.so", 0x7f00_0020_0000, 0x7f00_0030_0000),
            ]
        );
        assert_eq!(space.deleted, HashSet::from([0x7f00_0020_0000]));
        assert!(space.has_ring);
        assert!(!parse_maps(maps, Nanos(5), 78).has_ring);
    }

    #[test]
    fn the_code_of_an_emulated_program_is_what_it_maps_without_running_it() {
        let program = "\
5500000000-5500002000 r--p 00000000 08:01 11 /usr/bin/a
5500012000-5500013000 r--p 00002000 08:01 11 /usr/bin/a
5500013000-5500014000 rw-p 00003000 08:01 11 /usr/bin/a
";
        let emulator = "7f0000200000-7f0000300000 r-xp 00000000 08:01 12 /usr/bin/qemu-aarch64-static\n";
        let names = |maps: &str| -> Vec<String> {
            let space = parse_maps(maps, Nanos(5), 0);
            space.modules.into_iter().map(|module| format!("{} {:x}", module.path, module.start)).collect()
        };
        assert_eq!(names(program), [""; 0]);
        let both = names(&format!("{program}{emulator}"));
        assert_eq!(both, ["/usr/bin/a 5500000000", "/usr/bin/qemu-aarch64-static 7f0000200000"]);
    }

    #[test]
    fn only_variables_that_matter_are_kept() {
        let environ = b"HOME=/root\0RANK=3\0AWS_SECRET_ACCESS_KEY=x\0PYTORCH_CUDA_ALLOC_CONF=a:b=c\0SLURM_PROCID=9\0LOCAL_RANK=1\0";
        let kept = kept_environment(environ);
        let names: Vec<&str> = kept.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["LOCAL_RANK", "PYTORCH_CUDA_ALLOC_CONF", "RANK", "SLURM_PROCID"]);
        assert_eq!((rank(&kept), local_rank(&kept)), (Some(3), Some(1)));
        assert_eq!(kept[1].1, "a:b=c");
    }

    #[test]
    fn a_name_with_parentheses_does_not_hide_the_start_time() {
        let stat = "42 (a) b) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 1";
        let found = Stat { state: 'S', n_threads: 1, start_time: 987_654, exit_code: 0 };
        assert_eq!(parse_stat(stat), Some(found));
    }

    #[test]
    fn only_who_has_us_preloaded_is_one_of_the_job() {
        assert!(preloads_us(b"LD_PRELOAD=/x/libjemalloc.so:/opt/libgputrace.so"));
        assert!(
            !preloads_us(b"LD_PRELOAD=/x/libjemalloc.so") && !preloads_us(b"A=LD_PRELOAD=libgputrace.so")
        );
    }

    #[test]
    fn our_own_process_is_known() {
        let pid = std::process::id();
        let target = Target::new(pid, Some(pid), 0);
        assert!(proc_is_ours() && stat(pid).is_some());
        assert_eq!(numbers_of(pid), Some(vec![pid]));
        assert!(target.thread_name(pid).is_some());
        let space = target.address_space(0).expect("maps of ourselves");
        let here = our_own_process_is_known as *const () as u64;
        let mut ours =
            space.modules.into_iter().find(|module| (module.start..module.end).contains(&here)).expect("us");
        let (file, reach) = target.open(&ours, Fate::There).expect("our own file");
        assert_eq!(reach, Reach::ByPath);
        read_module(&mut ours, &file);
        assert!(ours.bias != 0 && ours.bias <= here);
    }

    #[test]
    fn version_and_uuid_are_read_as_written() {
        assert_eq!(parse_torch_version("x\n__version__ = '2.11.0+cu130'\n"), Some("2.11.0+cu130".to_owned()));
        let bytes = std::array::from_fn(|at| at as u8 * 16);
        assert_eq!(gpu_uuid("NVIDIA H200", bytes), "GPU-00102030-4050-6070-8090-a0b0c0d0e0f0");
        let part = gpu_uuid("NVIDIA A100-SXM4-40GB MIG 1g.5gb", bytes);
        assert_eq!(part, "MIG-00102030-4050-6070-8090-a0b0c0d0e0f0");
    }
}
