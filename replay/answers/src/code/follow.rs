//! Follows a value through the program's statements to what keeps it: from the line that requested the memory, by the names that it is
//! assigned to, into functions that it is passed to, and by what functions return, out to their callers.
//!
//! Names are followed, not objects, and functions only within their file.

use std::collections::BTreeSet;
use std::rc::Rc;

use super::Line;
use super::containers::{is_emptied, is_looked_up, parked, put, put_of_chain, taken_out};
use super::handlers;
use super::hooks::of_hooks;
use super::keeper::{Found, How, Keeper};
use super::later;
use super::records::{is_call_of_several, is_container, several};
use super::statements::{Function, Statement, Statements};
use super::text::{
    DEEPEST, EMPTY, added, arguments_have, assigned, calls, carries, carries_any, is_joined, is_of_views,
    is_word, leaves_all, parts, words,
};

/// Decorators that keep what a function returns (functools, cachetools, joblib).
const MEMOIZES: [&str; 5] = ["lru_cache", "cache", "cached", "memoize", "cachedmethod"];
/// What runs a model's layers.
const MODELS: [&str; 2] = ["def forward(", "def __call__("];

/// What keeps the memory that a stack requested: its lines of the program's own, innermost first.
pub(super) fn keeper(lines: &[Line], file: impl Fn(&str) -> Option<Rc<Statements>>) -> Option<Keeper> {
    let found = nearest(lines, &file)?;
    let Some(statements) = file(&found.file) else { return Some(found) };
    // What keeps the object keeps what the object has.
    if let Some(hook) = later::hook_of_object(&statements, &found, lines) {
        return Some(hook);
    }
    let is_used_as_tensor = later::is_used_as_tensor(&statements, &found);
    let backward = later::backward_of_caller(&found, lines, &file);
    Some(Keeper { is_used_as_tensor, backward, ..found })
}

/// The statement that keeps it, as far as the value itself is followed.
fn nearest(lines: &[Line], file: &impl Fn(&str) -> Option<Rc<Statements>>) -> Option<Keeper> {
    let (mut local, mut attribute, mut hook, mut context) = (None, None, None, None);
    // Whether what a function returned is a part of the tensor, or has several.
    let (mut is_view, mut is_record) = (false, false);
    // The method in which the value has become an attribute of its object.
    let mut method: Option<&str> = None;
    // Without a graph, what goes on to the next turn does not keep what was before.
    let has_graph =
        !lines.iter().any(|(_, name, line)| file(name).is_some_and(|it| super::is_without_graph(&it, *line)));
    for (at, name, line) in lines {
        let statements = file(name)?;
        let (own, function) = statements.function_at(*line)?;
        if let Some(method) = method.take() {
            if let Some(found) = made_and_kept(own, method) {
                let is_cache = found.how == How::Entry && is_looked_up(&statements, &found.text);
                return Some(Keeper { is_cache, ..found.named(name, false) });
            }
            match holder_of(&own.text, method) {
                Some("self") => {}
                Some(object) => {
                    let object = kept_object(&function, object).map(|it| it.named(name, false));
                    return context.or(local).or(hook).or(object).or(attribute);
                }
                None => break,
            }
        }
        let mut stored = of_hooks(&statements).into_iter();
        let first = stored.next();
        let taken = first.as_ref().and_then(|hook| taken_out(&function, hook));
        let walk = Walk::of(&statements, Start::Statement(taken.unwrap_or(own)), &function, 0);
        let is_part = is_view;
        is_view |= walk.returns_view;
        let was_record = std::mem::replace(&mut is_record, walk.returns_record());
        let of_call = assigned(&own.text).map_or("", |(target, ..)| target);
        let has_several = |found: &Found| {
            // `kept.append(model(x))`, and not one entry of that.
            let is_call = found.line == own.lines.0 && !found.value.ends_with(']');
            let is_record = was_record && (found.value == of_call || is_call);
            found.is_several || is_record || is_call_of_several(&statements, &found.value)
        };
        if let Some(found) = walk.kept {
            // What is emptied each turn keeps less than what goes on to the next.
            let carried = walk
                .attribute
                .filter(|it| has_graph && it.how == How::Carried && is_emptied(&statements, &found));
            let found = carried.unwrap_or(found);
            let (is_view, is_several) = (found.is_view || is_part, has_several(&found));
            let is_cache = found.how == How::Entry && is_looked_up(&statements, &found.text);
            let found = found.named(name, false);
            return Some(Keeper { more: walk.more, is_view, is_several, is_cache, ..found });
        }
        let decorated = function.decorators.iter().find(|it| is_memoizing(&it.text));
        if let Some(decorator) = decorated.filter(|_| walk.returns) {
            let is_of_method = function.parameters().next() == Some("self");
            let found = Found::at(decorator, How::Memoized, "").named(name, false);
            return Some(Keeper { is_of_method, ..found });
        }
        let of_local = |found: Found| {
            let (is_view, is_several) = (found.is_view || is_part, has_several(&found));
            Keeper { is_view, is_several, ..found.named(name, false) }
        };
        local = local.or_else(|| walk.local.map(of_local));
        context =
            context.or_else(|| of_context(&statements, &function).map(|found| found.named(name, false)));
        if let Some(found) = walk.attribute.as_ref().filter(|_| !has_graph)
            && let Some(parked) = parked(&statements, &found.text)
        {
            let is_view = found.is_view || is_part;
            return Some(Keeper { is_view, ..parked.named(name, false) });
        }
        attribute = attribute.or_else(|| walk.attribute.map(|found| found.named(name, false)));
        hook = hook.or_else(|| {
            let found = first.filter(|_| taken.is_none())?;
            Some(Keeper { more: stored.map(|it| it.line).collect(), ..found.named(name, true) })
        });
        let last = at.rsplit('.').next().unwrap_or_default();
        let is_of_self = attribute.as_ref().is_some_and(|it: &Keeper| it.text.starts_with("self."));
        match walk.returns {
            true => {}
            false if is_of_self && local.is_none() && hook.is_none() => method = Some(last),
            false => break,
        }
    }
    let exception = || {
        lines.iter().find_map(|(_, name, line)| {
            let statements = file(name)?;
            let (statement, exception) = handlers::stored(&statements, *line)?;
            Some(Found::at(statement, How::Exception, exception).named(name, false))
        })
    };
    context.or(local).or(hook).or_else(exception).or(attribute)
}

/// Plain names that a statement binds.
fn bound(statement: &Statement) -> Vec<&str> {
    let of_loop = statement.text.strip_prefix("for ").and_then(|rest| rest.split_once(" in ")).map(|it| it.0);
    let target = of_loop.or_else(|| assigned(&statement.text).map(|(target, ..)| target)).unwrap_or_default();
    parts(target, ',').into_iter().filter(|it| it.chars().all(is_word)).collect()
}

/// The dict of a statement `record["key"] = value`, if it is a name of the function's own and the key is always the same.
fn fixed_entry<'t>(statement: &Statement, target: &'t str) -> Option<&'t str> {
    let record = target.strip_suffix("[\"\"]").filter(|it| !it.is_empty() && it.chars().all(is_word))?;
    let key = statement.shown.split_once('[').map_or("", |(_, rest)| rest);
    key.starts_with(['"', '\'']).then_some(record)
}

/// A statement that makes an object and puts it into a container: `self.known[key] = Thing(...)`.
fn made_and_kept(own: &Statement, method: &str) -> Option<Found> {
    let (how, _, value) = put_of_chain(&own.text).filter(|_| method == "__init__")?;
    let name = value.split('(').next().unwrap_or_default().rsplit('.').next().unwrap_or_default();
    let is_made = value.ends_with(')') && name.starts_with(char::is_uppercase);
    is_made.then(|| Found { is_several: true, ..Found::at(own, how, value) })
}

/// The object in `object.method(...)`, or in `object = Class(...)` for a constructor.
fn holder_of<'t>(text: &'t str, method: &str) -> Option<&'t str> {
    if method == "__init__" {
        return assigned(text).map(|(target, ..)| target).filter(|target| target.chars().all(is_word));
    }
    let call = format!(".{method}(");
    let before = &text[..text.find(&call)?];
    before.rsplit(|c| !is_word(c)).next().filter(|name| !name.is_empty())
}

/// The statement that puts an object itself into a container.
fn kept_object(function: &Function<'_>, object: &str) -> Option<Found> {
    function.body.iter().find_map(|it| {
        let (how, _, values) = put(&it.text)?;
        let is_it = parts(values, ',').iter().any(|argument| argument.trim() == object);
        is_it.then(|| Found { is_several: true, ..Found::at(it, how, object) })
    })
}

/// What a function of autograd that these lines use keeps of its own result.
fn of_context(statements: &Statements, function: &Function<'_>) -> Option<Found> {
    function.body.iter().find_map(|it| {
        let at = it.text.find(".apply(")?;
        let class = it.text[..at].rsplit(|c| !is_word(c)).next()?;
        let body = statements.class_named(class)?;
        let is_of_autograd = body.first()?.text.contains("Function");
        let forward = body.iter().find(|it| it.text.starts_with("def forward(ctx"))?;
        let (_, forward) = statements.function_at(forward.lines.0 + 1)?;
        let returned: Vec<&str> =
            forward.body.iter().filter_map(|it| it.text.strip_prefix("return ")).flat_map(words).collect();
        forward.body.iter().filter(|_| is_of_autograd).find_map(|it| {
            let (target, "=", value) = assigned(&it.text)? else { return None };
            let is_kept = target.starts_with("ctx.") && returned.contains(&value);
            is_kept.then(|| Found::at(it, How::Context, value))
        })
    })
}

/// The name of a method that is memoized, and its line: the cache refers to `self`.
pub(super) fn method_memoized(statements: &Statements) -> Option<(String, u32)> {
    let decorators = statements.all().filter(|it| it.text.starts_with('@') && is_memoizing(&it.text));
    decorators.filter(|it| !it.text.contains("cachedmethod")).find_map(|decorator| {
        let head = statements.all().find(|it| it.lines.0 > decorator.lines.1 && !it.text.starts_with('@'))?;
        let (name, parameters) = head.text.strip_prefix("def ")?.split_once('(')?;
        parameters.starts_with("self").then(|| (name.to_owned(), decorator.lines.0))
    })
}

fn is_memoizing(decorator: &str) -> bool {
    let name = decorator.trim_start_matches('@').split('(').next().unwrap_or_default();
    MEMOIZES.contains(&name.rsplit('.').next().unwrap_or_default().trim())
}

/// Whether a value of a function is a part of a tensor: by the expression itself, the name's assignment, or the function that returns it.
fn is_view_of(statements: &Statements, function: &Function<'_>, value: &str) -> bool {
    let returns_view = |value: &str| {
        let called = calls(value).next().and_then(|(name, _)| statements.function_named(name));
        let is_part = |it: &&Statement| it.text.strip_prefix("return ").is_some_and(is_of_views);
        called.is_some_and(|called| called.body.iter().any(is_part))
    };
    let of_expression = |value: &str| is_of_views(value) || returns_view(value);
    let assigned_to = |it: &&Statement| {
        assigned(&it.text).is_some_and(|(target, _, of)| target == value && of_expression(of))
    };
    of_expression(value) || function.body.iter().any(assigned_to)
}

/// What is followed.
pub(super) enum Start<'a> {
    /// What a statement computes.
    Statement(&'a Statement),
    /// Names that refer to it.
    Names(BTreeSet<String>),
}

/// Where a value goes within one function.
pub(super) struct Walk<'a> {
    own: Option<&'a Statement>,
    names: BTreeSet<String>,
    /// Names of containers that the function makes.
    made: BTreeSet<&'a str>,
    /// Names of dicts, tuples and lists: no tensors, but several.
    several: BTreeSet<String>,
    /// Names of the function's parameters: their objects are the caller's.
    parameters: BTreeSet<&'a str>,
    /// Lines of statements in a loop that may carry a state from turn to turn. A model's own loop goes through its layers.
    loops: BTreeSet<u32>,
    body: Vec<&'a Statement>,
    /// In what outlives the function.
    pub(super) kept: Option<Found>,
    /// Lines of other statements that keep it so.
    pub(super) more: Vec<u32>,
    /// In a container that the function makes.
    pub(super) local: Option<Found>,
    attribute: Option<Found>,
    returns: bool,
    /// What it returns is a part of a tensor.
    returns_view: bool,
}

impl<'a> Walk<'a> {
    pub(super) fn of(
        statements: &Statements,
        start: Start<'a>,
        function: &Function<'a>,
        depth: usize,
    ) -> Walk<'a> {
        // `a, b = [], []`
        let made =
            function.body.iter().filter_map(|it| assigned(&it.text)).flat_map(|(targets, _, values)| {
                let pairs = parts(targets, ',').into_iter().zip(parts(values, ','));
                let is_empty = |value: &str| EMPTY.iter().any(|empty| value.trim().starts_with(empty));
                pairs
                    .filter(|(_, value)| is_empty(value))
                    .map(|(target, _)| target.trim())
                    .collect::<Vec<_>>()
            });
        let is_model = function.head.is_some_and(|head| MODELS.iter().any(|name| head.text.contains(name)));
        let in_loop = |it: &&&Statement| !is_model && statements.around(it.lines.0).any(Statement::is_loop);
        let loops = function.body.iter().filter(in_loop).map(|it| it.lines.0).collect();
        let (own, names) = match start {
            Start::Statement(own) => (Some(own), BTreeSet::new()),
            Start::Names(names) => (None, names),
        };
        let mut walk = Walk {
            own,
            names,
            loops,
            several: several(statements, function, 0),
            parameters: function.parameters().collect(),
            made: made.filter(|target| target.chars().all(is_word)).collect(),
            body: function.body.clone(),
            kept: None,
            more: vec![],
            local: None,
            attribute: None,
            returns: false,
            returns_view: false,
        };
        if let Some(own) = own {
            walk.visit(own);
        }
        // What is assigned further up is used in the next turn of a loop.
        loop {
            let n = walk.names.len();
            for statement in function.body.iter().filter(|it| own.is_none_or(|own| !std::ptr::eq(**it, own)))
            {
                walk.visit(statement);
            }
            if walk.names.len() == n {
                break;
            }
        }
        if walk.kept.is_none() && depth < DEEPEST {
            let passed =
                function.body.iter().find_map(|statement| walk.passed_on(statements, statement, depth));
            if let Some((found, more)) = passed {
                (walk.kept, walk.more) = (Some(found), more);
            }
        }
        // A function that refers to itself keeps what it uses until the collector runs, even if nothing else does.
        if let Some(found) = walk.closure(statements) {
            walk.kept = Some(found);
        }
        let is_view = |value: &str| is_view_of(statements, function, value);
        for found in [&mut walk.kept, &mut walk.local, &mut walk.attribute].into_iter().flatten() {
            found.is_view |= is_view(&found.value);
        }
        let mut returned = function.body.iter().filter_map(|it| it.text.strip_prefix("return "));
        walk.returns_view = walk.returns && returned.any(is_view);
        walk
    }

    /// Whether it returns a dict, tuple or list.
    fn returns_record(&self) -> bool {
        let mut returned = self.body.iter().filter_map(|it| it.text.strip_prefix("return "));
        self.returns && returned.any(|value| is_container(value) || self.several.contains(value.trim()))
    }

    /// An inner function that calls itself, and uses a name of the value that is not its own, or collects what it is given.
    fn closure(&self, statements: &Statements) -> Option<Found> {
        self.body.iter().find_map(|head| {
            let name = head.text.strip_prefix("def ")?.split('(').next()?;
            let (_, inner) = statements.function_at(head.lines.1 + 1)?;
            let is_it = inner.head.is_some_and(|it| it.lines == head.lines);
            let calls_it = |it: &Statement| calls(&it.text).any(|(called, _)| called == name);
            let own: BTreeSet<&str> =
                inner.parameters().chain(inner.body.iter().flat_map(|it| bound(it))).collect();
            let is_used = |name: &String| {
                !own.contains(name.as_str()) && inner.body.iter().any(|it| carries_any(&it.text, name))
            };
            let is_given = |it: &&Statement| calls_it(it) && self.carries(it, &it.text);
            let collects = |it: &&Statement| {
                added(&it.text).is_some_and(|(into, _)| self.made.contains(into) && !own.contains(into))
            };
            let is_collected =
                || self.body.iter().copied().any(|it| is_given(&it)) && inner.body.iter().any(collects);
            let has_value = || self.names.iter().any(is_used) || is_collected();
            (is_it && inner.body.iter().any(|it| calls_it(it)) && has_value())
                .then(|| Found::at(head, How::Closure, name))
        })
    }

    /// What a function of the same file keeps of an argument, and other lines of it that do.
    fn passed_on(
        &self,
        statements: &Statements,
        statement: &Statement,
        depth: usize,
    ) -> Option<(Found, Vec<u32>)> {
        if !self.carries(statement, &statement.text) || statement.text.starts_with("def ") {
            return None;
        }
        calls(&statement.text).find_map(|(name, arguments)| {
            let arguments = parts(arguments, ',');
            // What the statement itself computes may be an argument, too: `update(model(x))`.
            let is_made = self.own.is_some_and(|own| std::ptr::eq(own, statement));
            let has = |argument: &str| {
                let is_call = is_made && argument.contains('(') && !leaves_all(argument);
                is_call || self.names.iter().any(|name| carries(argument, name))
            };
            if !arguments.iter().any(|it| has(it)) {
                return None;
            }
            let function = statements.function_named(name)?;
            let positional: Vec<&str> =
                function.parameters().filter(|it| *it != "self" && *it != "cls").collect();
            // `*items` takes what is left.
            let rest = positional.last().filter(|name| function.has_star(name));
            let mut names = BTreeSet::new();
            for (at, argument) in arguments.iter().enumerate() {
                let Some(parameter) = positional.get(at).or(rest).copied() else { break };
                // `f(x=value)`
                let (parameter, argument) = match assigned(argument) {
                    Some((keyword, "=", value)) => (keyword, value),
                    _ => (parameter, *argument),
                };
                if has(argument) {
                    names.insert(parameter.to_owned());
                }
            }
            if names.is_empty() {
                return None;
            }
            let walk = Walk::of(statements, Start::Names(names), &function, depth + 1);
            let found = walk.kept.or(walk.attribute.filter(|it| it.how == How::Carried))?;
            Some((found, walk.more))
        })
    }

    /// Of the statement that asked for the memory, all that it computes is the value.
    fn carries(&self, statement: &Statement, part: &str) -> bool {
        if self.own.is_some_and(|own| std::ptr::eq(own, statement)) {
            return !leaves_all(part);
        }
        self.names.iter().any(|name| carries(part, name))
    }

    fn found(&self, statement: &Statement, how: How, value: &str) -> Found {
        let is_number = self.is_number(value.trim());
        let is_several = self.several.contains(value.trim());
        Found { is_several, is_number, ..Found::at(statement, how, value) }
    }

    /// Whether a name is of one number, as far as the function shows it: a backward pass begins with one, and `reduction="none"` leaves many.
    fn is_number(&self, name: &str) -> Option<bool> {
        let made =
            self.body.iter().filter(|it| assigned(&it.text).is_some_and(|(target, ..)| target == name));
        if made
            .into_iter()
            .any(|it| it.shown.contains("reduction=\"none\"") || it.shown.contains("reduction='none'"))
        {
            return Some(false);
        }
        let begins = [format!("{name}.backward("), format!("{name}.item(")];
        let is_one = |it: &&&Statement| begins.iter().any(|text| it.text.starts_with(text.as_str()));
        let is_plain = !name.is_empty() && name.chars().all(is_word);
        self.body.iter().find(|it| is_plain && is_one(it)).map(|_| true)
    }

    fn put(&mut self, container: &str, found: Found) {
        let root = container.split(['.', '[']).next().unwrap_or_default().trim();
        // A part of the value itself is replaced: `out["loss"] = out["loss"].detach()`.
        if found.how == How::Entry && self.names.contains(root) && !self.made.contains(root) {
            return;
        }
        if self.made.contains(root) {
            self.names.insert(root.to_owned());
            self.local.get_or_insert(found);
        } else {
            self.keep(found);
        }
    }

    fn keep(&mut self, found: Found) {
        match &self.kept {
            None => self.kept = Some(found),
            Some(first) if !first.how.accumulates() && found.how.accumulates() => self.kept = Some(found),
            Some(first) if first.line != found.line && !self.more.contains(&found.line) => {
                self.more.push(found.line)
            }
            Some(_) => {}
        }
    }

    fn visit(&mut self, statement: &Statement) {
        let text = statement.text.as_str();
        for keyword in ["return", "yield"] {
            if let Some(value) = text.strip_prefix(keyword).filter(|rest| !rest.starts_with(is_word)) {
                self.returns |= self.carries(statement, value);
                return;
            }
        }
        if let Some((container, argument)) = added(text) {
            let of_call = parts(argument, ',');
            let values: Vec<&&str> = of_call.iter().filter(|it| self.carries(statement, it)).collect();
            if let Some(first) = values.first() {
                let value = if values.len() == 1 { **first } else { "" };
                self.put(container, self.found(statement, How::Added, value));
            }
            return;
        }
        if let Some((targets, value)) = text.strip_prefix("for ").and_then(|rest| rest.split_once(" in ")) {
            if self.carries(statement, value) {
                self.names.extend(words(targets).map(str::to_owned));
            }
            return;
        }
        if text.starts_with("def ") || text.starts_with("class ") {
            return;
        }
        let Some((target, operator, value)) = assigned(text) else { return };
        if !self.carries(statement, value) {
            return;
        }
        self.store(statement, target, operator, value);
    }

    fn store(&mut self, statement: &Statement, target: &str, operator: &str, value: &str) {
        let is_plain = target.chars().all(is_word);
        let terms = parts(value, '+');
        // Of `total = total + loss`, the loss.
        let is_new = |it: &&&str| **it != target && self.carries(statement, it);
        let added: Vec<&&str> = terms.iter().filter(is_new).collect();
        let term = if added.len() == 1 { *added[0] } else { "" };
        let refers = carries_any(value, target)
            || value.contains(&format!("{}.get(", target.split('[').next().unwrap_or_default()));
        // A name of the function's own adds up only in a loop.
        let adds_up = !is_plain || self.loops.contains(&statement.lines.0) || self.is_of_outer(target);
        let is_sum = terms.len() > 1 && refers && adds_up;
        if operator == "+=" && !adds_up {
            self.names.insert(target.to_owned());
        } else if operator == "+=" {
            let how = if value.starts_with('[') { How::Added } else { How::Total };
            self.keep(self.found(statement, how, value));
        } else if is_joined(value) && refers && adds_up {
            self.keep(self.found(statement, How::Joined, value));
        } else if is_sum && !terms.iter().any(|it| it.contains('*')) {
            self.keep(self.found(statement, How::Total, term));
        } else if is_sum {
            // A running mean: each value has a graph that refers to the one before. The term without the mean itself is the new value.
            let new = added.iter().find(|it| !carries_any(it, target)).map_or("", |it| self.named_in(it));
            self.keep(self.found(statement, How::Carried, new));
        } else if let Some(record) = fixed_entry(statement, target) {
            // One value at a time: what keeps the record keeps the values.
            self.names.insert(record.to_owned());
            self.several.insert(record.to_owned());
            self.returns |= self.parameters.contains(record);
        } else if target.ends_with(']') && !target.starts_with('[') {
            self.put(target, self.found(statement, How::Entry, value));
        } else if (value.starts_with('[') || value.starts_with('{')) && words(value).any(|it| it == "for") {
            self.local.get_or_insert_with(|| Found::at(statement, How::Listed, ""));
            self.names.extend(words(target).map(str::to_owned));
        } else if !is_plain && target.contains('.') {
            // What the function reads of it, the next call gets.
            let is_read = parts(target, ',').iter().any(|it| self.reads(it));
            let how = if refers || is_read { How::Carried } else { How::Attribute };
            self.attribute.get_or_insert_with(|| Found::at(statement, how, value));
            self.names.extend(
                parts(target, ',').into_iter().filter(|it| it.chars().all(is_word)).map(str::to_owned),
            );
        } else {
            let targets: Vec<&str> = words(target).filter(|it| *it != "self" && *it != "_").collect();
            // `out, state = model(x, state)` in a loop
            let is_carried = self.loops.contains(&statement.lines.0)
                && !self.is_layer(value)
                && targets.iter().any(|it| arguments_have(value, it));
            if is_carried && self.attribute.is_none() {
                self.attribute = Some(Found::at(statement, How::Carried, ""));
            }
            self.names.extend(targets.into_iter().map(str::to_owned));
        }
    }

    /// Whether a loop calls what it goes through: `for layer in layers: x = layer(x)` carries nothing from turn to turn of the program's.
    fn is_layer(&self, value: &str) -> bool {
        let called = value.split('(').next().unwrap_or_default();
        let goes_through = |it: &&&Statement| {
            let targets = it.text.strip_prefix("for ").and_then(|rest| rest.split_once(" in "));
            targets.is_some_and(|(targets, _)| words(targets).any(|it| it == called))
        };
        self.body.iter().find(goes_through).is_some()
    }

    /// Whether a name is one of an outer function or of the module, by the function's own declaration.
    fn is_of_outer(&self, name: &str) -> bool {
        let mut declared = self
            .body
            .iter()
            .filter_map(|it| it.text.strip_prefix("global ").or_else(|| it.text.strip_prefix("nonlocal ")));
        declared.any(|names| names.split(',').any(|it| it.trim() == name))
    }

    /// Whether the function uses what an attribute has.
    fn reads(&self, attribute: &str) -> bool {
        attribute.contains('.')
            && self
                .body
                .iter()
                .any(|it| carries_any(assigned(&it.text).map_or(&*it.text, |(.., value)| value), attribute))
    }

    /// The first name of the value in an expression.
    fn named_in<'t>(&self, expression: &'t str) -> &'t str {
        words(expression).find(|word| self.names.contains(*word)).unwrap_or("")
    }
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
            "out = f(x)  # here\nself.n += int((out[:, 1:] != out[:, :-1]).sum())\n",
            "out = f(x)  # here\nself.all.append(torch.stack([it for it in out]).mean().item())\n",
            "def forward(self, h):\n    for layer in self.layers:\n        h = layer(h)  # here\n",
        ] {
            assert_eq!(kept(text), None, "{text}");
        }
    }

    #[test]
    fn totals_caches_and_tensors_that_are_joined_are_told_apart() {
        for (text, how, line) in [
            ("l = f(x)  # here\nself.total += l\n", How::Total, 2),
            ("for x in d:\n    l = f(x)  # here\n    total = total + l\n", How::Total, 3),
            ("for x in d:\n    l = f(x)  # here\n    kept = torch.cat([kept, l])\n", How::Joined, 3),
            ("ls = [f(x) for x in xs]  # here\n", How::Listed, 1),
            ("@lru_cache(maxsize=None)\ndef table(n):\n    return f(n)  # here\n", How::Memoized, 1),
            ("def g(self, x):\n    self.last = f(x)  # here\n", How::Attribute, 2),
            ("for k in s:\n    l = f(x)  # here\n    sums[k] = sums.get(k, 0) + l\n", How::Total, 3),
            (
                "for x in xs:\n    out, state = f(x, state)  # here\n    out.sum().backward()\n",
                How::Carried,
                2,
            ),
            ("l = f(x)  # here\nself.mean = 0.9 * self.mean + 0.1 * l\n", How::Carried, 2),
            ("r = f(x)  # here\nall[k] += [r]\n", How::Added, 2),
            (
                "def forward(self, x):\n    out, s = self.lstm(x, (self.h, self.c))  # here\n    self.h, self.c = s\n    return out\n",
                How::Carried,
                3,
            ),
        ] {
            assert_eq!(kept(text).map(|it| (it.0, it.1)), Some((how, line)), "{text}");
        }
    }

    #[test]
    fn a_value_is_followed_into_methods_hooks_and_past_lists_that_a_call_makes() {
        let method = "class M:\n    def update(self, preds, target):\n        self.preds.append(preds)\n\ndef fit():\n    out = model(x)  # here\n    metric.update(out, y)\n";
        assert_eq!(kept(method), Some((How::Added, 3, "preds".into())));
        let hook = "def note(module, args, out):\n    seen.append(out)\nmodel.register_forward_hook(note)\ndef step(x):\n    y = model(x)  # here\n    y.sum().backward()\n";
        assert_eq!(kept(hook), Some((How::Added, 2, "out".into())));
        let outer = "def forward(x):\n    outs = []\n    for t in x:\n        h = cell(t)  # here\n        outs.append(h)\n    return torch.stack(outs)\n\ndef main():\n    y = forward(x)  # here!\n    self.seen.append(y)\n";
        assert_eq!(kept(outer).map(|it| it.1), Some(10));
        let inner = outer.replace("    self.seen.append(y)\n", "");
        assert_eq!(kept(&inner).map(|it| it.1), Some(5));
    }

    #[test]
    fn parts_of_the_value_and_objects_that_keep_it_are_told_apart() {
        // Replaces a part of what is kept two lines later.
        let dict = "def run(self):\n    outs = []\n    for x in d:\n        out = f(x)  # here\n        out[\"loss\"] = out[\"loss\"].detach()\n        outs.append(out)\n";
        assert_eq!(kept(dict), Some((How::Added, 6, "out".into())));
        let meter = "def update(self, i, v):\n    w = f(v)  # here\n    self.last[i] = w\n    self.sum[i] = self.sum[i] + w\n";
        assert_eq!(kept(meter).map(|it| (it.0, it.1)), Some((How::Total, 4)));
        let forward =
            "def forward(self, x):\n    b = f(x)  # here\n    b = b + g(x)\n    b += x\n    return b\n";
        assert_eq!(kept(forward), None);
        let layers = "def encode(self, x):\n    h = g(x)\n    for b in self.blocks:\n        h = b(h)  # here\n    return h\n";
        assert_eq!(kept(layers), None);
        let join = "def forward(self, x):\n    u = f(torch.cat([u, x], 1))  # here\n    return u\n";
        assert_eq!(kept(join), None);
        let index = "for x in d:\n    a = f(x)  # here\n    s = s + table[a]\n";
        assert_eq!(kept(index), None);
        let buffer = "def push(self, *items):\n    self.buffer.append(items)\n\ndef roll(self):\n    a, b = [], []\n    a.append(f(s))  # here\n    return stack(a), stack(b)\n\ndef fill(self):\n    x, y = self.roll()  # here!\n    self.replay.push(x, y)\n";
        assert_eq!(kept(buffer).map(|it| it.1), Some(11));
        let ctx = "class G(Function):\n    def forward(ctx, u):\n        y = u * 2\n        ctx.y = y\n        return y\n\ndef layer(x):\n    c = G.apply(x)  # here\n    return c\n";
        assert_eq!(kept(ctx), Some((How::Context, 4, "y".into())));
    }

    #[test]
    fn an_object_whose_attribute_the_value_is_may_be_kept_itself() {
        let text = "class Net:\n    def fit(self, x):\n        self.net = f(x)  # here\n\ndef cross(data):\n    for x in data:\n        one = make()\n        one.fit(x)  # here!\n        report[x.name].append(one)\n";
        let statements = Rc::new(Statements::of(text));
        let lines =
            [("Net.fit".to_owned(), "/a.py".to_owned(), 3), ("cross".to_owned(), "/a.py".to_owned(), 8)];
        let found = keeper(&lines, |_| Some(statements.clone())).expect("a keeper");
        assert_eq!((found.how, found.line), (How::Added, 9));
        assert!(found.with_less(false).is_none(), "an object is no tensor");
        // It may be put there as it is made.
        let made = "class Net:\n    def __init__(self, n):\n        self.layers = load(n)\n\ndef get(self, n):\n    if n not in self.nets:\n        self.nets[n] = Net(n)\n    return self.nets[n]\n";
        let statements = Rc::new(Statements::of(made));
        let of_made =
            [("Net.__init__".to_owned(), "/a.py".to_owned(), 3), ("get".to_owned(), "/a.py".to_owned(), 7)];
        let found = keeper(&of_made, |_| Some(statements.clone())).expect("a keeper");
        assert!(found.instead(false).starts_with("bound `self.nets` at a.py:7"), "{found:?}");
        // What a function of the object returns is not the object.
        let text = text.replace("append(one)", "append(one.score(x))");
        let statements = Rc::new(Statements::of(&text));
        let found = keeper(&lines, |_| Some(statements.clone())).expect("a keeper");
        assert_eq!(found.how, How::Attribute);
    }

    #[test]
    fn an_entry_of_one_key_is_kept_by_what_keeps_its_record() {
        let text = "def forward(self, batch):\n    batch[\"energy\"] = f(batch)  # here\n    return batch\n\ndef run(data):\n    outs = []\n    for x in data:\n        out = model(x)  # here!\n        outs.append(out)\n    return outs\n";
        assert_eq!(kept(text), Some((How::Added, 9, "out".into())));
        let statements = Rc::new(Statements::of(text));
        let lines = [("f".into(), "/a.py".into(), 2), ("run".into(), "/a.py".into(), 8)];
        let found = keeper(&lines, |_| Some(statements.clone())).expect("a keeper");
        assert_eq!(found.with_less(true), None, "a record is no tensor");
        assert_eq!(kept(&text.replace("outs.append(out)", "outs.append(out.item())")), None);
        // Other keys are other entries.
        let keyed = text.replace("batch[\"energy\"]", "batch[f\"energy{n}\"]");
        assert_eq!(kept(&keyed).map(|it| it.1), Some(2));
    }

    #[test]
    fn an_inner_function_that_calls_itself_keeps_the_names_it_uses() {
        let text = "def flat(tree):\n    leaves = []\n    def walk(node):\n        if isinstance(node, dict):\n            for key in node:\n                walk(node[key])\n        else:\n            leaves.append(node)\n    walk(tree)\n    return leaves\n\ndef serve(x):\n    out = model(x)  # here\n    return [it.cpu() for it in flat(out)]\n";
        assert_eq!(kept(text), Some((How::Closure, 3, "walk".into())));
        let flat =
            text.replace("                walk(node[key])\n", "                leaves.append(node[key])\n");
        assert_ne!(kept(&flat).map(|it| it.0), Some(How::Closure));
    }

    #[test]
    fn what_is_emptied_or_taken_out_again_keeps_less_than_what_goes_on() {
        let store = "def store(self, h):\n    self.rows.append(h)\n\ndef clear(self):\n    self.rows.clear()\n\ndef roll(self):\n    for _ in steps:\n        out, h = net(x, self.h)  # here\n        memory.store(h)\n        self.h = h\n";
        assert_eq!(kept(store).map(|it| it.1), Some(2), "nothing calls `clear`");
        let cleared = format!("{store}    memory.clear()\n");
        assert_eq!(kept(&cleared).map(|it| (it.0, it.1)), Some((How::Carried, 11)));
        let hook = "def grab(module, args, out):\n    self.seen[name] = out\nnet.register_forward_hook(grab)\n\ndef extract(self):\n    features = []\n    for x in data:\n        net(x)  # here\n        act = self.seen.pop(name)\n        features.append(token(act))\n    return torch.cat(features)\n\ndef token(act):\n    return act[:, 0, :]\n";
        assert_eq!(kept(hook).map(|it| it.1), Some(10));
        let left = hook.replace(".pop(name)", "[name]");
        assert_eq!(kept(&left).map(|it| it.1), Some(2));
    }

    #[test]
    fn a_part_of_a_tensor_is_copied_where_it_is_kept() {
        let written = |text: &str, has_graph: bool| {
            let statements = Rc::new(Statements::of(text));
            let found = keeper(&[("f".into(), "/a.py".into(), 1)], |_| Some(statements.clone()));
            found.expect("a keeper").instead(has_graph)
        };
        let rest = ": a part of a tensor refers to all of its memory";
        for (text, instead) in [
            ("h = f(x)  # here\nall.append(h[:, 0])\n", "at a.py:2, write `all.append(h[:, 0].clone())`"),
            ("h = f(x)  # here\nc = h[..., -1]\nall.append(c)\n", "at a.py:3, write `all.append(c.clone())`"),
        ] {
            assert_eq!(written(text, false), format!("{instead}{rest}"));
            assert!(!written(text, true).contains("clone"), "the graph has the tensor, too");
        }
        assert!(!written("h = f(x)  # here\nall.append(h[0])\n", false).contains("clone"));
        assert!(!written("h = f(x)  # here\nall.append(h[:, :5])\n", false).contains("clone"));
    }

    #[test]
    fn an_exception_that_is_stored_keeps_what_its_frames_have() {
        let text = "def encode(self, x):\n    y = net(x)  # here\n    return check(y).cpu()\n\ndef run(self):\n    try:\n        done(self.encode(x))  # here!\n    except ValueError as e:\n        status.set_exception(e)\n";
        assert_eq!(kept(text), Some((How::Exception, 9, "e".into())));
    }

    #[test]
    fn dicts_and_tuples_are_not_rewritten_as_tensors() {
        for text in [
            "def step(x):\n    return {\"a\": f(x)}\n\ndef train(self, x):\n    log = step(x)  # here\n    self.all.append(log)\n",
            "out = f(x)  # here\ny = out[\"logits\"]\nall.append(out)\n",
        ] {
            let statements = Rc::new(Statements::of(text));
            let line = (1..).zip(text.lines()).find(|(_, line)| line.contains("# here")).expect("a line").0;
            let found = keeper(&[("f".to_owned(), "/a.py".to_owned(), line)], |_| Some(statements.clone()));
            assert_eq!(found.expect("a keeper").with_less(false), None, "{text}");
        }
    }

    #[test]
    fn other_statements_that_keep_it_are_named_too() {
        let text =
            "l, m = f(x)  # here\nfor k in l:\n    n = k\nself.a += l\nself.b += m\nself.c += m.item()\n";
        let statements = Rc::new(Statements::of(text));
        let found =
            keeper(&[("f".to_owned(), "/a.py".to_owned(), 1)], |_| Some(statements.clone())).expect("one");
        assert_eq!(found.instead(true), "at a.py:4, write `self.a += l.detach()`; the same at 5");
    }

    #[test]
    fn names_that_go_on_to_the_next_turn_are_detached_by_name() {
        let text = "for x in xs:\n    y, h, c = f(x, h, c)  # here\n    y.sum().backward()\n";
        let statements = Rc::new(Statements::of(text));
        let found =
            keeper(&[("f".to_owned(), "/a.py".to_owned(), 2)], |_| Some(statements.clone())).expect("one");
        assert_eq!(
            found.instead(true),
            "detach what a.py:2 passes to the next turn: `h, c = h.detach(), c.detach()`"
        );
    }

    #[test]
    fn what_to_write_instead_is_a_statement() {
        for (text, instead) in [
            ("l = f(x)  # here\nself.all.append(l)\n", "self.all.append(l.detach().cpu())"),
            ("l = f(x)  # here\ntrain_loss = l\nall.append(train_loss)\n", "all.append(train_loss.item())"),
            // A part of a name is no name, and some losses are one for each item.
            ("l = f(x)  # here\naccepted = l\nall.append(accepted)\n", "all.append(accepted.detach().cpu())"),
            (
                "l = f(x)  # here\nloss = g(l, reduction='none')\nall.append(loss)\n",
                "all.append(loss.detach().cpu())",
            ),
            // A backward pass begins with one number.
            ("l = f(x)  # here\nelbo = l\nelbo.backward()\nall.append(elbo)\n", "all.append(elbo.item())"),
            ("l = f(x)  # here\nself.all += l\n", "self.all += l.detach()"),
            ("r = f(x)  # here\nall[k] += [r]\n", "all[k] += [r.detach().cpu()]"),
            (
                "r = f(x)  # here\nall.setdefault(k, []).append(r)\n",
                "all.setdefault(k, []).append(r.detach().cpu())",
            ),
            (
                "loss = f(x)  # here\nsums[k] = sums.get(k, 0) + loss[k]\n",
                "sums[k] = sums.get(k, 0) + loss[k].item()",
            ),
            (
                "l = f(x)  # here\nself.m = 0.9 * self.m + 0.1 * l\n",
                "self.m = 0.9 * self.m + 0.1 * l.detach()",
            ),
        ] {
            let statements = Rc::new(Statements::of(text));
            let lines = [("f".to_owned(), "/a.py".to_owned(), 1)];
            let found = keeper(&lines, |_| Some(statements.clone())).expect("a keeper");
            assert_eq!(found.with_less(false).as_deref(), Some(instead), "{text}");
        }
    }
}
