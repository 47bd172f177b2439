//! The user's own names for memory: rules in a file, applied when a trace is looked at.
//!
//! ```text
//! # what          which
//! embeddings:     site=*embedding.py* min=1MiB
//! paged KV cache: stack=*PagedAttention*
//! scratch:        role=temporaries max=512KiB
//! ```
//! A rule a line: a name, a colon, and fields that must all fit; the first rule that fits counts. `site` is the call site as
//! reports show it, `stack` is any line of the stack as `function (file:line)`, `role` is what gputrace would say. `*` stands
//! for anything; without one, a pattern fits the whole text. `min` and `max` are bytes of one block.

use gputrace_schemas::event::Frame;
use gputrace_sim::bytes;

use crate::leaks::is_like;
use crate::ledger::Sites;
use crate::lives::Life;
use crate::roles::Role;
use crate::trace::Definitions;

/// Rules, in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct Categories {
    rules: Vec<Rule>,
}

#[derive(Clone, Debug)]
struct Rule {
    name: String,
    text: String,
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
    /// A line that is no rule, with its number.
    pub fn parse(text: &str) -> Result<Categories, String> {
        let mut rules = vec![];
        for (idx, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            rules.push(rule(line).map_err(|what| format!("line {}: {what}", idx + 1))?);
        }
        Ok(Categories { rules })
    }

    /// Names with their rules, by number; a name that has several rules has one number.
    pub(crate) fn names(&self) -> Vec<(String, String)> {
        let mut names: Vec<(String, String)> = vec![];
        for rule in &self.rules {
            match names.iter_mut().find(|(name, _)| *name == rule.name) {
                Some((_, text)) => *text = format!("{text}, or {}", rule.text),
                None => names.push((rule.name.clone(), rule.text.clone())),
            }
        }
        names
    }

    /// There are no rules.
    pub(crate) fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The rules that fit everything but the size, which is the same for all blocks of a place.
    pub(crate) fn candidates(
        &self,
        life: &Life,
        role: Role,
        definitions: &dyn Definitions,
        sites: &Sites,
    ) -> Vec<usize> {
        let fits = |field: &Field| match field {
            Field::Min(_) | Field::Max(_) => true,
            Field::Role(name) => is_like(role.name(), name),
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

    /// The number of the name of the first candidate that fits the size, too.
    pub(crate) fn choose(&self, candidates: &[usize], life: &Life) -> Option<u16> {
        let fits = |field: &Field| match field {
            Field::Min(bytes) => life.bytes.0 >= *bytes,
            Field::Max(bytes) => life.bytes.0 <= *bytes,
            Field::Role(_) | Field::Site(_) | Field::Stack(_) => true,
        };
        let rule =
            candidates.iter().map(|idx| &self.rules[*idx]).find(|rule| rule.fields.iter().all(fits))?;
        let at = self.names().iter().position(|(name, _)| *name == rule.name)?;
        u16::try_from(at).ok()
    }
}

fn line(frame: &Frame) -> String {
    match frame {
        Frame::Python { function, file, line } | Frame::Native { function, file, line, .. } => {
            format!("{function} ({file}:{line})")
        }
    }
}

fn rule(line: &str) -> Result<Rule, String> {
    let (name, rest) = line.split_once(':').ok_or("write NAME: FIELD=PATTERN ...")?;
    let rest = rest.trim();
    let mut texts: Vec<(&str, String)> = vec![];
    for word in rest.split_whitespace() {
        match word.split_once('=') {
            Some((field, value)) if ["site", "stack", "role", "min", "max"].contains(&field) => {
                texts.push((field, value.to_owned()));
            }
            // Values may have spaces: a field reaches to the next one.
            _ => match texts.last_mut() {
                Some((_, value)) => *value = format!("{value} {word}"),
                None => {
                    return Err(format!(
                        "`{word}` is no field; there are site=, stack=, role=, min= and max="
                    ));
                }
            },
        }
    }
    let fields = texts.into_iter().map(|(field, value)| {
        Ok(match field {
            "site" => Field::Site(value),
            "stack" => Field::Stack(value),
            "role" => Field::Role(value),
            "min" => Field::Min(bytes::parse(&value)?),
            _ => Field::Max(bytes::parse(&value)?),
        })
    });
    let fields = fields.collect::<Result<Vec<_>, String>>()?;
    if name.trim().is_empty() || fields.is_empty() {
        return Err("write NAME: FIELD=PATTERN ...".into());
    }
    Ok(Rule { name: name.trim().to_owned(), text: rest.to_owned(), fields })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_no_rule_is_told() {
        let wrong = |text: &str| Categories::parse(text).unwrap_err();
        assert_eq!(wrong("\nKV cache"), "line 2: write NAME: FIELD=PATTERN ...");
        assert_eq!(wrong("a: b"), "line 1: `b` is no field; there are site=, stack=, role=, min= and max=");
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
