//! What `except` clauses keep: an exception refers to its traceback, this to the frames between `raise` and `except`, and these to their values.

use super::statements::{Function, Statement, Statements};
use super::text::{added, assigned, calls, is_word, parts};

/// The statement that keeps an exception beyond its handler, where a line runs inside of the `try`; and the exception's name.
pub(super) fn stored(statements: &Statements, line: u32) -> Option<(&Statement, &str)> {
    let (_, function) = statements.function_at(line)?;
    statements.around(line).filter(|it| it.text == "try:").find_map(|head| stored_after(&function, head))
}

/// The same of the handlers of one `try`.
fn stored_after<'s>(function: &Function<'s>, head: &Statement) -> Option<(&'s Statement, &'s str)> {
    let after = function.body.iter().skip_while(|it| it.lines.0 <= head.lines.1);
    let mut name: Option<&str> = None;
    for statement in after.take_while(|it| it.indent >= head.indent) {
        if statement.indent == head.indent {
            match statement.text.split([' ', ':', '(']).next() {
                Some("except") => name = named(&statement.text),
                Some("else" | "finally") => name = None,
                _ => return None,
            }
        } else if let Some(name) = name.filter(|name| keeps(&statement.text, name)) {
            return Some((statement, name));
        }
    }
    None
}

/// `except ValueError as error:`.
fn named(head: &str) -> Option<&str> {
    let name = head.strip_suffix(':')?.rsplit_once(" as ")?.1.trim();
    name.chars().all(is_word).then_some(name)
}

/// Whether a statement puts the exception itself into a container, an attribute or a future.
fn keeps(text: &str, name: &str) -> bool {
    let has = |values: &str| {
        let inner = values.trim().trim_start_matches(['(', '[']).trim_end_matches([')', ']']);
        // `Reply(False, error)`
        let of_record = |values: &str| {
            let (class, arguments) = values.trim().split_once('(')?;
            let last = class.rsplit('.').next().unwrap_or_default();
            let is_class =
                class.chars().all(|c| is_word(c) || c == '.') && last.starts_with(char::is_uppercase);
            Some(is_class && parts(arguments.strip_suffix(')')?, ',').contains(&name))
        };
        parts(inner, ',').contains(&name) || of_record(values).unwrap_or(false)
    };
    let is_set = || calls(text).any(|(called, arguments)| called == "set_exception" && has(arguments));
    let is_added = || added(text).is_some_and(|(_, arguments)| has(arguments));
    let is_assigned = || {
        assigned(text).is_some_and(|(target, operator, value)| {
            operator == "=" && target.contains(['.', '[']) && has(value)
        })
    };
    is_set() || is_added() || is_assigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exception_that_outlives_its_handler_is_found() {
        let of = |handler: &str| {
            let text = format!(
                "def run(self):\n    for item in work:\n        try:\n            done(encode(item))\n        except ValueError as e:\n{handler}        else:\n            self.last = e\n"
            );
            let statements = Statements::of(&text);
            stored(&statements, 4).map(|(it, name)| (it.lines.0, name.to_owned()))
        };
        let found = |line| Some((line, "e".to_owned()));
        assert_eq!(of("            log(e)\n            item.future.set_exception(e)\n"), found(7));
        assert_eq!(of("            self.errors.append((item, e))\n"), found(6));
        assert_eq!(of("            failed[item] = e\n"), found(6));
        assert_eq!(of("            self.replies.append(Reply(item.name, False, e))\n"), found(6));
        for handler in ["log(e)", "self.errors.append(str(e))", "text = e", "failed[item] = repr(e)", "raise"]
        {
            assert_eq!(of(&format!("            {handler}\n")), None, "{handler}");
        }
        let outside = Statements::of("try:\n    a()\nexcept E as e:\n    all.append(e)\nb()\n");
        assert_eq!(stored(&outside, 5), None);
        assert_eq!(stored(&outside, 4), None, "the handler itself is not tried");
        assert!(stored(&outside, 2).is_some());
    }
}
