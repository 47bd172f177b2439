//! The calling thread's return addresses, the same that libgcc's `_Unwind_Backtrace` finds.
//!
//! Three things make it cheap. A frame's unwind rule is cached by return address, so that the tables are read once a
//! thread and address. The previous stack is kept: where the walk meets a frame of it with the same registers, the
//! rest is not walked but compared, slot by slot, with loads that do not wait for each other. And every frame keeps
//! the hash of itself and everything outside it, so that an unchanged rest is not hashed again either.
//!
//! No lock, no allocation, no load outside the thread's own stack, other than of unwind tables.

use super::cfi::{FindObject, Object, Rule};
use super::memory::{Region, Stacks};
use super::{Fixed, join, mix};
use core::hint::select_unpredictable;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Frames that are kept, counted from the innermost. Deeper ones are cut and marked.
pub(crate) const MAX_FRAMES: usize = 512;
/// Two-way sets of the rule cache: 4,096 rules, 64 KiB a thread.
const RULE_SETS: usize = 2048;
/// Walks that are remembered by the frame they started from.
const PATHS: usize = 1024;
/// Frames of such a walk; longer ones take several.
const PATH_FRAMES: usize = 31;
/// In an address: it is that of an interrupted instruction, so it is itself in the function that it belongs to.
const EXACT: u64 = 1 << 63;
/// In [`Frame::rbp_slot`]: the frame was found in another way than through the word below `sp`; walk, do not compare. No
/// stack has this address.
const WALK: u64 = 0;

/// The registers of one frame, and where they were found.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Frame {
    /// Return address; [`EXACT`] may be set.
    ip: u64,
    sp: u64,
    rbp: u64,
    /// Address of the word that gave `rbp`; that of the return address where `rbp` is the callee's; or [`WALK`].
    rbp_slot: u64,
}

impl Frame {
    #[inline(always)]
    fn has_registers_of(&self, other: &Frame) -> bool {
        self.sp == other.sp && self.ip == other.ip && self.rbp == other.rbp
    }

    /// Whether the frame is still where it was. The caller knows that the frame called by it is unchanged.
    #[inline(always)]
    fn is_unchanged(&self, stack: &Region) -> bool {
        let return_slot = self.sp.wrapping_sub(8);
        // Which of the two it is follows no pattern: selected, not branched on.
        let saved = select_unpredictable(self.rbp_slot == return_slot, self.ip, self.rbp);
        (stack.word(return_slot) == Some(self.ip)) & (stack.word(self.rbp_slot) == Some(saved))
    }
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct CachedRule {
    /// Return address, with [`EXACT`]; 0 empty.
    ip: u64,
    rule: Rule,
}

/// A walk as it went when it was last done from its first frame.
#[repr(C, align(64))]
struct Path {
    frames: Fixed<Frame, PATH_FRAMES>,
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
    /// `path_tags[slot]` says which frame `paths[slot]` starts from, without a look into it; 0 none.
    path_tags: [u32; PATHS],
    paths: [Path; PATHS],
    /// Stacks this thread was seen on.
    pub(crate) stacks: Stacks,
    /// End of the stack on which `frames` was found.
    stack_end: u64,
    /// [`UNLOADED`] when the rules were read.
    unloaded: u32,
    /// Marks of the last capture.
    marks: u32,
    /// Innermost frames that are the shim's own.
    n_own: u32,
    reserved: u32,
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

static FIND_OBJECT: AtomicPtr<core::ffi::c_void> = AtomicPtr::new(core::ptr::null_mut());
static OWN_START: AtomicU64 = AtomicU64::new(0);
static OWN_END: AtomicU64 = AtomicU64::new(0);
static UNLOADED: AtomicU32 = AtomicU32::new(0);

/// Prepares the process for captures. `find_object` null: no native stacks (glibc before 2.35, musl).
///
/// # Safety
/// `find_object` is null or glibc's `_dl_find_object`.
pub(crate) unsafe fn init(find_object: *mut core::ffi::c_void) {
    FIND_OBJECT.store(find_object, Ordering::Release);
    if let Some(own) = object_around(init as *const () as u64) {
        OWN_START.store(own.mapping.start(), Ordering::Relaxed);
        OWN_END.store(own.mapping.end(), Ordering::Relaxed);
    }
}

/// Says that an object was unloaded: every thread forgets its rules at its next capture, because another object may
/// come to the same addresses.
pub(crate) fn note_unloaded() {
    UNLOADED.fetch_add(1, Ordering::Relaxed);
}

/// The loaded object around `addr`, when it has unwind tables and they can be found.
#[must_use]
pub(crate) fn object_around(addr: u64) -> Option<Object> {
    let find_object = FIND_OBJECT.load(Ordering::Relaxed);
    if find_object.is_null() {
        return None;
    }
    // SAFETY: `init` was given glibc's function or null.
    let find_object: FindObject = unsafe { core::mem::transmute(find_object) };
    // SAFETY: as above.
    unsafe { Object::containing(find_object, addr) }
}

impl NativeState {
    /// Captures the stack of the frame with these registers.
    #[inline]
    pub(crate) fn capture(&mut self, ip: u64, sp: u64, rbp: u64) -> NativeStack {
        let stack =
            if FIND_OBJECT.load(Ordering::Relaxed).is_null() { Region::EMPTY } else { self.stacks.above(sp) };
        if stack == Region::EMPTY {
            self.frames.clear();
            return NativeStack { marks: super::Captured::NO_NATIVE, ..NativeStack::default() };
        }
        let unloaded = UNLOADED.load(Ordering::Relaxed);
        if unloaded != self.unloaded {
            self.forget(unloaded);
        }
        // A cut stack has no outermost frame to start from, and a broken one must be found broken again.
        let unusable = super::Captured::TRUNCATED | super::Captured::BROKEN;
        if stack.end() != self.stack_end || self.marks & unusable != 0 {
            self.frames.clear();
            self.stack_end = stack.end();
        }
        let innermost = Frame { ip, sp, rbp, rbp_slot: WALK };
        if !self.walk(innermost, stack) {
            self.frames.clear();
            self.walk(innermost, stack);
        }
        self.summary()
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
        self.unloaded = unloaded;
        self.rules.fill([CachedRule::default(); 2]);
        self.path_tags.fill(0);
        self.frames.clear();
    }

    /// Makes `frames` the stack of `innermost`. False when that needs a start from nothing: the known rest and the
    /// new frames together are more than can be kept.
    #[inline(always)]
    fn walk(&mut self, innermost: Frame, mut stack: Region) -> bool {
        self.found.clear();
        self.marks = 0;
        let mut frame = innermost;
        let mut recording = NOT_RECORDING;
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
                recording = NOT_RECORDING;
            } else {
                // A way that was gone before?
                let (slot, tag) = path_of(&frame);
                if self.path_tags.get(slot) == Some(&tag) {
                    recording = NOT_RECORDING;
                    if let Some(reached) = self.follow(slot, &frame, &stack) {
                        frame = reached;
                        continue;
                    }
                } else {
                    recording = self.record(recording, slot, tag, frame);
                }
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

    /// Goes along a remembered path as far as it still is there. `None` when that is not even one step.
    #[inline(always)]
    fn follow(&mut self, slot: usize, frame: &Frame, stack: &Region) -> Option<Frame> {
        let path = self.paths.get(slot)?.frames.as_slice();
        let (start, outer) = path.split_first()?;
        if !start.has_registers_of(frame) {
            return None;
        }
        let n_same = outer.iter().take_while(|frame| frame.is_unchanged(stack)).count();
        let reached = *outer.get(n_same.checked_sub(1)?)?;
        if !self.found.extend(path.get(..n_same)?) {
            return None;
        }
        Some(reached)
    }

    /// Adds a frame to the path that is being recorded, or starts one with it.
    #[inline(always)]
    fn record(&mut self, recording: usize, slot: usize, tag: u32, frame: Frame) -> usize {
        if let Some(path) = self.paths.get_mut(recording)
            && path.frames.push(frame)
        {
            return recording;
        }
        if let (Some(path), Some(path_tag)) = (self.paths.get_mut(slot), self.path_tags.get_mut(slot)) {
            path.frames.clear();
            path.frames.push(frame);
            *path_tag = tag;
        }
        slot
    }

    /// The outermost index from which on every frame up to `index`, which is, is unchanged.
    #[inline(always)]
    fn first_unchanged(&self, index: usize, stack: &Region) -> usize {
        let outer = self.frames.as_slice().get(..index).unwrap_or_default();
        outer.iter().rposition(|frame| !frame.is_unchanged(stack)).map_or(0, |changed| changed + 1)
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
            let index = self.frames.len();
            hash = join(hash, frame.ip, index);
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
    fn step(&mut self, frame: &Frame, stack: &mut Region) -> Option<Frame> {
        let rule = self.rule(frame.ip)?;
        if !rule.is_simple() {
            return self.step_unusual(rule, frame, stack);
        }
        let base = select_unpredictable(rule.kind == Rule::RBP, frame.rbp, frame.sp);
        let cfa = base.wrapping_add(rule.cfa as i64 as u64);
        let return_slot = cfa.wrapping_sub(8);
        let has_rbp = rule.rbp_base() == Rule::RBP_AT_CFA;
        let rbp_slot =
            select_unpredictable(has_rbp, cfa.wrapping_add(i64::from(rule.rbp) as u64), return_slot);
        // The return address lies below the frame address, above everything of the frame itself.
        let (Some(ip), Some(saved_rbp), true) =
            (stack.word(return_slot), stack.word(rbp_slot), cfa > frame.sp)
        else {
            return self.broken();
        };
        if ip == 0 {
            return None;
        }
        if ip & EXACT != 0 {
            return self.broken();
        }
        Some(Frame { ip, sp: cfa, rbp: select_unpredictable(has_rbp, saved_rbp, frame.rbp), rbp_slot })
    }

    /// Every other rule.
    #[inline(never)]
    fn step_unusual(&mut self, rule: Rule, frame: &Frame, stack: &mut Region) -> Option<Frame> {
        match rule.kind {
            Rule::END => None,
            Rule::AT_RSP | Rule::AT_RBP => self.step_through_memory(rule, frame, stack),
            Rule::RSP | Rule::RBP => {
                let base = if rule.kind == Rule::RBP { frame.rbp } else { frame.sp };
                let cfa = base.wrapping_add(rule.cfa as i64 as u64);
                if cfa <= frame.sp {
                    return self.broken();
                }
                let Some(ip) = stack.word(cfa.wrapping_sub(8)) else { return self.broken() };
                self.caller(rule, frame, stack, cfa, ip)
            }
            _ => self.broken(),
        }
    }

    /// Frame addresses that are themselves in memory: realigned frames and the signal trampoline.
    fn step_through_memory(&mut self, rule: Rule, frame: &Frame, stack: &mut Region) -> Option<Frame> {
        let base = if rule.kind == Rule::AT_RSP { frame.sp } else { frame.rbp };
        let cfa_slot = base.wrapping_add(rule.cfa as i64 as u64);
        let Some(cfa) = stack.word(cfa_slot) else { return self.broken() };
        if rule.marks & Rule::RETURN_AFTER_CFA == 0 {
            if cfa <= frame.sp {
                return self.broken();
            }
            let Some(ip) = stack.word(cfa.wrapping_sub(8)) else { return self.broken() };
            return self.caller(rule, frame, stack, cfa, ip);
        }
        // The interrupted code may have been on another stack than its signal handler.
        let Some(ip) = stack.word(cfa_slot.wrapping_add(8)) else { return self.broken() };
        let caller = self.caller(rule, frame, stack, cfa, ip)?;
        if !stack.contains(cfa) {
            *stack = self.stacks.above(cfa);
        }
        Some(caller)
    }

    fn caller(&mut self, rule: Rule, frame: &Frame, stack: &Region, cfa: u64, ip: u64) -> Option<Frame> {
        let offset = i64::from(rule.rbp) as u64;
        let slot = match rule.rbp_base() {
            Rule::RBP_SAME => {
                return self.checked(rule, Frame { ip, sp: cfa, rbp: frame.rbp, rbp_slot: WALK });
            }
            Rule::RBP_AT_CFA => cfa.wrapping_add(offset),
            Rule::RBP_AT_RBP => frame.rbp.wrapping_add(offset),
            _ => frame.sp.wrapping_add(offset),
        };
        let Some(rbp) = stack.word(slot) else { return self.broken() };
        self.checked(rule, Frame { ip, sp: cfa, rbp, rbp_slot: WALK })
    }

    fn checked(&mut self, rule: Rule, mut caller: Frame) -> Option<Frame> {
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

    #[inline(always)]
    fn rule(&mut self, ip: u64) -> Option<Rule> {
        let set = (ip.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as usize;
        let [first, second] = self.rules.get(set).copied().unwrap_or_default();
        let cached = select_unpredictable(first.ip == ip, first, second);
        if cached.ip == ip {
            return Some(cached.rule);
        }
        self.read_rule(ip, set)
    }

    #[cold]
    #[inline(never)]
    fn read_rule(&mut self, ip: u64, set: usize) -> Option<Rule> {
        // The address after a call may belong to the next function already.
        let pc = if ip & EXACT != 0 { ip & !EXACT } else { ip.wrapping_sub(1) };
        let Some(rule) = object_around(pc).and_then(|object| object.rule(pc)) else {
            // Generated code: nothing is known about it, and its addresses may be used again. Not cached.
            self.marks |= super::Captured::GUESSED;
            return Some(FRAME_POINTER);
        };
        if let Some(set) = self.rules.get_mut(set) {
            *set = [CachedRule { ip, rule }, set[0]];
        }
        Some(rule)
    }
}

/// No path is being recorded: an index beyond all.
const NOT_RECORDING: usize = PATHS;

/// Where the path that starts from `frame` is, and its tag.
#[inline(always)]
fn path_of(frame: &Frame) -> (usize, u32) {
    let hash = mix(frame.sp, frame.ip);
    ((hash >> 54) as usize, hash as u32 | 1)
}

/// The rule of code that keeps a frame pointer: `push rbp; mov rbp, rsp`.
const FRAME_POINTER: Rule =
    Rule { cfa: 16, rbp: -16, kind: Rule::RBP, marks: Rule::RBP_AT_CFA | Rule::GUESSED };
