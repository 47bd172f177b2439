//! What an expression of Python is made of, by its text: names, calls, arguments, and what its methods leave of a value.

/// Makes a container.
pub(super) const EMPTY: [&str; 8] =
    ["[]", "{}", "list()", "dict()", "set()", "deque(", "defaultdict(", "OrderedDict("];
/// Functions that a value is followed into, one from another.
pub(super) const DEEPEST: usize = 2;
/// What calls a function beside a module's own code.
pub(super) const HOOKS: [&str; 4] = [
    "register_forward_hook(",
    "register_forward_pre_hook(",
    "register_full_backward_hook(",
    "register_hook(",
];

/// Methods that add to a container.
const ADDS: [&str; 9] =
    ["append", "extend", "insert", "add", "appendleft", "put", "put_nowait", "push", "setdefault"];
/// Behind a tensor's name: what follows is a number, a copy on the CPU, or nothing of its memory.
const LEAVES: [&str; 14] = [
    "argmax", "item", "tolist", "cpu", "numpy", "shape", "size", "numel", "dtype", "device", "backward",
    "data_ptr", "dim", "ndim",
];
/// The same of its graph.
const WITHOUT_GRAPH: [&str; 14] = [
    "argmax", "argmin", "argsort", "item", "tolist", "detach", "data", "numpy", "shape", "size", "numel",
    "dtype", "device", "long",
];
/// Functions of a tensor that keep nothing of it.
const MEASURES: [&str; 9] = ["float", "int", "len", "print", "isinstance", "id", "type", "str", "del"];

pub(super) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !is_word(c)).filter(|word| word.starts_with(|c: char| !c.is_ascii_digit()))
}

pub(super) fn is_joined(value: &str) -> bool {
    ["cat(", "concat(", "concatenate(", "hstack(", "vstack("].iter().any(|name| value.contains(name))
}

/// Whether a name, or what an attribute is called, stands in an expression.
pub(super) fn carries_any(expression: &str, name: &str) -> bool {
    expression.match_indices(name).any(|(at, _)| {
        !expression[..at].ends_with(is_word) && !expression[at + name.len()..].starts_with(is_word)
    })
}

/// A container and what is put into it: the arguments of a method that adds, where the statement is its call.
pub(super) fn added(text: &str) -> Option<(&str, &str)> {
    // `kept.setdefault(key, []).append(value)`: the call that ends the statement.
    let opens = text.match_indices('(').map(|(at, _)| at);
    let open = opens.rev().find(|at| closing(&text[*at..]) == Some(text.len() - at))?;
    let (container, method) = text[..open].rsplit_once('.')?;
    let argument = text[open + 1..text.len() - 1].trim();
    let is_one = is_chain(container) && assigned(container).is_none();
    (ADDS.contains(&method) && is_one && !argument.is_empty()).then_some((container, argument))
}

/// Calls in a statement: the last part of the function's name, and its arguments.
pub(super) fn calls(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.match_indices('(').filter_map(|(at, _)| {
        let name = text[..at].rsplit(|c| !is_word(c)).next().filter(|name| !name.is_empty())?;
        let end = closing(&text[at..])?;
        Some((name, &text[at + 1..at + end - 1]))
    })
}

/// The call that a whole expression is: the name or chain before its dot, and the function's own name.
pub(super) fn last_call(value: &str) -> Option<(&str, &str)> {
    let value = value.trim();
    let opens = value.match_indices('(').map(|(at, _)| at);
    let open = opens.rev().find(|at| closing(&value[*at..]) == Some(value.len() - at))?;
    let called = &value[..open];
    let (receiver, name) = called.rsplit_once('.').unwrap_or(("", called));
    (is_chain(called) && !name.is_empty()).then_some((receiver, name))
}

/// Whether a name is an argument of a call in an expression.
pub(super) fn arguments_have(value: &str, name: &str) -> bool {
    calls(value).any(|(_, arguments)| parts(arguments, ',').iter().any(|it| it.trim() == name))
}

/// An expression at its outermost commas, or another sign.
pub(super) fn parts(expression: &str, sign: char) -> Vec<&str> {
    let (mut depth, mut from, mut found) = (0_i32, 0, vec![]);
    for (at, c) in expression.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ if c == sign && depth == 0 => {
                found.push(expression[from..at].trim());
                from = at + c.len_utf8();
            }
            _ => {}
        }
    }
    found.push(expression[from..].trim());
    found.retain(|part| !part.is_empty());
    found
}

/// Whether brackets around an expression are of one element.
pub(super) fn is_chain_of_one(expression: &str) -> bool {
    let inner = expression.strip_prefix('(').and_then(|it| it.strip_suffix(')'));
    inner.is_some_and(|inner| parts(inner, ',').len() == 1 && !inner.ends_with(','))
}

/// Whether an expression is a name with attributes, calls and subscripts, to which a method can be added.
pub(super) fn is_chain(expression: &str) -> bool {
    let mut rest = expression.trim_start_matches(is_word);
    while !rest.is_empty() {
        if let Some(attribute) = rest.strip_prefix('.') {
            rest = attribute.trim_start_matches(is_word);
        } else if rest.starts_with(['(', '[']) {
            let Some(end) = closing(rest) else { return false };
            rest = &rest[end..];
        } else {
            return false;
        }
    }
    true
}

/// Target, operator and value of an assignment.
pub(super) fn assigned(text: &str) -> Option<(&str, &str, &str)> {
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
pub(super) fn carries(expression: &str, name: &str) -> bool {
    carries_but(expression, name, &LEAVES)
}

/// Whether an expression has the graph of what a name refers to: a copy on the CPU has it, and a detached tensor does not.
pub(super) fn carries_graph(expression: &str, name: &str) -> bool {
    carries_but(expression, name, &WITHOUT_GRAPH)
}

fn carries_but(expression: &str, name: &str, ends: &[&str]) -> bool {
    expression.match_indices(name).any(|(at, _)| {
        let (before, after) = (&expression[..at], &expression[at + name.len()..]);
        let is_whole = !before.ends_with(is_word) && !before.ends_with('.') && !after.starts_with(is_word);
        // `f(name=...)`
        let is_keyword = after.starts_with('=') && !after.starts_with("==");
        is_whole
            && !is_keyword
            && !is_index(before)
            && !leaves_by(after, ends)
            && !is_measured(expression, at, ends)
    })
}

/// Whether brackets around a place make a number of what stands there, or a copy on the CPU: `int((x > 0).sum())`, `stack([x]).mean().item()`.
fn is_measured(expression: &str, at: usize, ends: &[&str]) -> bool {
    let opens = expression[..at].match_indices(['(', '[', '{']).map(|(open, _)| open);
    opens.filter_map(|open| Some((open, open + closing(&expression[open..])?))).any(|(open, end)| {
        let function = expression[..open].rsplit(|c| !is_word(c)).next().unwrap_or_default();
        end > at && (MEASURES.contains(&function) || leaves_by(&expression[end..], ends))
    })
}

/// Whether what follows is an index, `table[value]`: the result has no graph of it.
fn is_index(before: &str) -> bool {
    let mut depth = 0_i32;
    for (at, c) in before.char_indices().rev() {
        match c {
            ')' | ']' | '}' => depth += 1,
            '(' | '[' | '{' if depth > 0 => depth -= 1,
            '[' => return before[..at].ends_with(|c| is_word(c) || matches!(c, ')' | ']')),
            '(' | '{' => return false,
            _ => {}
        }
    }
    false
}

/// Whether what follows a value, `.detach().cpu()`, leaves nothing of it on the GPU.
fn leaves_by(mut rest: &str, ends: &[&str]) -> bool {
    let is_memory = ends == LEAVES;
    loop {
        if let Some(method) = rest.strip_prefix('.') {
            let end = method.find(|c| !is_word(c)).unwrap_or(method.len());
            if ends.contains(&&method[..end]) || is_memory && is_to_cpu(&method[..end], &method[end..]) {
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
pub(super) fn is_to_cpu(method: &str, arguments: &str) -> bool {
    method == "to" && arguments.starts_with("(\"\")")
}

/// Whether a statement copies a value to the GPU, and may go on to work on it: `.cuda()`, or `.to()` of a device.
pub(crate) fn moves_to_device(text: &str) -> bool {
    let value = assigned(text).map_or(text, |(.., value)| value);
    // Each value of a dict, a list or a tuple.
    let inner = [('{', '}'), ('[', ']')].into_iter().find_map(|(open, close)| {
        let inner = value.strip_prefix(open)?.strip_suffix(close)?;
        (closing(value) == Some(value.len())).then_some(inner)
    });
    if let Some(inner) = inner {
        let value_of = |it: &str| match it.strip_prefix("\"\":") {
            Some(value) => value.trim().to_owned(),
            None => it.to_owned(),
        };
        return parts(inner, ',').into_iter().any(|it| moves_to_device(&value_of(it)));
    }
    let is_device = |it: &str| it == "\"\"" || ["device", "cuda", "gpu"].iter().any(|word| it.contains(word));
    let mut calls = value.match_indices('(').filter_map(|(at, _)| Some((at, closing(&value[at..])?)));
    calls.any(|(at, end)| {
        let (before, arguments) = (&value[..at], &value[at + 1..at + end - 1]);
        let is_move = before.ends_with(".cuda")
            || before.ends_with(".to") && parts(arguments, ',').first().is_some_and(|it| is_device(it));
        is_move && is_chain(before)
    })
}

/// Whether an expression is a part of a tensor, which refers to all of its memory: a row or column `x[:, 0]`, `x.select(1, 0)`.
pub(super) fn is_view(expression: &str) -> bool {
    let expression = expression.trim();
    let Some(open) = expression
        .match_indices(['[', '('])
        .map(|(at, _)| at)
        .rfind(|at| closing(&expression[*at..]) == Some(expression.len() - at) && *at > 0)
    else {
        return false;
    };
    let (before, inside) = (&expression[..open], &expression[open + 1..expression.len() - 1]);
    // `i:i + 1` is one row, too.
    let is_step = |it: &str| {
        it.split_once(':').is_some_and(|(from, to)| {
            let to = to.trim();
            is_one_name(from)
                && to
                    .strip_prefix(from.trim())
                    .is_some_and(|rest| rest.trim() == "+ 1" || rest.trim() == "+1")
        })
    };
    let is_number = |it: &&str| it.trim_start_matches('-').chars().all(|c| c.is_ascii_digit()) || is_step(it);
    if expression.ends_with(')') {
        return [".select", ".narrow"].iter().any(|name| before.ends_with(name));
    }
    let indices = parts(inside, ',');
    is_chain(before)
        && indices.iter().any(is_number)
        && indices.iter().any(|it| it.contains(':') || *it == "...")
}

/// Whether an expression is a part of a tensor, or a list or tuple of such.
pub(super) fn is_of_views(expression: &str) -> bool {
    let text = expression.trim();
    let inner = [('[', ']'), ('(', ')')].into_iter().find_map(|(open, close)| {
        let inner = text.strip_prefix(open)?.strip_suffix(close)?;
        (closing(text) == Some(text.len())).then_some(inner)
    });
    let elements = inner.map(|inner| inner.split(" for ").next().unwrap_or_default());
    is_view(text) || elements.is_some_and(|inner| parts(inner, ',').into_iter().any(is_of_views))
}

fn is_one_name(text: &str) -> bool {
    let text = text.trim();
    !text.is_empty() && text.chars().all(is_word)
}

/// Whether an expression as a whole ends in such a method: `model(x).item()`.
pub(super) fn leaves_all(expression: &str) -> bool {
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

/// Whether the result of a whole expression has no graph: `model(x).argmax(1)`, `float(loss)`.
pub(super) fn ends_graph(expression: &str) -> bool {
    let of_call = last_call(expression);
    let is_last =
        of_call.is_some_and(|(receiver, name)| !receiver.is_empty() && WITHOUT_GRAPH.contains(&name));
    let measures = |(receiver, name): (&str, &str)| receiver.is_empty() && MEASURES.contains(&name);
    is_last || of_call.is_some_and(measures) || expression.trim().ends_with(".data")
}

/// Behind the bracket that closes the first one.
pub(super) fn closing(text: &str) -> Option<usize> {
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

    #[test]
    fn one_row_by_a_slice_is_a_part_of_a_tensor_and_so_are_lists_of_them() {
        assert!(is_of_views("[(h[:, i:i + 1], c[:, i:i + 1]) for i in range(n)]"));
        assert!(is_of_views("x[:, 0]") && !is_of_views("x[0]") && !is_of_views("[f(x), g(x)]"));
    }

    #[test]
    fn statements_that_copy_a_value_to_the_device_may_work_on_it() {
        for text in [
            "v = frames.to(device).float() / 255.0",
            "self.a = torch.rand(n).log().to(device)",
            "x = load(path).cuda()",
            "x = y.to(\"\")",
            "all = {\"\": self.obs[:n].to(device).float(), \"\": n}",
        ] {
            assert!(moves_to_device(text), "{text}");
        }
        for text in ["x = y.to(torch.float16)", "x = torch.rand(n, device=device)", "x = f(y.to(device)) + 1"]
        {
            assert!(!moves_to_device(text), "{text}");
        }
    }
}
