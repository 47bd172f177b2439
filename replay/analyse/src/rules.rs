//! Rules that users write into files, one per line: `FIELD=PATTERN FIELD=PATTERN ...`. Empty lines and those that begin with
//! `#` do not count.

/// Reads a file of rules: each with the number of its line, from 1.
///
/// # Errors
/// What `rule` says of a line, with its number.
pub fn read<Rule>(
    text: &str,
    rule: impl Fn(&str) -> Result<Rule, String>,
) -> Result<Vec<(usize, Rule)>, String> {
    let lines = (1..).zip(text.lines().map(str::trim));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|(number, line)| match rule(line) {
            Ok(rule) => Ok((number, rule)),
            Err(what) => Err(format!("line {number}: {what}")),
        })
        .collect()
}

/// The fields of a rule. Values may have spaces: a field reaches to the next one.
///
/// # Errors
/// The first word, where it is not a field that is known.
pub fn fields<'a, Field: Copy>(
    rule: &'a str,
    known: &[(&str, Field)],
) -> Result<Vec<(Field, String)>, &'a str> {
    let mut fields: Vec<(Field, String)> = vec![];
    for word in rule.split_whitespace() {
        let field = word.split_once('=').and_then(|(name, value)| {
            known.iter().find(|(known, _)| *known == name).map(|(_, field)| (*field, value.to_owned()))
        });
        match (field, fields.last_mut()) {
            (Some(field), _) => fields.push(field),
            (None, Some((_, value))) => *value = format!("{value} {word}"),
            (None, None) => return Err(word),
        }
    }
    Ok(fields)
}

/// Whether `text` is `pattern`, in which `*` stands for anything.
pub fn is_like(text: &str, pattern: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = text.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}
