//! The calling thread's return addresses, the same that libgcc's `_Unwind_Backtrace` finds.
//!
//! Three things make it cheap. A stack that the thread has had before is not walked: [`Known`] says which words of memory
//! made it what it was, and if they still are the same, so is the stack; their loads do not wait for each other. Where
//! a walk meets a frame of the stack walked last with the same registers, the rest is compared in the same way. And a
//! frame's unwind rule is cached by return address, so that the tables are read once a thread and address.
//!
//! No lock, no allocation, no load outside the thread's own stack, other than of unwind tables.

use super::cfi::{FindObject, Object, Rule};
use super::memory::{Stack, Stacks};
use super::{Fixed, mix, objects};
use crate::arch::{self, FoundAt, ReturnAt};
use crate::asked;
use core::hint::select_unpredictable;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Frames that are kept, counted from the innermost. Deeper ones are cut and marked.
pub(crate) const MAX_FRAMES: usize = 512;
/// Two-way sets of the rule cache: 4,096 rules, 64 KiB a thread.
const RULE_SETS: usize = 2048;
/// Parts of stacks that are recognised, in sets of those with the same innermost frame: 832 KiB a thread, if it has as many.
const KNOWN_SETS: usize = 64;
const WAYS: usize = 16;
/// Guesses which of a set it will be: parts with the same innermost frame differ further out, as what was called by the
/// program does.
const GUESSES: usize = 8192;
/// Frames of a part, counted from the outermost of the stack, so that stacks share their outer parts.
const PART_FRAMES: usize = 32;
/// Words compared to recognise a part: one a frame, and where a frame is found through its frame pointer one more. They are
/// compared eight at a time.
const MOST_WORDS: usize = 72;
/// In an address: it is that of an interrupted instruction, so it is itself in the function that it belongs to.
const EXACT: u64 = 1 << 63;
/// In [`Frame::fp_slot`]: the frame was found in another way than through the word below `sp`; walk, do not compare. No
/// stack has this address.
const WALK: u64 = 0;

/// The registers of one frame, and where they were found.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Frame {
    /// Return address; [`EXACT`] may be set.
    ip: u64,
    sp: u64,
    fp: u64,
    /// Address of the word that gave `fp`; that of the return address where `fp` is the callee's; or [`WALK`].
    fp_slot: u64,
    /// Where `ip` was found.
    found: FoundAt,
}

impl Frame {
    const NONE: Frame = Frame { ip: 0, sp: 0, fp: 0, fp_slot: WALK, found: FoundAt::NOWHERE };

    #[inline(always)]
    fn has_registers_of(&self, other: &Frame) -> bool {
        self.sp == other.sp && self.ip == other.ip && self.fp == other.fp
    }

    /// Whether the frame is still where it was. The caller knows that the frame called by it is unchanged.
    #[inline(always)]
    fn is_unchanged(&self, stack: &Stack, stacks: &mut Stacks) -> bool {
        let return_slot = self.found.address(self.sp);
        // Which of the two it is follows no pattern: selected, not branched on.
        let saved = select_unpredictable(self.fp_slot == return_slot, self.ip, self.fp);
        let bits = arch::address_bits();
        (stack.word(return_slot, stacks).map(|word| word & bits) == Some(self.ip & bits))
            & (stack.word(self.fp_slot, stacks).map(|word| word & bits) == Some(saved & bits))
    }
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct CachedRule {
    /// Return address, with [`EXACT`]; 0 empty.
    ip: u64,
    rule: Rule,
}

/// A part of a stack by what decides it: where its innermost frame is, and every word that was read to walk on from there.
///
/// From the same innermost frame, the same rule leads to the same slot of the return address; if that holds the same
/// address, the next frame is the same, and so on. Frame pointers matter only where a frame is found through one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Known {
    start: Frame,
    /// The next frame further out; `sp` is 0 at the outermost end of the stack.
    end: Frame,
    /// Hash of the frames, and what that of those further out is multiplied by.
    hash: u64,
    power: u64,
    n_frames: u32,
    n_words: u32,
    /// Whether `fp` of `start` must be the same.
    needs_fp: u32,
    /// Whether `fp` of `end` follows from the words.
    knows_fp: u32,
    /// Bytes from `sp` to the end of the outermost of the words.
    reach: u32,
    /// Where the part outside it was found last time: set, way, and 1; 0 not yet.
    outer: u32,
    /// Each word, and its distance from `sp` in words.
    words: [u64; MOST_WORDS],
    places: [u16; MOST_WORDS],
}

const _: () = assert!(size_of::<Known>() == arch::KNOWN_STACK_BYTES && MOST_WORDS.is_multiple_of(8));

impl Known {
    const EMPTY: Known = Known {
        start: Frame::NONE,
        end: Frame::NONE,
        hash: 0,
        power: 1,
        n_frames: 0,
        n_words: 0,
        needs_fp: 0,
        knows_fp: 0,
        reach: 0,
        outer: 0,
        words: [0; MOST_WORDS],
        places: [0; MOST_WORDS],
    };

    #[inline(always)]
    fn is_still(&self, start: &Frame, knows_fp: bool, stack: &Stack, stacks: &mut Stacks) -> bool {
        let is_here = self.start.ip == start.ip && self.start.sp == start.sp;
        if !is_here || (self.needs_fp != 0 && !(knows_fp && self.start.fp == start.fp)) {
            return false;
        }
        let Some(memory) = stack.part(start.sp, u64::from(self.reach), stacks) else { return false };
        let n_eights = self.n_words.div_ceil(8) as usize;
        let (words, places) = (self.words.as_chunks::<8>().0, self.places.as_chunks::<8>().0);
        let bits = arch::address_bits();
        // Eight at a time: most are what they were, and to ask after each costs more than the others' loads.
        for (words, places) in words.iter().zip(places).take(n_eights) {
            let mut differ = 0;
            for (known, place) in words.iter().zip(places) {
                // SAFETY: `needs` alone adds words, and lets `reach`, the part's length, cover each.
                differ |= known ^ unsafe { memory.word_unchecked(usize::from(*place)) };
            }
            if differ & bits != 0 {
                return false;
            }
        }
        true
    }

    /// Adds a word, by its address, that must be the same; false when there is no room.
    fn needs(&mut self, slot: u64, word: u64) -> bool {
        let at = self.n_words as usize;
        let distance = slot.wrapping_sub(self.start.sp);
        // The rest of the eight is the same word again, so that all of them can be compared.
        let eight = at..(at / 8 + 1) * 8;
        let (Some(words), Some(places)) = (self.words.get_mut(eight.clone()), self.places.get_mut(eight))
        else {
            return false;
        };
        let Some(place) = u16::try_from(distance >> 3).ok().filter(|_| distance.is_multiple_of(8)) else {
            return false;
        };
        words.fill(word);
        places.fill(place);
        self.n_words += 1;
        self.reach = self.reach.max(distance as u32 + 8);
        true
    }

    /// Adds what the step from `callee` by `rule` to `frame` reads. `needs_fp` is whether the frame's own `fp` matters
    /// before, and whether the callee's does afterwards. False when it cannot be kept.
    fn needs_step(&mut self, callee: &Frame, rule: Rule, frame: &Frame, needs_fp: &mut bool) -> bool {
        let is_through_memory = matches!(rule.kind, Rule::AT_SP | Rule::AT_FP);
        let is_through_fp = matches!(rule.kind, Rule::FP | Rule::AT_FP);
        let in_register = if arch::HAS_LINK_REGISTER { Rule::RETURN_IN_REGISTER } else { 0 };
        let in_other_ways = Rule::RETURN_AFTER_CFA | Rule::INTERRUPTED | in_register;
        if rule.marks & in_other_ways != 0 || !self.needs(rule.ret.slot(frame.sp), frame.ip) {
            return false;
        }
        if is_through_memory {
            let base = if is_through_fp { callee.fp } else { callee.sp };
            if !self.needs(base.wrapping_add(rule.cfa as i64 as u64), frame.sp) {
                return false;
            }
        }
        let base = match rule.fp_base() {
            Rule::FP_SAME => {
                *needs_fp |= is_through_fp;
                return true;
            }
            Rule::FP_AT_CFA => frame.sp,
            Rule::FP_AT_FP => callee.fp,
            _ => callee.sp,
        };
        let is_kept = !*needs_fp || self.needs(base.wrapping_add(i64::from(rule.fp) as u64), frame.fp);
        *needs_fp = is_through_fp || (*needs_fp && rule.fp_base() == Rule::FP_AT_FP);
        is_kept
    }
}

/// A thread's part. All zeros is the state before the first capture.
#[repr(C)]
pub(crate) struct NativeState {
    rules: [[CachedRule; 2]; RULE_SETS],
    /// The stack as last seen, outermost frame first.
    frames: Fixed<Frame, MAX_FRAMES>,
    /// `hashes[i]` is the hash of `frames[0..=i]`.
    hashes: Fixed<u64, MAX_FRAMES>,
    /// What the walk found before it met known frames, innermost first.
    found: Fixed<Frame, MAX_FRAMES>,
    /// Which innermost frame `known` of the same place is for, without a look into it; 0 none.
    tags: [[u32; WAYS]; KNOWN_SETS],
    known: [[Known; WAYS]; KNOWN_SETS],
    /// Ways of a set, by innermost frame and hint.
    guesses: [u8; GUESSES],
    /// Stacks this thread was seen on.
    pub(crate) stacks: Stacks,
    /// End of the thread's own stack, if `frames` was found on that; 0 otherwise.
    stack_end: u64,
    /// [`UNLOADED`] and one when the rules were read; 0 if none were.
    unloaded: u32,
    /// Marks of the last capture.
    marks: u32,
    /// Innermost frames that are the shim's own.
    n_own: u32,
    /// Which way of a full set gives way next.
    next_way: u32,
    /// The innermost frame of a stack that was recognised, `frames` being that of an earlier one; `sp` is 0 otherwise.
    recognised: Frame,
    recognised_hash: u64,
}

/// What a capture found.
#[derive(Clone, Copy, Default)]
pub(crate) struct NativeStack {
    /// Hash of the addresses; 0 when there are none.
    pub(crate) hash: u64,
    /// Frames without the shim's own at the inner end.
    pub(crate) n_frames: u32,
    /// Marks, see [`super::Captured`].
    pub(crate) marks: u32,
}

#[unsafe(link_section = "gputrace_hot_data")]
static FIND_OBJECT: AtomicPtr<core::ffi::c_void> = AtomicPtr::new(core::ptr::null_mut());
#[unsafe(link_section = "gputrace_hot_data")]
static OWN_START: AtomicU64 = AtomicU64::new(0);
#[unsafe(link_section = "gputrace_hot_data")]
static OWN_END: AtomicU64 = AtomicU64::new(0);
#[unsafe(link_section = "gputrace_hot_data")]
static UNLOADED: AtomicU32 = AtomicU32::new(0);

/// Prepares the process for captures. `find_object` null: there is none (glibc before 2.35), and we keep a table.
///
/// # Safety
/// `find_object` is null or glibc's `_dl_find_object`.
pub(crate) unsafe fn init(mut find_object: *mut core::ffi::c_void) {
    if find_object.is_null() {
        objects::start();
        find_object = objects::find as *mut core::ffi::c_void;
    }
    FIND_OBJECT.store(find_object, Ordering::Release);
    if let Some(own) = object_around(init as *const () as u64) {
        OWN_START.store(own.mapping.start(), Ordering::Relaxed);
        OWN_END.store(own.mapping.end(), Ordering::Relaxed);
    }
}

/// Says that an object was unloaded: every thread forgets its rules at its next capture, because another object may
/// come to the same addresses.
pub(crate) fn note_unloaded() {
    objects::refresh();
    UNLOADED.fetch_add(1, Ordering::Relaxed);
}

/// The loaded object around `addr`, when it has unwind tables and they can be found.
#[must_use]
pub(crate) fn object_around(addr: u64) -> Option<Object> {
    let find_object = FIND_OBJECT.load(Ordering::Relaxed);
    if find_object.is_null() {
        return None;
    }
    // SAFETY: `init` stored glibc's function or ours.
    let find_object: FindObject = unsafe { core::mem::transmute(find_object) };
    // SAFETY: as above.
    unsafe { Object::containing(find_object, addr) }
}

impl NativeState {
    /// Makes it another thread's. Rules belong to the code; a known part of a stack says itself by which words, at which
    /// addresses, it is recognised.
    pub(super) fn hand_on(&mut self) {
        self.frames.clear();
        self.hashes.clear();
        self.stacks.forget();
        self.stack_end = 0;
        (self.marks, self.n_own) = (0, 0);
        self.recognised = Frame::default();
    }

    /// Captures the stack of the frame with these registers. `hint` is often the same where the stack is.
    #[inline(never)]
    #[unsafe(link_section = "gputrace_hot")]
    pub(crate) fn capture(&mut self, ip: u64, sp: u64, fp: u64, hint: u64) -> NativeStack {
        // What an earlier capture recognised is not this one's, whatever becomes of it.
        self.recognised = Frame::default();
        let stack = self.stacks.above(sp);
        if stack.is_empty() || FIND_OBJECT.load(Ordering::Relaxed).is_null() {
            self.frames.clear();
            return NativeStack { marks: super::Captured::NO_NATIVE, ..NativeStack::default() };
        }
        let unloaded = UNLOADED.load(Ordering::Relaxed).wrapping_add(1);
        if unloaded != self.unloaded {
            self.forget(unloaded);
        }
        let innermost = Frame { ip: arch::address(ip), sp, fp, ..Frame::NONE };
        if let Some(found) = self.recognise(innermost, hint, &stack) {
            (self.recognised, self.recognised_hash) = (innermost, found.hash);
            return found;
        }
        let found = self.walk_whole(innermost, stack);
        if found.marks == 0 {
            self.remember(hint);
        }
        found
    }

    #[inline(never)]
    fn walk_whole(&mut self, innermost: Frame, stack: Stack) -> NativeStack {
        // A cut stack has no outermost frame to start from, and a broken one must be found broken again.
        let unusable = super::Captured::TRUNCATED | super::Captured::BROKEN;
        let is_same = stack.is_own() && stack.own_end() == self.stack_end;
        if !is_same || self.marks & unusable != 0 {
            self.frames.clear();
            self.stack_end = stack.own_end();
        }
        if !self.walk(innermost, stack) {
            self.frames.clear();
            self.walk(innermost, stack);
        }
        self.summary()
    }

    #[inline(always)]
    fn recognise(&mut self, innermost: Frame, hint: u64, stack: &Stack) -> Option<NativeStack> {
        let (mut start, mut knows_fp) = (innermost, true);
        let (mut hash, mut power, mut n_frames) = (0_u64, 1_u64, 0);
        let mut inner: Option<Index> = None;
        // Every part ends further out than it starts, and no stack that is kept has more.
        for _ in 0..=MAX_FRAMES / PART_FRAMES {
            // Outer parts are mostly those of last time: then nothing else needs to be looked at.
            let expected = inner.and_then(|inner| Index::decode(self.known(inner).outer));
            let index = match expected {
                Some(expected) if self.is_still(expected, &start, knows_fp, stack) => expected,
                _ => {
                    let found = self.recognise_part(&start, knows_fp, hint, stack)?;
                    if let Some(inner) = inner.and_then(|inner| self.known_at(inner)) {
                        inner.outer = found.encode();
                    }
                    found
                }
            };
            inner = Some(index);
            let known = self.known(index);
            hash = hash.wrapping_add(power.wrapping_mul(known.hash));
            power = power.wrapping_mul(known.power);
            n_frames += known.n_frames;
            if known.end.sp == 0 {
                return Some(NativeStack { hash, n_frames, marks: 0 });
            }
            (start, knows_fp) = (known.end, known.knows_fp != 0);
        }
        None
    }

    #[inline(always)]
    fn is_still(&mut self, index: Index, start: &Frame, knows_fp: bool, stack: &Stack) -> bool {
        let known = self.known.get(index.set).and_then(|set| set.get(index.way));
        known.is_some_and(|known| known.is_still(start, knows_fp, stack, &mut self.stacks))
    }

    #[inline(always)]
    fn recognise_part(&mut self, start: &Frame, knows_fp: bool, hint: u64, stack: &Stack) -> Option<Index> {
        let place = Place::of(start, hint);
        let (tags, set) = (self.tags.get(place.set)?, self.known.get(place.set)?);
        let guess = self.guesses.get_mut(place.guess)?;
        let stacks = &mut self.stacks;
        let mut is_it = |way: usize| match (tags.get(way), set.get(way)) {
            (Some(tag), Some(known)) if *tag == place.tag => known.is_still(start, knows_fp, stack, stacks),
            _ => false,
        };
        if !is_it(usize::from(*guess)) {
            *guess = (0..WAYS).find(|way| is_it(*way))? as u8;
        }
        Some(Index { set: place.set, way: usize::from(*guess) })
    }

    #[inline(always)]
    fn known(&self, index: Index) -> &Known {
        self.known.get(index.set).and_then(|set| set.get(index.way)).unwrap_or(&Known::EMPTY)
    }

    fn known_at(&mut self, index: Index) -> Option<&mut Known> {
        self.known.get_mut(index.set)?.get_mut(index.way)
    }

    /// Keeps what decided the stack just walked, part by part from the outermost inwards, up to something unusual.
    #[inline(never)]
    fn remember(&mut self, hint: u64) {
        let n_shown = self.frames.len().saturating_sub(self.n_own as usize);
        let mut needs_fp = false;
        for first in (0..self.frames.len()).step_by(PART_FRAMES) {
            let last = (first + PART_FRAMES).min(self.frames.len()) - 1;
            let mut known =
                Known { start: self.frames.get(last), knows_fp: u32::from(needs_fp), ..Known::EMPTY };
            let mut outer_hash = 0;
            if let Some(outer) = first.checked_sub(1) {
                known.end = self.frames.get(outer);
                outer_hash = self.hashes.get(outer);
            }
            for index in first.max(1)..=last {
                let callee = self.frames.get(index);
                let Some(rule) = self.cached_rule(callee.ip) else { return };
                if !known.needs_step(&callee, rule, &self.frames.get(index - 1), &mut needs_fp) {
                    return;
                }
            }
            known.needs_fp = u32::from(needs_fp);
            let end = n_shown.min(last + 1);
            for _ in first..end {
                known.power = known.power.wrapping_mul(JOIN);
                known.n_frames += 1;
            }
            if end > first {
                known.hash = self.hashes.get(end - 1).wrapping_sub(outer_hash.wrapping_mul(known.power));
            }
            self.keep(known, hint);
        }
    }

    fn keep(&mut self, known: Known, hint: u64) {
        let place = Place::of(&known.start, hint);
        let way = self.next_way as usize % WAYS;
        self.next_way = self.next_way.wrapping_add(1);
        let (Some(tags), Some(set)) = (self.tags.get_mut(place.set), self.known.get_mut(place.set)) else {
            return;
        };
        // A part that others share is there already.
        let is_same = |other: &Known| {
            let n_words = known.n_words as usize;
            (other.start.ip, other.start.sp, other.n_words) == (known.start.ip, known.start.sp, known.n_words)
                && other.needs_fp == known.needs_fp
                && (known.needs_fp == 0 || other.start.fp == known.start.fp)
                && other.knows_fp == known.knows_fp
                && other.words.get(..n_words) == known.words.get(..n_words)
                && other.places.get(..n_words) == known.places.get(..n_words)
        };
        let way = (0..WAYS)
            .find(|way| tags.get(*way) == Some(&place.tag) && set.get(*way).is_some_and(is_same))
            .unwrap_or(way);
        if let (Some(tag), Some(room)) = (tags.get_mut(way), set.get_mut(way)) {
            (*tag, *room) = (place.tag, known);
        }
        if let Some(guess) = self.guesses.get_mut(place.guess) {
            *guess = way as u8;
        }
    }

    /// Makes [`NativeState::frames`] those of the last capture, which may only have recognised its stack. To be called
    /// before the captured function goes on. False if they are not what was recognised.
    pub(crate) fn complete(&mut self) -> bool {
        let innermost = core::mem::take(&mut self.recognised);
        if innermost.sp == 0 {
            return true;
        }
        let stack = self.stacks.above(innermost.sp);
        self.walk_whole(innermost, stack).hash == self.recognised_hash
    }

    /// Return addresses of the last capture, innermost first, without the shim's own, each with the part of the stack
    /// that its function uses.
    pub(crate) fn frames(&self) -> impl Iterator<Item = (u64, core::ops::Range<u64>)> + '_ {
        let n = self.frames.len().saturating_sub(self.n_own as usize);
        let mut frames = self.frames.as_slice().iter().take(n).rev().peekable();
        core::iter::from_fn(move || {
            let frame = frames.next()?;
            let end = frames.peek().map_or(u64::MAX, |outer| outer.sp);
            Some((frame.ip & !EXACT, frame.sp..end))
        })
    }

    #[cold]
    #[inline(never)]
    fn forget(&mut self, unloaded: u32) {
        // What was never used is empty as it is, and stays untouched: each page would cost a fault.
        if self.unloaded != 0 {
            self.rules.fill([CachedRule::default(); 2]);
            self.tags.fill([0; WAYS]);
        }
        self.unloaded = unloaded;
        self.frames.clear();
    }

    /// Makes `frames` the stack of `innermost`. False when that needs a start from nothing: the known rest and the
    /// new frames together are more than can be kept.
    #[inline(always)]
    fn walk(&mut self, innermost: Frame, mut stack: Stack) -> bool {
        self.found.clear();
        self.marks = 0;
        let mut frame = innermost;
        // Frames of the previous stack that may still be outside `frame`.
        let mut n_known = self.frames.len();
        loop {
            while n_known > 0 && self.frames.get(n_known - 1).sp < frame.sp {
                n_known -= 1;
            }
            // The rest of the previous stack?
            if n_known > 0 && self.frames.get(n_known - 1).has_registers_of(&frame) {
                let first = self.first_unchanged(n_known - 1, &stack);
                if first == 0 {
                    return self.assemble(n_known);
                }
                for index in (first + 1..n_known).rev() {
                    self.found.push(self.frames.get(index));
                }
                frame = self.frames.get(first);
                n_known = first;
            }
            if !self.found.push(frame) {
                self.marks |= super::Captured::TRUNCATED;
                return self.assemble(0);
            }
            match self.step(&frame, &mut stack) {
                Some(caller) => frame = caller,
                None => return self.assemble(0),
            }
        }
    }

    /// The outermost index from which on every frame up to `index`, which is, is unchanged.
    #[inline(always)]
    fn first_unchanged(&mut self, index: usize, stack: &Stack) -> usize {
        let (outer, stacks) = (self.frames.as_slice().get(..index).unwrap_or_default(), &mut self.stacks);
        outer.iter().rposition(|frame| !frame.is_unchanged(stack, stacks)).map_or(0, |changed| changed + 1)
    }

    /// Puts what was found onto the first `kept` known frames.
    #[inline(always)]
    fn assemble(&mut self, kept: usize) -> bool {
        if kept + self.found.len() > MAX_FRAMES {
            return false;
        }
        self.frames.truncate(kept);
        self.hashes.truncate(kept);
        let mut hash = if kept == 0 { 0 } else { self.hashes.get(kept - 1) };
        for frame in self.found.as_slice().iter().rev() {
            hash = hash.wrapping_mul(JOIN).wrapping_add(mix(frame.ip, 0));
            self.frames.push(*frame);
            self.hashes.push(hash);
        }
        true
    }

    #[inline(always)]
    fn summary(&mut self) -> NativeStack {
        let own = OWN_START.load(Ordering::Relaxed)..OWN_END.load(Ordering::Relaxed);
        let n_own = self.frames.as_slice().iter().rev().take_while(|frame| own.contains(&frame.ip)).count();
        self.n_own = n_own as u32;
        let n_frames = self.frames.len() - n_own;
        let hash = if n_frames == 0 { 0 } else { self.hashes.get(n_frames - 1) };
        NativeStack { hash, n_frames: n_frames as u32, marks: self.marks }
    }

    /// The caller of `frame`; `None` at the outermost frame and where the walk cannot go on.
    ///
    /// Which register and which slot differs from frame to frame in no pattern that a processor could predict, so
    /// the common rules are applied by selection and without branches.
    #[inline(always)]
    fn step(&mut self, frame: &Frame, stack: &mut Stack) -> Option<Frame> {
        let rule = self.rule(frame.ip, stack)?;
        if !rule.is_simple() {
            return self.step_unusual(rule, frame, stack);
        }
        let base = select_unpredictable(rule.kind == Rule::FP, frame.fp, frame.sp);
        let cfa = base.wrapping_add(rule.cfa as i64 as u64);
        let return_slot = rule.ret.slot(cfa);
        let has_fp = rule.fp_base() == Rule::FP_AT_CFA;
        let fp_slot = select_unpredictable(has_fp, cfa.wrapping_add(i64::from(rule.fp) as u64), return_slot);
        // The return address lies below the frame address, above everything of the frame itself.
        let (Some(ip), Some(saved_fp), true) = (
            stack.word(return_slot, &mut self.stacks),
            stack.word(fp_slot, &mut self.stacks),
            cfa > frame.sp,
        ) else {
            return self.broken();
        };
        let ip = arch::address(ip);
        if ip == 0 {
            return None;
        }
        if ip & EXACT != 0 {
            return self.broken();
        }
        let fp = select_unpredictable(has_fp, saved_fp, frame.fp);
        Some(Frame { ip, sp: cfa, fp, fp_slot, found: FoundAt::slot(return_slot) })
    }

    /// Every other rule.
    #[inline(never)]
    fn step_unusual(&mut self, rule: Rule, frame: &Frame, stack: &mut Stack) -> Option<Frame> {
        match rule.kind {
            Rule::END => None,
            Rule::AT_SP | Rule::AT_FP => self.step_through_memory(rule, frame, stack),
            Rule::SP | Rule::FP => {
                let base = if rule.kind == Rule::FP { frame.fp } else { frame.sp };
                let cfa = base.wrapping_add(rule.cfa as i64 as u64);
                if arch::HAS_LINK_REGISTER && rule.marks & Rule::RETURN_IN_REGISTER != 0 {
                    // Only where it was interrupted is a function without a frame of its own.
                    if frame.ip & EXACT == 0 || cfa < frame.sp {
                        return self.broken();
                    }
                    return self.caller(rule, frame, stack, cfa, frame.found.link());
                }
                if cfa <= frame.sp {
                    return self.broken();
                }
                let Some(ip) = stack.word(rule.ret.slot(cfa), &mut self.stacks) else {
                    return self.broken();
                };
                self.caller(rule, frame, stack, cfa, ip)
            }
            _ => self.broken(),
        }
    }

    /// Frame addresses that are themselves in memory: realigned frames and the signal trampoline.
    fn step_through_memory(&mut self, rule: Rule, frame: &Frame, stack: &mut Stack) -> Option<Frame> {
        let base = if rule.kind == Rule::AT_SP { frame.sp } else { frame.fp };
        let cfa_slot = base.wrapping_add(rule.cfa as i64 as u64);
        let Some(cfa) = stack.word(cfa_slot, &mut self.stacks) else { return self.broken() };
        if rule.marks & Rule::RETURN_AFTER_CFA == 0 {
            if cfa <= frame.sp {
                return self.broken();
            }
            let Some(ip) = stack.word(rule.ret.slot(cfa), &mut self.stacks) else { return self.broken() };
            return self.caller(rule, frame, stack, cfa, ip);
        }
        // The interrupted code may have been on another stack than its signal handler.
        let Some(ip) = stack.word(cfa_slot.wrapping_add(8), &mut self.stacks) else { return self.broken() };
        let mut caller = self.caller(rule, frame, stack, cfa, ip)?;
        if arch::HAS_LINK_REGISTER {
            // The registers follow each other: link, stack pointer, instruction.
            let Some(link) = stack.word(cfa_slot.wrapping_sub(8), &mut self.stacks) else {
                return self.broken();
            };
            caller.found = FoundAt::interrupted(link);
        }
        if !(stack.is_own() && stack.contains(cfa)) {
            *stack = stack.interrupted(cfa, &mut self.stacks);
        }
        Some(caller)
    }

    fn caller(&mut self, rule: Rule, frame: &Frame, stack: &Stack, cfa: u64, ip: u64) -> Option<Frame> {
        let offset = i64::from(rule.fp) as u64;
        let slot = match rule.fp_base() {
            Rule::FP_SAME => {
                return self.checked(rule, Frame { ip, sp: cfa, fp: frame.fp, ..Frame::NONE });
            }
            Rule::FP_AT_CFA => cfa.wrapping_add(offset),
            Rule::FP_AT_FP => frame.fp.wrapping_add(offset),
            _ => frame.sp.wrapping_add(offset),
        };
        let Some(fp) = stack.word(slot, &mut self.stacks) else { return self.broken() };
        self.checked(rule, Frame { ip, sp: cfa, fp, ..Frame::NONE })
    }

    fn checked(&mut self, rule: Rule, mut caller: Frame) -> Option<Frame> {
        caller.ip = arch::address(caller.ip);
        if caller.ip == 0 {
            return None;
        }
        if caller.ip & EXACT != 0 {
            return self.broken();
        }
        if rule.marks & Rule::INTERRUPTED != 0 {
            caller.ip |= EXACT;
        }
        Some(caller)
    }

    #[cold]
    fn broken(&mut self) -> Option<Frame> {
        self.marks |= super::Captured::BROKEN;
        None
    }

    fn cached_rule(&self, ip: u64) -> Option<Rule> {
        let set = self.rules.get(rule_set(ip))?;
        set.iter().find(|cached| cached.ip == ip).map(|cached| cached.rule)
    }

    #[inline(always)]
    fn rule(&mut self, ip: u64, stack: &mut Stack) -> Option<Rule> {
        let set = rule_set(ip);
        let [first, second] = self.rules.get(set).copied().unwrap_or_default();
        let cached = select_unpredictable(first.ip == ip, first, second);
        if cached.ip == ip {
            return Some(cached.rule);
        }
        self.read_rule(ip, set, stack)
    }

    #[cold]
    #[inline(never)]
    fn read_rule(&mut self, ip: u64, set: usize, stack: &mut Stack) -> Option<Rule> {
        // The address after a call may belong to the next function already.
        let pc = if ip & EXACT != 0 { ip & !EXACT } else { ip.wrapping_sub(1) };
        // What has code on the thread's stack stays. Where the walk may err, tables are read only while nothing can go.
        let reading = objects::Reading::begin();
        if reading.is_none() && !stack.is_certain() {
            self.marks |= super::Captured::BROKEN;
            return None;
        }
        let of_signal = || arch::signal_frame(ip, |at| stack.follows_tables() && asked::can_read(at));
        let from_table = || object_around(pc).and_then(|object| object.rule(pc));
        let known = arch::known_signal_frame(ip).map(Rule::of_signal);
        let rule = known.or_else(from_table).or_else(|| of_signal().map(Rule::of_signal));
        drop(reading);
        let Some(rule) = rule else {
            if objects::is_in_use() {
                // Likely an object that was loaded after the table was filled: cut rather than guessed.
                self.marks |= super::Captured::BROKEN;
                return None;
            }
            // Generated code: nothing is known about it, and its addresses may be used again. Not cached.
            self.marks |= super::Captured::GUESSED;
            stack.distrust();
            return Some(FRAME_POINTER);
        };
        if let Some(set) = self.rules.get_mut(set) {
            *set = [CachedRule { ip, rule }, set[0]];
        }
        Some(rule)
    }
}

/// Place of an address in [`NativeState::rules`].
#[inline(always)]
fn rule_set(ip: u64) -> usize {
    (ip.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as usize
}

/// What the hash of the frames further out is multiplied by when one more is joined: an odd number, so that no bit is lost.
const JOIN: u64 = 0xd1b5_4a32_d192_ed03;

/// A place in [`NativeState::known`].
#[derive(Clone, Copy)]
struct Index {
    set: usize,
    way: usize,
}

impl Index {
    fn encode(self) -> u32 {
        (self.set * WAYS + self.way) as u32 + 1
    }

    #[inline(always)]
    fn decode(encoded: u32) -> Option<Index> {
        let index = encoded.checked_sub(1)? as usize;
        Some(Index { set: index / WAYS, way: index % WAYS })
    }
}

/// Where a part of a stack is kept.
struct Place {
    set: usize,
    tag: u32,
    guess: usize,
}

impl Place {
    #[inline(always)]
    fn of(start: &Frame, hint: u64) -> Place {
        let hash = mix(start.sp, start.ip);
        Place { set: (hash >> 58) as usize, tag: hash as u32 | 1, guess: (mix(hash, hint) >> 51) as usize }
    }
}

/// The rule of code that keeps a frame pointer, which points to the caller's; the return address lies above that.
const FRAME_POINTER: Rule =
    Rule { cfa: 16, fp: -16, kind: Rule::FP, marks: Rule::FP_AT_CFA | Rule::GUESSED, ret: ReturnAt::BELOW };
