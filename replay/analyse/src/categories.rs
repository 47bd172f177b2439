//! The user's own names for memory: rules in a file, applied when a trace is looked at.
//!
//! ```text
//! # what          which
//! embeddings:     site=*embedding.py* min=1MiB
//! paged KV cache: stack=*PagedAttention*
//! scratch:        role=temporaries max=512KiB
//! ```
//! One rule per line: a name, a colon, and fields that must all fit; the first rule that fits counts. `site` is the call site as
//! reports show it, `stack` is any line of the stack as `function (file:line)`, `role` is what gputrace would say. `*` stands
//! for anything; without one, a pattern fits the whole text. `min` and `max` are bytes of one block.

use gputrace_schemas::event::Frame;
use gputrace_sim::bytes;

use crate::lives::Life;
use crate::rules::{self, is_like};
use gputrace_trace::Definitions;
use gputrace_trace::ledger::Sites;

/// Rules, in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct Categories {
    rules: Vec<Rule>,
    names: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
struct Rule {
    /// Index of its name.
    name: u16,
    fields: Vec<Field>,
}

#[derive(Clone, Debug)]
enum Field {
    Site(String),
    Stack(String),
    Role(String),
    Min(u64),
    Max(u64),
}

impl Categories {
    /// Reads rules.
    ///
    /// # Errors
    /// A line that is not a rule, with its number.
    pub fn parse(text: &str) -> Result<Categories, String> {
        let mut categories = Categories::default();
        for (_, (name, text, fields)) in rules::read(text, category)? {
            let known = categories.names.iter_mut().zip(0..).find(|((known, _), _)| *known == name);
            let number = match known {
                Some(((_, texts), number)) => {
                    *texts = format!("{texts}, or {text}");
                    number
                }
                None => {
                    let number = u16::try_from(categories.names.len()).map_err(|_| "too many names")?;
                    categories.names.push((name, text));
                    number
                }
            };
            categories.rules.push(Rule { name: number, fields });
        }
        Ok(categories)
    }

    /// Names with their rules, by number; a name that has several rules has one number.
    pub fn names(&self) -> &[(String, String)] {
        &self.names
    }

    /// There are no rules.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The rules that fit everything but the size, which is the same for all blocks of a place.
    pub fn candidates(
        &self,
        life: &Life,
        role: &str,
        definitions: &dyn Definitions,
        sites: &Sites,
    ) -> Vec<usize> {
        let fits = |field: &Field| match field {
            Field::Min(_) | Field::Max(_) => true,
            Field::Role(name) => is_like(role, name),
            Field::Site(pattern) => sites.site(life.site).is_some_and(|it| is_like(&it.to_string(), pattern)),
            Field::Stack(pattern) => {
                let frames = definitions.stack(life.stack).map_or(&[][..], |stack| &stack.frames);
                frames
                    .iter()
                    .filter_map(|id| definitions.frame(*id))
                    .any(|frame| is_like(&line(frame), pattern))
            }
        };
        (0..self.rules.len()).filter(|idx| self.rules[*idx].fields.iter().all(fits)).collect()
    }

    /// The number of the name of the first candidate that also fits the size.
    pub fn choose(&self, candidates: &[usize], life: &Life) -> Option<u16> {
        let fits = |field: &Field| match field {
            Field::Min(bytes) => life.bytes.0 >= *bytes,
            Field::Max(bytes) => life.bytes.0 <= *bytes,
            Field::Role(_) | Field::Site(_) | Field::Stack(_) => true,
        };
        let rule =
            candidates.iter().map(|idx| &self.rules[*idx]).find(|rule| rule.fields.iter().all(fits))?;
        Some(rule.name)
    }
}

fn line(frame: &Frame) -> String {
    match frame {
        Frame::Python { function, file, line } | Frame::Native { function, file, line, .. } => {
            format!("{function} ({file}:{line})")
        }
    }
}

/// Name, the rule as it was written, and its fields.
fn category(line: &str) -> Result<(String, String, Vec<Field>), String> {
    type Make = fn(String) -> Result<Field, String>;
    const FIELDS: [(&str, Make); 5] = [
        ("site", |value| Ok(Field::Site(value))),
        ("stack", |value| Ok(Field::Stack(value))),
        ("role", |value| Ok(Field::Role(value))),
        ("min", |value| Ok(Field::Min(bytes::parse(&value)?))),
        ("max", |value| Ok(Field::Max(bytes::parse(&value)?))),
    ];
    let (name, rest) = line.split_once(':').ok_or("write NAME: FIELD=PATTERN ...")?;
    let (name, rest) = (name.trim(), rest.trim());
    let fields = rules::fields(rest, &FIELDS)
        .map_err(|word| format!("`{word}` is not a field; fields are site=, stack=, role=, min= and max="))?;
    let fields = fields.into_iter().map(|(make, value)| make(value)).collect::<Result<Vec<_>, _>>()?;
    if name.is_empty() || fields.is_empty() {
        return Err("write NAME: FIELD=PATTERN ...".into());
    }
    Ok((name.to_owned(), rest.to_owned(), fields))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_no_rule_is_told() {
        let wrong = |text: &str| Categories::parse(text).unwrap_err();
        assert_eq!(wrong("\nKV cache"), "line 2: write NAME: FIELD=PATTERN ...");
        assert_eq!(
            wrong("a: b"),
            "line 1: `b` is not a field; fields are site=, stack=, role=, min= and max="
        );
        assert!(wrong("a: min=x").starts_with("line 1: "));
    }

    #[test]
    fn rules_of_one_name_are_one_category() {
        let rules = Categories::parse("# mine\na: min=1MiB\nb: site=x y*\na: role=temporaries").unwrap();
        assert_eq!(
            rules.names(),
            [("a".into(), "min=1MiB, or role=temporaries".into()), ("b".into(), "site=x y*".into())]
        );
    }
}
