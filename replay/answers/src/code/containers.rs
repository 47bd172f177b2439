//! What the program does with a container or an attribute that keeps a value: whether it empties it, looks things up in it, or moves them on.

use super::keeper::{Found, How};
use super::statements::{Function, Statement, Statements};
use super::text::{added, assigned, calls, is_chain, is_word, leaves_all};

/// What a statement puts into a container: how, the container, and the value.
pub(super) fn put(text: &str) -> Option<(How, &str, &str)> {
    if let Some((container, argument)) = added(text) {
        return Some((How::Added, container, argument));
    }
    let (target, "=", value) = assigned(text)? else { return None };
    target.ends_with(']').then_some((How::Entry, target, value))
}

/// The same of `value = kept[key] = Thing()`, too.
pub(super) fn put_of_chain(text: &str) -> Option<(How, &str, &str)> {
    put(text).or_else(|| {
        let (target, "=", value) = assigned(text)? else { return None };
        put(value).filter(|(how, ..)| *how == How::Entry && target.chars().all(is_word))
    })
}

/// The statement that puts an attribute, or an element of it, into a container: what replaces the attribute does not replace that.
pub(super) fn parked(statements: &Statements, text: &str) -> Option<Found> {
    let (target, "=", _) = assigned(text)? else { return None };
    let is_one = target.starts_with("self.") && target.chars().all(|c| is_word(c) || c == '.');
    let element = format!("{target}[");
    let is_it =
        |value: &str| value == target || value.starts_with(&element) && is_chain(value) && !leaves_all(value);
    statements.all().filter(|_| is_one).find_map(|it| {
        let (how, container, value) = put(&it.text)?;
        let is_other = !container.starts_with(target);
        // What a function returns for it may be a tuple of parts.
        (is_other && is_it(value)).then(|| Found { is_several: true, ..Found::at(it, how, value) })
    })
}

/// Whether the program reads what an entry was put into by its key: it is a cache, and not a result.
pub(super) fn is_looked_up(statements: &Statements, text: &str) -> bool {
    let Some((_, target, _)) = put_of_chain(text) else { return false };
    let container = target.split('[').next().unwrap_or_default();
    let is_of_module =
        |it: &Statement| it.indent == 0 && assigned(&it.text).is_some_and(|(target, ..)| target == container);
    // A name of the function's own is a result.
    (container.starts_with("self.") || statements.all().any(is_of_module))
        && statements.all().any(|it| {
            let value = assigned(&it.text).map_or(it.text.as_str(), |(.., value)| value);
            // `old = kept[key] = new` puts it there.
            let value = assigned(value).map_or(value, |(.., value)| value);
            [".get(", "["].iter().any(|by| value.contains(&format!("{container}{by}")))
        })
}

/// Whether the program empties a container, or takes its elements out again.
pub(super) fn is_emptied(statements: &Statements, keeper: &Found) -> bool {
    let put = added(&keeper.text).map(|(container, _)| container);
    let container = put.or_else(|| assigned(&keeper.text).map(|(target, ..)| target)).unwrap_or_default();
    let container = container.split('[').next().unwrap_or_default();
    let empties = |it: &Statement| {
        let is_taken = [".clear(", ".pop(", ".popleft("].iter().any(|method| {
            let call = format!("{container}{method}");
            it.text.match_indices(&call).any(|(at, _)| !it.text[..at].ends_with(is_word))
        });
        is_taken && {
            // A method that nothing calls empties nothing.
            let method = statements.function_at(it.lines.0).and_then(|(_, function)| function.head);
            let name = method.and_then(|head| calls(&head.text).next()).map(|(name, _)| name);
            let is_other = |other: &Statement| !std::ptr::eq(other, it) && !other.text.starts_with("def ");
            let is_called =
                |name: &str| statements.all().any(|other| is_other(other) && calls_it(&other.text, name));
            name.is_none_or(is_called)
        }
    };
    !container.is_empty() && statements.all().any(empties)
}

fn calls_it(text: &str, name: &str) -> bool {
    calls(text).any(|(called, _)| called == name)
}

/// The statement of a function that takes out again what a hook has stored.
pub(super) fn taken_out<'s>(function: &Function<'s>, hook: &Found) -> Option<&'s Statement> {
    let container = assigned(&hook.text).map(|(target, ..)| target.split('[').next().unwrap_or_default())?;
    let take = format!("{container}.pop(");
    function.body.iter().copied().find(|it| it.text.contains(&take) && assigned(&it.text).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_that_is_moved_on_is_kept_where_it_goes() {
        let text = "def turn(self, x):\n    self.rows = cut(x)\ndef park(self, i):\n    self.away[i] = self.rows[i]\n    self.n[i] = len(self.rows)\n";
        let found = |text: &str| parked(&Statements::of(text), "self.rows = cut(x)").map(|it| it.line);
        assert_eq!(found(text), Some(4));
        assert_eq!(found(&text.replace("= self.rows[i]", "= self.rows[i].sum().item()")), None);
        assert_eq!(found(&text.replace("self.away[i] = self.rows[i]", "self.rows[i] = self.rows[0]")), None);
    }

    #[test]
    fn what_is_looked_up_by_key_is_a_cache() {
        let put = "self.known[key] = value";
        let of = |text: &str| is_looked_up(&Statements::of(text), put);
        assert!(of("old = self.known.get(key)\nself.known[key] = value\n"));
        assert!(of("if key in self.known:\n    return self.known[key]\nself.known[key] = value\n"));
        assert!(!of("self.known[key] = value\nprint(len(self.known))\n"));
        // So is one of the module's own.
        let module = "_known = {}\ndef get(key):\n    entry = _known.get(key)\n    if entry is None:\n        entry = _known[key] = Thing()\n    return entry\n";
        assert!(is_looked_up(&Statements::of(module), "entry = _known[key] = Thing()"));
        assert!(!is_looked_up(&Statements::of(module), "entry = other[key] = Thing()"));
    }
}
