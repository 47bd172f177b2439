//! Text that others chose, made safe to show.
//!
//! Names in a trace come from the traced program: paths, functions, threads, NVTX ranges, command lines. A terminal obeys some
//! characters instead of drawing them, so a name could move the cursor, rename the window, paste into the shell, or put one
//! thing on the screen where another was meant. [`Screen`] is what every command prints through; it shows such characters as
//! `\u{1b}`, whether or not a terminal is there to obey: what goes into a file is printed from it later.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

/// Whether a terminal may do something else than draw it, or draws nothing where something is.
#[must_use]
pub fn is_obeyed(c: char) -> bool {
    // Codes of a terminal: C0, DEL, and C1, whose U+009B is as good as ESC [.
    c.is_control()
        || matches!(c,
            // Marks that turn the direction of what follows, or of what is around them (Trojan Source, CVE-2021-42574).
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{206f}'
            // Without width: two names may differ and look alike.
            | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2065}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
            // Ends of lines and paragraphs.
            | '\u{2028}' | '\u{2029}')
}

/// A name as a part of a line: all that [`is_obeyed`], ends of lines too, is written as `\u{a}`.
///
/// A backslash stays one, so ordinary names stay what they are: this cannot be read back, and need not be.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_obeyed) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_obeyed(c) { escape(c, Notation::Text, &mut shown) } else { shown.push(c) }
    }
    Cow::Owned(shown)
}

/// How a character is written that must not be shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Notation {
    /// `\u{1b}`, as in Rust.
    Text,
    /// `\u001b`: the same string to who reads the JSON, which holds such characters only inside of strings.
    Json,
}

fn escape(c: char, notation: Notation, shown: &mut String) {
    // Writing to a string does not fail.
    let _ = match notation {
        Notation::Text => write!(shown, "\\u{{{:x}}}", u32::from(c)),
        Notation::Json => {
            c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(shown, "\\u{unit:04x}"))
        }
    };
}

/// A writer that lets nothing through that [`is_obeyed`], but ends of lines and tabs.
pub struct Screen<'a> {
    to: &'a mut dyn Write,
    notation: Notation,
    /// The beginning of a character whose end was not written yet.
    begun: Vec<u8>,
}

impl<'a> Screen<'a> {
    /// Shows on `to`.
    pub fn new(to: &'a mut dyn Write) -> Screen<'a> {
        Screen { to, notation: Notation::Text, begun: vec![] }
    }

    /// For JSON: what it holds stays the same to who parses it.
    pub fn json(&mut self) -> Screen<'_> {
        Screen { to: self.to, notation: Notation::Json, begun: vec![] }
    }

    /// What is behind the screen: for colours, which are ours, and for formats that have rules of their own.
    pub fn behind(&mut self) -> &mut dyn Write {
        self.to
    }

    fn show(&self, text: &str, shown: &mut String) {
        for c in text.chars() {
            match c {
                '\n' => shown.push(c),
                '\t' if self.notation == Notation::Text => shown.push(c),
                _ if is_obeyed(c) => escape(c, self.notation, shown),
                _ => shown.push(c),
            }
        }
    }

    /// Bytes that are no text.
    fn show_bytes(&self, bytes: &[u8], shown: &mut String) {
        for byte in bytes {
            let _ = match self.notation {
                Notation::Text => write!(shown, "\\x{byte:02x}"),
                Notation::Json => write!(shown, "\\ufffd"),
            };
        }
    }
}

impl Write for Screen<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let is_plain = |text: &str| !text.contains(|c| c != '\n' && is_obeyed(c));
        if self.begun.is_empty() && std::str::from_utf8(bytes).is_ok_and(is_plain) {
            self.to.write_all(bytes)?;
            return Ok(bytes.len());
        }
        let mut all = std::mem::take(&mut self.begun);
        all.extend_from_slice(bytes);
        let mut shown = String::with_capacity(all.len() + 16);
        let mut chunks = all.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            self.show(chunk.valid(), &mut shown);
            let is_begun = || std::str::from_utf8(chunk.invalid()).is_err_and(|e| e.error_len().is_none());
            if chunks.peek().is_none() && is_begun() {
                self.begun = chunk.invalid().to_vec();
            } else {
                self.show_bytes(chunk.invalid(), &mut shown);
            }
        }
        self.to.write_all(shown.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let begun = std::mem::take(&mut self.begun);
        let mut shown = String::new();
        self.show_bytes(&begun, &mut shown);
        self.to.write_all(shown.as_bytes())?;
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(write: impl FnOnce(&mut Screen)) -> String {
        let mut bytes = vec![];
        let mut screen = Screen::new(&mut bytes);
        write(&mut screen);
        screen.flush().unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn ordinary_names_stay_what_they_are() {
        for name in ["", "forward (/job/modèle.py:12)", "日本語 🚀 \\n \\x1b", "│ └ …\u{fffd}"] {
            assert!(matches!(printable(name), Cow::Borrowed(same) if same == name));
            assert_eq!(shown(|screen| screen.write_all(name.as_bytes()).unwrap()), name);
        }
    }

    #[test]
    fn what_a_terminal_would_obey_is_spelled_out() {
        assert_eq!(printable("a\x1b]0;b\x07\r\n\t\0"), r"a\u{1b}]0;b\u{7}\u{d}\u{a}\u{9}\u{0}");
        assert_eq!(printable("\u{7f}\u{9b}2J\u{202e}\u{2066}"), r"\u{7f}\u{9b}2J\u{202e}\u{2066}");
        assert_eq!(printable("\u{200b}\u{feff}\u{2028}\u{e0041}"), r"\u{200b}\u{feff}\u{2028}\u{e0041}");
    }

    #[test]
    fn a_screen_keeps_lines_and_tabs_and_nothing_else() {
        let text = shown(|screen| write!(screen, "a\tb\n\x1b[2J\r\u{9b}0m\n").unwrap());
        assert_eq!(text, "a\tb\n\\u{1b}[2J\\u{d}\\u{9b}0m\n");
    }

    #[test]
    fn characters_may_come_in_parts_and_bytes_may_be_no_text() {
        for at in 0..=5 {
            let (first, second) = "é\u{9b}x".as_bytes().split_at(at);
            let text = shown(|screen| {
                screen.write_all(first).unwrap();
                screen.write_all(second).unwrap();
            });
            assert_eq!(text, "é\\u{9b}x", "in parts of {at} bytes and the rest");
        }
        assert_eq!(shown(|screen| screen.write_all(b"a\xff\x9bb\xe2\x80").unwrap()), r"a\xff\x9bb\xe2\x80");
    }

    #[test]
    fn json_stays_the_same_to_who_parses_it() {
        let json = "{\n  \"a\": \"\u{7f}\u{9b}\u{202e}\u{e0041}é\"\n}\n";
        let text = shown(|screen| screen.json().write_all(json.as_bytes()).unwrap());
        assert_eq!(text, "{\n  \"a\": \"\\u007f\\u009b\\u202e\\udb40\\udc41é\"\n}\n");
    }

    #[test]
    fn what_is_behind_a_screen_gets_bytes_as_they_are() {
        assert_eq!(shown(|screen| screen.behind().write_all(b"\x1b[1m").unwrap()), "\x1b[1m");
    }
}
