//! Python's source, statement by statement: as much of its grammar as is needed to see where a value goes.

/// A statement, or the head of a compound one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Statement {
    /// Its first and last line, from 1.
    pub(super) lines: (u32, u32),
    pub(super) indent: usize,
    /// In one line, without comments and without what strings say.
    pub(super) text: String,
    /// The same for people, with what strings say.
    pub(super) shown: String,
}

impl Statement {
    /// The head of a loop.
    pub(super) fn is_loop(&self) -> bool {
        self.text.starts_with("for ") || self.text.starts_with("while ")
    }
}

/// Longer statements say nothing: they are tables of data, and what is asked of a statement takes time and depth by its length.
const LONGEST: usize = 4096;

/// All statements of a file, in order.
#[derive(Debug, Default)]
pub(super) struct Statements(Vec<Statement>);

impl Statements {
    /// Of a file's text. What is no Python gives statements that say nothing.
    pub(super) fn of(text: &str) -> Statements {
        let mut all = Statements::default();
        let mut reader = Reader::default();
        for (number, line) in (1_u32..).zip(text.lines()) {
            if reader.is_between() && line.trim_start().is_empty() {
                continue;
            }
            if reader.is_between() {
                reader.begins = number;
                reader.indent = line.chars().take_while(|c| c.is_whitespace()).count();
            }
            reader.line(line);
            if reader.is_between() {
                let text = one_line(&std::mem::take(&mut reader.text));
                let shown = one_line(&std::mem::take(&mut reader.shown));
                if !text.is_empty() && text.len() <= LONGEST {
                    let lines = (reader.begins, number);
                    all.0.push(Statement { lines, indent: reader.indent, text, shown });
                }
            }
        }
        all
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Statement> {
        self.0.iter()
    }

    /// The function of a name, if there is one.
    pub(super) fn function_named(&self, name: &str) -> Option<Function<'_>> {
        let is_one = |it: &Statement| {
            let head = it.text.trim_start_matches("async ").strip_prefix("def ");
            head.and_then(|head| head.strip_prefix(name)).is_some_and(|rest| rest.starts_with('('))
        };
        let mut found = self.0.iter().enumerate().filter(|(_, it)| is_one(it));
        let (at, _) = found.next()?;
        found.next().is_none().then(|| self.function(at))
    }

    /// The statements of a class, its head first.
    pub(super) fn class_named(&self, name: &str) -> Option<Vec<&Statement>> {
        let is_one = |it: &Statement| {
            let head = it.text.strip_prefix("class ").and_then(|head| head.strip_prefix(name));
            head.is_some_and(|rest| rest.starts_with(['(', ':']))
        };
        let at = self.0.iter().position(is_one)?;
        let indent = self.0[at].indent;
        let body = self.0[at + 1..].iter().take_while(|it| it.indent > indent);
        Some(std::iter::once(&self.0[at]).chain(body).collect())
    }

    fn function(&self, head: usize) -> Function<'_> {
        let indent = self.0[head].indent;
        let body = self.0[head + 1..].iter().take_while(|it| it.indent > indent).collect();
        let above = self.0[..head].iter().rev();
        let decorators = above.take_while(|it| it.indent == indent && it.text.starts_with('@')).collect();
        Function { head: Some(&self.0[head]), body, decorators }
    }

    /// The statements that a line's own is inside of, innermost first, up to its function's `def` or the module's.
    pub(super) fn around(&self, line: u32) -> impl Iterator<Item = &Statement> {
        let at = self.0.iter().position(|it| it.lines.0 <= line && line <= it.lines.1).unwrap_or(0);
        let mut least = self.0.get(at).map_or(0, |own| own.indent);
        let mut is_over = false;
        let above = self.0[..at].iter().rev();
        above.filter(move |it| {
            let is_around = !is_over && it.indent < least;
            if is_around {
                least = it.indent;
                is_over = is_function(&it.text);
            }
            is_around
        })
    }

    /// The statement that a line is part of, and the function around it, with its decorators.
    pub(super) fn function_at(&self, line: u32) -> Option<(&Statement, Function<'_>)> {
        let at = self.0.iter().position(|it| it.lines.0 <= line && line <= it.lines.1)?;
        let own = &self.0[at];
        let mut least = own.indent;
        let mut head = None;
        for (idx, it) in self.0[..at].iter().enumerate().rev() {
            if it.indent < least {
                least = it.indent;
                if is_function(&it.text) {
                    head = Some(idx);
                    break;
                }
            }
        }
        let Some(head) = head else {
            // The module's own: all but the bodies of functions.
            let mut within: Option<usize> = None;
            let body = self.0.iter().filter(|it| {
                if within.is_some_and(|indent| it.indent <= indent) {
                    within = None;
                }
                let is_inside = within.is_some();
                if within.is_none() && is_function(&it.text) {
                    within = Some(it.indent);
                }
                !is_inside
            });
            return Some((own, Function { head: None, body: body.collect(), decorators: vec![] }));
        };
        Some((own, self.function(head)))
    }
}

/// A function of the program, or what stands outside of all.
pub(super) struct Function<'a> {
    /// Its `def`; none outside of all.
    pub(super) head: Option<&'a Statement>,
    pub(super) body: Vec<&'a Statement>,
    pub(super) decorators: Vec<&'a Statement>,
}

impl<'a> Function<'a> {
    /// Whether a parameter takes any number of arguments.
    pub(super) fn has_star(&self, name: &str) -> bool {
        self.head.is_some_and(|head| head.text.contains(&format!("*{name}")))
    }

    /// Names of its parameters, in order.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let text = self.head.map_or("", |head| head.text.as_str());
        let list = text.split_once('(').map_or("", |(_, rest)| rest);
        let (mut depth, mut is_name) = (0_i32, true);
        // Behind a name come its type and its default.
        let names = list.split(move |c: char| {
            match c {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth -= 1,
                _ => {}
            }
            let was_name = is_name;
            match c {
                ',' if depth == 0 => is_name = true,
                ':' | '=' if depth == 0 => is_name = false,
                _ => {}
            }
            depth < 0 || (depth == 0 && matches!(c, ',' | ':' | '=')) || !was_name
        });
        names
            .map(|name| name.trim().trim_start_matches('*'))
            .filter(|name| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_'))
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn is_function(text: &str) -> bool {
    text.starts_with("def ") || text.starts_with("async def ")
}

/// Joins physical lines to logical ones (docs.python.org/3/reference/lexical_analysis.html).
#[derive(Default)]
struct Reader {
    text: String,
    shown: String,
    begins: u32,
    indent: usize,
    brackets: usize,
    /// The quotes of a string that goes on in the next line.
    quotes: Option<&'static str>,
    goes_on: bool,
}

impl Reader {
    fn is_between(&self) -> bool {
        self.brackets == 0 && self.quotes.is_none() && !self.goes_on
    }

    fn line(&mut self, line: &str) {
        self.goes_on = false;
        let mut rest = line;
        if self.quotes.is_none() {
            self.text.push(' ');
        }
        self.shown.push(' ');
        loop {
            if let Some(quotes) = self.quotes {
                match end_of_string(rest, quotes) {
                    Some(end) => {
                        self.shown.push_str(&rest[..end]);
                        rest = &rest[end..];
                        self.quotes = None;
                        self.text.push('"');
                    }
                    // A string of one line goes on after a backslash; else the file is no Python.
                    None => {
                        self.shown.push_str(rest);
                        if quotes.len() == 1 && !rest.ends_with('\\') {
                            self.quotes = None;
                        }
                        return;
                    }
                }
                continue;
            }
            let Some(c) = rest.chars().next() else { return };
            let opening = ["\"\"\"", "'''", "\"", "'"].into_iter().find(|quotes| rest.starts_with(quotes));
            if let Some(quotes) = opening {
                self.quotes = Some(quotes);
                self.text.push('"');
                self.shown.push_str(quotes);
                rest = &rest[quotes.len()..];
                continue;
            }
            match c {
                '#' => return,
                '\\' if rest.len() == 1 => {
                    self.goes_on = true;
                    return;
                }
                '(' | '[' | '{' => self.brackets += 1,
                ')' | ']' | '}' => self.brackets = self.brackets.saturating_sub(1),
                _ => {}
            }
            self.text.push(c);
            self.shown.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
}

/// Where a string ends behind its closing quotes.
fn end_of_string(text: &str, quotes: &str) -> Option<usize> {
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        if is_escaped {
            is_escaped = false;
        } else if c == '\\' {
            is_escaped = true;
        } else if text[at..].starts_with(quotes) {
            return Some(at + quotes.len());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_joined_as_python_joins_them() {
        let text = "import a  # b\n\ndef f(x,\n      y):\n    '''Says (\n    what'''\n    z = g(x,  # first (\n          \"a)b\")\n    return z + \\\n        y\n";
        let all = Statements::of(text);
        let told: Vec<_> = all.0.iter().map(|it| (it.lines, it.indent, &*it.text)).collect();
        assert_eq!(
            told,
            [
                ((1, 1), 0, "import a"),
                ((3, 4), 0, "def f(x, y):"),
                ((5, 6), 4, "\"\""),
                ((7, 8), 4, "z = g(x, \"\")"),
                ((9, 10), 4, "return z + y"),
            ]
        );
    }

    #[test]
    fn a_line_knows_its_function_and_the_module_its_own_statements() {
        let text = "a = 1\n@cache\ndef f():\n    if a:\n        b = 2\n    def g():\n        c = 3\n    return b\nd = f()\n";
        let all = Statements::of(text);
        let of = |line| {
            let (own, function) = all.function_at(line).expect("a statement");
            let body: Vec<_> = function.body.iter().map(|it| &*it.text).collect();
            (own.text.clone(), body.join("; "), function.decorators.len())
        };
        assert_eq!(of(5), ("b = 2".into(), "if a:; b = 2; def g():; c = 3; return b".into(), 1));
        assert_eq!(of(7), ("c = 3".into(), "c = 3".into(), 0));
        assert_eq!(of(9), ("d = f()".into(), "a = 1; @cache; def f():; d = f()".into(), 0));
    }

    #[test]
    fn what_is_no_python_has_statements_and_no_panic() {
        for text in ["((((", "'''", "\"\\", ")]}", "\u{feff}def\n\\", "é = 'ü\\'"] {
            let all = Statements::of(text);
            (0..9).for_each(|line| drop(all.function_at(line)));
        }
    }

    #[test]
    fn tables_of_data_are_no_statements_to_follow() {
        let deep = format!("a = f(x)\nb = {}a{}\n", "(".repeat(100_000), ")".repeat(100_000));
        assert_eq!(Statements::of(&deep).all().map(|it| &*it.text).collect::<Vec<_>>(), ["a = f(x)"]);
    }
}
