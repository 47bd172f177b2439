//! Call sites and other words in less room than they need: a file and its line are never cut.

/// `text` in at most `width` characters: without the folders of its file, then without what was called there, then with less of
/// its function. What names no file keeps its beginning, a path its end.
pub(super) fn fitted(text: &str, width: usize) -> String {
    if length(text) <= width {
        return text.to_owned();
    }
    let Some(site) = Site::of(text) else {
        if let Some(device) = device(text) {
            return cut_end(device, width);
        }
        let is_path = text.contains('/') && !text.contains(' ');
        return if is_path { cut_start(text, width) } else { cut_end(text, width) };
    };
    let name = site.file.rsplit('/').next().unwrap_or(site.file);
    let mut folders = site.file;
    while let Some((_, below)) = folders.split_once('/') {
        folders = below;
        let shorter = format!("{} (…/{folders}:{}){}", site.function, site.line, site.rest);
        if length(&shorter) <= width {
            return shorter;
        }
    }
    let place = format!("({name}:{})", site.line);
    let plain = format!("{} {place}", site.function);
    let room = width.saturating_sub(length(&plain));
    if room >= LEAST_REST.min(length(site.rest)) && !site.rest.is_empty() {
        return plain + &cut_end(site.rest, room);
    }
    if length(&plain) <= width {
        return plain;
    }
    match width.saturating_sub(length(&place) + 1) {
        room @ LEAST_FUNCTION.. => format!("{} {place}", cut_end(site.function, room)),
        _ => format!("{name}:{}", site.line),
    }
}

/// Whether it is a call site, or a path: a name, and no sentence.
pub(super) fn is_one(text: &str) -> bool {
    Site::of(text).is_some() || !text.contains(' ')
}

/// What must stay of it: `train.py:12`, `cuda:0`, `/host.r0.gtr`; of other words all.
pub(super) fn shortest(text: &str) -> &str {
    let Some(site) = Site::of(text) else {
        let is_path = !text.contains(' ');
        let name = text.rfind('/').filter(|_| is_path).map(|at| &text[at..]);
        return name.or(device(text)).unwrap_or(text);
    };
    let name = site.file.rsplit('/').next().unwrap_or(site.file);
    let at = name.as_ptr() as usize - text.as_ptr() as usize;
    &text[at..at + name.len() + 1 + site.line.len()]
}

/// `cuda:0` of `cuda:0 NVIDIA H200`.
fn device(text: &str) -> Option<&str> {
    text.starts_with("cuda:").then(|| text.split(' ').next()).flatten()
}

/// Keeps the beginning.
pub(super) fn cut_end(text: &str, width: usize) -> String {
    if length(text) <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// Keeps the end.
fn cut_start(text: &str, width: usize) -> String {
    let left_out = length(text).saturating_sub(width.saturating_sub(1));
    std::iter::once('…').chain(text.chars().skip(left_out)).collect()
}

/// Less of what was called there says nothing.
const LEAST_REST: usize = 8;
/// Less of a function says nothing.
const LEAST_FUNCTION: usize = 4;

/// `function (file:line) in inner (backward of Node)`.
struct Site<'a> {
    function: &'a str,
    file: &'a str,
    line: &'a str,
    rest: &'a str,
}

impl<'a> Site<'a> {
    fn of(text: &'a str) -> Option<Site<'a>> {
        for (open, _) in text.match_indices(" (") {
            let inside = &text[open + 2..];
            let Some((place, rest)) = inside.split_once(')') else { continue };
            let Some((file, line)) = place.rsplit_once(':') else { continue };
            if !line.is_empty() && line.bytes().all(|digit| digit.is_ascii_digit()) {
                return Some(Site { function: &text[..open], file, line, rest });
            }
        }
        None
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_site_gives_up_folders_first_then_what_was_called_then_its_function_and_never_its_line() {
        let site = "evaluate (/job/evaluation-with-graph/evaluate.py:26) in Linear.forward";
        let shown = [70, 69, 52, 49, 40, 26, 22, 14].map(|width| fitted(site, width));
        assert_eq!(
            shown,
            [
                site,
                "evaluate (…/evaluation-with-graph/evaluate.py:26) in Linear.forward",
                "evaluate (…/evaluate.py:26) in Linear.forward",
                "evaluate (…/evaluate.py:26) in Linear.forward",
                "evaluate (evaluate.py:26) in Linear.for…",
                "evaluate (evaluate.py:26)",
                "eval… (evaluate.py:26)",
                "evaluate.py:26",
            ]
        );
        assert_eq!(shortest(site), "evaluate.py:26");
    }

    #[test]
    fn other_words_keep_their_beginning_and_paths_their_end() {
        assert_eq!(fitted("cuda:0 NVIDIA H200", 9), "cuda:0");
        assert_eq!(fitted("job/host.r0.1234.gtr", 12), "…r0.1234.gtr");
        assert_eq!(fitted("std::sort(int) (a.cpp:7)", 12), "a.cpp:7");
    }
}
