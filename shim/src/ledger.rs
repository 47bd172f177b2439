//! What lives while nobody records, in a process whose library sleeps: memory, contexts and pools of the driver, and blocks of
//! PyTorch's allocator. When a session begins it is told them, with the time at which each was given out.
//!
//! A table of fixed size in pages of its own, which a forked child finds empty and which cost memory only where they were touched.
//! An entry's place follows from its address: one of eight slots in one of two buckets, so that looking for it costs two
//! cache lines whatever came and went before. What finds no slot is counted.

use crate::arch;
use crate::{kernel, sys};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
use gputrace_ring::clock::Ticks;
use gputrace_ring::record::{Action, BlockAlloc, Call, UNKNOWN, pack_device};
use gputrace_ring::ring::Producer;

const SLOTS: usize = 8;
const BUCKETS: usize = 8 << 10;
/// A slot that a thread is writing to.
const TAKEN: u64 = 1;

/// What an address names; two kinds of things may have the same one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(crate) enum Class {
    /// Memory of a device, or mapped from elsewhere.
    Device = 1,
    Host = 2,
    Reservation = 3,
    /// Physical memory, by its handle.
    Physical = 4,
    Map = 5,
    Pool = 6,
    Context = 7,
    Array = 8,
    /// PyTorch's.
    Block = 9,
    /// Physical memory that was released and is still mapped.
    Released = 10,
}

/// Beside the class of a key: it was taken back while a [`Merge`] is at work.
const GONE: u64 = 1 << 63;
/// Whether one is.
static MERGING: AtomicBool = AtomicBool::new(false);

/// What one entry says, in words that any thread may read at any time.
#[derive(Debug)]
#[repr(C, align(64))]
struct Facts {
    /// The session that was told, in the lower half; in the upper one how often the slot was used.
    told: AtomicU64,
    /// When it was given out.
    at: AtomicU64,
    /// Row, action, device and flags of the call.
    call: AtomicU64,
    bytes: AtomicU64,
    /// Of physical memory: when it was released.
    stream: AtomicU64,
    /// Of a map: the slot of what is mapped, plus one, above its handle's lower 48 bits.
    handle: AtomicU64,
    extra: AtomicU64,
    /// Of physical memory: how often it is mapped.
    maps: AtomicU64,
}

struct Table {
    keys: [[AtomicU64; SLOTS]; BUCKETS],
    facts: [Facts; SLOTS * BUCKETS],
    unknown: AtomicU64,
}

/// Null in a process that does not sleep.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(null_mut());

/// From here on it is kept; false if there is no memory.
pub(crate) fn keep() -> bool {
    // A forked child may have its parent's.
    MERGING.store(false, Ordering::Relaxed);
    if !TABLE.load(Ordering::Acquire).is_null() {
        // A forked child's copy of its parent's, which the kernel has emptied.
        return true;
    }
    let bytes = size_of::<Table>().next_multiple_of(4096);
    let fresh = sys::pages(bytes);
    // SAFETY: the pages were just made.
    if fresh.is_null() || unsafe { kernel::advise(fresh, bytes, libc::MADV_WIPEONFORK) }.is_err() {
        return false;
    }
    TABLE.store(fresh.cast(), Ordering::Release);
    true
}

#[inline]
fn table() -> Option<&'static Table> {
    let table = TABLE.load(Ordering::Acquire);
    // SAFETY: pages once published stay mapped; all zeros are a value.
    (!table.is_null()).then(|| unsafe { &*table })
}

/// Whether one is kept.
#[inline]
pub(crate) fn is_kept() -> bool {
    !TABLE.load(Ordering::Relaxed).is_null()
}

/// Forgets everything: it may have been taken back unseen.
pub(crate) fn empty() {
    let bytes = size_of::<Table>().next_multiple_of(4096);
    let table = TABLE.load(Ordering::Acquire);
    if !table.is_null() {
        // SAFETY: the table's own pages, of which all zeros are a value.
        let _ = unsafe { kernel::advise(table.cast(), bytes, libc::MADV_DONTNEED) };
    }
}

/// How many are known to live, and for how many there was no room.
pub(crate) fn counts() -> (u64, u64) {
    // Counted when asked for: each of the calls meanwhile would pay for a number that is kept.
    let lives = |key: &&AtomicU64| (TAKEN + 1..GONE).contains(&key.load(Ordering::Relaxed));
    let known = |table: &Table| table.keys.iter().flatten().filter(lives).count() as u64;
    table().map_or((0, 0), |table| (known(table), table.unknown.load(Ordering::Relaxed)))
}

/// What this action gives out, and what a program knows it by.
pub(crate) const fn given(action: Action) -> Option<Class> {
    Some(match action {
        Action::Alloc
        | Action::AllocManaged
        | Action::AllocAsync
        | Action::IpcOpen
        | Action::ImportPointer => Class::Device,
        Action::AllocHost | Action::HostRegister => Class::Host,
        Action::Reserve => Class::Reservation,
        Action::Create | Action::Import => Class::Physical,
        Action::Map => Class::Map,
        Action::PoolCreate => Class::Pool,
        Action::ContextCreate | Action::PrimaryRetain => Class::Context,
        Action::ArrayCreate => Class::Array,
        _ => return None,
    })
}

/// What this action takes back.
pub(crate) const fn taken(action: Action) -> Option<Class> {
    Some(match action {
        Action::Free | Action::FreeAsync | Action::IpcClose => Class::Device,
        Action::FreeHost | Action::HostUnregister => Class::Host,
        Action::Unreserve => Class::Reservation,
        Action::Release => Class::Physical,
        Action::Unmap => Class::Map,
        Action::PoolDestroy => Class::Pool,
        Action::ContextDestroy => Class::Context,
        Action::ArrayDestroy => Class::Array,
        _ => return None,
    })
}

#[inline]
fn key_of(class: Class, name: u64) -> u64 {
    (class as u64) << 56 | (name & ((1 << 56) - 1))
}

/// The slot's next use, which no session was told of.
#[inline]
fn next_use(facts: &Facts) -> u64 {
    (facts.told.load(Ordering::Relaxed) >> 32).wrapping_add(1) << 32
}

/// The two buckets of a key.
#[inline]
fn buckets(key: u64) -> [usize; 2] {
    // Fibonacci hashing: the upper bits of the product are well mixed.
    let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let part = |shift: u32| (mixed >> shift) as usize % BUCKETS;
    [part(51), part(38)]
}

impl Table {
    /// The slots of a bucket, and the place of the first.
    #[inline]
    fn bucket(&self, bucket: usize) -> (usize, &[AtomicU64]) {
        (bucket * SLOTS, self.keys.get(bucket).map_or(&[], |slots| slots.as_slice()))
    }

    #[inline]
    fn find(&self, key: u64) -> Option<(usize, &AtomicU64, &Facts)> {
        for bucket in buckets(key) {
            let (first, slots) = self.bucket(bucket);
            for (at, slot) in slots.iter().enumerate() {
                // SYNC: the facts are whole for whoever sees the key.
                if slot.load(Ordering::Acquire) == key {
                    return Some((first + at, slot, self.facts.get(first + at)?));
                }
            }
        }
        None
    }

    /// Takes a free slot, fills it, and shows it.
    #[inline]
    fn insert(&self, key: u64, fill: impl FnOnce(&Facts)) -> Option<&Facts> {
        let win =
            |slot: &AtomicU64| slot.compare_exchange(0, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        for bucket in buckets(key) {
            let (first, slots) = self.bucket(bucket);
            for (at, slot) in slots.iter().enumerate() {
                if slot.load(Ordering::Relaxed) != 0 || !win(slot) {
                    continue;
                }
                let facts = self.facts.get(first + at)?;
                facts.told.store(next_use(facts), Ordering::Relaxed);
                facts.maps.store(0, Ordering::Relaxed);
                fill(facts);
                // SYNC: the facts are whole for whoever sees the key.
                slot.swap(key, Ordering::AcqRel);
                // SYNC: either the session that begins now sees the key, or the caller sees that session.
                arch::fence_after_exchange();
                return Some(facts);
            }
        }
        self.unknown.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Makes the slot free; the session that was told of it. `None` if another thread did so first.
    #[inline]
    fn remove(&self, key: u64, slot: &AtomicU64, facts: &Facts) -> Option<u32> {
        slot.compare_exchange(key, TAKEN, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        let before = facts.told.swap(next_use(facts), Ordering::AcqRel);
        slot.store(0, Ordering::Release);
        Some(before as u32)
    }

    /// All slots that have this key: more than one only while a [`Merge`] is at work.
    fn slots(&self, key: u64) -> impl Iterator<Item = (&AtomicU64, &Facts)> {
        let [one, other] = buckets(key);
        let both = core::iter::once(one).chain((other != one).then_some(other));
        both.flat_map(move |bucket| {
            let (first, slots) = self.bucket(bucket);
            slots.iter().enumerate().filter_map(move |(at, slot)| Some((slot, self.facts.get(first + at)?)))
        })
        .filter(move |(slot, _)| slot.load(Ordering::Acquire) == key)
    }

    /// The program takes this back: a list that was made before must not bring it again. The session that was told of what came in
    /// from such a list meanwhile.
    #[inline]
    fn is_gone(&self, key: u64) -> Option<u32> {
        if MERGING.load(Ordering::Relaxed) { self.mark_gone(key) } else { None }
    }

    #[cold]
    fn mark_gone(&self, key: u64) -> Option<u32> {
        if self.find(key | GONE).is_none() {
            self.insert(key | GONE, |_| ());
        }
        // SYNC: either the merge sees the mark, or this sees what it has added.
        let (_, slot, facts) = self.find(key)?;
        self.remove(key, slot, facts)
    }

    /// The program has been given this out: what was said before of its name does not hold any more.
    #[inline]
    fn is_there(&self, key: u64) {
        if MERGING.load(Ordering::Relaxed)
            && let Some((_, slot, _)) = self.find(key | GONE)
        {
            let _ = slot.compare_exchange(key | GONE, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    fn call_of(&self, key: u64, facts: &Facts) -> Call {
        let word = facts.call.load(Ordering::Relaxed);
        let name = key & ((1 << 56) - 1);
        let class = key >> 56;
        let is_handle = [Class::Physical, Class::Released, Class::Pool, Class::Context, Class::Array]
            .iter()
            .any(|it| *it as u64 == class);
        let is_physical = class == Class::Physical as u64 || class == Class::Released as u64;
        let handle = facts.handle.load(Ordering::Relaxed);
        Call {
            api: word as u16,
            action: (word >> 16) as u8,
            device: (word >> 24) as i8,
            flags: (word >> 32) as u32,
            addr: if is_handle { 0 } else { name },
            bytes: facts.bytes.load(Ordering::Relaxed),
            stream: if is_physical { 0 } else { facts.stream.load(Ordering::Relaxed) },
            handle: if is_handle { name } else { handle },
            extra: facts.extra.load(Ordering::Relaxed),
            ..Call::default()
        }
    }
}

/// Remembers what a call gave out, unless it failed or became part of a graph. The session that knows it already; 0 none.
pub(crate) fn note(call: &Call, at: Ticks, session: u32) -> Option<Noted> {
    let table = table()?;
    let class = given(Action::from_raw(call.action)?)?;
    if call.result != 0 || call.flags & Call::CAPTURED != 0 {
        return None;
    }
    let name = match class {
        Class::Physical | Class::Pool | Class::Context | Class::Array => call.handle,
        _ => call.addr,
    };
    let key = key_of(class, name);
    // A primary context is given out again and again.
    if name == 0 || (class == Class::Context && table.find(key).is_some()) {
        return None;
    }
    if class == Class::Map
        && let Some((_, _, physical)) = table.find(key_of(Class::Physical, call.handle))
    {
        physical.maps.fetch_add(1, Ordering::Relaxed);
    }
    let facts = table.insert(key, |facts| facts.fill(call, at, session))?;
    table.is_there(key);
    Some(Noted(facts))
}

impl Facts {
    fn fill(&self, call: &Call, at: Ticks, session: u32) {
        let word = u64::from(call.api)
            | u64::from(call.action) << 16
            | u64::from(call.device as u8) << 24
            | u64::from(call.flags) << 32;
        self.at.store(at.0, Ordering::Relaxed);
        self.call.store(word, Ordering::Relaxed);
        self.bytes.store(call.bytes, Ordering::Relaxed);
        self.stream.store(call.stream, Ordering::Relaxed);
        self.handle.store(call.handle, Ordering::Relaxed);
        self.extra.store(call.extra, Ordering::Relaxed);
        self.told.fetch_or(session.into(), Ordering::Relaxed);
    }

    fn fill_block(&self, record: &BlockAlloc, at: Ticks, session: u32) {
        self.at.store(at.0, Ordering::Relaxed);
        self.bytes.store(record.device_bytes, Ordering::Relaxed);
        self.stream.store(record.stream, Ordering::Relaxed);
        self.handle.store(record.requested, Ordering::Relaxed);
        self.told.fetch_or(session.into(), Ordering::Relaxed);
    }
}

/// What was just remembered.
pub(crate) struct Noted(&'static Facts);

impl Noted {
    /// Whether the session that has begun meanwhile must still be told, by the caller.
    pub(crate) fn is_mine_to_tell(&self, session: u32) -> bool {
        let now = self.0.told.load(Ordering::Acquire);
        let told = now >> 32 << 32 | u64::from(session);
        now as u32 != session
            && self.0.told.compare_exchange(now, told, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// Forgets what a call takes back: the session that was told of it last, 0 none. `None` if it was not known. From then on no session
/// is told, so the caller looks for the session only after this.
pub(crate) fn forget(call: &Call, at: impl FnOnce() -> Ticks) -> Option<u32> {
    let table = table()?;
    let class = Action::from_raw(call.action).and_then(taken)?;
    if class == Class::Map {
        return unmap(table, call.addr, call.bytes);
    }
    let name = match class {
        Class::Physical | Class::Pool | Class::Context | Class::Array => call.handle,
        _ => call.addr,
    };
    let key = key_of(class, name);
    let Some((_, slot, facts)) = table.find(key) else { return table.is_gone(key) };
    if class == Class::Physical && facts.maps.load(Ordering::Relaxed) != 0 {
        let at = at();
        let told = facts.told.load(Ordering::Relaxed) as u32;
        // Its slot stays: both names have the same buckets only by chance, so it is moved.
        let (bytes, word, since) = (
            facts.bytes.load(Ordering::Relaxed),
            facts.call.load(Ordering::Relaxed),
            facts.at.load(Ordering::Relaxed),
        );
        let maps = facts.maps.load(Ordering::Relaxed);
        if table.remove(key, slot, facts).is_some() {
            table.insert(key_of(Class::Released, name), |to| {
                to.at.store(since, Ordering::Relaxed);
                to.call.store(word, Ordering::Relaxed);
                to.bytes.store(bytes, Ordering::Relaxed);
                to.stream.store(at.0, Ordering::Relaxed);
                to.maps.store(maps, Ordering::Relaxed);
                to.told.fetch_or(told.into(), Ordering::Relaxed);
            });
        }
        return Some(told);
    }
    let told = table.remove(key, slot, facts);
    let came = table.is_gone(key);
    told.or(came)
}

/// One call may take back several maps that lie behind one another.
fn unmap(table: &Table, addr: u64, bytes: u64) -> Option<u32> {
    let (mut at, mut newest, mut n) = (addr, Some(0), 0);
    while at < addr.saturating_add(bytes) {
        let key = key_of(Class::Map, at);
        let Some((_, slot, facts)) = table.find(key) else {
            table.is_gone(key);
            break;
        };
        n += 1;
        let (length, handle) = (facts.bytes.load(Ordering::Relaxed), facts.handle.load(Ordering::Relaxed));
        newest = newest.zip(table.remove(key, slot, facts)).map(|(newest, told)| told.max(newest));
        let physical = table.find(key_of(Class::Physical, handle));
        let released = || table.find(key_of(Class::Released, handle));
        if let Some((_, _, physical)) = physical {
            let _ =
                physical.maps.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |maps| maps.checked_sub(1));
        } else if let Some((_, slot, physical)) = released()
            && physical.maps.fetch_sub(1, Ordering::Relaxed) <= 1
        {
            table.remove(key_of(Class::Released, handle), slot, physical);
        }
        at = at.saturating_add(length.max(1));
    }
    newest.filter(|_| n != 0)
}

/// Remembers a block of PyTorch's.
pub(crate) fn block_given(record: &BlockAlloc, at: Ticks, session: u32) -> Option<Noted> {
    let table = table()?;
    let key = key_of(Class::Block, record.addr);
    let facts = table.insert(key, |facts| facts.fill_block(record, at, session))?;
    table.is_there(key);
    Some(Noted(facts))
}

/// Forgets one; as [`forget`].
pub(crate) fn block_taken(addr: u64) -> Option<u32> {
    let table = table()?;
    let key = key_of(Class::Block, addr);
    let told = table.find(key).and_then(|(_, slot, facts)| table.remove(key, slot, facts));
    // Also of what was there: a list made before has it.
    let came = table.is_gone(key);
    told.or(came)
}

/// What was given out before this library came, as the program's own books list it, is added while the program's threads give and
/// take: what they do wins over the list, which was made at some moment since this began.
pub(crate) struct Merge {
    table: &'static Table,
    at: Ticks,
}

impl Merge {
    /// `at` is a time before the program's threads were seen to give and take. `None` where no table is kept.
    pub(crate) fn begin(at: Ticks) -> Option<Merge> {
        let table = table()?;
        MERGING.store(true, Ordering::SeqCst);
        Some(Merge { table, at })
    }

    /// So many will be added: each has a time of its own, in their order, and all before that with which it began.
    pub(crate) fn of(mut self, n: u64) -> Merge {
        self.at.0 = self.at.0.saturating_sub(n);
        self
    }

    /// Memory of the driver's.
    pub(crate) fn call(&mut self, call: &Call) {
        let Some(class) = Action::from_raw(call.action).and_then(given) else { return };
        self.add(key_of(class, call.addr), |facts, at| facts.fill(call, at, 0));
    }

    /// Mapped physical memory, whose handle is the program's own business.
    pub(crate) fn mapped(&mut self, create: &Call, map: &Call) {
        let released = key_of(Class::Released, create.handle);
        let is_new = self.add(released, |facts, at| {
            facts.fill(create, at, 0);
            facts.maps.store(1, Ordering::Relaxed);
        });
        if is_new
            && !self.add(key_of(Class::Map, map.addr), |facts, at| facts.fill(map, at, 0))
            && let Some((_, slot, facts)) = self.table.find(released)
        {
            self.table.remove(released, slot, facts);
        }
    }

    /// A block of PyTorch's.
    pub(crate) fn block(&mut self, record: &BlockAlloc) {
        self.add(key_of(Class::Block, record.addr), |facts, at| facts.fill_block(record, at, 0));
    }

    /// Whether it is there now because of this.
    fn add(&mut self, key: u64, fill: impl FnOnce(&Facts, Ticks)) -> bool {
        let at = self.at;
        self.at.0 = self.at.0.saturating_add(1);
        if self.table.find(key).is_some() || self.table.find(key | GONE).is_some() {
            return false;
        }
        let Some(ours) = self.table.insert(key, |facts| fill(facts, at)) else { return false };
        // SYNC: whoever takes it back from here on finds it, or has said so before.
        let is_gone = self.table.find(key | GONE).is_some();
        // It was taken back and given out again since the list was made: theirs is right.
        let is_twice = || self.table.slots(key).any(|(_, facts)| !core::ptr::eq(facts, ours));
        if !is_gone && !is_twice() {
            return true;
        }
        let own = self.table.slots(key).find(|(_, facts)| core::ptr::eq(*facts, ours));
        if let Some((slot, facts)) = own {
            self.table.remove(key, slot, facts);
        }
        false
    }
}

impl Drop for Merge {
    fn drop(&mut self) {
        MERGING.store(false, Ordering::SeqCst);
        // Whoever was about to add one does so now at worst: it takes a slot, and is no entry.
        for slot in self.table.keys.iter().flatten() {
            let key = slot.load(Ordering::Relaxed);
            if key & GONE != 0 {
                let _ = slot.compare_exchange(key, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

/// Tells a session that has just begun of everything, in the order in which it was given out; how many.
pub(crate) fn tell(producer: &mut Producer, session: u32) -> u64 {
    let Some(table) = table() else { return 0 };
    // SYNC: either the session that begins now sees the key, or the caller sees that session.
    fence(Ordering::SeqCst);
    let bytes = SLOTS * BUCKETS * size_of::<(u64, u64)>();
    let Some(room) = kernel::map_private(bytes) else { return 0 };
    // SAFETY: the pages were just made, are aligned, and all zeros are a value.
    let order = unsafe { core::slice::from_raw_parts_mut(room.cast::<(u64, u64)>(), SLOTS * BUCKETS) };
    let keys = table.keys.iter().flatten().zip(&table.facts).enumerate();
    let live = keys.filter(|(_, (key, _))| (TAKEN + 1..GONE).contains(&key.load(Ordering::Acquire)));
    let mut n = 0;
    for (to, (index, (_, facts))) in order.iter_mut().zip(live) {
        *to = (facts.at.load(Ordering::Relaxed), index as u64);
        n += 1;
    }
    let order = order.get_mut(..n).unwrap_or_default();
    order.sort_unstable();
    let (mut told, mut reserved, mut allocated) = (0, [0_u64; 256], [0_u64; 256]);
    for (_, index) in order.iter() {
        let index = *index as usize;
        let slot = table.keys.get(index / SLOTS).and_then(|slots| slots.get(index % SLOTS));
        let Some((slot, facts)) = slot.zip(table.facts.get(index)) else { continue };
        let key = slot.load(Ordering::Acquire);
        if !(TAKEN + 1..GONE).contains(&key) {
            continue;
        }
        let before = facts.told.load(Ordering::Acquire);
        let (call, at) = (table.call_of(key, facts), facts.at.load(Ordering::Relaxed));
        let now = before >> 32 << 32 | u64::from(session);
        // Another thread takes it back just now, or has told it.
        let is_same = before as u32 != session && slot.load(Ordering::Acquire) == key;
        if !is_same || facts.told.compare_exchange(before, now, Ordering::AcqRel, Ordering::Relaxed).is_err()
        {
            continue;
        }
        told += 1;
        if key >> 56 != Class::Block as u64 {
            if call.flags & Call::IN_ALLOCATE != 0
                && (call.action == Action::Alloc as u8 || call.action == Action::Map as u8)
                && let Some(total) = reserved.get_mut(usize::from(call.device as u8))
            {
                *total = total.wrapping_add(call.bytes);
            }
            producer.push_call(Ticks(at), &call);
            continue;
        }
        let device = call.bytes >> 56;
        let total = allocated.get_mut(device as usize);
        let total = total.map_or(UNKNOWN, |total| {
            *total = total.wrapping_add(call.bytes & ((1 << 56) - 1));
            *total
        });
        let record = BlockAlloc {
            addr: key & ((1 << 56) - 1),
            device_bytes: pack_device(device as i8, call.bytes & ((1 << 56) - 1)),
            requested: call.handle,
            stream: call.stream,
            allocated: total,
            reserved: reserved.get(device as usize).copied().unwrap_or_default(),
            stack: 0,
        };
        producer.push_brief(Ticks(at), 0, &record);
    }
    // What is still mapped was there to be mapped, and is given back now, as far as anybody can tell.
    for (_, index) in order.iter() {
        let slot =
            table.keys.get(*index as usize / SLOTS).and_then(|slots| slots.get(*index as usize % SLOTS));
        let key = slot.map_or(0, |slot| slot.load(Ordering::Acquire));
        let handle = key & ((1 << 56) - 1);
        if key >> 56 == Class::Released as u64 && table.find(key_of(Class::Physical, handle)).is_none() {
            let call = Call { action: Action::Release as u8, handle, device: -1, ..Call::default() };
            producer.push_call(producer.now(), &call);
        }
    }
    // SAFETY: nobody else has seen this mapping.
    unsafe { kernel::unmap(room, bytes) };
    told
}
