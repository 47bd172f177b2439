//! Which names and calls of a program give dicts, lists and tuples: what is done to a tensor is done to each of their values.

use std::collections::BTreeSet;

use super::statements::{Function, Statements};
use super::text::{DEEPEST, assigned, calls, is_word, last_call, parts, words};

/// Methods of tensors: a function of the program that is called so is another one.
const OF_TENSORS: [&str; 9] = ["detach", "cpu", "item", "clone", "mean", "sum", "to", "float", "half"];

/// Names in a function that are containers, by what the function does with them or by what it assigns to them.
pub(super) fn several(statements: &Statements, function: &Function<'_>, depth: usize) -> BTreeSet<String> {
    let of_star = function.parameters().filter(|it| function.has_star(it)).map(str::to_owned);
    let mut names: BTreeSet<String> = of_star.collect();
    for statement in &function.body {
        let text = statement.text.as_str();
        // What strings say is not in the text.
        for word in words(text) {
            let is_used_so = ["[\"\"]", ".items()", ".keys()", ".update("]
                .iter()
                .any(|use_of| text.contains(&format!("{word}{use_of}")));
            if is_used_so {
                names.insert(word.to_owned());
            }
        }
        let Some((target, "=", value)) = assigned(text) else { continue };
        let of_call = || calls(value).next().filter(|_| value.ends_with(')'));
        let is_several = is_container(value)
            || depth < DEEPEST
                && of_call().is_some_and(|(name, _)| {
                    let of = statements.function_named(name);
                    of.is_some_and(|of| {
                        let inner = several(statements, &of, depth + 1);
                        let mut returned = of.body.iter().filter_map(|it| it.text.strip_prefix("return "));
                        returned.any(|value| is_container(value) || inner.contains(value.trim()))
                    })
                });
        if is_several && target.chars().all(is_word) {
            names.insert(target.to_owned());
        }
    }
    names
}

/// Whether an expression makes a dict, a list or a tuple.
pub(super) fn is_container(value: &str) -> bool {
    let value = value.trim();
    let is_made =
        value.starts_with(['{', '[']) || ["dict(", "list(", "tuple("].iter().any(|it| value.starts_with(it));
    is_made || parts(value, ',').len() > 1
}

/// Whether an expression is a call of a function of this file that returns a dict, a list or a tuple.
pub(super) fn is_call_of_several(statements: &Statements, value: &str) -> bool {
    let Some((receiver, name)) = last_call(value) else { return false };
    let is_of_tensor = OF_TENSORS.contains(&name) && !matches!(receiver, "" | "self");
    let function = statements.function_named(name).filter(|_| !is_of_tensor);
    function.is_some_and(|function| {
        let inner = several(statements, &function, 0);
        let mut returned = function.body.iter().filter_map(|it| it.text.strip_prefix("return "));
        returned.any(|value| is_container(value) || inner.contains(value.trim()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_of_a_function_that_returns_a_dict_is_no_tensor() {
        let text = "def detach(self, output):\n    return {k: v.detach() for k, v in output.items()}\n\ndef one(x):\n    return x + 1\n\ndef two(x):\n    return x, x\n";
        let of = |value: &str| is_call_of_several(&Statements::of(text), value);
        assert!(of("self.detach(output)") && of("two(x)"));
        assert!(!of("output.detach()") && !of("one(x)") && !of("two(x)[0]") && !of("other(x)"));
    }
}
