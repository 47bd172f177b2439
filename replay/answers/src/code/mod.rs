//! The program's own source, where this machine still has it as it ran: a trace says which line made memory, and the source says what the
//! program did with it.
//!
//! Read only on the host that recorded, and only Python files that were last written before the recording began and that the reader owns, or
//! root: a trace from elsewhere names no file of this machine.

use std::cell::RefCell;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;

use gputrace_schemas::event::Process;
use gputrace_trace::files;
use rustc_hash::FxHashMap;

mod containers;
mod follow;
mod handlers;
mod hooks;
mod keeper;
mod later;
mod locals;
mod records;
mod statements;
mod text;

pub(crate) use keeper::{How, KEPT_BY, Keeper};
use statements::{Statement, Statements};
pub(crate) use text::moves_to_device;

/// Around code that makes no graph.
const WITHOUT_GRAPH: [&str; 2] = ["no_grad", "inference_mode"];
/// What the names of functions that evaluate begin with, or a part of them.
const EVALUATES: [&str; 9] =
    ["eval", "valid", "test", "infer", "predict", "generate", "sample", "extract", "embed"];
/// A program that trains has one of these.
const TRAINS: [&str; 7] = ["backward(", "autograd", "optim", "Trainer", ".fit", ".train(", "requires_grad"];
/// Longer files are not read.
const MOST_BYTES: u64 = 4 << 20;

/// A frame of the program's own: function, file and line.
pub(crate) type Line = (String, String, u32);

/// The files that were asked for.
pub(crate) struct Sources {
    /// When the recording began, in nanoseconds since 1970; none where the files of this machine say nothing.
    since: Option<u64>,
    files: RefCell<FxHashMap<String, Option<Rc<Statements>>>>,
}

impl Sources {
    /// Those of a process.
    pub(crate) fn of(process: &Process) -> Sources {
        let is_here = !process.host.is_empty() && host().is_some_and(|host| host == process.host);
        let since = Some(process.start_realtime).filter(|since| is_here && *since > 0);
        Sources { since, files: RefCell::default() }
    }

    /// What keeps the memory that was requested there: `lines` are the program's own of a stack, innermost first.
    pub(crate) fn keeper(&self, lines: &[Line]) -> Option<Keeper> {
        follow::keeper(lines, |file| self.statements(file))
    }

    /// The function that evaluates a model without `torch.no_grad`, where the source says that: it is named so, or calls `eval()`, and neither
    /// it nor what it called on the way to the request begins a backward pass. Its name, and where it is.
    pub(crate) fn evaluated_by(&self, lines: &[Line]) -> Option<(String, String)> {
        for (function, name, line) in lines {
            let statements = self.statements(name)?;
            let (_, own) = statements.function_at(*line)?;
            if is_without_graph(&statements, *line) || later::begins_backward(&statements, &own, 0) {
                return None;
            }
            let Some(head) = own.head else { continue };
            let last = function.rsplit('.').next().unwrap_or_default().to_ascii_lowercase();
            // A comprehension is a part of the function around it.
            if last.starts_with('<') {
                continue;
            }
            let is_named = EVALUATES.iter().any(|word| last.split('_').any(|part| part.starts_with(word)));
            let is_set = own.body.iter().any(|it| it.text.ends_with(".eval()"));
            // A training step may call it as well.
            let name_of = function.rsplit('.').next().unwrap_or_default();
            if (is_named || is_set) && !later::is_differentiated(&statements, name_of) {
                return Some((last, place(name, head.lines.0)));
            }
        }
        None
    }

    /// The line of the program that calls a model with gradients and uses only detached values of the result, as far as the source shows it.
    pub(crate) fn unused_graph(&self, lines: &[Line]) -> Option<String> {
        if self.is_without_graph(lines) {
            return None;
        }
        let (file, line) = later::unused_graph(lines, |file| self.statements(file))?;
        Some(place(&file, line))
    }

    /// Where the function of the innermost line writes out a copy of a tensor for each item, and works on that there.
    pub(crate) fn repeated(&self, lines: &[Line]) -> Option<String> {
        let (_, file, line) = lines.first()?;
        Some(place(file, later::repeated(&*self.statements(file)?, *line)?))
    }

    /// The list whose tensors the function of the innermost line joins, and where another function fills it.
    pub(crate) fn joined_list(&self, lines: &[Line]) -> Option<(String, String)> {
        let (_, file, line) = lines.first()?;
        let (list, at) = later::joined_list(&*self.statements(file)?, *line)?;
        Some((list, place(file, at)))
    }

    /// Where the function of a line loads what it has copied to the device into a model that has as much already.
    pub(crate) fn loads_copy(&self, (_, file, line): &Line) -> Option<String> {
        Some(place(file, later::loads_copy(&*self.statements(file)?, *line)?))
    }

    /// In a program that trains nothing by its source, the function that called the model.
    pub(crate) fn only_infers(&self, lines: &[Line]) -> Option<(String, String)> {
        if self.have_any(lines, &TRAINS)? || self.is_without_graph(lines) {
            return None;
        }
        lines.iter().find_map(|(function, name, line)| {
            let last = function.rsplit('.').next().unwrap_or_default();
            let statements = self.statements(name)?;
            let head = statements.function_at(*line)?.1.head?;
            let is_layer = matches!(last, "forward" | "__call__") || last.starts_with('<');
            (!is_layer).then(|| (last.to_owned(), place(name, head.lines.0)))
        })
    }

    /// Names that a line assigns and that its function does not use from another line on.
    pub(crate) fn unused_from(&self, (_, file, line): &Line, now: u32) -> Option<Vec<String>> {
        locals::unused_from(&*self.statements(file)?, *line, now)
    }

    /// Whether the source of the innermost of these lines is known.
    pub(crate) fn have(&self, lines: &[Line]) -> bool {
        lines.first().is_some_and(|(_, name, _)| self.statements(name).is_some())
    }

    /// Whether the files of these lines begin a backward pass anywhere.
    pub(crate) fn differentiates(&self, lines: &[Line]) -> bool {
        self.have_any(lines, &["backward(", "autograd.grad("]).unwrap_or(false)
    }

    /// Whether a statement of the files of these lines has one of these words; none where a file is not known.
    fn have_any(&self, lines: &[Line], words: &[&str]) -> Option<bool> {
        let mut has = false;
        for (_, name, _) in lines {
            let statements = self.statements(name)?;
            has |= statements.all().any(|it| words.iter().any(|word| it.text.contains(word)));
        }
        Some(has)
    }

    /// Whether a frame's statement is under `torch.no_grad` or `torch.inference_mode`.
    pub(crate) fn is_without_graph(&self, lines: &[Line]) -> bool {
        lines.iter().any(|(_, name, line)| {
            self.statements(name).is_some_and(|statements| is_without_graph(&statements, *line))
        })
    }

    /// Whether a statement of the functions around has all of these words.
    pub(crate) fn mentions(&self, lines: &[Line], words: &[&str]) -> bool {
        lines.iter().any(|(_, name, line)| {
            self.statements(name).is_some_and(|statements| {
                let own = statements.function_at(*line);
                let has_all = |it: &&Statement| words.iter().all(|word| it.text.contains(word));
                own.is_some_and(|(_, own)| own.body.iter().any(has_all))
            })
        })
    }

    /// What keeps an old value until a statement of these frames has made the new one: an attribute, or a name of the module's own or of a loop.
    /// What is assigned, and where.
    pub(crate) fn replaced(&self, lines: &[Line]) -> Option<(String, String)> {
        lines.iter().find_map(|(_, name, line)| {
            let statements = self.statements(name)?;
            let (own, function) = statements.function_at(*line)?;
            let (target, operator, _) = text::assigned(&own.text)?;
            let lasts = target.contains('.')
                || function.head.is_none()
                || statements.around(*line).any(Statement::is_loop);
            let is_one = target.chars().all(|c| text::is_word(c) || c == '.');
            // An object that is being made has no old attributes.
            let is_made = function.head.is_some_and(|head| head.text.starts_with("def __init__("));
            (operator == "=" && lasts && is_one && !is_made)
                .then(|| (target.to_owned(), place(name, own.lines.0)))
        })
    }

    /// A method of these frames' files whose results are cached by its arguments, `self` among them: its name, and where it is.
    pub(crate) fn method_cached(&self, lines: &[Line]) -> Option<(String, String)> {
        lines.iter().find_map(|(_, name, _)| {
            let statements = self.statements(name)?;
            let (method, line) = follow::method_memoized(&statements)?;
            Some((method, place(name, line)))
        })
    }

    /// A call that a function around these lines has under a condition, on another way than theirs: where, and the condition.
    pub(crate) fn untaken(&self, lines: &[Line], call: &str) -> Option<(String, String)> {
        lines.iter().find_map(|(_, name, line)| {
            let statements = self.statements(name)?;
            let (own, function) = statements.function_at(*line)?;
            let is_other =
                |it: &Statement| it.lines != own.lines && text::calls(&it.text).any(|(name, _)| name == call);
            let other = function.body.iter().find(|it| is_other(it))?;
            let around = statements.around(other.lines.0).find(|it| it.text.starts_with("if "))?;
            let condition = around.shown.trim_start_matches("if ").trim_end_matches(':').trim().to_owned();
            Some((place(name, other.lines.0), condition))
        })
    }

    /// Whether the caller of a function uses, after the call, what that returned to it: `x = f()` and later `x`.
    pub(crate) fn uses_result(&self, lines: &[Line], function: &str) -> bool {
        let at = lines.iter().position(|(name, ..)| name == function);
        let caller = at.and_then(|at| lines[at + 1..].iter().find(|(name, ..)| name != function));
        let uses = |(_, name, line): &Line| {
            let statements = self.statements(name)?;
            let (own, of) = statements.function_at(*line)?;
            let (target, "=", _) = text::assigned(&own.text)? else { return None };
            let is_use = |it: &&Statement| {
                let is_later = it.lines.0 > own.lines.1 && !it.text.starts_with("del ");
                is_later && text::words(&it.text).any(|word| word == target)
            };
            Some(of.body.iter().any(is_use))
        };
        caller.and_then(uses).unwrap_or(false)
    }

    /// The statement that a line is part of.
    pub(crate) fn text(&self, file: &str, line: u32) -> Option<String> {
        let statements = self.statements(file)?;
        Some(statements.function_at(line)?.0.text.clone())
    }

    fn statements(&self, file: &str) -> Option<Rc<Statements>> {
        let since = self.since?;
        let mut files = self.files.borrow_mut();
        files.entry(file.to_owned()).or_insert_with(|| read(file, since).map(Rc::new)).clone()
    }
}

/// Whether a statement around a line, or a decorator of its function, turns gradients off.
fn is_without_graph(statements: &Statements, line: u32) -> bool {
    let is_one = |it: &Statement| WITHOUT_GRAPH.iter().any(|word| it.text.contains(word));
    let decorators = statements.function_at(line).map_or(vec![], |(_, own)| own.decorators);
    statements.around(line).chain(decorators).any(is_one)
}

/// `train.py:31`.
fn place(file: &str, line: u32) -> String {
    format!("{}:{line}", file.rsplit('/').next().unwrap_or_default())
}

fn read(name: &str, since: u64) -> Option<Statements> {
    let path = Path::new(name);
    if !path.is_absolute() || path.extension().is_none_or(|extension| extension != "py") {
        return None;
    }
    let file = files::open(path).ok()?;
    let found = file.metadata().ok()?;
    let written = u64::try_from(found.mtime()).ok()?.saturating_mul(1_000_000_000);
    let is_own = found.uid() == 0 || found.uid() == rustix::process::geteuid().as_raw();
    if !is_own || written > since || found.len() > MOST_BYTES {
        return None;
    }
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text).ok()?;
    Some(Statements::of(&text))
}

/// This machine's name, as recordings have it.
fn host() -> Option<String> {
    Some(rustix::system::uname().nodename().to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_program_that_trains_nothing_only_infers() {
        let folder = std::env::temp_dir().join(format!("gputrace-infers-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let found = |text: &str| {
            let path = folder.join("job.py");
            std::fs::write(&path, text).expect("a file");
            let process =
                Process { host: host().expect("a name"), start_realtime: u64::MAX / 2, ..Process::default() };
            let line = |name: &str, at| (name.to_owned(), path.to_str().expect("UTF-8").to_owned(), at);
            let lines = [line("Net.forward", 2), line("fuse", 4)];
            let sources = Sources::of(&process);
            (sources.only_infers(&lines).map(|(name, _)| name), sources.differentiates(&lines))
        };
        let text = "def forward(self, x):\n    return self.conv(x)\ndef fuse(x):\n    return net(x)\n";
        assert_eq!(found(text), (Some("fuse".into()), false));
        assert_eq!(found(&format!("{text}opt = torch.optim.SGD(p)\n")).0, None);
        assert_eq!(found(&format!("{text}def train(y):\n    y.backward()\n")), (None, true));
        std::fs::remove_dir_all(&folder).expect("ours");
    }

    #[test]
    fn what_refers_to_an_old_value_while_the_new_one_is_made_is_named() {
        let folder = std::env::temp_dir().join(format!("gputrace-old-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let found = |text: &str| {
            let path = folder.join("job.py");
            std::fs::write(&path, text).expect("a file");
            let here = (1..).zip(text.lines()).find(|(_, line)| line.ends_with("# here")).expect("a line").0;
            let process =
                Process { host: host().expect("a name"), start_realtime: u64::MAX / 2, ..Process::default() };
            let lines = [("f".to_owned(), path.to_str().expect("UTF-8").to_owned(), here)];
            let sources = Sources::of(&process);
            (sources.replaced(&lines), sources.method_cached(&lines))
        };
        let named = |name: &str, line: u32| Some((name.to_owned(), format!("job.py:{line}")));
        let attribute = found("class T:\n    def train(self):\n        self.model = make()  # here\n");
        assert_eq!(attribute, (named("self.model", 3), None));
        assert_eq!(found("for lr in rates:\n    model = make(lr)  # here\n").0, named("model", 2));
        // A local name of a function that returns, and a new object, keep nothing old.
        assert_eq!(found("def train():\n    model = make()  # here\n").0, None);
        assert_eq!(found("class T:\n    def __init__(self):\n        self.model = make()  # here\n").0, None);
        let cached = "class W:\n    @lru_cache(maxsize=1)\n    def count(self):\n        return 1\nrun(W(make()))  # here\n";
        assert_eq!(found(cached), (None, named("count", 2)));
        assert_eq!(found(&cached.replace("(self)", "(n)")).1, None);
        std::fs::remove_dir_all(&folder).expect("ours");
    }

    #[test]
    fn only_python_of_this_host_that_is_ones_own_and_older_than_the_recording_is_read() {
        let folder = std::env::temp_dir().join(format!("gputrace-code-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let put = |name: &str| {
            let path = folder.join(name);
            std::fs::write(&path, "kept.append(f(x))\n").expect("a file");
            path
        };
        let (own, text, others) = (put("own.py"), put("own.txt"), put("others.py"));
        let since = |after: u64| {
            let now = SystemTime::now() + Duration::from_secs(after);
            now.duration_since(UNIX_EPOCH).expect("after 1970").as_nanos() as u64
        };
        let process = |host: String, start_realtime| Process { host, start_realtime, ..Process::default() };
        let here = host().expect("a name");
        let kept = |host: &str, start, path: &Path| {
            let line = ("f".to_owned(), path.to_str().expect("UTF-8").to_owned(), 1);
            Sources::of(&process(host.to_owned(), start)).keeper(&[line]).is_some()
        };
        let later = since(60);
        assert!(kept(&here, later, &own));
        assert!(!kept(&here, 1, &own), "written after the recording began");
        assert!(!kept("another-host", later, &own));
        assert!(!kept(&here, later, &text));
        let fifo = folder.join("fifo.py");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
        assert!(!kept(&here, later, &fifo));
        // Only root can give a file away.
        if chown(&others, Some(12345), None).is_ok() {
            assert!(!kept(&here, later, &others));
        }
        std::fs::remove_dir_all(&folder).expect("ours");
    }
}
