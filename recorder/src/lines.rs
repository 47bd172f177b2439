//! Functions and lines of a few addresses, from the part of a file that says them.
//!
//! A stack of a short program has a dozen native frames, and half of them lie in a C library whose debug information is
//! ten megabytes long and compressed. `addr2line`'s own loader decompresses all of it, parses every unit and sorts every
//! symbol before its first answer: 70 ms of a processor for one address. Here `.debug_aranges` says which units the
//! addresses lie in, sections are decompressed as far as those units reach, and `addr2line` reads the units alone.
//! Whatever that cannot answer for certain is left to `whole.rs` ([`Answer::Unsure`]).

use crate::line::{Line, MOST_INLINED};
use crate::metered::{Meter, Metered};
use addr2line::gimli::{
    Abbreviations, AttributeValue, DW_AT_stmt_list, DW_FORM_GNU_ref_alt, DW_FORM_GNU_strp_alt,
    DW_FORM_ref_addr, DW_FORM_ref_sup4, DW_FORM_ref_sup8, DW_FORM_strp_sup, DebugAbbrev, DebugAbbrevOffset,
    DebugAranges, DebugInfo, DebugLineOffset, Dwarf, EndianSlice, RunTimeEndian, SectionId, UnitHeader,
};
use addr2line::{Context, LookupResult};
use object::{
    CompressionFormat, File, Object, ObjectSection, ObjectSymbol, ObjectSymbolTable, SymbolKind, SymbolScope,
};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use zlib_rs::{Inflate, InflateFlush};

/// Sections that are looked at.
const READ: [SectionId; 10] = [
    SectionId::DebugAranges,
    SectionId::DebugInfo,
    SectionId::DebugAbbrev,
    SectionId::DebugLine,
    SectionId::DebugAddr,
    SectionId::DebugLineStr,
    SectionId::DebugStr,
    SectionId::DebugStrOffsets,
    SectionId::DebugRanges,
    SectionId::DebugRngLists,
];
/// Those of which a part is enough: offsets into them are known before they are read.
const IN_PART: [SectionId; 3] = [SectionId::DebugInfo, SectionId::DebugAbbrev, SectionId::DebugLine];
/// How much of the abbreviations is looked at first: their end is known only when it is there.
const ABBREVIATIONS: usize = 8 << 10;

/// Bytes that are decompressed at once: they stay in a processor's cache.
const AT_ONCE: usize = 128 << 10;
/// How much of that is still there when more is: the start of a part is looked at before its length is known.
const TAIL: usize = 32 << 10;
/// Bytes that a section may have once it is decompressed, those of it that are kept, and those of all: a megabyte of zeros is a kilobyte
/// in a file.
const MOST_UNPACKED: u64 = 1 << 30;
const MOST_KEPT: usize = 256 << 20;
const MOST_KEPT_OF_ALL: usize = 512 << 20;
/// Bits of the largest window that zlib has.
const WINDOW_BITS: u8 = 15;

type Slice<'a> = EndianSlice<'a, RunTimeEndian>;

/// What debug information says about an address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// The functions there, innermost first; the last may lack its name, which the symbol table then has.
    Lines(Vec<Line>),
    /// All of the file must be read.
    Unsure,
}

/// What the debug information of a file says about these addresses of it, in their order.
pub(crate) fn lines(object: &File<'_>, probes: &[u64]) -> Vec<Answer> {
    let mut answers = vec![Answer::Unsure; probes.len()];
    if !has(object, SectionId::DebugInfo) {
        // Nothing to read, here or for `whole.rs`.
        answers.fill(Answer::Lines(Vec::new()));
    } else if let Some(mut sections) = Sections::of(object) {
        let units = sections.prepare(probes);
        let bytes = sections.bytes();
        for (unit, probes_in_it) in &units {
            let meter = Meter::default();
            let Some(context) = context(unit, &bytes, sections.endian, &meter) else { continue };
            for at in probes_in_it {
                let found = probes.get(*at).and_then(|probe| find(&context, *probe));
                if let (Some(answer), Some(found)) = (answers.get_mut(*at), found) {
                    *answer = Answer::Lines(found);
                }
            }
        }
    }
    answers
}

fn find(context: &Context<Metered<'_>>, probe: u64) -> Option<Vec<Line>> {
    // The unit's other half is in another file.
    let LookupResult::Output(frames) = context.find_frames(probe) else { return None };
    let mut frames = frames.ok()?;
    let mut lines = Vec::new();
    while lines.len() < MOST_INLINED
        && let Some(frame) = frames.next().ok()?
    {
        lines.push(Line::of(frame.function.as_ref(), frame.location.as_ref()));
    }
    // The unit says it has the address, and knows nothing of it: another may.
    (!lines.is_empty()).then_some(lines)
}

fn has(object: &File<'_>, id: SectionId) -> bool {
    object.section_by_name(id.name()).is_some_and(|section| section.size() > 0)
}

/// A unit of which everything was kept.
struct Unit {
    info: Vec<u8>,
}

/// The sections of a file that were asked for.
struct Sections<'m> {
    endian: RunTimeEndian,
    sections: HashMap<SectionId, Section<'m>>,
    /// Bytes that may still be kept.
    left: usize,
}

/// A section, in the file or decompressed as far as was needed.
enum Section<'m> {
    Whole(Cow<'m, [u8]>),
    Packed(Packed<'m>),
}

impl Section<'_> {
    /// Bytes from a place on: as many as this, or as there are.
    fn part(&mut self, from: usize, n: usize) -> Cow<'_, [u8]> {
        match self {
            Section::Whole(bytes) => {
                let end = from.saturating_add(n).min(bytes.len());
                Cow::Borrowed(bytes.get(from..end).unwrap_or_default())
            }
            Section::Packed(packed) => Cow::Owned(packed.part(from, n)),
        }
    }

    /// Bytes from a place on, for [`Section::bytes`] too; `left` says how many may be kept. What does not fit is left out.
    fn keep(&mut self, from: usize, n: usize, left: &mut usize) {
        if let Section::Packed(packed) = self {
            let part = packed.part(from, n.min(*left));
            *left -= part.len();
            if !part.is_empty() {
                packed.kept.push((from, part));
            }
        }
    }

    /// What was kept, where it belongs. What lies between is zero, and costs no memory.
    fn bytes(&self) -> Cow<'_, [u8]> {
        match self {
            Section::Whole(bytes) => Cow::Borrowed(bytes),
            Section::Packed(packed) => {
                if let [(0, part)] = &packed.kept[..] {
                    return Cow::Borrowed(part);
                }
                let ends = packed.kept.iter().map(|(from, part)| from + part.len());
                let mut bytes = vec![0; ends.max().unwrap_or_default()];
                for (from, part) in &packed.kept {
                    if let Some(place) = bytes.get_mut(*from..from + part.len()) {
                        place.copy_from_slice(part);
                    }
                }
                Cow::Owned(bytes)
            }
        }
    }
}

/// A zlib stream, and parts of what it holds. What nobody asked for is not kept: to clear pages for megabytes takes half as
/// long as to decompress them.
struct Packed<'m> {
    from: &'m [u8],
    stream: Inflate,
    /// What was decompressed last, and where it begins.
    last: Vec<u8>,
    at: usize,
    kept: Vec<(usize, Vec<u8>)>,
}

impl<'m> Packed<'m> {
    fn new(from: &'m [u8]) -> Packed<'m> {
        Packed { from, stream: Inflate::new(true, WINDOW_BITS), last: Vec::new(), at: 0, kept: Vec::new() }
    }

    fn part(&mut self, from: usize, n: usize) -> Vec<u8> {
        if from < self.at {
            // Parts are mostly asked for in their order.
            (self.stream, self.at) = (Inflate::new(true, WINDOW_BITS), 0);
            self.last.clear();
        }
        let (mut part, n) = (Vec::new(), n.min(MOST_KEPT));
        while part.len() < n {
            let within = (from + part.len()).saturating_sub(self.at);
            let known = self.last.get(within..).unwrap_or_default();
            part.extend_from_slice(known.get(..n - part.len()).unwrap_or(known));
            if part.len() < n && !self.go_on() {
                break;
            }
        }
        part
    }

    /// Decompresses the next bytes; false at the end, and where what is damaged ends.
    fn go_on(&mut self) -> bool {
        if self.stream.total_out() >= MOST_UNPACKED {
            return false;
        }
        let old = self.last.len().saturating_sub(TAIL);
        self.last.drain(..old);
        self.at += old;
        let tail = self.last.len();
        self.last.resize(tail + AT_ONCE, 0);
        let before = (self.stream.total_in(), self.stream.total_out());
        let from = self.from.get(before.0 as usize..).unwrap_or_default();
        let into = self.last.get_mut(tail..).unwrap_or_default();
        let status = self.stream.decompress(from, into, InflateFlush::NoFlush);
        self.last.truncate(tail + (self.stream.total_out() - before.1) as usize);
        let has_come_on = before != (self.stream.total_in(), self.stream.total_out());
        has_come_on && status.is_ok()
    }
}

impl<'m> Sections<'m> {
    /// Of an executable file or library that says which units its addresses are in.
    fn of(object: &File<'m>) -> Option<Sections<'m>> {
        let endian = if object.is_little_endian() { RunTimeEndian::Little } else { RunTimeEndian::Big };
        // What `dwz` shares between files has no meaning alone.
        if !matches!(object.gnu_debugaltlink(), Ok(None)) {
            return None;
        }
        let mut sections = HashMap::new();
        for id in READ {
            if let Some(section) = object.section_by_name(id.name()) {
                let packed = section.compressed_data().ok()?;
                let section = match packed.format {
                    CompressionFormat::Zstandard if packed.uncompressed_size > MOST_KEPT as u64 => {
                        return None;
                    }
                    CompressionFormat::Zlib => Section::Packed(Packed::new(packed.data)),
                    _ => Section::Whole(packed.decompress().ok()?),
                };
                sections.insert(id, section);
            }
        }
        sections.contains_key(&SectionId::DebugAranges).then_some(Sections {
            endian,
            sections,
            left: MOST_KEPT_OF_ALL,
        })
    }

    /// Keeps what the addresses need: units, and the addresses that only they have.
    fn prepare(&mut self, probes: &[u64]) -> Vec<(Unit, Vec<usize>)> {
        let units = self.units(probes);
        let prepared = units.into_iter().filter_map(|(start, probes)| Some((self.unit(start)?, probes)));
        let prepared: Vec<_> = prepared.collect();
        if !prepared.is_empty() {
            for (_, section) in self.sections.iter_mut().filter(|(id, _)| !IN_PART.contains(id)) {
                section.keep(0, usize::MAX, &mut self.left);
            }
        }
        prepared
    }

    /// Where the unit of each address begins. An address that several have, or none, is nobody's.
    fn units(&mut self, probes: &[u64]) -> BTreeMap<usize, Vec<usize>> {
        let mut sorted: Vec<(u64, usize)> = probes.iter().copied().zip(0..).collect();
        sorted.sort_unstable();
        let mut owners: Vec<Option<usize>> = vec![None; probes.len()];
        let mut is_shared = vec![false; probes.len()];
        let aranges = self.sections.get_mut(&SectionId::DebugAranges);
        let aranges = aranges.map(|section| section.part(0, usize::MAX)).unwrap_or_default();
        let mut headers = DebugAranges::new(&aranges, self.endian).headers();
        while let Ok(Some(header)) = headers.next() {
            let unit = header.debug_info_offset().0;
            let mut entries = header.entries();
            while let Ok(Some(entry)) = entries.next() {
                let range = entry.range();
                let first = sorted.partition_point(|(probe, _)| *probe < range.begin);
                let here = sorted.iter().skip(first).take_while(|(probe, _)| *probe < range.end);
                for (_, at) in here {
                    if let (Some(owner), Some(is_shared)) = (owners.get_mut(*at), is_shared.get_mut(*at)) {
                        *is_shared |= owner.is_some_and(|owner| owner != unit);
                        *owner = Some(unit);
                    }
                }
            }
        }
        let mut units: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (at, (owner, is_shared)) in owners.into_iter().zip(is_shared).enumerate() {
            if let Some(unit) = owner.filter(|_| !is_shared) {
                units.entry(unit).or_default().push(at);
            }
        }
        units
    }

    /// Keeps the unit that begins here, its abbreviations and its lines. `None` for one that does not stand for itself.
    fn unit(&mut self, start: usize) -> Option<Unit> {
        let endian = self.endian;
        let section = self.sections.get_mut(&SectionId::DebugInfo)?;
        let n = length(&section.part(start, 12), endian)?;
        self.left = self.left.checked_sub(n)?;
        let info = section.part(start, n).into_owned();
        let header = DebugInfo::new(&info, endian).units().next().ok()??;
        let abbreviations = self.abbreviations(&header)?;
        if refers_elsewhere(&abbreviations) {
            return None;
        }
        let mut entries = header.entries(&abbreviations);
        let lines = entries.next_dfs().ok()??.attr_value(DW_AT_stmt_list);
        if let Some(AttributeValue::DebugLineRef(DebugLineOffset(at))) = lines {
            let section = self.sections.get_mut(&SectionId::DebugLine)?;
            let n = length(&section.part(at, 12), endian)?;
            section.keep(at, n, &mut self.left);
        }
        Some(Unit { info })
    }

    fn abbreviations(&mut self, header: &UnitHeader<Slice<'_>>) -> Option<Abbreviations> {
        let section = self.sections.get_mut(&SectionId::DebugAbbrev)?;
        let from = header.debug_abbrev_offset().0;
        let mut n = ABBREVIATIONS;
        loop {
            let part = section.part(from, n);
            let meter = Meter::default();
            let read = meter.read(SectionId::DebugAbbrev, &part, self.endian);
            match DebugAbbrev::from(read).abbreviations(DebugAbbrevOffset(0)) {
                Ok(abbreviations) => {
                    drop(part);
                    section.keep(from, n, &mut self.left);
                    return Some(abbreviations);
                }
                // Its end is further on.
                Err(_) if part.len() == n && !meter.is_over() => n *= 2,
                Err(_) => return None,
            }
        }
    }

    /// All that was kept.
    fn bytes(&self) -> HashMap<SectionId, Cow<'_, [u8]>> {
        // Units say themselves where they are.
        let read = self.sections.iter().filter(|(id, _)| **id != SectionId::DebugAranges);
        read.map(|(id, section)| (*id, section.bytes())).collect()
    }
}

/// Debug information that consists of this unit.
fn context<'a>(
    unit: &'a Unit,
    sections: &'a HashMap<SectionId, Cow<'a, [u8]>>,
    endian: RunTimeEndian,
    meter: &'a Meter,
) -> Option<Context<Metered<'a>>> {
    let load = |id| {
        let bytes = match id {
            SectionId::DebugInfo => &unit.info,
            _ => sections.get(&id).map_or(&[][..], |bytes| bytes),
        };
        Ok::<_, ()>(meter.read(id, bytes, endian))
    };
    Context::from_dwarf(Dwarf::load(load).ok()?).ok()
}

/// Bytes of what begins here, its length included (DWARF 5, 7.4).
fn length(bytes: &[u8], endian: RunTimeEndian) -> Option<usize> {
    let is_little = endian == RunTimeEndian::Little;
    let short = bytes
        .first_chunk()
        .map(|it| if is_little { u32::from_le_bytes(*it) } else { u32::from_be_bytes(*it) })?;
    if short < 0xffff_fff0 {
        return (short as usize).checked_add(4);
    }
    let long = bytes.get(4..)?.first_chunk();
    let long = long.map(|it| if is_little { u64::from_le_bytes(*it) } else { u64::from_be_bytes(*it) })?;
    usize::try_from(long).ok()?.checked_add(12)
}

/// Whether a unit with these abbreviations may name entries of other units.
fn refers_elsewhere(abbreviations: &Abbreviations) -> bool {
    let elsewhere = [
        DW_FORM_ref_addr,
        DW_FORM_ref_sup4,
        DW_FORM_ref_sup8,
        DW_FORM_strp_sup,
        DW_FORM_GNU_ref_alt,
        DW_FORM_GNU_strp_alt,
    ];
    let mut all = (1..).map_while(|code| abbreviations.get(code));
    all.any(|it| it.attributes().iter().any(|attribute| elsewhere.contains(&attribute.form())))
}

/// A symbol that may be the one an address lies in. Ordered as `object::SymbolMap` prefers them: the nearest before the
/// address, and of several there the one that says most.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    address: u64,
    preference: Reverse<(u8, Reverse<usize>)>,
    size: u64,
}

/// The symbols at these addresses, by one walk over the table: to sort a million of them takes longer than many walks.
pub(crate) fn symbols<'m>(object: &File<'m>, probes: &[u64]) -> Vec<Option<&'m str>> {
    let mut none = vec![None; probes.len()];
    let Some(table) = object.symbol_table().or_else(|| object.dynamic_symbol_table()) else { return none };
    let mut sorted: Vec<(u64, usize)> = probes.iter().copied().zip(0..).collect();
    sorted.sort_unstable();
    let mut best: Vec<Option<(Candidate, object::SymbolIndex)>> = vec![None; probes.len()];
    for symbol in table.symbols() {
        let at = sorted.partition_point(|(probe, _)| *probe < symbol.address());
        let Some(slot) = best.get_mut(at) else { continue };
        if slot.is_some_and(|(best, _)| best.address > symbol.address()) || !symbol.is_definition() {
            continue;
        }
        let Some(preference) = preference(&symbol) else { continue };
        let preference = Reverse((preference, Reverse(symbol.index().0)));
        let candidate = Candidate { address: symbol.address(), preference, size: symbol.size() };
        if slot.is_none_or(|(best, _)| best < candidate) && symbol.name().is_ok_and(|name| !name.is_empty()) {
            *slot = Some((candidate, symbol.index()));
        }
    }
    let mut nearest = None;
    for ((probe, at), slot) in sorted.into_iter().zip(best) {
        nearest = slot.or(nearest);
        let Some((candidate, index)) = nearest else { continue };
        let is_inside = match candidate.size {
            0 => next_boundary(object, candidate.address).is_none_or(|next| probe < next),
            size => probe - candidate.address < size,
        };
        if let (true, Some(found)) = (is_inside, none.get_mut(at)) {
            *found = table.symbol_by_index(index).ok().and_then(|symbol| symbol.name().ok());
        }
    }
    none
}

/// As `object::SymbolMap` does it; lower is better, `None` for what is no symbol of code or data.
fn preference<'m>(symbol: &impl ObjectSymbol<'m>) -> Option<u8> {
    let kind = match symbol.kind() {
        SymbolKind::Text | SymbolKind::Data => 0,
        SymbolKind::Unknown => 1,
        _ => return None,
    };
    let scope = match symbol.scope() {
        SymbolScope::Dynamic => 0,
        SymbolScope::Linkage => 1,
        SymbolScope::Compilation => 2,
        SymbolScope::Unknown => 3,
    };
    Some(kind * 8 + u8::from(symbol.size() == 0) * 4 + scope)
}

/// Where a symbol without a size ends: at the next symbol or the end of a section.
fn next_boundary(object: &File<'_>, address: u64) -> Option<u64> {
    let table = object.symbol_table().or_else(|| object.dynamic_symbol_table())?;
    let is_one = |symbol: &object::Symbol<'_, '_>| symbol.is_definition() && preference(symbol).is_some();
    let symbols = table.symbols().filter(is_one).map(|symbol| symbol.address());
    let sections = object.sections().map(|section| section.address().saturating_add(section.size()));
    symbols.chain(sections).filter(|boundary| *boundary > address).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the loader says about an address.
    fn reference(loader: &addr2line::Loader, probe: u64) -> (Vec<Line>, Option<String>) {
        let mut lines = Vec::new();
        let mut frames = loader.find_frames(probe).expect("frames");
        while let Some(frame) = frames.next().expect("a frame") {
            lines.push(Line::of(frame.function.as_ref(), frame.location.as_ref()));
        }
        (lines, loader.find_symbol(probe).map(str::to_owned))
    }

    /// Addresses all over a file's functions, and some that are in none.
    fn probes(object: &File<'_>, n: usize) -> Vec<u64> {
        let table = object.symbol_table().or_else(|| object.dynamic_symbol_table()).expect("symbols");
        let functions: Vec<_> =
            table.symbols().filter(|it| it.kind() == SymbolKind::Text && it.size() > 0).collect();
        let some = functions.iter().step_by((functions.len() / n).max(1));
        some.flat_map(|it| [it.address(), it.address() + it.size() / 2, it.address() + it.size()])
            .chain([0, 1, u64::MAX - 1])
            .collect()
    }

    /// Whatever is answered is what the loader answers; how many addresses of how many.
    fn compare(path: &std::path::Path, n: usize) -> (usize, usize) {
        let bytes = std::fs::read(path).expect("readable");
        let object = File::parse(&*bytes).expect("an object");
        let probes = probes(&object, n);
        let loader = addr2line::Loader::new(path).expect("readable");
        let answers = lines(&object, &probes);
        let names = symbols(&object, &probes);
        let mut n_sure = 0;
        for ((probe, answer), name) in probes.iter().zip(answers).zip(names) {
            let (lines, symbol) = reference(&loader, *probe);
            assert_eq!(name.map(str::to_owned), symbol, "{probe:#x} of {}", path.display());
            if let Answer::Lines(found) = answer {
                assert_eq!(found, lines, "{probe:#x} of {}", path.display());
                n_sure += 1;
            }
        }
        (n_sure, probes.len())
    }

    #[test]
    fn a_part_of_a_file_says_what_all_of_it_does() {
        let (n_sure, n) = compare(&std::env::current_exe().expect("ours"), 60);
        assert!(n > 60, "{n_sure} of {n}");
        // Compressed, and of thousands of units, where it is installed.
        let debug = std::path::Path::new("/usr/lib/debug/.build-id");
        let folders = std::fs::read_dir(debug).into_iter().flatten().flatten();
        let files =
            folders.flat_map(|folder| std::fs::read_dir(folder.path()).into_iter().flatten().flatten());
        let largest = files.map(|file| (file.metadata().map_or(0, |it| it.len()), file.path())).max();
        if let Some((_, path)) = largest {
            let (n_sure, n) = compare(&path, 60);
            assert!(n_sure * 2 > n, "{n_sure} of {n} in {}", path.display());
        }
    }

    #[test]
    fn a_stream_is_read_as_far_as_it_is_needed_and_never_further_than_it_goes() {
        // A header of zlib (RFC 1950), then stored blocks (RFC 1951, 3.2.4).
        let (mut packed, mut plain) = (vec![0x78, 0x9c], Vec::new());
        for (part, is_last) in [(vec![b'a'; 65_535], 0_u8), (vec![b'b'; 4_465], 1)] {
            let length = part.len() as u16;
            packed.push(is_last);
            packed.extend(length.to_le_bytes());
            packed.extend((!length).to_le_bytes());
            packed.extend(&part);
            plain.extend(part);
        }
        let mut section = Section::Packed(Packed::new(&packed));
        for (from, n) in [(0, 1_000), (65_000, 1_000), (300, 70_000), (69_999, 1), (0, 70_000)] {
            let end = (from + n).min(plain.len());
            assert_eq!(*section.part(from, n), plain[from..end], "{from} {n}");
        }
        // Its end has no sum of what it holds: what is there is there.
        assert_eq!(section.part(0, usize::MAX).len(), plain.len());
        assert_eq!(section.part(70_001, 5).len(), 0);
        section.keep(65_530, 10, &mut MOST_KEPT.clone());
        let kept = section.bytes();
        assert_eq!((kept.len(), &kept[65_530..], kept[65_529]), (65_540, &plain[65_530..65_540], 0));
    }
}
