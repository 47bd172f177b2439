//! A verb's JSON in as many bytes as a client takes, with a mark wherever something was left out.
//!
//! Numbers and texts stay the very bytes that the verb wrote: nothing is parsed further than to where it ends. (Also, `serde_json`
//! reads 128 levels at most, and a tree of calls may have more.)

use std::fmt::Write;

use super::tools::Shown;

/// JSON, by where its parts lie in the text.
enum Node<'a> {
    /// A number, a text, true, false or null, as it was written.
    Atom(&'a str),
    List(Vec<Node<'a>>),
    /// Names are with their quotes.
    Table(Vec<(&'a str, Node<'a>)>),
}

/// Levels that are read. Call stacks have at most a few hundred frames.
const DEEPEST: usize = 2000;
/// A text that is longer is left out where nothing else helps.
const LONG: usize = 200;

/// The part of this JSON that was asked for, in `max_bytes`, without the field `without` of each process. Whether it is all of it.
///
/// # Errors
/// There is no such part, or it cannot be made short enough.
pub(super) fn shorten(json: &str, without: Option<&str>, shown: &Shown) -> Result<(String, bool), String> {
    let mut root = Reader { text: json, at: 0 }.read(0).ok_or("gputrace wrote something that is not JSON")?;
    if let Some(field) = without {
        root.leave_out(field);
    }
    let part = root.at(&shown.pointer).ok_or_else(|| {
        format!("the answer has no {}: ask without `pointer`, and take one from the answer", shown.pointer)
    })?;
    let with = |bounds: Bounds| part.written(bounds, shown);
    if let Some(all) = with(Bounds::NONE) {
        return Ok((all, true));
    }
    let too_long = "this part of the answer cannot be shortened to `max_bytes`: allow more, or ask for a smaller part with `pointer`";
    // A mark in the place of a whole answer would name itself.
    if matches!(part, Node::Atom(_)) {
        return Err(too_long.to_owned());
    }
    // As many elements of each list as fit; if not even one does, not all levels; if that is not enough, no long texts.
    for (texts, deepest) in
        [(usize::MAX, DEEPEST)].into_iter().chain((1..16).rev().flat_map(|it| [(usize::MAX, it), (LONG, it)]))
    {
        let bounds = |rows| Bounds { rows, deepest, texts };
        let Some(mut best) = with(bounds(1)) else { continue };
        let (mut fits, mut too_many) = (1, part.longest() + 1);
        while fits + 1 < too_many {
            let rows = fits + (too_many - fits) / 2;
            match with(bounds(rows)) {
                Some(longer) => (best, fits) = (longer, rows),
                None => too_many = rows,
            }
        }
        return Ok((best, false));
    }
    Err(too_long.to_owned())
}

/// What is written of a part.
#[derive(Clone, Copy)]
struct Bounds {
    /// Elements of each list.
    rows: usize,
    /// Levels.
    deepest: usize,
    /// Bytes of a text.
    texts: usize,
}

impl Bounds {
    const NONE: Bounds = Bounds { rows: usize::MAX, deepest: usize::MAX, texts: usize::MAX };
}

impl<'a> Node<'a> {
    fn leave_out(&mut self, field: &str) {
        let Node::Table(fields) = self else { return };
        for (name, value) in fields {
            let ("\"processes\"", Node::List(processes)) = (*name, value) else { continue };
            for process in processes {
                if let Node::Table(fields) = process {
                    fields.retain(|(name, _)| name.trim_matches('"') != field);
                }
            }
        }
    }

    /// By a JSON Pointer (RFC 6901).
    fn at(&self, pointer: &str) -> Option<&Node<'a>> {
        pointer.split('/').skip(1).try_fold(self, |node, step| match node {
            Node::Atom(_) => None,
            Node::List(elements) => elements.get(step.parse::<usize>().ok()?),
            Node::Table(fields) => {
                fields.iter().find(|(name, _)| escaped(name) == step).map(|(_, value)| value)
            }
        })
    }

    /// The most elements that a list has.
    fn longest(&self) -> usize {
        match self {
            Node::Atom(_) => 0,
            Node::List(elements) => elements.iter().map(Node::longest).max().unwrap_or(0).max(elements.len()),
            Node::Table(fields) => fields.iter().map(|(_, value)| value.longest()).max().unwrap_or(0),
        }
    }

    /// Nothing if it is longer than that.
    fn written(&self, bounds: Bounds, shown: &Shown) -> Option<String> {
        let mut writer =
            Writer { bounds, most: shown.max_bytes, text: String::new(), pointer: shown.pointer.clone() };
        match self {
            Node::List(elements) => writer.list(elements, shown.skip, 0)?,
            other => writer.node(other, 0)?,
        }
        Some(writer.text)
    }

    /// Bytes without what was left out.
    fn bytes(&self) -> usize {
        match self {
            Node::Atom(text) => text.len(),
            Node::List(elements) => elements.iter().map(|it| it.bytes() + 1).sum::<usize>() + 2,
            Node::Table(fields) => {
                fields.iter().map(|(name, it)| name.len() + it.bytes() + 2).sum::<usize>() + 2
            }
        }
    }
}

/// A field's name as a step of a JSON Pointer.
fn escaped(name: &str) -> String {
    let name = name.strip_prefix('"').and_then(|name| name.strip_suffix('"')).unwrap_or(name);
    name.replace('~', "~0").replace('/', "~1")
}

struct Writer {
    bounds: Bounds,
    most: usize,
    text: String,
    /// Of what is being written.
    pointer: String,
}

impl Writer {
    fn push(&mut self, text: &str) -> Option<()> {
        self.text.push_str(text);
        (self.text.len() <= self.most).then_some(())
    }

    fn node(&mut self, node: &Node, depth: usize) -> Option<()> {
        match node {
            Node::Atom(text) if text.len() > self.bounds.texts => {
                self.mark(&format!("\"left_out_bytes\":{}", text.len()))
            }
            Node::Atom(text) => self.push(text),
            Node::List(elements) if elements.is_empty() => self.push("[]"),
            Node::Table(fields) if fields.is_empty() => self.push("{}"),
            _ if depth >= self.bounds.deepest => self.mark(&format!("\"left_out_bytes\":{}", node.bytes())),
            Node::List(elements) => self.list(elements, 0, depth),
            Node::Table(fields) => {
                self.push("{")?;
                for (position, (name, value)) in fields.iter().enumerate() {
                    self.push(if position == 0 { "" } else { "," })?;
                    self.push(name)?;
                    self.push(":")?;
                    self.below(&escaped(name), |it| it.node(value, depth + 1))?;
                }
                self.push("}")
            }
        }
    }

    fn list(&mut self, elements: &[Node], skip: usize, depth: usize) -> Option<()> {
        self.push("[")?;
        let end = skip.saturating_add(self.bounds.rows).min(elements.len());
        for (position, element) in elements.iter().enumerate().take(end).skip(skip) {
            self.push(if position == skip { "" } else { "," })?;
            self.below(&position.to_string(), |it| it.node(element, depth + 1))?;
        }
        if end < elements.len() {
            self.push(if end > skip { "," } else { "" })?;
            self.mark(&format!("\"left_out\":{},\"skip\":{end}", elements.len() - end))?;
        }
        self.push("]")
    }

    /// Says in the place of what is left out how to see it.
    fn mark(&mut self, what: &str) -> Option<()> {
        // The steps of a pointer come from names as they were written in JSON.
        let mark = format!("{{{what},\"pointer\":\"{}\"}}", self.pointer);
        self.push(&mark)
    }

    fn below(&mut self, step: &str, write: impl FnOnce(&mut Writer) -> Option<()>) -> Option<()> {
        let length = self.pointer.len();
        // Writing to a string does not fail.
        let _ = write!(self.pointer, "/{step}");
        let written = write(self);
        self.pointer.truncate(length);
        written
    }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn read(&mut self, depth: usize) -> Option<Node<'a>> {
        if depth > DEEPEST {
            return None;
        }
        match self.peek()? {
            b'[' => {
                let mut elements = vec![];
                self.each(b']', |it| {
                    elements.push(it.read(depth + 1)?);
                    Some(())
                })?;
                Some(Node::List(elements))
            }
            b'{' => {
                let mut fields = vec![];
                self.each(b'}', |it| {
                    it.peek().filter(|byte| *byte == b'"')?;
                    let name = it.atom()?;
                    it.peek().filter(|byte| *byte == b':')?;
                    it.at += 1;
                    fields.push((name, it.read(depth + 1)?));
                    Some(())
                })?;
                Some(Node::Table(fields))
            }
            _ => self.atom().map(Node::Atom),
        }
    }

    /// What stands between brackets, with commas between.
    fn each(&mut self, end: u8, mut one: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.at += 1;
        if self.peek()? == end {
            self.at += 1;
            return Some(());
        }
        loop {
            one(self)?;
            let next = self.peek()?;
            self.at += 1;
            match next {
                b',' => {}
                next if next == end => return Some(()),
                _ => return None,
            }
        }
    }

    /// The next byte that is not white space.
    fn peek(&mut self) -> Option<u8> {
        let rest = &self.text.as_bytes()[self.at..];
        let blank = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        self.at += blank;
        rest.get(blank).copied()
    }

    fn atom(&mut self) -> Option<&'a str> {
        let rest = &self.text[self.at..];
        let length = if rest.starts_with('"') {
            let mut is_escaped = false;
            let end = rest.bytes().skip(1).position(|byte| {
                let ends = byte == b'"' && !is_escaped;
                is_escaped = byte == b'\\' && !is_escaped;
                ends
            });
            end? + 2
        } else {
            rest.find(|c: char| ",]}".contains(c) || c.is_ascii_whitespace()).unwrap_or(rest.len())
        };
        self.at += length;
        (length > 0).then(|| &rest[..length])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(pointer: &str, skip: usize, max_bytes: usize) -> Shown {
        Shown { pointer: pointer.to_owned(), skip, max_bytes }
    }

    #[track_caller]
    fn check(json: &str, of: (&str, usize, usize), expected: &str) {
        let (pointer, skip, max_bytes) = of;
        let (text, _) = shorten(json, None, &shown(pointer, skip, max_bytes)).expect("is short enough");
        assert_eq!(text, expected);
        assert!(text.len() <= max_bytes);
    }

    const ROWS: &str =
        "{\n \"a\": [1, 2.50, 3e2, \"x,\\\"]\", null],\n \"b\": {\"c/d\": [[], {}, true]}\n}\n";

    #[test]
    fn what_fits_is_whole_and_every_number_is_as_it_was_written() {
        check(ROWS, ("", 0, 1000), r#"{"a":[1,2.50,3e2,"x,\"]",null],"b":{"c/d":[[],{},true]}}"#);
    }

    #[test]
    fn a_part_is_named_by_a_pointer_and_a_list_goes_on_after_what_is_skipped() {
        check(ROWS, ("/b/c~1d/2", 0, 1000), "true");
        check(ROWS, ("/a", 2, 1000), r#"[3e2,"x,\"]",null]"#);
        check(ROWS, ("/a", 9, 1000), "[]");
        for wrong in ["/c", "/a/5", "/a/x", "/a/0/0"] {
            let error = shorten(ROWS, None, &shown(wrong, 0, 1000)).expect_err(wrong);
            assert!(error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn a_list_that_is_cut_says_how_to_go_on() {
        let list: Vec<String> = (0..1000).map(|number| number.to_string()).collect();
        let json = format!("{{\"rows\":[{}]}}", list.join(","));
        let (mut seen, mut skip) = (vec![], 0);
        while skip < 1000 {
            let (text, is_all) = shorten(&json, None, &shown("/rows", skip, 1024)).expect("is short enough");
            assert!(text.len() <= 1024);
            let rows: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            let rows = rows.as_array().expect("a list").clone();
            seen.extend(rows.iter().filter_map(serde_json::Value::as_u64));
            let last = rows.last().expect("a row");
            skip = last["skip"].as_u64().unwrap_or(1000) as usize;
            assert_eq!(is_all, skip == 1000);
            assert!(is_all || last["pointer"] == "/rows", "{last}");
        }
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
        check(&json, ("", 0, 59), r#"{"rows":[0,1,{"left_out":998,"skip":2,"pointer":"/rows"}]}"#);
    }

    #[test]
    fn a_tree_that_is_too_deep_is_cut_below_a_level_and_says_where_it_goes_on() {
        let depth = 700;
        let json = format!("{}1{}", "{\"child\":[".repeat(depth), "]}".repeat(depth));
        let (text, is_all) = shorten(&json, None, &shown("", 0, 1024)).expect("is short enough");
        assert!(!is_all && text.len() <= 1024);
        let pointer =
            text.split("\"pointer\":\"").nth(1).and_then(|rest| rest.split('"').next()).expect("a pointer");
        assert!(shorten(&json, None, &shown(pointer, 0, 1024)).is_ok(), "{pointer}");
        let too_deep = format!("{}1{}", "[".repeat(3000), "]".repeat(3000));
        assert!(shorten(&too_deep, None, &shown("", 0, 1024)).is_err());
    }

    #[test]
    fn long_texts_go_where_nothing_else_helps() {
        let json = format!("{{\"a\":\"{}\",\"b\":1}}", "x".repeat(5000));
        check(&json, ("", 0, 1024), r#"{"a":{"left_out_bytes":5002,"pointer":"/a"},"b":1}"#);
        assert!(shorten(&json, None, &shown("/a", 0, 1024)).is_err());
    }

    #[test]
    fn a_field_of_each_process_can_be_left_out() {
        let json = r#"{"processes":[{"sections":[1],"pid":1},{"pid":2}],"sections":3}"#;
        let (text, is_all) = shorten(json, Some("sections"), &shown("", 0, 1024)).expect("is short enough");
        assert_eq!((&*text, is_all), (r#"{"processes":[{"pid":1},{"pid":2}],"sections":3}"#, true));
    }

    #[test]
    fn what_is_not_json_is_refused() {
        for wrong in ["", "{", "[1", "[1 2]", "{\"a\"}", "{1:2}", "\"a"] {
            assert!(shorten(wrong, None, &shown("", 0, 1024)).is_err(), "{wrong}");
        }
    }
}
