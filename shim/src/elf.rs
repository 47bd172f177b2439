//! Symbols of loaded objects, found in their own tables.
//!
//! `dlsym` would do, but it is what we interpose: it takes the loader's lock, may call `malloc`, and leaves a
//! `dlerror` behind that the program would see. Reading `DT_GNU_HASH` does none of that.
//!
//! The list of objects is the C library's to give (`dl_iterate_phdr`), but not under its name: sanitizers and others stand
//! in for that function, and are not ready yet when a program's first `dlsym` comes. So its address is read from the C
//! library's own table, like that of every function that is called here ([`c_library`]).

use crate::arch;
use crate::asked;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// An object the loader has mapped.
#[derive(Clone, Copy)]
pub(crate) struct Object {
    base: usize,
    /// First and last byte that its segments take.
    start: usize,
    end: usize,
    dynamic: *const Entry,
    path: *const c_char,
    headers: *const libc::Elf64_Phdr,
    n_headers: u16,
}

#[repr(C)]
struct Entry {
    tag: i64,
    value: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

// Tags of the dynamic section (gABI 4.1, chapter 5; DT_GNU_HASH from binutils' elf/common.h).
const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_SONAME: i64 = 14;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const STT_GNU_IFUNC: u8 = 10;

#[repr(C)]
#[derive(Clone, Copy)]
struct Relocation {
    offset: usize,
    info: u64,
    addend: i64,
}

const DT_PLTRELSZ: i64 = 2;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;
const DT_RELACOUNT: i64 = 0x6fff_fff9;
/// Of the relocations that are not for calls, so many are looked at: C++ libraries have millions.
const MOST_RELOCATIONS: usize = 1 << 16;

const PAGE: usize = 4096;

/// Pages from a function of the C library down to its first: glibc's code has some 400 in all.
const MOST_PAGES: usize = 4096;

/// The head of an object in memory (gABI 4.1, figure 4-3), for 64 bits.
#[repr(C)]
struct Head {
    magic: [u8; 16],
    kind: u16,
    machine: u16,
    version: u32,
    entry: usize,
    program_headers: usize,
    section_headers: usize,
    flags: u32,
    size: u16,
    program_header_size: u16,
    n_program_headers: u16,
}

/// `ELFMAG`, `ELFCLASS64`, `ELFDATA2LSB`, and `ET_DYN`.
const MAGIC: [u8; 6] = [0x7f, b'E', b'L', b'F', 2, 1];
const SHARED_OBJECT: u16 = 3;

unsafe extern "C" {
    // Never called here. Each library calls the first at its end, and each file that is compiled calls the second, so
    // nobody stands in for them: their addresses lie in the C library.
    fn __cxa_finalize(library: *mut c_void);
    fn __errno_location() -> *mut c_int;
}

/// The C library, found without a call to it: from a function of it down to its first page.
#[cold]
fn find_c_library() -> Option<Object> {
    /// Its first page, once it was found: whether a page can be read may not be asked at all times.
    static FIRST: AtomicUsize = AtomicUsize::new(0);
    let anchors = [__cxa_finalize as *const () as usize, __errno_location as *const () as usize];
    let known = FIRST.load(Ordering::Relaxed);
    anchors.iter().find_map(|anchor| {
        if known != 0 {
            // SAFETY: it was read as the C library's first page, which stays.
            return unsafe { Object::from_memory(known, *anchor) };
        }
        let first = anchor & !(PAGE - 1);
        let pages = (0..MOST_PAGES).map_while(|n| first.checked_sub(n * PAGE));
        let object = pages
            .take_while(|page| asked::can_read(*page))
            // SAFETY: the page could just be read, and the C library, which it mostly is a part of, stays.
            .find_map(|page| unsafe { Object::from_memory(page, *anchor) })?;
        object.symbol(c"dl_iterate_phdr")?;
        FIRST.store(object.start, Ordering::Relaxed);
        Some(object)
    })
}

/// Address of a function of the C library's own, whoever else has one of that name. `None` if it cannot be found.
pub(crate) fn c_library(name: &CStr) -> Option<usize> {
    // Threads had a library of their own before glibc 2.34, and `dlopen` had.
    find_c_library()?.symbol(name).or_else(|| {
        let is_part = |object: &Object| [c"libpthread.so.0", c"libdl.so.2"].contains(&object.soname());
        let mut found = None;
        find(|object| {
            if is_part(object) {
                found = object.symbol(name);
            }
            found.is_some()
        });
        found
    })
}

type Visit = unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int;
type Iterate = unsafe extern "C" fn(Visit, *mut c_void) -> c_int;

/// The C library's own `dl_iterate_phdr`: takes the loader's lock, calls nothing of others. -1 if it cannot be found.
///
/// # Safety
/// `visit` can be called with `data`.
pub(crate) unsafe fn iterate(visit: Visit, data: *mut c_void) -> c_int {
    static ITERATE: AtomicUsize = AtomicUsize::new(0);
    let mut address = ITERATE.load(Ordering::Relaxed);
    if address == 0 {
        let Some(found) = find_c_library().and_then(|library| library.symbol(c"dl_iterate_phdr")) else {
            return -1;
        };
        address = found;
        ITERATE.store(address, Ordering::Relaxed);
    }
    // SAFETY: the C library's function of this name has this type.
    let iterate: Iterate = unsafe { core::mem::transmute(address) };
    // SAFETY: the caller's promise.
    unsafe { iterate(visit, data) }
}

/// The first loaded object that `wanted` says yes to. Takes the loader's lock: for cold moments only.
pub(crate) fn find(mut wanted: impl FnMut(&Object) -> bool) -> Option<Object> {
    struct Search<'a> {
        wanted: &'a mut dyn FnMut(&Object) -> bool,
        found: Option<Object>,
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: dl_iterate_phdr passes back what `find` gave it.
        let search = unsafe { &mut *search.cast::<Search<'_>>() };
        // SAFETY: the loader describes the object for the length of this call.
        let info = unsafe { &*info };
        if let Some(object) = Object::from_headers(info)
            && (search.wanted)(&object)
        {
            search.found = Some(object);
            return 1;
        }
        0
    }
    let mut search = Search { wanted: &mut wanted, found: None };
    // SAFETY: `visit` gets the search and nothing else.
    unsafe { iterate(visit, (&raw mut search).cast()) };
    search.found
}

/// Address of the first object's symbol of this name; null if there is none.
///
/// # Safety
/// The name is a C string.
pub(crate) unsafe extern "C" fn lookup(name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    let mut found = core::ptr::null_mut();
    find(|object| match object.symbol(name) {
        Some(address) => {
            found = address as *mut c_void;
            true
        }
        None => false,
    });
    found
}

/// Whether this library came into a process that ran already.
static IS_LATE: AtomicBool = AtomicBool::new(false);

/// Says that this library came into a process that ran already: it stands before nobody.
pub(crate) fn note_late() {
    IS_LATE.store(true, Ordering::Relaxed);
    N_STARTUP.store(0, Ordering::Relaxed);
}

/// Whether this library came into a process that ran already.
#[inline]
pub(crate) fn is_late() -> bool {
    IS_LATE.load(Ordering::Relaxed)
}

/// The first object behind this library that `wanted` says yes to: the one that the linker would have found without us. All
/// others are, where this library came last.
pub(crate) fn find_behind_us(mut wanted: impl FnMut(&Object) -> bool) -> Option<Object> {
    let mut is_behind = is_late();
    find(|object| {
        if object.is_ours() {
            is_behind = true;
            return false;
        }
        is_behind && wanted(object)
    })
}

/// The function of this name that the program would have without us; 0 if there is none.
pub(crate) fn function_behind_us(name: &CStr) -> usize {
    let mut address = 0;
    find_behind_us(|object| {
        address = object.symbol(name).unwrap_or(0);
        address != 0
    });
    address
}

/// How many objects were unloaded so far. Takes the loader's lock: for cold moments only.
pub(crate) fn n_unloaded() -> u64 {
    n_changes().1
}

/// How many objects were loaded and unloaded so far. Takes the loader's lock: for cold moments only.
pub(crate) fn n_changes() -> (u64, u64) {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, counts: *mut c_void) -> c_int {
        // SAFETY: the loader describes the object for the length of this call.
        let info = unsafe { &*info };
        // SAFETY: dl_iterate_phdr passes back what `n_changes` gave it.
        unsafe { *counts.cast::<(u64, u64)>() = (info.dlpi_adds, info.dlpi_subs) };
        1
    }
    let mut counts = (0_u64, 0_u64);
    // SAFETY: `visit` gets the numbers and nothing else.
    unsafe { iterate(visit, (&raw mut counts).cast()) };
    counts
}

/// Objects that the loader had when the process began: it never lets go of them.
static N_STARTUP: AtomicUsize = AtomicUsize::new(0);

/// Says that no object was loaded yet by the program itself.
pub(crate) fn note_startup(n_objects: usize) {
    let _ = N_STARTUP.compare_exchange(0, n_objects, Ordering::Relaxed, Ordering::Relaxed);
}

/// How many objects the loader had when the process began.
pub(crate) fn n_startup() -> usize {
    N_STARTUP.load(Ordering::Relaxed)
}

/// Whether the address lies in an object that the loader had when the process began.
pub(crate) fn is_startup(address: usize) -> bool {
    let mut n_objects = 0;
    let found = find(|object| {
        n_objects += 1;
        object.contains(address)
    });
    found.is_some() && n_objects <= n_startup()
}

/// The loaded object with this `DT_SONAME`.
pub(crate) fn by_soname(name: &CStr) -> Option<Object> {
    find(|object| object.soname() == name)
}

/// The loaded object that has this address.
pub(crate) fn by_address(address: usize) -> Option<Object> {
    find(|object| object.contains(address))
}

/// Whether the address lies in code of a loaded object.
pub(crate) fn is_code(address: usize) -> bool {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, sought: *mut c_void) -> c_int {
        // SAFETY: the loader describes the object for the length of this call.
        let info = unsafe { &*info };
        // SAFETY: dl_iterate_phdr passes back what `is_code` gave it.
        let address = unsafe { *sought.cast::<usize>() };
        let has = (0..usize::from(info.dlpi_phnum)).any(|i| {
            // SAFETY: the loader's array has `dlpi_phnum` entries.
            let header = unsafe { &*info.dlpi_phdr.wrapping_add(i) };
            let start = (info.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
            header.p_type == libc::PT_LOAD
                && header.p_flags & libc::PF_X != 0
                && (start..start.saturating_add(header.p_memsz as usize)).contains(&address)
        });
        c_int::from(has)
    }
    let mut sought = address;
    // SAFETY: `visit` gets the address and nothing else.
    unsafe { iterate(visit, (&raw mut sought).cast()) == 1 }
}

impl Object {
    /// The object whose first page this is, if `inside` is an address of it.
    ///
    /// # Safety
    /// The page can be read, and what is mapped there stays.
    unsafe fn from_memory(page: usize, inside: usize) -> Option<Object> {
        // SAFETY: the caller's promise; the head is shorter than a page.
        let head = unsafe { &*(page as *const Head) };
        let end = head
            .program_headers
            .checked_add(usize::from(head.n_program_headers) * size_of::<libc::Elf64_Phdr>())?;
        let is_head = head.magic.starts_with(&MAGIC)
            && head.kind == SHARED_OBJECT
            && usize::from(head.program_header_size) == size_of::<libc::Elf64_Phdr>()
            && end <= PAGE;
        if !is_head {
            return None;
        }
        // Libraries are linked to begin at address 0 (`from_headers` would otherwise not have `inside` in it).
        // SAFETY: of the structure's fields all zeros are a value.
        let mut info: libc::dl_phdr_info = unsafe { core::mem::zeroed() };
        info.dlpi_addr = page as u64;
        info.dlpi_phdr = (page + head.program_headers) as *const _;
        info.dlpi_phnum = head.n_program_headers;
        Object::from_headers(&info).filter(|object| object.start == page && object.contains(inside))
    }

    fn from_headers(info: &libc::dl_phdr_info) -> Option<Object> {
        let base = info.dlpi_addr as usize;
        let (mut start, mut end, mut dynamic) = (usize::MAX, 0, core::ptr::null());
        for i in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: the loader's array has `dlpi_phnum` entries.
            let header = unsafe { &*info.dlpi_phdr.wrapping_add(i) };
            let at = base.wrapping_add(header.p_vaddr as usize);
            match header.p_type {
                libc::PT_LOAD => {
                    start = start.min(at);
                    end = end.max(at.wrapping_add(header.p_memsz as usize));
                }
                libc::PT_DYNAMIC => dynamic = at as *const Entry,
                _ => {}
            }
        }
        (!dynamic.is_null() && start < end).then_some(Object {
            base,
            start,
            end,
            dynamic,
            path: info.dlpi_name,
            headers: info.dlpi_phdr.cast(),
            n_headers: info.dlpi_phnum,
        })
    }

    /// Whether the address lies between the object's first and last byte.
    pub(crate) fn contains(&self, address: usize) -> bool {
        (self.start..self.end).contains(&address)
    }

    /// Whether it is this library.
    pub(crate) fn is_ours(&self) -> bool {
        self.contains(gnu_hash as *const () as usize)
    }

    /// Path under which the loader found it; empty for the program itself.
    pub(crate) fn path(&self) -> &[u8] {
        // SAFETY: the loader keeps the name as long as the object, and we ask only for objects that stay.
        if self.path.is_null() { b"" } else { unsafe { CStr::from_ptr(self.path) }.to_bytes() }
    }

    /// Byte after the last.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// First byte.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    fn entry(&self, tag: i64) -> Option<usize> {
        let mut at = self.dynamic;
        loop {
            // SAFETY: the loader mapped the dynamic section, which ends with DT_NULL.
            let entry = unsafe { &*at };
            if entry.tag == DT_NULL {
                return None;
            }
            if entry.tag == tag {
                return Some(entry.value);
            }
            // SAFETY: as above; this was not the last one.
            at = unsafe { at.add(1) };
        }
    }

    /// glibc turns these entries into addresses when it loads an object; musl leaves them as offsets, and so does
    /// the kernel's own vDSO.
    fn address(&self, tag: i64) -> Option<usize> {
        let value = self.entry(tag)?;
        Some(if value < self.base { value.wrapping_add(self.base) } else { value })
    }

    /// `DT_SONAME`; empty if there is none.
    pub(crate) fn soname(&self) -> &CStr {
        let (Some(strings), Some(offset)) = (self.address(DT_STRTAB), self.entry(DT_SONAME)) else {
            return c"";
        };
        // SAFETY: the loader uses the same string of the same table.
        unsafe { CStr::from_ptr((strings + offset) as *const _) }
    }

    /// Whether one of the object's slots for functions of others holds an address that `wanted` says yes to.
    pub(crate) fn calls(&self, mut wanted: impl FnMut(usize) -> bool) -> bool {
        self.find_slot(|_, slot| {
            // SAFETY: the slot lies in the object's own data.
            wanted(unsafe { (slot as *const usize).read_unaligned() })
        })
    }

    /// Whether `wanted` says yes to one of the object's slots for functions of others: the function's name, and where the slot is.
    pub(crate) fn find_slot(&self, mut wanted: impl FnMut(&CStr, usize) -> bool) -> bool {
        let table = |address: i64, bytes: i64| {
            let (table, bytes) = (self.address(address)?, self.entry(bytes)?);
            Some((table as *const Relocation, bytes / size_of::<Relocation>()))
        };
        let (Some(strings), Some(symbols)) = (self.address(DT_STRTAB), self.address(DT_SYMTAB)) else {
            return false;
        };
        let relative = self.entry(DT_RELACOUNT).unwrap_or(0);
        let lists = [
            table(DT_JMPREL, DT_PLTRELSZ),
            // Those that only move addresses come first.
            table(DT_RELA, DT_RELASZ).and_then(|(table, n)| {
                let n = n.checked_sub(relative)?.min(MOST_RELOCATIONS);
                Some((table.wrapping_add(relative), n))
            }),
        ];
        for (table, n) in lists.into_iter().flatten() {
            for index in 0..n {
                // SAFETY: the loader has just used the same table, which has `n` entries.
                let relocation = unsafe { *table.wrapping_add(index) };
                let slot = self.base.wrapping_add(relocation.offset);
                if !arch::FUNCTION_SLOTS.contains(&(relocation.info as u32)) || !self.contains(slot) {
                    continue;
                }
                let symbol = (symbols as *const Symbol).wrapping_add((relocation.info >> 32) as usize);
                // SAFETY: relocations name symbols of the object's own table.
                let name = strings + unsafe { (*symbol).name } as usize;
                // SAFETY: symbol names are C strings of the string table.
                if wanted(unsafe { CStr::from_ptr(name as *const _) }, slot) {
                    return true;
                }
            }
        }
        false
    }

    /// Its program headers of this kind, as addresses: flags, first byte, and the byte after the last.
    fn parts(&self, kind: u32) -> impl Iterator<Item = (u32, usize, usize)> + '_ {
        (0..usize::from(self.n_headers)).filter_map(move |index| {
            // SAFETY: the loader's array has as many entries.
            let header = unsafe { &*self.headers.wrapping_add(index) };
            let start = self.base.wrapping_add(header.p_vaddr as usize);
            let part = (header.p_flags, start, start.saturating_add(header.p_memsz as usize));
            (header.p_type == kind).then_some(part)
        })
    }

    /// The data that it writes to, and that is not code.
    pub(crate) fn data(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.parts(libc::PT_LOAD)
            .filter(|(flags, ..)| flags & (libc::PF_W | libc::PF_X) == libc::PF_W)
            .map(|(_, start, end)| (start, end))
    }

    /// Whether the word at the address lies in its data.
    pub(crate) fn has_data(&self, address: usize) -> bool {
        self.data().any(|(start, end)| address >= start && address.saturating_add(size_of::<usize>()) <= end)
    }

    /// Whether the address is in data that the loader locks once it has filled it in (`PT_GNU_RELRO`: whole pages of it, glibc
    /// 2.17 to 2.43, elf/dl-reloc.c).
    pub(crate) fn is_locked(&self, address: usize) -> bool {
        let whole = !(arch::page_bytes() - 1);
        self.parts(libc::PT_GNU_RELRO).any(|(_, start, end)| (start & whole..end & whole).contains(&address))
    }

    /// Whether the address lies in its code.
    pub(crate) fn has_code(&self, address: usize) -> bool {
        self.parts(libc::PT_LOAD)
            .any(|(flags, start, end)| flags & libc::PF_X != 0 && (start..end).contains(&address))
    }

    /// Address of an exported symbol, the first version found. `None` for what must be called to be resolved (ifunc).
    pub(crate) fn symbol(&self, name: &CStr) -> Option<usize> {
        let strings = self.address(DT_STRTAB)?;
        let symbols = self.address(DT_SYMTAB)? as *const Symbol;
        let table = self.address(DT_GNU_HASH)? as *const u32;
        let hash = gnu_hash(name.to_bytes());
        // SAFETY: the table starts with four words.
        let [n_buckets, first, bloom_words] = [0, 1, 2].map(|i| unsafe { *table.wrapping_add(i) });
        if n_buckets == 0 {
            return None;
        }
        // SAFETY: after them come `bloom_words` eight-byte words, then the buckets, then one word a symbol.
        let buckets = unsafe { table.add(4 + 2 * bloom_words as usize) };
        // SAFETY: as above.
        let chains = unsafe { buckets.add(n_buckets as usize) };
        // SAFETY: the remainder is below the number of buckets.
        let mut index = unsafe { *buckets.wrapping_add((hash % n_buckets) as usize) };
        if index < first {
            return None;
        }
        loop {
            // SAFETY: chains have a word for every symbol from `first` on; the last of a bucket is odd.
            let word = unsafe { *chains.wrapping_add((index - first) as usize) };
            if word | 1 == hash | 1 {
                // SAFETY: the index comes from the object's own hash table.
                let symbol = unsafe { *symbols.wrapping_add(index as usize) };
                // SAFETY: symbol names are C strings of the string table.
                let found = unsafe { CStr::from_ptr((strings + symbol.name as usize) as *const _) };
                if found == name && symbol.section != 0 && symbol.info & 15 != STT_GNU_IFUNC {
                    return Some(self.base.wrapping_add(symbol.value));
                }
            }
            if word & 1 == 1 {
                return None;
            }
            index += 1;
        }
    }
}

/// The hash of `DT_GNU_HASH`: Bernstein's, times 33 from 5381.
fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)))
}
