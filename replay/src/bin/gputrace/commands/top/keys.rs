//! What keys do: bytes of a terminal as keys, and keys as changes of the view.

use super::view::{Sort, View, rows};
use crate::commands::parts::live::figures::Figures;

/// A key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Key {
    Letter(char),
    Up,
    Down,
    Enter,
    Escape,
    Backspace,
    Interrupt,
    StandStill,
}

/// Whether to go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    Stay,
    StandStill,
    End,
}

/// The keys in what a terminal sent at once. Sequences that are not known are no keys.
pub(super) fn keys(bytes: &[u8]) -> Vec<Key> {
    let text = String::from_utf8_lossy(bytes);
    let mut keys = vec![];
    let mut rest: &str = &text;
    while let Some(first) = rest.chars().next() {
        let mut length = first.len_utf8();
        keys.extend(match first {
            '\x1b' if rest.len() > 1 && rest[1..].starts_with(['[', 'O']) => {
                let end = rest[2..].find(|c: char| c.is_ascii_alphabetic() || c == '~');
                length = end.map_or(rest.len(), |end| end + 3);
                match &rest[2..length] {
                    "A" => Some(Key::Up),
                    "B" => Some(Key::Down),
                    _ => None,
                }
            }
            '\x1b' => Some(Key::Escape),
            '\r' | '\n' => Some(Key::Enter),
            '\x03' => Some(Key::Interrupt),
            '\x1a' => Some(Key::StandStill),
            '\x7f' | '\x08' => Some(Key::Backspace),
            letter if letter.is_control() => None,
            letter => Some(Key::Letter(letter)),
        });
        rest = &rest[length..];
    }
    keys
}

/// What a key changes.
pub(super) fn press(view: &mut View, key: Key, figures: &Figures) -> Next {
    if key == Key::Interrupt {
        return Next::End;
    }
    if key == Key::StandStill {
        return Next::StandStill;
    }
    if view.is_typing {
        type_filter(view, key);
        return Next::Stay;
    }
    let n_rows = rows(figures, view).len();
    match key {
        Key::Letter('q') => return Next::End,
        Key::Letter('?' | 'h') => view.is_help = !view.is_help,
        Key::Letter('f' | ' ') => view.is_frozen = !view.is_frozen,
        Key::Letter('/') => view.is_typing = true,
        Key::Letter('s') => {
            let at = Sort::ALL.iter().position(|sort| *sort == view.sort).unwrap_or_default();
            view.sort = Sort::ALL[(at + 1) % Sort::ALL.len()];
        }
        Key::Up | Key::Letter('k') => view.chosen = view.chosen.saturating_sub(1),
        Key::Down | Key::Letter('j') => view.chosen += 1,
        Key::Enter => {
            let chosen = rows(figures, view).get(view.chosen).map(|(process, _)| process.trace.clone());
            view.inside = if view.inside.is_some() { None } else { chosen };
        }
        // What is nearest goes first.
        Key::Escape if view.is_help => view.is_help = false,
        Key::Escape if view.inside.is_some() => view.inside = None,
        Key::Escape => view.filter.clear(),
        Key::Backspace => view.inside = None,
        Key::Letter(_) | Key::Interrupt | Key::StandStill => {}
    }
    view.chosen = view.chosen.min(n_rows.saturating_sub(1));
    Next::Stay
}

fn type_filter(view: &mut View, key: Key) {
    match key {
        Key::Letter(letter) => view.filter.push(letter),
        Key::Backspace => {
            view.filter.pop();
        }
        Key::Enter => view.is_typing = false,
        Key::Escape => {
            view.is_typing = false;
            view.filter.clear();
        }
        Key::Up | Key::Down | Key::Interrupt | Key::StandStill => {}
    }
    view.chosen = 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrows_are_keys_and_unknown_sequences_are_none() {
        let sent = keys(b"j\x1b[A\x1bOB\x1b[15~\x1b[1;5C\r\x7f\x03/\xc3\xa9");
        let expected = [
            Key::Letter('j'),
            Key::Up,
            Key::Down,
            Key::Enter,
            Key::Backspace,
            Key::Interrupt,
            Key::Letter('/'),
            Key::Letter('é'),
        ];
        assert_eq!(sent, expected);
        assert_eq!(keys(b"\x1b"), [Key::Escape]);
        assert_eq!(keys(b"\x1b[1;5"), [], "cut off");
    }
}
