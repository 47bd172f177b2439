//! What a program file says about itself before it runs.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Context;
use object::elf;
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Sym};
use object::{Endianness, FileKind, ReadCache, ReadRef};

/// An ELF file.
pub(crate) struct Elf {
    /// `EM_X86_64` and its like, and 32 or 64 bits.
    pub(crate) machine: (u16, u8),
    /// It names a program interpreter: the dynamic loader will run, and look at `LD_PRELOAD`.
    pub(crate) has_interpreter: bool,
    /// Functions that it defines for others, sorted.
    pub(crate) exports: BTreeSet<String>,
    /// Functions that it takes from others, sorted.
    pub(crate) imports: BTreeSet<String>,
    /// Libraries that it names.
    pub(crate) needed: Vec<String>,
    /// Newest version of the C library that it asks for, if it asks: `(2, 34)`.
    pub(crate) glibc: Option<(u32, u32)>,
}

impl Elf {
    /// Reads a file; `None` if it is not an ELF file.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Option<Elf>> {
        let unread = || format!("cannot read {}", path.display());
        let file = std::fs::File::open(path).with_context(unread)?;
        anyhow::ensure!(!file.metadata().with_context(unread)?.is_dir(), "{}: it is a folder", unread());
        // Only the sections that are asked for are read: most of a file is code and debug information.
        let data = ReadCache::new(file);
        let damaged = || format!("{} is a damaged ELF file", path.display());
        match FileKind::parse(&data) {
            Ok(FileKind::Elf64) => {
                parse::<elf::FileHeader64<Endianness>>(&data).map(Some).with_context(damaged)
            }
            Ok(FileKind::Elf32) => {
                parse::<elf::FileHeader32<Endianness>>(&data).map(Some).with_context(damaged)
            }
            Ok(_) | Err(_) => Ok(None),
        }
    }
}

fn parse<'data, H: FileHeader<Endian = Endianness>>(data: impl ReadRef<'data>) -> anyhow::Result<Elf> {
    let header = H::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let segments = header.program_headers(endian, data)?;
    let (mut exports, mut imports) = (BTreeSet::new(), BTreeSet::new());
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    for symbol in symbols.iter() {
        let name = String::from_utf8_lossy(symbol.name(endian, symbols.strings())?).into_owned();
        if symbol.st_type() == elf::STT_FUNC && !symbol.is_undefined(endian) {
            exports.insert(name);
        } else if symbol.is_undefined(endian) && !name.is_empty() {
            imports.insert(name);
        }
    }
    let mut needed = Vec::new();
    if let Some((entries, link)) = sections.dynamic(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        for entry in entries.iter().filter(|entry| entry.tag(endian) == elf::DT_NEEDED) {
            needed.push(String::from_utf8_lossy(entry.string(endian, strings)?).into_owned());
        }
    }
    let mut glibc = None;
    if let Some((mut needs, link)) = sections.gnu_verneed(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        while let Some((_, mut versions)) = needs.next()? {
            while let Some(version) = versions.next()? {
                let name = version.name(endian, strings)?;
                glibc = glibc.max(glibc_version(&String::from_utf8_lossy(name)));
            }
        }
    }
    Ok(Elf {
        machine: (header.e_machine(endian).0, header.e_ident().class.0),
        has_interpreter: segments.iter().any(|segment| segment.p_type(endian) == elf::PT_INTERP),
        exports,
        imports,
        needed,
        glibc,
    })
}

/// `GLIBC_2.34` as `(2, 34)`.
fn glibc_version(name: &str) -> Option<(u32, u32)> {
    let (major, minor) = name.strip_prefix("GLIBC_")?.split_once('.')?;
    Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?))
}

/// Newest version that a C library's file defines.
pub(crate) fn defined_glibc(path: &Path) -> Option<(u32, u32)> {
    let data = &ReadCache::new(std::fs::File::open(path).ok()?);
    let header = elf::FileHeader64::<Endianness>::parse(data).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, data).ok()?;
    let (mut definitions, link) = sections.gnu_verdef(endian, data).ok()??;
    let strings = sections.strings(endian, data, link).ok()?;
    let mut newest = None;
    while let Ok(Some((_, mut names))) = definitions.next() {
        while let Ok(Some(name)) = names.next() {
            let name = name.name(endian, strings).ok()?;
            newest = newest.max(glibc_version(&String::from_utf8_lossy(name)));
        }
    }
    newest
}

/// The version of this system's C library.
pub(crate) fn system_glibc() -> Option<(u32, u32)> {
    const PLACES: [&str; 4] = [
        "/lib/x86_64-linux-gnu/libc.so.6",
        "/lib64/libc.so.6",
        "/usr/lib/libc.so.6",
        "/lib/aarch64-linux-gnu/libc.so.6",
    ];
    PLACES.iter().find_map(|path| defined_glibc(Path::new(path)))
}
