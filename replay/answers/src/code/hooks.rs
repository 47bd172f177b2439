//! What functions keep that the program registers as hooks of modules and tensors.

use super::follow::{Start, Walk};
use super::keeper::{Found, How};
use super::statements::Statements;
use super::text::{DEEPEST, HOOKS, assigned, parts};

/// What functions that the file registers as hooks keep of their arguments, each statement once.
pub(super) fn of_hooks(statements: &Statements) -> Vec<Found> {
    let mut all: Vec<Found> = vec![];
    for name in statements.all().flat_map(|it| registered(statements, &it.text)) {
        let Some(function) = statements.function_named(&name) else { continue };
        // A function that makes the hook has it inside.
        let inner = function.body.iter().find_map(|it| {
            let name = it.text.strip_prefix("def ")?.split('(').next()?;
            statements.function_named(name)
        });
        for function in [Some(function), inner].into_iter().flatten() {
            // The module comes first, if there is more than one.
            let names: Vec<&str> = function.parameters().filter(|it| *it != "self").collect();
            let values = names.iter().skip(usize::from(names.len() > 1));
            let names = values.map(|it| (*it).to_owned()).collect();
            let walk = Walk::of(statements, Start::Names(names), &function, DEEPEST);
            let is_cycle = function.body.iter().any(|it| it.text.contains(".register_hook(self."));
            let more = walk.more.iter().filter_map(|line| statements.function_at(*line)).map(|it| it.0);
            let more = more.map(|it| Found::at(it, How::Entry, "")).collect::<Vec<_>>();
            let found = walk.kept.or(walk.local).into_iter().chain(more);
            // A list keeps all of them, with or without a graph.
            let of_self = |it: &Found| it.how == How::Entry && it.text.starts_with("self.");
            for found in found.filter(|it| all.iter().all(|known| known.line != it.line)).collect::<Vec<_>>()
            {
                all.push(Found { is_cycle: is_cycle && of_self(&found), ..found });
            }
        }
    }
    all
}

/// Names of the functions that a statement registers as hooks: by themselves, or from a dict that an assignment of the file makes.
fn registered(statements: &Statements, text: &str) -> Vec<String> {
    let at = HOOKS.iter().find_map(|hook| Some(text.find(hook)? + hook.len()));
    let Some(argument) = at.and_then(|at| parts(&text[at..], ',').first().copied()) else { return vec![] };
    let argument = argument.trim_end_matches(')').trim();
    let last = |value: &str| {
        let name = value.rsplit('.').next().unwrap_or_default();
        name.split('(').next().unwrap_or_default().trim_end_matches(['}', ']', ')']).trim().to_owned()
    };
    let Some((container, _)) = argument.split_once('[') else {
        return Some(last(argument)).filter(|name| !name.is_empty()).into_iter().collect();
    };
    let made = statements.all().filter_map(|it| assigned(&it.text)).find(|(target, ..)| *target == container);
    let entries = made.map_or(vec![], |(.., value)| parts(value.trim_matches(['{', '}']), ','));
    entries.iter().filter_map(|entry| Some(last(entry.split_once(':')?.1))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(text: &str) -> Vec<(u32, bool)> {
        of_hooks(&Statements::of(text)).into_iter().map(|it| (it.line, it.is_cycle)).collect()
    }

    #[test]
    fn all_hooks_that_keep_what_they_are_given_are_found() {
        let text = "class Probe:\n    def __init__(self, layer):\n        layer.register_forward_hook(self.on_output)\n    def on_output(self, module, args, out):\n        self.outs.append(out)\n        out.register_hook(self.on_grad)\n    def on_grad(self, grad):\n        self.grads.append(grad)\n";
        assert_eq!(kept(text), [(5, false), (8, false)]);
        assert_eq!(kept(&text.replace("append(grad)", "append(grad.item())")), [(5, false)]);
    }

    #[test]
    fn a_hook_from_a_dict_is_found_and_a_tensor_whose_hook_refers_back_is_a_cycle() {
        let text = "class Probe:\n    def __init__(self):\n        self.calls = {\"there\": self.note, \"back\": self.mark}\n    def add(self, layer):\n        layer.register_forward_hook(self.calls[\"there\"])\n    def note(self, module, args, out):\n        self.last[\"in\"] = args[0]\n        self.last[\"out\"] = out\n        out.register_hook(self.calls[\"back\"])\n    def mark(self, grad):\n        return grad\n";
        assert_eq!(kept(text), [(7, true), (8, true)]);
        let without = text.replace("        out.register_hook(self.calls[\"back\"])\n", "");
        assert_eq!(kept(&without), [(7, false), (8, false)]);
    }
}
