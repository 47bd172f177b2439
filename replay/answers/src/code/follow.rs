//! Follows a value through the program's statements to what keeps it: from the line that requested the memory, by the names that it is
//! assigned to, and by what functions return, out to their callers.
//!
//! Names are followed, not objects: a function that stores its argument, and a hook, are not seen.

use std::collections::BTreeSet;
use std::rc::Rc;

use super::Line;
use super::statements::{Statement, Statements};

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
    /// `self.kept = value`: the last one.
    Attribute,
}

/// A statement that keeps a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Keeper {
    pub(crate) how: How,
    pub(crate) file: String,
    pub(crate) line: u32,
    /// The statement.
    pub(crate) text: String,
    /// The part of it that is kept; empty where that is a call of several parts.
    pub(crate) value: String,
}

impl Keeper {
    /// `train.py:31`.
    pub(crate) fn place(&self) -> String {
        format!("{}:{}", self.file.rsplit('/').next().unwrap_or_default(), self.line)
    }

    /// The line of code to write in its place, in words.
    pub(crate) fn instead(&self) -> String {
        let at = self.place();
        match self.how {
            How::Added | How::Entry | How::Total | How::Attribute => match self.with_less() {
                Some(statement) => format!("at {at}, write `{statement}`"),
                None => format!("at {at}, keep only `.item()` or `.detach().cpu()` of each tensor"),
            },
            How::Joined => format!(
                "at {at}, collect the parts in a list and join them once, or write into one preallocated tensor"
            ),
            How::Listed => format!("at {at}, let the list have `.item()` or `.detach().cpu()` of each"),
            How::Memoized => format!(
                "at {at}, bound the cache (`maxsize=`), or let the function return tensors on the CPU"
            ),
        }
    }

    /// The statement with a number, or a copy on the CPU, for the value.
    fn with_less(&self) -> Option<String> {
        let value = self.value.as_str();
        let is_one = !value.is_empty() && value.chars().all(|c| is_word(c) || ".[]".contains(c));
        let (before, after) = self.text.rsplit_once(value).filter(|_| is_one)?;
        let is_number = NUMBERS.iter().any(|name| value.to_ascii_lowercase().contains(name));
        let less = match (self.how, is_number) {
            (How::Attribute, _) => ".detach()",
            (How::Total, _) | (_, true) => ".item()",
            (_, false) => ".detach().cpu()",
        };
        Some(format!("{before}{value}{less}{after}"))
    }
}

/// In the names of what is a number.
const NUMBERS: [&str; 6] = ["loss", "acc", "metric", "score", "error", "norm"];
/// Methods that add to a container.
const ADDS: [&str; 8] =
    ["append", "extend", "insert", "add", "appendleft", "put", "put_nowait", "setdefault"];
/// Behind a tensor's name: what follows is a number, a copy on the CPU, or nothing of its memory.
const LEAVES: [&str; 13] = [
    "item", "tolist", "cpu", "numpy", "shape", "size", "numel", "dtype", "device", "backward", "data_ptr",
    "dim", "ndim",
];
/// Functions of a tensor that keep nothing of it.
const MEASURES: [&str; 9] = ["float", "int", "len", "print", "isinstance", "id", "type", "str", "del"];
/// Decorators that keep what a function returns (functools, cachetools, joblib).
const MEMOIZES: [&str; 5] = ["lru_cache", "cache", "cached", "memoize", "cachedmethod"];
/// Longer statements are not shown whole.
const MOST_SHOWN: usize = 100;

/// What keeps the memory that a stack requested: its lines of the program's own, innermost first.
pub(super) fn keeper(lines: &[Line], file: impl Fn(&str) -> Option<Rc<Statements>>) -> Option<Keeper> {
    let mut last = None;
    for (_, name, line) in lines {
        let statements = file(name)?;
        let (own, function) = statements.function_at(*line)?;
        let walk = Walk::of(own, &function.body);
        if let Some(found) = walk.kept {
            return Some(found.named(name));
        }
        let decorated = function.decorators.iter().find(|it| is_memoizing(&it.text));
        if let Some(decorator) = decorated.filter(|_| walk.returns) {
            return Some(Found::at(decorator, How::Memoized, "").named(name));
        }
        last = last.or_else(|| walk.attribute.map(|found| found.named(name)));
        if !walk.returns {
            break;
        }
    }
    last
}

fn is_memoizing(decorator: &str) -> bool {
    let name = decorator.trim_start_matches('@').split('(').next().unwrap_or_default();
    MEMOIZES.contains(&name.rsplit('.').next().unwrap_or_default().trim())
}

/// A [`Keeper`] whose file is not named yet.
struct Found {
    how: How,
    line: u32,
    text: String,
    value: String,
}

impl Found {
    fn at(statement: &Statement, how: How, value: &str) -> Found {
        let text: String = match statement.shown.char_indices().nth(MOST_SHOWN) {
            Some((end, _)) => format!("{}...", &statement.shown[..end]),
            None => statement.shown.clone(),
        };
        Found { how, line: statement.lines.0, text, value: value.to_owned() }
    }

    fn named(self, file: &str) -> Keeper {
        let Found { how, line, text, value } = self;
        Keeper { how, file: file.to_owned(), line, text, value }
    }
}

/// Where a value goes within one function.
#[derive(Default)]
struct Walk {
    kept: Option<Found>,
    attribute: Option<Found>,
    returns: bool,
}

impl Walk {
    fn of(own: &Statement, body: &[&Statement]) -> Walk {
        let mut walk = Walk::default();
        let mut names: BTreeSet<String> = BTreeSet::new();
        // Of the statement itself, all that it computes is the value.
        let mut carries = |statement: &Statement, part: &str, names: &BTreeSet<String>| {
            if std::ptr::eq(statement, own) {
                !leaves_all(part)
            } else {
                names.iter().any(|it| carries(part, it))
            }
        };
        walk.visit(own, &mut names, &mut carries);
        // What is assigned further up is used in the next turn of a loop.
        loop {
            let n = names.len();
            for statement in body.iter().filter(|it| !std::ptr::eq(**it, own)) {
                walk.visit(statement, &mut names, &mut carries);
            }
            if names.len() == n || walk.kept.is_some() {
                return walk;
            }
        }
    }

    fn visit(
        &mut self,
        statement: &Statement,
        names: &mut BTreeSet<String>,
        carries: &mut dyn FnMut(&Statement, &str, &BTreeSet<String>) -> bool,
    ) {
        if self.kept.is_some() {
            return;
        }
        let text = statement.text.as_str();
        for keyword in ["return", "yield"] {
            if let Some(value) = text.strip_prefix(keyword).filter(|rest| !rest.starts_with(is_word)) {
                self.returns |= carries(statement, value, names);
                return;
            }
        }
        if let Some(value) = added(text).filter(|value| carries(statement, value, names)) {
            self.kept = Some(Found::at(statement, How::Added, value));
            return;
        }
        if let Some((targets, value)) = text.strip_prefix("for ").and_then(|rest| rest.split_once(" in ")) {
            if carries(statement, value, names) {
                names.extend(words(targets).map(str::to_owned));
            }
            return;
        }
        let Some((target, operator, value)) = assigned(text) else { return };
        if !carries(statement, value, names) {
            return;
        }
        let is_name = target.chars().all(is_word);
        if operator == "+=" {
            self.kept = Some(Found::at(statement, How::Total, value));
        } else if target.ends_with(']') && !target.starts_with('[') {
            self.kept = Some(Found::at(statement, How::Entry, value));
        } else if is_joined(value) && carries_any(value, target) {
            self.kept = Some(Found::at(statement, How::Joined, value));
        } else if value.starts_with(target) && value[target.len()..].trim_start().starts_with('+') {
            let added = value[target.len()..].trim_start().trim_start_matches('+');
            self.kept = Some(Found::at(statement, How::Total, added));
        } else if (value.starts_with('[') || value.starts_with('{')) && words(value).any(|it| it == "for") {
            self.kept = Some(Found::at(statement, How::Listed, ""));
        } else if !is_name && target.contains('.') && !target.contains(',') {
            self.attribute.get_or_insert_with(|| Found::at(statement, How::Attribute, value));
        } else {
            names.extend(words(target).filter(|it| *it != "self").map(str::to_owned));
        }
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !is_word(c)).filter(|word| word.starts_with(|c: char| !c.is_ascii_digit()))
}

fn is_joined(value: &str) -> bool {
    ["cat(", "concat(", "concatenate(", "hstack(", "vstack("].iter().any(|name| value.contains(name))
}

/// Whether a name, or what an attribute is called, stands in an expression.
fn carries_any(expression: &str, name: &str) -> bool {
    expression.match_indices(name).any(|(at, _)| {
        !expression[..at].ends_with(is_word) && !expression[at + name.len()..].starts_with(is_word)
    })
}

/// What is put into a container: the argument of a method that adds, where the statement is its call.
fn added(text: &str) -> Option<&str> {
    let open = text.find('(').filter(|_| text.ends_with(')'))?;
    let (container, method) = text[..open].rsplit_once('.')?;
    let is_plain = container.chars().all(|c| is_word(c) || ".[]\"' ".contains(c));
    let argument = text[open + 1..text.len() - 1].trim();
    (ADDS.contains(&method) && is_plain && !argument.is_empty()).then_some(argument)
}

/// Target, operator and value of an assignment.
fn assigned(text: &str) -> Option<(&str, &str, &str)> {
    let mut depth = 0_i32;
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '=' if depth == 0 => {
                let (before, after) = (&text[..at], &text[at + 1..]);
                if after.starts_with('=') || before.ends_with(['=', '!', '<', '>', ':']) {
                    return None;
                }
                let (target, operator) =
                    match before.strip_suffix(['+', '-', '*', '/', '%', '@', '|', '&', '^']) {
                        Some(target) => (target, &text[target.len()..=at]),
                        None => (before, "="),
                    };
                // `value: Tensor = ...`
                let target = target.split(':').next().unwrap_or_default();
                return Some((target.trim(), operator, after.trim()));
            }
            _ => {}
        }
    }
    None
}

/// Whether an expression has the memory of what a name refers to, or a graph that has it.
fn carries(expression: &str, name: &str) -> bool {
    expression.match_indices(name).any(|(at, _)| {
        let (before, after) = (&expression[..at], &expression[at + name.len()..]);
        let is_whole = !before.ends_with(is_word) && !before.ends_with('.') && !after.starts_with(is_word);
        // `f(name=...)`
        let is_keyword = after.starts_with('=') && !after.starts_with("==");
        let is_measured = before.strip_suffix('(').is_some_and(|it| {
            let function = it.rsplit(|c| !is_word(c)).next().unwrap_or_default();
            MEASURES.contains(&function)
        });
        is_whole && !is_keyword && !is_measured && !leaves(after)
    })
}

/// Whether what follows a value, `.detach().cpu()`, leaves nothing of it on the GPU.
fn leaves(mut rest: &str) -> bool {
    loop {
        if let Some(method) = rest.strip_prefix('.') {
            let end = method.find(|c| !is_word(c)).unwrap_or(method.len());
            if LEAVES.contains(&&method[..end]) || is_to_cpu(&method[..end], &method[end..]) {
                return true;
            }
            rest = &method[end..];
        } else if rest.starts_with(['(', '[']) {
            let Some(end) = closing(rest) else { return false };
            rest = &rest[end..];
        } else {
            return false;
        }
    }
}

/// What strings say is not in a statement's text.
fn is_to_cpu(method: &str, arguments: &str) -> bool {
    method == "to" && arguments.starts_with("(\"\")")
}

/// Whether an expression as a whole ends in such a method: `model(x).item()`.
fn leaves_all(expression: &str) -> bool {
    let expression = expression.trim();
    let mut depth = 0_i32;
    let mut last = 0;
    for (at, c) in expression.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '.' if depth == 0 => last = at,
            ' ' | ',' | '+' | '*' if depth == 0 => return false,
            _ => {}
        }
    }
    let method = expression[last..].trim_start_matches('.');
    let name = method.split('(').next().unwrap_or_default();
    (last > 0 && LEAVES.contains(&name))
        || MEASURES.iter().any(|it| expression.starts_with(&format!("{it}(")))
}

/// Behind the bracket that closes the first one.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0_i32;
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What keeps the value of the line that says `here`, and of its callers in the same file, each marked `here` too, innermost first.
    fn kept(text: &str) -> Option<(How, u32, String)> {
        let statements = Rc::new(Statements::of(text));
        let here = (1..).zip(text.lines()).filter(|(_, line)| line.contains("# here"));
        let mut lines: Vec<(u32, usize)> = here
            .map(|(number, line)| (number, line.rsplit("# here").next().unwrap_or_default().len()))
            .collect();
        lines.sort_by_key(|(number, marks)| (*marks, *number));
        let lines: Vec<Line> =
            lines.into_iter().map(|(line, _)| ("f".into(), "/a.py".into(), line)).collect();
        let found = keeper(&lines, |_| Some(statements.clone()))?;
        Some((found.how, found.line, found.value))
    }

    #[test]
    fn a_list_that_takes_the_value_is_found_in_the_function_or_its_caller() {
        let direct = "for x in data:\n    out = model(x)  # here\n    loss = f(out, x)\n    loss.backward()\n    losses.append(loss)\n";
        assert_eq!(kept(direct), Some((How::Added, 5, "loss".into())));
        let caller = "def step(x):\n    y = model(x)  # here\n    return y, x\n\ndef main():\n    for x in data:\n        out, _ = step(x)  # here!\n        history[x.name] = out\n";
        assert_eq!(kept(caller), Some((How::Entry, 8, "out".into())));
        let at_once = "outs.append(model(x))  # here\n";
        assert_eq!(kept(at_once), Some((How::Added, 1, "model(x)".into())));
    }

    #[test]
    fn numbers_and_copies_on_the_cpu_keep_nothing() {
        for text in [
            "loss = f(x)  # here\ntotal += loss.item()\n",
            "loss = f(x)  # here\nall.append(float(loss))\n",
            "out = f(x)  # here\nall.append(out.detach().cpu())\nn += len(out)\nshape = out.shape\nshapes.append(shape)\n",
            "total += f(x).item()  # here\n",
            "out = f(x)  # here\nif out == 3: pass\n",
        ] {
            assert_eq!(kept(text), None, "{text}");
        }
    }

    #[test]
    fn totals_caches_and_tensors_that_are_joined_are_told_apart() {
        for (text, how, line) in [
            ("l = f(x)  # here\nself.total += l\n", How::Total, 2),
            ("l = f(x)  # here\ntotal = total + l\n", How::Total, 2),
            ("l = f(x)  # here\nkept = torch.cat([kept, l])\n", How::Joined, 2),
            ("ls = [f(x) for x in xs]  # here\n", How::Listed, 1),
            ("@lru_cache(maxsize=None)\ndef table(n):\n    return f(n)  # here\n", How::Memoized, 1),
            ("def g(self, x):\n    self.last = f(x)  # here\n", How::Attribute, 2),
        ] {
            assert_eq!(kept(text).map(|it| (it.0, it.1)), Some((how, line)), "{text}");
        }
    }
}
