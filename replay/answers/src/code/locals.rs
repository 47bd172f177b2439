//! Local variables that a function does not use any more, and that refer to what they were assigned until it ends.

use super::statements::{Function, Statement, Statements};
use super::text::{assigned, carries_any, is_word, parts};

/// Names that one statement assigns and that its function does not use from another line on; none if it uses one of them, or has given it up.
pub(super) fn unused_from(statements: &Statements, line: u32, now: u32) -> Option<Vec<String>> {
    let (own, function) = statements.function_at(line)?;
    let (_, of_now) = statements.function_at(now)?;
    let is_same = function.head.map(|head| head.lines) == of_now.head.map(|head| head.lines);
    let names = targets(own);
    let is_unused = |name: &String| {
        is_left(&function, own, name, now)
            && !is_used(statements, &function, name, (own.lines.0, now))
            && (function.head.is_some() || !is_global_read(statements, name))
    };
    (is_same && own.lines.1 < now && !names.is_empty() && names.iter().all(is_unused)).then_some(names)
}

/// Plain names that a statement assigns.
fn targets(statement: &Statement) -> Vec<String> {
    let Some((target, "=", _)) = assigned(&statement.text) else { return vec![] };
    let names = parts(target.trim_matches(['(', ')']), ',');
    let is_plain = names.iter().all(|name| !name.is_empty() && name.chars().all(is_word));
    let all = names.into_iter().filter(|name| *name != "_").map(str::to_owned);
    if is_plain { all.collect() } else { vec![] }
}

/// Whether nothing between the two lines assigns the name anew, or deletes it.
fn is_left(function: &Function<'_>, own: &Statement, name: &str, now: u32) -> bool {
    let mut between = function.body.iter().filter(|it| it.lines.0 > own.lines.1 && it.lines.0 < now);
    !between.any(|it| {
        let is_deleted = it.text.strip_prefix("del ").is_some_and(|names| carries_any(names, name));
        is_deleted || assigns(it, name)
    })
}

/// Whether the function reads it from a line on: to its end, and in the next turn of a loop around both, until it is assigned again.
fn is_used(statements: &Statements, function: &Function<'_>, name: &str, (line, now): (u32, u32)) -> bool {
    let heads = |of: u32| statements.around(of).filter(|it| it.is_loop()).map(|it| it.lines.0);
    let around: Vec<u32> = heads(line).collect();
    let again = heads(now).filter(|head| around.contains(head)).min();
    let rest = function.body.iter().filter(|it| it.lines.1 >= now);
    let next =
        function.body.iter().filter(|it| again.is_some_and(|head| it.lines.0 >= head && it.lines.1 < now));
    for statement in rest.chain(next) {
        if reads(statement, name) {
            return true;
        }
        if assigns(statement, name) {
            return false;
        }
    }
    false
}

fn reads(statement: &Statement, name: &str) -> bool {
    let text = statement.text.as_str();
    if text.starts_with("del ") {
        return false;
    }
    if let Some((_, values)) = text.strip_prefix("for ").and_then(|rest| rest.split_once(" in ")) {
        return carries_any(values, name);
    }
    match assigned(text) {
        Some((target, "=", value)) => {
            carries_any(value, name) || target.contains(['.', '[']) && carries_any(target, name)
        }
        Some(_) | None => carries_any(text, name),
    }
}

fn assigns(statement: &Statement, name: &str) -> bool {
    let text = statement.text.as_str();
    let of_loop = text.strip_prefix("for ").and_then(|rest| rest.split_once(" in ")).map(|it| it.0);
    let target = of_loop.or_else(|| assigned(text).filter(|it| it.1 == "=").map(|it| it.0));
    target.is_some_and(|target| parts(target, ',').iter().any(|it| it.trim_matches(['(', ')']) == name))
}

/// Whether a function of the file reads a name of the module's own.
fn is_global_read(statements: &Statements, name: &str) -> bool {
    let is_inner =
        |it: &&Statement| statements.function_at(it.lines.0).is_some_and(|(_, of)| of.head.is_some());
    statements.all().filter(is_inner).any(|it| reads(it, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_function_leaves_in_its_variables_is_found() {
        let text = "def run(net):\n    for e in range(2):\n        for x in data:\n            y, maps = net(x)\n            loss = f(y)\n        for v in other:\n            z = net(v)\n            total = z.sum()\n";
        let of = |text: &str, line, now| unused_from(&Statements::of(text), line, now);
        assert_eq!(of(text, 4, 7), Some(vec!["y".into(), "maps".into()]));
        assert_eq!(of(text, 5, 7), Some(vec!["loss".into()]));
        // Read afterwards, in the next turn before it is assigned again, deleted, or assigned anew.
        assert_eq!(of(&text.replace("total = z.sum()", "total = z + maps"), 4, 7), None);
        assert_eq!(of(&text.replace("for x in data:", "for x in data(maps):"), 4, 7), None);
        assert_eq!(
            of(&text.replace("        for v in", "        del y, maps\n        for v in"), 4, 8),
            None
        );
        assert_eq!(
            of(&text.replace("        for v in", "        maps = None\n        for v in"), 4, 8),
            None
        );
        // A later line of the same turn comes first.
        assert_eq!(of(text, 7, 5), None);
        let module = "a = make()\nb = work()\ndef g():\n    return a\n";
        assert_eq!(of(module, 1, 2), None);
        assert_eq!(of(&module.replace("return a", "return 1"), 1, 2), Some(vec!["a".into()]));
    }
}
