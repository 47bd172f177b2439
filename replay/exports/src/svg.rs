//! A flame graph as an SVG that zooms and searches in any browser, drawn by inferno; with `--diff`, what grew since
//! another trace is red and what shrank is blue.

use std::collections::BTreeMap;
use std::io::{self, Write};

use gputrace_schemas::event::{Bytes, Nanos};
use gputrace_schemas::printable::printable;
use inferno::flamegraph::color::{BackgroundColor, Color, PaletteMap};
use inferno::flamegraph::{self, Options, TextTruncateDirection};

use super::folded::stacks;
use super::{Export, Request, Takes};
use gputrace_analyse::live::When;
use gputrace_trace::words;

pub(super) const ENTRY: Export = Export {
    name: "svg",
    summary: "bytes at a moment by stack as a flame graph, for browsers",
    takes: Takes { before: true, ..Takes::ONE },
    is_binary: false,
    export,
};

/// What inferno calls an amount: [`with_units`] finds the amounts by it.
const UNIT: &str = "bytes";

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    let after = stacks(request, request.source());
    let before = request.before.map(|before| stacks(request, before));
    let time = |time: Nanos| words::time(time);
    let when = match request.when {
        When::Peak => "at its peak".to_owned(),
        When::End => "at the end".to_owned(),
        When::At(at) => format!("after {}", time(at)),
        When::Within(from, to) => format!("at its peak between {} and {}", time(from), time(to)),
        When::Step(number) => format!("at its peak in step {number}"),
    };
    let lines: Vec<String> = match &before {
        None => after.iter().map(|(stack, bytes)| format!("{stack} {bytes}")).collect(),
        Some(before) => difference(before, &after),
    };
    if lines.is_empty() {
        return empty(out, &when);
    }
    let total = |stacks: &BTreeMap<String, u64>| words::bytes(Bytes(stacks.values().sum()));
    let mut palette = palette(&after);
    let mut options = Options::default();
    options.title = match request.before.zip(before.as_ref()) {
        None => format!("GPU memory {when}: {}", total(&after)),
        Some((source, before)) => format!(
            "GPU memory {when}: {}, red: more than in {} ({})",
            total(&after),
            printable(source.path()),
            total(before)
        ),
    };
    options.subtitle = Some(printable(request.source().path()).into_owned());
    UNIT.clone_into(&mut options.count_name);
    "Frame:".clone_into(&mut options.name_type);
    // A line of the program is known by its beginning.
    options.text_truncate_direction = TextTruncateDirection::Right;
    // What has not changed is nearly white.
    let ground = if before.is_some() { GROUND } else { WHITE };
    options.bgcolors = Some(BackgroundColor::Flat(ground));
    options.palette_map = Some(&mut palette);
    // The same picture for the same trace.
    options.hash = true;
    let mut drawn = vec![];
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut drawn)
        .map_err(io::Error::other)?;
    out.write_all(with_units(&String::from_utf8(drawn).map_err(io::Error::other)?).as_bytes())
}

/// Amounts that inferno writes, `(1,048,576 bytes, 1.23%)`, in the units of our reports.
fn with_units(svg: &str) -> String {
    let mut shown = String::with_capacity(svg.len());
    let mut parts = svg.split("</title>").peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            shown += part;
            break;
        }
        shown += &in_units(part).unwrap_or_else(|| part.to_owned());
        shown += "</title>";
    }
    shown
}

/// The same of one title, which ends in an amount.
fn in_units(title: &str) -> Option<String> {
    let (name, amount) = title.rsplit_once('(')?;
    let (bytes, shares) = amount.strip_suffix(')')?.split_once(&format!(" {UNIT}, "))?;
    let bytes: u64 = bytes.replace(',', "").parse().ok()?;
    Some(format!("{name}({}, {})", words::bytes(Bytes(bytes)), shares.replace('%', " %")))
}

const fn color(rgb: u32) -> Color {
    Color { r: (rgb >> 16) as u8, g: (rgb >> 8) as u8, b: rgb as u8 }
}

const WHITE: Color = color(0xffffff);
const GROUND: Color = color(0xdfe4e8);
/// Frames that several owners have a part in.
const SHARED: Color = color(0xd0d5d9);

/// Colours of owners, as the page has them (page/src/colours.ts).
const NAMED: [(&str, u32); 7] = [
    ("PyTorch", 0x0072b2),
    ("PyTorch, unused", 0xd5dce1),
    ("NCCL", 0x7f9c3b),
    ("cuBLAS", 0xa6761d),
    ("cuDNN", 0xaa3377),
    ("CUDA runtime", 0x999999),
    ("unknown", 0x999999),
];
/// Those of others, in the order of their names.
const OTHERS: [u32; 5] = [0xe69f00, 0x009e73, 0xcc79a7, 0xd55e00, 0x8c6bb1];

/// One colour for each owner, pale enough for dark letters, in four shades that tell neighbours apart.
fn palette(stacks: &BTreeMap<String, u64>) -> PaletteMap {
    let mut owners: BTreeMap<&str, Option<&str>> = BTreeMap::new();
    let mut others = OTHERS.iter().cycle();
    let mut colors: BTreeMap<&str, u32> = BTreeMap::new();
    for stack in stacks.keys() {
        let mut frames = stack.split(';');
        let (device, Some(owner)) = (frames.next(), frames.next()) else { continue };
        colors.entry(owner).or_insert_with(|| {
            let named = NAMED.iter().find(|(name, _)| *name == owner).map(|(_, rgb)| *rgb);
            named.or_else(|| others.next().copied()).unwrap_or_default()
        });
        owners.extend(device.map(|device| (device, None)));
        for frame in std::iter::once(owner).chain(frames) {
            let known = owners.entry(frame).or_insert(Some(owner));
            *known = known.filter(|known| *known == owner);
        }
    }
    let mut map = PaletteMap::default();
    map.insert("", SHARED);
    for (frame, owner) in owners {
        map.insert(frame, owner.and_then(|owner| colors.get(owner)).map_or(SHARED, |rgb| shade(*rgb, frame)));
    }
    map
}

/// Between a third and nearly half of the colour, the rest white.
fn shade(rgb: u32, frame: &str) -> Color {
    let sum = frame.bytes().fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    let part = 36 + 4 * (sum % 4);
    let pale = |channel: u8| (255 - (255 - u32::from(channel)) * part / 100) as u8;
    let Color { r, g, b } = color(rgb);
    Color { r: pale(r), g: pale(g), b: pale(b) }
}

/// What inferno draws in two colours: bytes before and bytes after.
fn difference(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> Vec<String> {
    let gone = before.keys().filter(|stack| !after.contains_key(*stack));
    let stacks = after.keys().chain(gone);
    let of = |side: &BTreeMap<String, u64>, stack| side.get(stack).copied().unwrap_or(0);
    stacks.map(|stack| format!("{stack} {} {}", of(before, stack), of(after, stack))).collect()
}

/// Nothing was held; a flame graph of nothing is an error to inferno.
fn empty(out: &mut dyn Write, when: &str) -> io::Result<()> {
    writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="600" height="40"><text x="10" y="25">No GPU memory was held {when}.</text></svg>"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_units_and_names_stay() {
        let svg =
            "<title>f(x) (1 bytes, 2) (1,572,864 bytes, 12.50%; +3.00%)</title><text>(7 bytes, 1%)</text>";
        assert_eq!(
            with_units(svg),
            "<title>f(x) (1 bytes, 2) (1.50 MiB, 12.50 %; +3.00 %)</title><text>(7 bytes, 1%)</text>"
        );
        assert_eq!(with_units("<title>no amount</title>"), "<title>no amount</title>");
    }

    #[test]
    fn a_frame_of_one_owner_has_its_colour_and_a_shared_one_none() {
        let stacks = ["cuda:0;PyTorch;main;a", "cuda:0;NCCL;main;b", "cuda:0;PyTorch;main;c"];
        let map = palette(&stacks.iter().map(|stack| ((*stack).to_owned(), 1)).collect());
        assert_eq!(["", "cuda:0", "main"].map(|frame| map.get(frame)), [Some(SHARED); 3]);
        let is_blue = |frame| map.get(frame).is_some_and(|it| it.b > it.g && it.g > it.r);
        assert!(is_blue("PyTorch") && is_blue("a") && is_blue("c") && !is_blue("b") && !is_blue("NCCL"));
    }

    #[test]
    fn the_page_has_the_same_colours() {
        let page = include_str!("../../../page/src/colours.ts");
        for (name, rgb) in NAMED.iter().filter(|(name, _)| !["PyTorch, unused", "unknown"].contains(name)) {
            let (bare, quoted) = (format!("{name}: \"#{rgb:06x}\""), format!("\"{name}\": \"#{rgb:06x}\""));
            assert!(page.contains(&bare) || page.contains(&quoted), "{name}");
        }
    }
}
