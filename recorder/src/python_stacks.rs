//! The Python stacks of another process's threads, read while it runs.
//!
//! Nothing of the process is stopped or changed: words are read from `/proc/PID/mem`, by the offsets that the library uses inside
//! ([`gputrace_ring::python_offsets`]). What is read may change meanwhile, so each thread is read until two readings in a row are the
//! same; one of which no two are is marked. Every read is bounded, and nothing that was read is believed before it was checked: a
//! code object must be of CPython's type for code, a text of its type for texts.
//!
//! The kernel lets only those read who may trace the process (`PTRACE_MODE_ATTACH`): its own user where yama's `ptrace_scope` is 0,
//! root else.

use crate::opened::text_of_proc;
use crate::process::{Fate, Target};
use crate::python_lines::line_at;
use gputrace_ring::python_offsets::{
    DEBUG_COOKIE, DEBUG_FREE_THREADED, DEBUG_VERSION, DEBUG_WORDS, NONE, Offsets, Place, VERSIONS,
};
use gputrace_schemas::event::Module;
use object::read::ReadCache;
use object::{Object, ObjectSymbol};
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// Threads, interpreters, and frames of a thread that are read at most.
const MOST_THREADS: usize = 1024;
const MOST_INTERPRETERS: usize = 64;
const MOST_FRAMES: usize = 256;
/// Characters of a name, and bytes of a table of lines, that are read at most.
const MOST_TEXT: u64 = 1024;
const MOST_LINES: u64 = 1 << 20;
/// Readings of a thread before it is marked.
const MOST_READINGS: u32 = 4;
/// No structure lies below.
const LEAST_ADDRESS: u64 = 4096;
/// `tid` in `struct pthread` (glibc 2.28 to 2.41, x86-64): before 3.11 the interpreter knows a thread only by the address of that.
const TID_IN_PTHREAD: u64 = 0x2d0;
/// Bytes of `_PyRuntime` in which it says its offsets.
const DEBUG_BYTES: usize = 1024;

/// Why there are no stacks.
#[derive(Debug, thiserror::Error)]
pub enum NoStacks {
    /// There is no such process.
    #[error("process {0} does not exist (any more)")]
    Gone(u32),
    /// The kernel does not let us read.
    #[error("the memory of process {pid} may not be read: {why}")]
    Refused {
        /// The process.
        pid: u32,
        /// Why, and what to change.
        why: String,
    },
    /// It runs no Python that we know.
    #[error("process {pid}: {why}")]
    NoPython {
        /// The process.
        pid: u32,
        /// Why not.
        why: String,
    },
}

/// A line of a stack.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Line {
    /// The function, qualified from Python 3.11 on.
    pub function: String,
    /// Its file, as the interpreter names it.
    pub file: String,
    /// The line that runs; 0 where the table of lines does not say it.
    pub line: u32,
}

/// The stack of a thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ThreadStack {
    /// The kernel's number of it, as its own namespace has it; 0 not known.
    pub tid: u32,
    /// The kernel's name of it.
    pub name: String,
    /// Its state, as `/proc` says: `S` sleeps, `R` runs, `D` waits in the kernel.
    pub state: char,
    /// Its lines, innermost first; none where it is not in Python.
    pub lines: Vec<Line>,
    /// It changed under each reading: lines may be of different moments.
    pub is_torn: bool,
}

/// Reads the stacks of all threads that the Python interpreter of a process knows, by the process's number in the `/proc` that we see.
/// The main thread comes first.
///
/// # Errors
/// The process is gone, may not be read, or runs no Python that is known.
pub fn stacks(pid: u32) -> Result<Vec<ThreadStack>, NoStacks> {
    if fs::metadata(format!("/proc/{pid}")).is_err() {
        return Err(NoStacks::Gone(pid));
    }
    let memory = File::open(format!("/proc/{pid}/mem"))
        .map_err(|error| NoStacks::Refused { pid, why: format!("{error}; {}", remedy()) })?;
    let foreign = Foreign { memory };
    let python = Python::find(pid, &foreign).map_err(|why| NoStacks::NoPython { pid, why })?;
    let mut threads = python.threads(pid, &foreign);
    threads.sort_by_key(|thread| (thread.tid != pid, thread.tid));
    Ok(threads)
}

fn remedy() -> &'static str {
    let scope = text_of_proc("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match scope.trim() {
        "1" => {
            "only root, or the parent of the process, may (kernel.yama.ptrace_scope=1): run this as root, or set it to 0"
        }
        "2" => "only root may (kernel.yama.ptrace_scope=2): run this as root",
        "3" => "nobody may on this machine (kernel.yama.ptrace_scope=3)",
        _ => "only its own user and root may, and only where it is dumpable",
    }
}

/// The memory of the process.
struct Foreign {
    memory: File,
}

impl Foreign {
    fn bytes(&self, address: u64, to: &mut [u8]) -> Option<()> {
        if address < LEAST_ADDRESS {
            return None;
        }
        self.memory.read_exact_at(to, address).ok()
    }

    fn word(&self, address: u64, offset: u16) -> Option<u64> {
        let mut word = [0; 8];
        self.bytes(address.checked_add(u64::from(offset))?, &mut word)?;
        Some(u64::from_le_bytes(word))
    }

    fn half(&self, address: u64, offset: u16) -> Option<u32> {
        self.word(address, offset).map(|word| word as u32)
    }
}

/// The interpreter of the process.
struct Python {
    offsets: Offsets,
    runtime: u64,
    code_type: u64,
    text_type: u64,
    bytes_type: u64,
}

/// A frame before its code is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Frame {
    code: u64,
    instruction: i32,
}

impl Python {
    fn find(pid: u32, foreign: &Foreign) -> Result<Python, String> {
        let target = Target::new(pid, Some(pid), 0);
        let space = target.address_space(0).ok_or("its mappings may not be read")?;
        let is_python = |module: &&Module| {
            let name = module.path.rsplit('/').next().unwrap_or_default();
            name.starts_with("libpython3") || name.starts_with("python3") || name == "python"
        };
        let named = space.modules.iter().filter(is_python);
        // A program that embeds the interpreter is the first of the modules.
        for module in named.chain(space.modules.first()) {
            let Some((file, _)) = target.open(module, Fate::There) else { continue };
            let Some(symbols) = symbols(module, &file) else { continue };
            let offsets = offsets(module, &symbols, foreign)?;
            return Ok(Python {
                offsets,
                runtime: symbols["_PyRuntime"],
                code_type: *symbols.get("PyCode_Type").ok_or("it has no PyCode_Type")?,
                text_type: *symbols.get("PyUnicode_Type").ok_or("it has no PyUnicode_Type")?,
                bytes_type: *symbols.get("PyBytes_Type").ok_or("it has no PyBytes_Type")?,
            });
        }
        Err("it runs no CPython 3".to_owned())
    }

    fn threads(&self, pid: u32, foreign: &Foreign) -> Vec<ThreadStack> {
        let mut reader = Reader { python: self, foreign, codes: HashMap::new() };
        let mut threads = vec![];
        let mut interpreter = foreign.word(self.runtime, self.offsets.interpreters).unwrap_or(0);
        for _ in 0..MOST_INTERPRETERS {
            let Some(first) = foreign.word(interpreter, self.offsets.interpreter_threads) else { break };
            let (mut thread, mut seen) = (first, HashSet::new());
            while thread >= LEAST_ADDRESS && threads.len() < MOST_THREADS && seen.insert(thread) {
                threads.extend(reader.thread(pid, thread));
                thread = foreign.word(thread, self.offsets.thread_next).unwrap_or(0);
            }
            interpreter = foreign.word(interpreter, self.offsets.interpreter_next).unwrap_or(0);
        }
        threads
    }
}

/// Addresses of the symbols that are needed, if `_PyRuntime` is one of this file's.
fn symbols(module: &Module, file: &File) -> Option<HashMap<&'static str, u64>> {
    const WANTED: [&str; 5] = ["_PyRuntime", "PyCode_Type", "PyUnicode_Type", "PyBytes_Type", "Py_Version"];
    let cache = ReadCache::new(file);
    let elf = object::File::parse(&cache).ok()?;
    let mut module = module.clone();
    crate::process::read_module(&mut module, file);
    let mut found = HashMap::new();
    for symbol in elf.dynamic_symbols().filter(object::ObjectSymbol::is_definition) {
        let known = symbol.name().ok().and_then(|name| WANTED.iter().find(|wanted| **wanted == name));
        if let Some(name) = known {
            found.insert(*name, module.bias.wrapping_add(symbol.address()));
        }
    }
    found.contains_key("_PyRuntime").then_some(found)
}

/// The row of this interpreter, with what the process says itself.
fn offsets(
    module: &Module,
    symbols: &HashMap<&'static str, u64>,
    foreign: &Foreign,
) -> Result<Offsets, String> {
    let runtime = symbols["_PyRuntime"];
    let mut debug = [0; DEBUG_BYTES];
    foreign.bytes(runtime, &mut debug).ok_or("its interpreter may not be read")?;
    let word = |index: u8| {
        let at = usize::from(index) * 8;
        debug.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
    };
    if word(0) != DEBUG_COOKIE {
        let by_symbol = symbols.get("Py_Version").and_then(|at| foreign.half(*at, 0));
        let minor = by_symbol.map(|version| version >> 16 & 0xff).or_else(|| minor_by_name(&module.path));
        let minor = minor.ok_or("its version of CPython is not known")?;
        // From 3.13 on it would have said its offsets.
        let row = VERSIONS.iter().find(|row| u32::from(row.minor) == minor && minor < 13);
        return row.copied().ok_or_else(|| format!("CPython 3.{minor} is not known"));
    }
    let minor = word(DEBUG_VERSION) >> 16 & 0xff;
    if word(DEBUG_FREE_THREADED) != 0 {
        return Err(format!("CPython 3.{minor} without a global lock is not read"));
    }
    let words = DEBUG_WORDS.iter().find(|words| u64::from(words.minor) == minor);
    let row = VERSIONS.iter().find(|row| u64::from(row.minor) == minor);
    let (Some(words), Some(row)) = (words, row) else {
        return Err(format!("CPython 3.{minor} is not known"));
    };
    let offset = |index: u8| u16::try_from(word(index)).unwrap_or(NONE);
    let said = Offsets {
        interpreters: offset(words.finalizing + 1),
        interpreter_next: offset(words.interpreter_id + 1),
        interpreter_threads: offset(words.interpreter_id + 2),
        thread_next: offset(words.thread_interpreter - 1),
        thread_top: offset(words.thread_interpreter + 1),
        thread_id: offset(words.thread_id),
        thread_native_id: offset(words.thread_id + 1),
        frame_previous: offset(words.frame_previous),
        frame_code: offset(words.frame_previous + 1),
        frame_place: offset(words.frame_previous + 2),
        frame_owner: offset(words.frame_previous + 4),
        code_file: offset(words.code_file),
        code_name: offset(words.code_file + 2),
        code_lines: offset(words.code_file + 3),
        code_first_line: offset(words.code_file + 4),
        code_start: offset(words.code_start),
        object_type: offset(words.object_type),
        ..*row
    };
    Ok(said)
}

/// `/usr/bin/python3.10`, `/usr/lib/libpython3.9.so.1.0`: 10 and 9.
fn minor_by_name(path: &str) -> Option<u32> {
    let name = path.rsplit('/').next()?;
    let (_, rest) = name.split_once("python3.")?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

struct Reader<'a> {
    python: &'a Python,
    foreign: &'a Foreign,
    codes: HashMap<u64, Option<Code>>,
}

struct Code {
    function: String,
    file: String,
    first_line: u32,
    lines: Vec<u8>,
}

impl Reader<'_> {
    fn thread(&mut self, pid: u32, thread: u64) -> Option<ThreadStack> {
        let offsets = &self.python.offsets;
        let tid = match offsets.thread_native_id {
            NONE => {
                let pthread = self.foreign.word(thread, offsets.thread_id)?;
                let mut tid = [0; 4];
                self.foreign.bytes(pthread.checked_add(TID_IN_PTHREAD)?, &mut tid)?;
                u32::from_le_bytes(tid)
            }
            native => self.foreign.half(thread, native)?,
        };
        let (mut frames, mut is_torn) = (self.frames(thread), true);
        for _ in 1..MOST_READINGS {
            let again = self.frames(thread);
            is_torn = again != frames;
            if !is_torn {
                break;
            }
            frames = again;
        }
        let lines = frames.unwrap_or_default().into_iter().filter_map(|frame| self.line(frame)).collect();
        let folder = format!("/proc/{pid}/task/{tid}");
        let name = text_of_proc(&format!("{folder}/comm")).unwrap_or_default().trim().to_owned();
        let stat = text_of_proc(&format!("{folder}/stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('?');
        Some(ThreadStack { tid, name, state, lines, is_torn })
    }

    /// Where its frames are, innermost first; `None` where they could not be followed to their end.
    fn frames(&self, thread: u64) -> Option<Vec<Frame>> {
        let (offsets, foreign) = (&self.python.offsets, self.foreign);
        let mut at = foreign.word(thread, offsets.thread_top)?;
        if offsets.cframe_current != NONE && at != 0 {
            at = foreign.word(at, offsets.cframe_current)?;
        }
        let mut frames = vec![];
        for _ in 0..MOST_FRAMES {
            if at < LEAST_ADDRESS {
                break;
            }
            let code = foreign.word(at, offsets.frame_code)? & !7;
            let is_shim = offsets.frame_owner != NONE && {
                let owner = foreign.word(at, offsets.frame_owner)?;
                owner & 0xff >= u64::from(offsets.shim_owner) && offsets.shim_owner != u8::MAX
            };
            if !is_shim && code != 0 && foreign.word(code, offsets.object_type) == Some(self.python.code_type)
            {
                let place = foreign.word(at, offsets.frame_place)?;
                let instruction = match offsets.place {
                    Place::Bytes => place as u32,
                    Place::Instructions => (place as u32).wrapping_mul(2),
                    Place::Address => {
                        place.wrapping_sub(code).wrapping_sub(u64::from(offsets.code_start)) as u32
                    }
                };
                frames.push(Frame { code, instruction: instruction.cast_signed() });
            }
            at = foreign.word(at, offsets.frame_previous)?;
        }
        Some(frames)
    }

    fn line(&mut self, frame: Frame) -> Option<Line> {
        if !self.codes.contains_key(&frame.code) {
            let code = self.code(frame.code);
            self.codes.insert(frame.code, code);
        }
        let code = self.codes.get(&frame.code)?.as_ref()?;
        let python = 3 << 8 | u16::from(self.python.offsets.minor);
        let line = line_at(python, &code.lines, code.first_line, frame.instruction).unwrap_or(0);
        Some(Line { function: code.function.clone(), file: code.file.clone(), line })
    }

    fn code(&self, code: u64) -> Option<Code> {
        let (offsets, foreign) = (&self.python.offsets, self.foreign);
        let lines = foreign.word(code, offsets.code_lines)?;
        if foreign.word(lines, offsets.object_type)? != self.python.bytes_type {
            return None;
        }
        let length = foreign.word(lines, offsets.length)?;
        let mut table = vec![0; usize::try_from(length.min(MOST_LINES)).ok()?];
        foreign.bytes(lines.checked_add(u64::from(offsets.bytes_data))?, &mut table)?;
        Some(Code {
            function: self.text(foreign.word(code, offsets.code_name)?)?,
            file: self.text(foreign.word(code, offsets.code_file)?)?,
            first_line: foreign.half(code, offsets.code_first_line)?,
            lines: table,
        })
    }

    /// A compact string (unicodeobject.h): interned:2, kind:3, compact:1, ascii:1.
    fn text(&self, text: u64) -> Option<String> {
        let (offsets, foreign) = (&self.python.offsets, self.foreign);
        if foreign.word(text, offsets.object_type)? != self.python.text_type {
            return None;
        }
        let state = foreign.half(text, offsets.text_state)?;
        let (width, is_compact, is_ascii) = (state >> 2 & 7, state >> 5 & 1 != 0, state >> 6 & 1 != 0);
        if !is_compact || !matches!(width, 1 | 2 | 4) {
            return None;
        }
        let start = if is_ascii { offsets.text_ascii } else { offsets.text_compact };
        let length = foreign.word(text, offsets.length)?.min(MOST_TEXT);
        let mut bytes = vec![0; usize::try_from(length * u64::from(width)).ok()?];
        foreign.bytes(text.checked_add(u64::from(start))?, &mut bytes)?;
        let numbers = bytes
            .chunks_exact(width as usize)
            .map(|chunk| chunk.iter().rev().fold(0_u32, |number, byte| number << 8 | u32::from(*byte)));
        Some(numbers.map(|code| char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    const PROGRAM: &str = "
import sys, threading, time, queue
def worker(lock):
    lock.acquire()
def in_a_queue(items):
    items.get()
class Late:
    def sleep_näher(self):
        print('ready', flush=True)
        time.sleep(1000)
lock = threading.Lock()
lock.acquire()
threading.Thread(target=worker, args=(lock,), daemon=True).start()
threading.Thread(target=in_a_queue, args=(queue.Queue(),), daemon=True).start()
time.sleep(0.2)
Late().sleep_näher()
";

    struct Running(Child);
    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// `python3`, and those that `GPUTRACE_TEST_PYTHONS` lists, each with its minor version.
    fn interpreters() -> Vec<(String, u32)> {
        let listed = std::env::var_os("GPUTRACE_TEST_PYTHONS").unwrap_or_default();
        let listed = std::env::split_paths(&listed).filter(|path| path.exists());
        let found = std::iter::once("python3".into()).chain(listed).filter_map(|path| {
            let script = "import sys; print(sys.executable); print(sys.version_info[1]); \
                          print(getattr(sys, '_is_gil_enabled', lambda: True)())";
            let output = Command::new(path).args(["-c", script]).output().ok()?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let mut lines = text.lines();
            let (path, minor) = (lines.next()?.to_owned(), lines.next()?.parse().ok()?);
            (lines.next() == Some("True")).then_some((path, minor))
        });
        found.collect()
    }

    fn until_stacks(pid: u32) -> Vec<ThreadStack> {
        // Threads begin when they get to a processor.
        loop {
            let stacks = stacks(pid).expect("we may read our own child");
            let functions: HashSet<&str> =
                stacks.iter().flat_map(|it| &it.lines).map(|line| line.function.as_str()).collect();
            let has = |name: &str| functions.iter().any(|it| it.ends_with(name));
            if ["worker", "get", "sleep_näher"].iter().all(|name| has(name)) {
                return stacks;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    #[test]
    fn every_thread_of_every_interpreter_is_read_from_outside() {
        let interpreters = interpreters();
        assert!(!interpreters.is_empty(), "python3 is there");
        let file = std::env::temp_dir().join(format!("gputrace-stacks-{}.py", std::process::id()));
        fs::write(&file, PROGRAM).expect("a file");
        for (path, minor) in interpreters {
            let child = Command::new(&path).arg(&file).stdout(Stdio::piped()).spawn().expect("python runs");
            let mut child = Running(child);
            let mut line = String::new();
            let out = child.0.stdout.take().expect("a pipe");
            BufReader::new(out).read_line(&mut line).expect("it speaks");
            let stacks = until_stacks(child.0.id());
            assert_eq!(stacks.len(), 3, "3.{minor}: {stacks:?}");
            let main = &stacks[0];
            assert_eq!(main.tid, child.0.id(), "3.{minor}");
            let shown: Vec<(String, u32)> = main
                .lines
                .iter()
                .map(|line| (line.function.rsplit('.').next().unwrap_or_default().to_owned(), line.line))
                .collect();
            assert_eq!(shown, [("sleep_näher".to_owned(), 10), ("<module>".to_owned(), 16)], "3.{minor}");
            assert!(main.lines.iter().all(|line| Some(line.file.as_str()) == file.to_str()), "3.{minor}");
            let worker = stacks.iter().find(|it| it.lines.iter().any(|line| line.function == "worker"));
            let worker = worker.expect("a worker");
            assert_eq!(worker.lines[0].line, 4, "3.{minor}");
            assert!(worker.tid != main.tid && !worker.is_torn, "3.{minor}: {worker:?}");
            assert!(fs::metadata(format!("/proc/{}/task/{}", main.tid, worker.tid)).is_ok(), "3.{minor}");
        }
        let _ = fs::remove_file(file);
    }

    #[test]
    fn what_is_not_python_or_gone_is_said() {
        let child = Running(Command::new("sleep").arg("1000").spawn().expect("sleep runs"));
        let said = stacks(child.0.id()).expect_err("no Python").to_string();
        assert!(said.contains("no CPython 3"), "{said}");
        assert!(matches!(stacks(u32::MAX >> 2), Err(NoStacks::Gone(_))));
        assert_eq!(minor_by_name("/usr/lib/libpython3.9.so.1.0"), Some(9));
        assert_eq!(minor_by_name("/opt/python3.12/bin/python3.10"), Some(10));
        assert_eq!(minor_by_name("/usr/bin/python"), None);
    }
}
