//! How a statement of the program keeps a value, and what to write in its place.

use super::containers::put_of_chain;
use super::statements::Statement;
use super::text::{arguments_have, assigned, is_chain, is_chain_of_one, is_word, parts};

/// How the program keeps a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum How {
    /// `kept.append(value)`, or another method that adds to a container.
    Added,
    /// `kept[key] = value`.
    Entry,
    /// `kept += value`.
    Total,
    /// `kept = torch.cat([kept, value])`.
    Joined,
    /// `[f(x) for x in ...]`.
    Listed,
    /// `@functools.lru_cache`.
    Memoized,
    /// `state = f(x, state)`: each value has a graph that refers to the one before.
    Carried,
    /// `self.kept = value`: the last one.
    Attribute,
    /// `errors.append(error)`, `future.set_exception(error)`: the traceback's frames refer to the value.
    Exception,
    /// `def inner(x): ... inner(y)` inside another function: it refers to itself, and to the names that it uses.
    Closure,
    /// `module.register_forward_hook(self.note)`: the hook refers to the object, whose container has the value.
    Hook,
    /// `ctx.kept = result` in a function of autograd: the result's graph refers to the result.
    Context,
}

impl How {
    /// How much more likely it is to be what keeps many values than another: a container by key may hold one only.
    pub(super) fn accumulates(self) -> bool {
        !matches!(self, How::Entry | How::Attribute)
    }
}

/// A statement that keeps a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Keeper {
    pub(crate) how: How,
    pub(crate) file: String,
    pub(crate) line: u32,
    /// The statement.
    pub(crate) text: String,
    /// The part of it that is kept; empty where that is not one expression.
    pub(crate) value: String,
    /// It is in a function that a module calls beside its own code.
    pub(crate) is_hook: bool,
    /// Lines of other statements of that function that keep it as well.
    pub(crate) more: Vec<u32>,
    /// The value is no tensor, but several of them.
    pub(crate) is_several: bool,
    /// It is a part of a tensor, which refers to all of that.
    pub(crate) is_view: bool,
    /// Whether it is one number, where the program shows it.
    pub(crate) is_number: Option<bool>,
    /// The program takes values out of the container by their keys.
    pub(crate) is_cache: bool,
    /// A method's results are kept, with the object that they are of.
    pub(crate) is_of_method: bool,
    /// The tensor's own hook refers to what keeps it.
    pub(crate) is_cycle: bool,
    /// Later code handles it as a tensor: a number in its place would fail.
    pub(crate) is_used_as_tensor: bool,
    /// The function that begins a backward pass with it, after the function that collects it has returned.
    pub(crate) backward: Option<String>,
}

/// A [`Keeper`] whose file is not named yet.
pub(super) struct Found {
    pub(super) how: How,
    pub(super) line: u32,
    pub(super) text: String,
    pub(super) value: String,
    pub(super) is_several: bool,
    pub(super) is_view: bool,
    pub(super) is_number: Option<bool>,
    pub(super) is_cycle: bool,
}

impl Found {
    pub(super) fn at(statement: &Statement, how: How, value: &str) -> Found {
        let is_long = statement.shown.chars().count() > MOST_SHOWN;
        let text: String = statement.shown.chars().take(MOST_SHOWN).collect();
        let text = if is_long { text + CUT } else { text };
        let value = value.trim().to_owned();
        let line = statement.lines.0;
        Found { how, line, text, value, is_several: false, is_view: false, is_number: None, is_cycle: false }
    }

    pub(super) fn named(self, file: &str, is_hook: bool) -> Keeper {
        let Found { how, line, text, value, is_several, is_view, is_number, is_cycle } = self;
        Keeper {
            how,
            file: file.to_owned(),
            line,
            text,
            value,
            is_hook,
            more: vec![],
            is_several,
            is_view,
            is_number,
            is_cycle,
            is_cache: false,
            is_of_method: false,
            is_used_as_tensor: false,
            backward: None,
        }
    }
}

/// Between a line and the statement that keeps what it makes.
pub(crate) const KEPT_BY: &str = "; likely kept by ";

impl Keeper {
    /// Behind the line that requested the memory.
    pub(crate) fn behind(&self) -> String {
        format!("{KEPT_BY}`{}` ({})", self.text, self.place())
    }

    /// `train.py:31`.
    pub(crate) fn place(&self) -> String {
        super::place(&self.file, self.line)
    }

    /// The line of code to write in its place, in words. `has_graph`: what is kept is mostly the value's graph, and not the value.
    pub(crate) fn instead(&self, has_graph: bool) -> String {
        let at = self.place();
        let more: Vec<String> = self.more.iter().map(u32::to_string).collect();
        let more = if more.is_empty() { String::new() } else { format!("; the same at {}", more.join(", ")) };
        match self.how {
            How::Entry if self.is_cache && !has_graph && !self.is_hook => {
                let target = put_of_chain(&self.text).map_or("it", |(_, target, _)| target);
                let container = target.split('[').next().unwrap_or(target);
                format!(
                    "bound `{container}` at {at}: drop the entry that was used longest ago (`OrderedDict.popitem(last=False)`), or keep idle entries on the CPU{more}"
                )
            }
            How::Added | How::Entry | How::Total | How::Attribute => match self.with_less(has_graph) {
                Some(statement) if self.is_view && statement.contains(".clone()") && !has_graph => {
                    format!(
                        "at {at}, write `{statement}`{more}: a part of a tensor refers to all of its memory"
                    )
                }
                Some(statement) if self.is_cycle => format!(
                    "at {at}, write `{statement}`{more}, or empty it when you remove the hooks: the tensor's hook refers to this object, and the object to the tensor"
                ),
                Some(statement) if statement.contains(".cpu()") && self.is_hook => format!(
                    "at {at}, write `{statement}`{more}, and move back what a later step uses; or remove the hook after its use (`handle.remove()`)"
                ),
                Some(statement) if statement.contains(".cpu()") => {
                    format!("at {at}, write `{statement}`{more}, and move back what a later step uses")
                }
                Some(statement) => format!("at {at}, write `{statement}`{more}"),
                None if self.is_view && !has_graph => format!(
                    "at {at}, copy what you keep (`.clone()` of each tensor){more}: a part of a tensor refers to all of its memory"
                ),
                None if self.how == How::Total => format!("at {at}, add `.detach()` of each tensor{more}"),
                None if self.is_several => {
                    format!(
                        "at {at}, keep only the values that you use later, `.detach().cpu()` of each tensor{more}"
                    )
                }
                None if self.is_used_as_tensor => {
                    format!("at {at}, keep only `.detach().cpu()` of each tensor{more}")
                }
                None => {
                    format!(
                        "at {at}, keep only `.detach().cpu()` of each tensor (`.item()` of a number){more}"
                    )
                }
            },
            How::Hook => {
                let container = &self.value;
                format!(
                    "{at} discards the hook's handle: keep it, and call `handle.remove()` when you are done with the object. The hook refers to `self`, and so to `{container}`"
                )
            }
            How::Carried => match self.with_less(has_graph) {
                Some(statement) => format!("at {at}, write `{statement}`{more}"),
                None => format!("detach what {at} passes to the next turn: {}", self.detached()),
            },
            How::Closure => {
                let name = &self.value;
                format!(
                    "make `{name}` ({at}) a function of its own, outside the other, or set `{name} = None` once it has run: it refers to itself, and so keeps what it uses until Python's garbage collector runs"
                )
            }
            How::Exception => {
                let name = &self.value;
                format!(
                    "at {at}, keep `str({name})`, or `{name}.with_traceback(None)`: the traceback of an exception refers to its frames and their tensors"
                )
            }
            How::Context => {
                format!(
                    "at {at}, write `ctx.save_for_backward({})`, and read `ctx.saved_tensors` in `backward`",
                    self.value
                )
            }
            How::Joined if has_graph => {
                format!(
                    "at {at}, join `.detach()`ed tensors, or run this under `torch.no_grad()`: each joined tensor has the graph of those before"
                )
            }
            How::Joined => {
                format!(
                    "at {at}, collect the parts on the CPU and join them once, or write into one preallocated tensor"
                )
            }
            How::Listed => format!("at {at}, let the list have `.item()` or `.detach().cpu()` of each"),
            How::Memoized if self.is_of_method => {
                format!(
                    "at {at}, keep the result on its object (`functools.cached_property`): a cache of a method keeps every `self` and its result; or bound it (`maxsize=1`)"
                )
            }
            How::Memoized => {
                format!(
                    "at {at}, bound the cache (`maxsize=`), or let the function return tensors on the CPU"
                )
            }
        }
    }

    /// `h, c = h.detach(), c.detach()` for names of the statement that it also takes.
    fn detached(&self) -> String {
        let (target, _, value) = assigned(&self.text).unwrap_or_default();
        let names =
            parts(target.trim_matches(['(', ')']), ',').into_iter().filter(|it| arguments_have(value, it));
        let names: Vec<&str> = names.filter(|name| name.chars().all(is_word)).collect();
        let detached: Vec<String> = names.iter().map(|name| format!("{name}.detach()")).collect();
        match names.is_empty() || self.text.ends_with(CUT) {
            true => "`x = x.detach()`".into(),
            false => format!("`{} = {}`", names.join(", "), detached.join(", ")),
        }
    }

    /// The statement with a number, or a copy on the CPU, for the value.
    pub(super) fn with_less(&self, has_graph: bool) -> Option<String> {
        let whole = self.value.as_str();
        // `kept += [value]`
        let inner = whole
            .strip_prefix('[')
            .and_then(|it| it.strip_suffix(']'))
            .filter(|it| parts(it, ',').len() == 1);
        let value = inner.unwrap_or(whole);
        // Several tensors have no one method.
        let is_several = self.is_several
            || ["dict(", "list(", "tuple("].iter().any(|it| value.starts_with(it))
            || value.starts_with(['(', '[', '{']) && !is_chain_of_one(value);
        let is_unpacked = self.how == How::Carried
            && assigned(&self.text).is_some_and(|(target, ..)| parts(target, ',').len() > 1);
        // A statement that is not shown whole is none to write.
        if is_several || is_unpacked || self.text.ends_with(CUT) {
            return None;
        }
        if value.is_empty() || value.contains('"') {
            return None;
        }
        let is_whole = |at: usize| {
            !self.text[..at].ends_with(is_word) && !self.text[at + value.len()..].starts_with(is_word)
        };
        let at = self.text.match_indices(value).map(|(at, _)| at).filter(|at| is_whole(*at)).last()?;
        let (before, after) = (&self.text[..at], &self.text[at + value.len()..]);
        let is_number = self.is_number.unwrap_or_else(|| is_called_number(value));
        let less = match self.how {
            _ if self.is_view && !has_graph => ".clone()",
            How::Attribute if value.contains(".detach()") => ".cpu()",
            How::Attribute | How::Carried => ".detach()",
            _ if self.is_cycle => ".detach()",
            _ if is_number && !self.is_used_as_tensor => ".item()",
            How::Total if inner.is_none() => ".detach()",
            _ if value.contains(".detach()") => ".cpu()",
            // What a hook gets is large itself.
            _ if has_graph && !self.is_hook => ".detach()",
            _ => ".detach().cpu()",
        };
        let value = if is_chain(value) { value.to_owned() } else { format!("({value})") };
        Some(format!("{before}{value}{less}{after}"))
    }
}

/// Longer statements are not shown whole.
const MOST_SHOWN: usize = 100;
/// Behind a statement that is not shown whole.
const CUT: &str = "...";
/// Whether a name, an attribute or an entry is called what people call numbers: `out.train_loss`, `loss[k]`, and not `accepted`.
fn is_called_number(value: &str) -> bool {
    let name = value.split(['[', '(']).next().unwrap_or_default();
    let name = name.rsplit('.').next().unwrap_or_default().trim().to_ascii_lowercase();
    let last = name.rsplit('_').next().unwrap_or_default();
    // A call may return anything: `model(loss)`.
    !value.contains('(') && NUMBERS.contains(&last)
}

/// Names of what is a number.
const NUMBERS: [&str; 5] = ["loss", "acc", "accuracy", "metric", "norm"];
