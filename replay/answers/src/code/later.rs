//! What the program does later with what it computes or keeps: how much less it may keep, and whether a backward pass needs the graph.

use std::collections::BTreeSet;
use std::rc::Rc;

use super::Line;
use super::containers::put;
use super::keeper::{Found, How, Keeper};
use super::statements::{Function, Statement, Statements};
use super::text::{
    DEEPEST, EMPTY, HOOKS, added, assigned, calls, carries_any, carries_graph, ends_graph, is_word, parts,
    words,
};

/// What a program does to tensors, and not to numbers.
const AS_TENSORS: [&str; 7] = [".item(", "stack(", "torch.cat(", ".cpu(", ".detach(", ".numpy(", ".tolist("];
/// Begins a backward pass, or decides whether there may be one.
const BACKWARD: [&str; 3] = ["backward(", "autograd.grad(", "set_grad_enabled("];
/// Writes out a copy of a tensor for each item.
const REPEATS: [&str; 3] = [".repeat(", "repeat_interleave(", ".tile("];
/// Joins what a list has.
const JOINS: [&str; 4] = ["cat(", "stack(", "hstack(", "vstack("];

/// What becomes of the graph of what a statement computes, within its function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Graph {
    /// All that is used of the result has no graph.
    Unused,
    /// The function returns it.
    Returned,
    /// A backward pass begins with it.
    Differentiated,
    /// Something else has it, or the source does not show it.
    Kept,
}

/// The graph of what a statement computes.
pub(super) fn graph_of(own: &Statement, function: &Function<'_>) -> Graph {
    let is_begun = |text: &str| text.contains(".backward(") || text.contains("autograd.grad(");
    if is_begun(&own.text) {
        return Graph::Differentiated;
    }
    if let Some(value) = own.text.strip_prefix("return ") {
        return if ends_graph(value) { Graph::Unused } else { Graph::Returned };
    }
    let Some((target, "=", value)) = assigned(&own.text) else { return Graph::Kept };
    let names_of = |target: &str| -> Option<Vec<String>> {
        let names = parts(target.trim_matches(['(', ')']), ',');
        names.iter().all(|it| it.chars().all(is_word)).then(|| names.into_iter().map(str::to_owned).collect())
    };
    let Some(names) = names_of(target) else { return Graph::Kept };
    if ends_graph(value) {
        return Graph::Unused;
    }
    let mut names: BTreeSet<String> = names.into_iter().collect();
    loop {
        let (n, mut found) = (names.len(), Graph::Unused);
        for it in function.body.iter().filter(|it| it.lines != own.lines) {
            let text = it.text.as_str();
            let has = |part: &str| names.iter().any(|name| carries_graph(part, name));
            if is_begun(text) && names.iter().any(|name| carries_any(text, name)) {
                return Graph::Differentiated;
            }
            let is_plain = ["if ", "elif ", "while ", "assert ", "del ", "print(", "def ", "class "];
            if is_plain.iter().any(|word| text.starts_with(word)) {
                continue;
            }
            if let Some(value) = text.strip_prefix("return ").or_else(|| text.strip_prefix("yield ")) {
                if has(value) {
                    found = Graph::Returned;
                }
            } else if let Some((targets, value)) =
                text.strip_prefix("for ").and_then(|it| it.split_once(" in "))
            {
                if has(value) {
                    names.extend(words(targets).map(str::to_owned));
                }
            } else if let Some((target, _, value)) = assigned(text) {
                match names_of(target) {
                    Some(more) if has(value) && !ends_graph(value) => names.extend(more),
                    None if has(value) && !ends_graph(value) => return Graph::Kept,
                    Some(_) | None => {}
                }
            } else if has(text) {
                return Graph::Kept;
            }
        }
        if names.len() == n {
            return found;
        }
    }
}

/// The line of the program whose call of a model has a graph that nothing uses: each function returns the result up to there.
pub(super) fn unused_graph(
    lines: &[Line],
    file: impl Fn(&str) -> Option<Rc<Statements>>,
) -> Option<(String, u32)> {
    for (_, name, line) in lines {
        let statements = file(name)?;
        let (own, function) = statements.function_at(*line)?;
        match graph_of(own, &function) {
            Graph::Unused => return Some((name.clone(), own.lines.0)),
            Graph::Returned => {}
            Graph::Differentiated | Graph::Kept => return None,
        }
    }
    None
}

/// Whether a function, or one of this file that it calls, begins a backward pass or decides about gradients.
pub(super) fn begins_backward(statements: &Statements, function: &Function<'_>, depth: usize) -> bool {
    let decides = |it: &Statement| BACKWARD.iter().any(|word| it.text.contains(word));
    let called: BTreeSet<&str> =
        function.body.iter().flat_map(|it| calls(&it.text)).map(|(name, _)| name).collect();
    function.body.iter().any(|it| decides(it))
        || depth < DEEPEST
            && called.into_iter().any(|name| {
                let of = statements.function_named(name);
                of.is_some_and(|of| begins_backward(statements, &of, depth + 1))
            })
}

/// Whether another caller in this file begins a backward pass with what a function returns.
pub(super) fn is_differentiated(statements: &Statements, function: &str) -> bool {
    let is_call = |it: &&Statement| {
        !it.text.starts_with("def ") && calls(&it.text).any(|(called, _)| called == function)
    };
    statements.all().filter(is_call).any(|it| {
        let around = statements.function_at(it.lines.0);
        around.is_some_and(|(own, of)| graph_of(own, &of) == Graph::Differentiated)
    })
}

/// Whether later code handles what a container or a total has as tensors: numbers in their place would fail.
pub(super) fn is_used_as_tensor(statements: &Statements, found: &Keeper) -> bool {
    let Some((own, _)) = statements.function_at(found.line) else { return false };
    let into = put(&own.text).map(|it| it.1).or_else(|| assigned(&own.text).map(|it| it.0));
    let root = into.unwrap_or_default().split('[').next().unwrap_or_default();
    let name = root.rsplit('.').next().unwrap_or_default();
    let is_use = |it: &Statement| {
        it.lines != own.lines
            && carries_any(&it.shown, name)
            && AS_TENSORS.iter().any(|word| it.shown.contains(word))
    };
    !name.is_empty() && statements.all().any(is_use)
}

/// The hook that keeps the object of a container, if the object is made anew and nothing removes its hooks.
pub(super) fn hook_of_object(statements: &Statements, found: &Keeper, lines: &[Line]) -> Option<Keeper> {
    let (own, _) = statements.function_at(found.line)?;
    let (_, container, _) = put(&own.text)?;
    let container = container.split('[').next().filter(|it| it.starts_with("self.") && !found.is_hook)?;
    let class = lines.iter().find_map(|(function, file, _)| {
        let class = function.strip_suffix(".__init__").filter(|_| *file == found.file)?;
        class.rsplit('.').next()
    })?;
    let body = statements.class_named(class)?;
    let is_in_class = body.iter().any(|it| it.lines == own.lines);
    // A handle that is kept may be removed elsewhere.
    let is_thrown_away = |it: &Statement| {
        let is_registered = HOOKS.iter().any(|hook| it.text.contains(hook)) && it.text.contains("(self.");
        is_registered && assigned(&it.text).is_none() && added(&it.text).is_none()
    };
    let is_removed = statements.all().any(|it| it.text.contains(".remove()"));
    let hook = body.iter().find(|it| is_thrown_away(it)).filter(|_| is_in_class && !is_removed)?;
    Some(Found::at(hook, How::Hook, container).named(&found.file, false))
}

/// The function that begins a backward pass with what a list of another function has, once that has returned.
pub(super) fn backward_of_caller(
    found: &Keeper,
    lines: &[Line],
    file: impl Fn(&str) -> Option<Rc<Statements>>,
) -> Option<String> {
    let statements = file(&found.file)?;
    let (own, function) = statements.function_at(found.line)?;
    let head = function.head?;
    let (_, container, _) = put(&own.text).filter(|_| found.how == How::Added)?;
    let is_made = |it: &&Statement| {
        assigned(&it.text).is_some_and(|(targets, _, values)| {
            let mut pairs = parts(targets, ',').into_iter().zip(parts(values, ','));
            pairs.any(|(target, value)| target == container && EMPTY.iter().any(|it| value.starts_with(it)))
        })
    };
    let is_returned = |it: &&Statement| it.text.starts_with("return ") && carries_graph(&it.text, container);
    if !function.body.iter().any(is_made) || !function.body.iter().any(is_returned) {
        return None;
    }
    let is_of = |(_, name, line): &Line| {
        let of = (*name == found.file).then(|| statements.function_at(*line))?;
        Some(of?.1.head? == head)
    };
    let at = lines.iter().position(|line| is_of(line).unwrap_or(false))?;
    lines[at + 1..].iter().find_map(|(function, name, line)| {
        let statements = file(name)?;
        let (own, of) = statements.function_at(*line)?;
        let is_later = |it: &&Statement| it.lines.0 > own.lines.1 && it.text.contains(".backward(");
        let last = function.rsplit('.').next().unwrap_or_default();
        (of.head.is_some() && of.body.iter().any(is_later)).then(|| last.to_owned())
    })
}

/// A statement of the function that writes out copies of a tensor, in what a line computes: its own line.
pub(super) fn repeated(statements: &Statements, line: u32) -> Option<u32> {
    let (own, function) = statements.function_at(line)?;
    let repeats = |it: &Statement| REPEATS.iter().any(|word| it.text.contains(word));
    if repeats(own) {
        return Some(own.lines.0);
    }
    let is_used = |it: &Statement| {
        let name = assigned(&it.text).map_or("", |(target, ..)| target);
        !name.is_empty() && name.chars().all(is_word) && carries_any(&own.text, name)
    };
    let found = function.body.iter().find(|it| it.lines.0 < own.lines.0 && repeats(it) && is_used(it));
    found.map(|it| it.lines.0)
}

/// The line of the function that loads into a model what a line has copied to the device, entry by entry.
pub(super) fn loads_copy(statements: &Statements, line: u32) -> Option<u32> {
    let (own, function) = statements.function_at(line)?;
    let (name, "=", value) = assigned(&own.text)? else { return None };
    let is_copy = value.starts_with('{')
        && value.contains(".items()")
        && [".to(", ".cuda("].iter().any(|it| value.contains(it));
    let loads =
        |it: &&&Statement| calls(&it.text).any(|(called, of)| called == "load_state_dict" && of == name);
    function.body.iter().filter(|_| is_copy).find(loads).map(|it| it.lines.0)
}

/// An attribute whose list another function fills, and that the function of a line joins to one tensor: its name, and the line that adds to it.
pub(super) fn joined_list(statements: &Statements, line: u32) -> Option<(String, u32)> {
    let (_, function) = statements.function_at(line)?;
    let joined = function.body.iter().flat_map(|it| calls(&it.text)).filter_map(|(name, argument)| {
        let is_attribute = argument.starts_with("self.") && argument.chars().all(|c| is_word(c) || c == '.');
        (is_attribute && JOINS.iter().any(|it| it.trim_end_matches('(') == name)).then_some(argument)
    });
    joined.into_iter().find_map(|list| {
        let is_own = |it: &Statement| function.body.iter().any(|own| own.lines == it.lines);
        let fills = |it: &&Statement| added(&it.text).is_some_and(|(into, _)| into == list) && !is_own(it);
        statements.all().find(|it| fills(it)).map(|it| (list.to_owned(), it.lines.0))
    })
}

#[cfg(test)]
mod tests {
    use super::super::follow::keeper;
    use super::*;

    fn graph(text: &str) -> Graph {
        let statements = Statements::of(text);
        let line = (1..).zip(text.lines()).find(|(_, line)| line.contains("# here")).expect("a line").0;
        let (own, function) = statements.function_at(line).expect("a statement");
        graph_of(own, &function)
    }

    #[test]
    fn a_graph_is_unused_where_only_detached_values_and_numbers_follow() {
        let text = "def loss(x, y):\n    q = net(x)\n    t = target(y)  # here\n    best = t.argmax(1)\n    bound = (r + g * t).detach()\n    self.n = t.mean().item()\n    print(t)\n    return f(q, bound)\n";
        assert_eq!(graph(text), Graph::Unused);
        assert_eq!(graph(&text.replace(".detach()", "")), Graph::Returned);
        assert_eq!(graph(&text.replace(".item()", "")), Graph::Kept);
        // A copy on the CPU has the graph.
        assert_eq!(graph(&text.replace(".detach()", ".cpu()")), Graph::Returned);
        let step = "def step(x):\n    y = net(x)  # here\n    loss = f(y)\n    loss.backward()\n";
        assert_eq!(graph(step), Graph::Differentiated);
        assert_eq!(graph("def best(x):\n    return net(x).argmax(1)  # here\n"), Graph::Unused);
    }

    fn kept(text: &str, lines: &[(&str, u32)]) -> Keeper {
        let statements = Rc::new(Statements::of(text));
        let lines: Vec<Line> =
            lines.iter().map(|(name, at)| ((*name).to_owned(), "/a.py".to_owned(), *at)).collect();
        keeper(&lines, |_| Some(statements.clone())).expect("a keeper")
    }

    #[test]
    fn what_is_written_runs_with_what_the_program_does_later() {
        let list = "loss = f(x)\nall.append(loss)\nprint(f'{torch.stack(all).mean()}')\n";
        assert_eq!(
            kept(list, &[("f", 1)]).instead(true),
            "at a.py:2, write `all.append(loss.detach())`",
            "a number cannot be stacked"
        );
        let total = "def run(x):\n    for i in n:\n        w = w + (g(x, i) - h(x))\n    return w.view(2)\n";
        assert_eq!(
            kept(total, &[("run", 3)]).instead(true),
            "at a.py:3, write `w = w + (g(x, i) - h(x)).detach()`"
        );
        let record = "def forward(self, x):\n    y = self.net(x)\n    return {\"y\": y}\n\ndef run():\n    for x in data:\n        all.append(model(x))\n";
        assert_eq!(
            kept(record, &[("forward", 2), ("run", 7)]).instead(true),
            "at a.py:7, keep only the values that you use later, `.detach().cpu()` of each tensor"
        );
    }

    #[test]
    fn two_states_that_one_call_carries_on_are_both_named() {
        let text = "def step(self, loss):\n    for i, g in enumerate(grads(loss)):\n        self.a[i] = 0.9 * self.a[i] + 0.1 * g\n        self.b[i] = 0.5 * self.b[i] + 0.5 * g\n\ndef main():\n    loss = f(x)\n    own.step(loss)\n";
        assert_eq!(
            kept(text, &[("main", 7)]).instead(true),
            "at a.py:3, write `self.a[i] = 0.9 * self.a[i] + 0.1 * g.detach()`; the same at 4"
        );
    }

    #[test]
    fn a_hook_that_nothing_removes_keeps_an_object_that_is_made_anew() {
        let text = "class Fault:\n    def __init__(self, net):\n        self.build(net)\n        self.hook(net)\n    def build(self, net):\n        self.masks[net] = rand(net)\n    def hook(self, net):\n        net.register_forward_hook(self.make(net))\n";
        let lines = [("Fault.build", 6), ("Fault.__init__", 3)];
        let found = kept(text, &lines);
        assert_eq!((found.how, found.line, found.value.as_str()), (How::Hook, 8, "self.masks"));
        let removed = format!("{text}    def close(self):\n        self.handle.remove()\n");
        assert_eq!(kept(&removed, &lines).how, How::Entry);
        let handle = text.replace("net.register", "self.handle = net.register");
        assert_eq!(kept(&handle, &lines).how, How::Entry);
        assert_eq!(kept(text, &lines[..1]).how, How::Entry, "one object has it all");
    }

    #[test]
    fn what_a_caller_differentiates_is_needed_until_then() {
        let text = "def parts(x):\n    all = []\n    for i in n:\n        row = f(x, i)\n        all.append(row)\n    return torch.cat(all)\n\ndef update(x):\n    y = parts(x)\n    loss = y.mean()\n    loss.backward()\n";
        let lines = [("parts", 4), ("update", 9)];
        assert_eq!(kept(text, &lines).backward.as_deref(), Some("update"));
        assert_eq!(kept(&text.replace("loss.backward()", "log(loss)"), &lines).backward, None);
        assert_eq!(kept(&text.replace("return torch.cat(all)", "return len(all)"), &lines).backward, None);
    }

    #[test]
    fn a_function_that_training_calls_needs_its_graph() {
        let text = "def infer(x):\n    return net(x)\n\ndef step(x):\n    y = infer(x)\n    loss = f(y)\n    loss.backward()\n\ndef check(x):\n    return infer(x)\n";
        assert!(is_differentiated(&Statements::of(text), "infer"));
        assert!(!is_differentiated(&Statements::of(text), "check"));
        let beside = "def train():\n    loss.backward()\n    score = check(x)\n";
        assert!(!is_differentiated(&Statements::of(beside), "check"));
    }

    #[test]
    fn weights_that_are_copied_before_they_are_loaded_are_found() {
        let text = "def best(state):\n    w = {k: v.to(device) for k, v in state.best.items()}\n    model.load_state_dict(w)\n";
        assert_eq!(loads_copy(&Statements::of(text), 2), Some(3));
        assert_eq!(loads_copy(&Statements::of(&text.replace(".to(device)", ".cpu()")), 2), None);
        assert_eq!(loads_copy(&Statements::of(&text.replace("(w)", "(other)")), 2), None);
    }

    #[test]
    fn a_function_begins_the_backward_passes_of_those_that_it_calls() {
        let text = "def pull(x):\n    return torch.autograd.grad(f(x), x)\n\ndef sample(x):\n    x = x - pull(x)\n    return x\n\ndef show(x):\n    return g(x)\n";
        let statements = Statements::of(text);
        let begins =
            |name| begins_backward(&statements, &statements.function_named(name).expect("a function"), 0);
        assert!(begins("sample") && begins("pull") && !begins("show"));
    }

    #[test]
    fn copies_for_each_item_and_joined_lists_are_found_by_the_line_that_works_on_them() {
        let mask = "def mask(x):\n    all = self.one.repeat(n, 1) * low\n    other = g(x)\n    return all.masked_fill(x, low)\n";
        assert_eq!(repeated(&Statements::of(mask), 4), Some(2));
        assert_eq!(repeated(&Statements::of(mask), 3), None);
        let metric = "def update(self, p):\n    self.preds.append(p)\n\ndef compute(self):\n    p = torch.cat(self.preds)\n    return f(p).mean()\n\ndef other(self):\n    return g(self.preds)\n";
        let found = |line| joined_list(&Statements::of(metric), line);
        assert_eq!(found(6), Some(("self.preds".to_owned(), 2)));
        assert_eq!(found(9), None);
    }
}
