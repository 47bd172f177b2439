//! From a code address to the rule that finds its caller: `_dl_find_object`, the sorted table of `.eh_frame_hdr`, and
//! the call frame instructions of `.eh_frame` (DWARF 5 §6.4; LSB core, exception frames).
//!
//! Only what a return needs is evaluated: the canonical frame address, the saved frame pointer, the return address. Storage is fixed, nothing is locked or allocated. What the rules below cannot express (a frame
//! address in another register, as in a few assembly functions) is [`Rule::UNSUPPORTED`].

use super::memory::{Cursor, Region};
use crate::arch::{self, FpOffset, ReturnAt, SignalFrame};
use core::ffi::{c_int, c_void};

/// `_dl_find_object(3)`, glibc 2.35 and later: lock-free and async-signal-safe.
pub(crate) type FindObject = unsafe extern "C" fn(pc: *mut c_void, result: *mut DlFindObject) -> c_int;

/// `struct dl_find_object` of `<dlfcn.h>` on x86-64 and AArch64 (`DLFO_STRUCT_HAS_EH_DBASE` is 0).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlFindObject {
    flags: u64,
    map_start: u64,
    map_end: u64,
    link_map: u64,
    eh_frame: u64,
    reserved: [u64; 7],
}

impl DlFindObject {
    pub(crate) const fn of(map_start: u64, map_end: u64, eh_frame: u64) -> DlFindObject {
        DlFindObject { flags: 0, map_start, map_end, link_map: 0, eh_frame, reserved: [0; 7] }
    }
}

/// A loaded object: its mapping, and where its `.eh_frame_hdr` starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Object {
    /// First to last mapped byte, holes included.
    pub(crate) mapping: Region,
    eh_frame_hdr: u64,
}

impl Object {
    /// The object that contains `pc`.
    ///
    /// # Safety
    /// `find_object` is glibc's function or one like it.
    #[must_use]
    pub(crate) unsafe fn containing(find_object: FindObject, pc: u64) -> Option<Object> {
        let mut found = DlFindObject::of(0, 0, 0);
        // SAFETY: any address may be asked for; `found` is a result structure of ours.
        let status = unsafe { find_object(pc as *mut c_void, &raw mut found) };
        if status != 0 || found.eh_frame == 0 {
            return None;
        }
        // SAFETY: the object is on the calling thread's stack, so nobody may unload it now; its headers and unwind
        // tables lie in loaded segments.
        let mapping = unsafe { Region::new(found.map_start, found.map_end) };
        Some(Object { mapping, eh_frame_hdr: found.eh_frame })
    }

    /// The rule for code at `pc`; `None` when there is no unwind information for it or it is damaged.
    #[must_use]
    pub(crate) fn rule(&self, pc: u64) -> Option<Rule> {
        let function = Function::find(self, pc)?;
        let row = function.row(pc)?;
        Some(row.pack(pc, function.common.is_signal_frame))
    }

    /// First address and the one after the last of the function around `pc`.
    #[must_use]
    pub(crate) fn function_range(&self, pc: u64) -> Option<(u64, u64)> {
        let function = Function::find(self, pc)?;
        Some((function.start, function.end))
    }
}

/// How to find the caller's registers: in eight bytes on x86-64.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub(crate) struct Rule {
    /// Added to the register that `kind` names.
    pub(crate) cfa: i32,
    /// Where the frame pointer was saved, from the base that [`Rule::fp_base`] names.
    pub(crate) fp: FpOffset,
    /// One of the constants.
    pub(crate) kind: u8,
    /// Base of the saved frame pointer (low two bits) and the marks below.
    pub(crate) marks: u8,
    /// Where the return address was saved, unless a mark says otherwise.
    pub(crate) ret: ReturnAt,
}

impl Rule {
    /// The outermost frame.
    pub(crate) const END: u8 = 0;
    /// CFA = stack pointer + cfa.
    pub(crate) const SP: u8 = 1;
    /// CFA = frame pointer + cfa.
    pub(crate) const FP: u8 = 2;
    /// CFA = word at the stack pointer + cfa: the signal trampoline.
    pub(crate) const AT_SP: u8 = 3;
    /// CFA = word at the frame pointer + cfa: functions that realign their stack.
    pub(crate) const AT_FP: u8 = 4;
    /// There is a rule that these constants cannot say.
    pub(crate) const UNSUPPORTED: u8 = 5;

    /// The frame pointer is the caller's still.
    pub(crate) const FP_SAME: u8 = 0;
    /// Saved at CFA + `fp`.
    pub(crate) const FP_AT_CFA: u8 = 1;
    /// Saved at the frame's own frame pointer + `fp`.
    pub(crate) const FP_AT_FP: u8 = 2;
    /// Saved at the frame's own stack pointer + `fp`.
    pub(crate) const FP_AT_SP: u8 = 3;
    /// The return address is not below the CFA but in the word after the one that held the CFA.
    pub(crate) const RETURN_AFTER_CFA: u8 = 4;
    /// The address found is that of an interrupted instruction, not of the one after a call.
    pub(crate) const INTERRUPTED: u8 = 8;
    /// Not from a table.
    pub(crate) const GUESSED: u8 = 16;
    /// The return address is in the link register still: the function has called nothing since it was called itself.
    pub(crate) const RETURN_IN_REGISTER: u8 = 32;

    /// The rule of the kernel's frame of a signal, where no table says it.
    pub(crate) const fn of_signal(frame: SignalFrame) -> Rule {
        let marks = Rule::FP_AT_SP | Rule::RETURN_AFTER_CFA | Rule::INTERRUPTED;
        Rule { cfa: frame.sp, fp: frame.fp, kind: Rule::AT_SP, marks, ret: ReturnAt::BELOW }
    }

    /// Whether frame address and frame pointer are a register, the frame address or a word below it.
    #[inline(always)]
    #[must_use]
    pub(crate) const fn is_simple(&self) -> bool {
        (self.kind == Self::SP || self.kind == Self::FP) && self.marks <= Self::FP_AT_CFA
    }

    /// One of the `FP_` constants.
    #[inline(always)]
    #[must_use]
    pub(crate) const fn fp_base(&self) -> u8 {
        self.marks & 3
    }
}

/// DWARF numbers of registers.
const FP: u64 = arch::FRAME_POINTER;
const SP: u64 = arch::STACK_POINTER;
const RETURN: u64 = arch::RETURN_ADDRESS;

/// What a common information entry says.
#[derive(Clone, Copy)]
struct Common {
    code_align: u64,
    data_align: i64,
    pointer_encoding: u8,
    has_augmentation: bool,
    is_signal_frame: bool,
    instructions: Cursor,
}

impl Common {
    fn parse(mut at: Cursor) -> Option<Common> {
        at = entry(at)?;
        if at.u32()? != 0 {
            return None; // Not a CIE.
        }
        let version = at.u8()?;
        let names = at;
        while at.u8()? != 0 {}
        if version == 4 {
            at.skip(2)?; // Sizes of an address and of a segment selector.
        }
        let code_align = at.uleb()?;
        let data_align = at.sleb()?;
        let return_register = if version == 1 { u64::from(at.u8()?) } else { at.uleb()? };
        if return_register != RETURN {
            return None;
        }
        let mut common = Common {
            code_align,
            data_align,
            pointer_encoding: 0,
            has_augmentation: false,
            is_signal_frame: false,
            instructions: at,
        };
        common.augmentation(names, at)?;
        Some(common)
    }

    fn augmentation(&mut self, mut names: Cursor, mut at: Cursor) -> Option<()> {
        let mut after = at;
        loop {
            match names.u8()? {
                0 => break,
                b'z' => {
                    let bytes = at.uleb()?;
                    after = at;
                    after.skip(bytes)?;
                    self.has_augmentation = true;
                }
                b'R' => self.pointer_encoding = at.u8()?,
                b'P' => {
                    let encoding = at.u8()?;
                    pointer(&mut at, encoding, 0)?;
                }
                b'L' => drop(at.u8()?),
                b'S' => self.is_signal_frame = true,
                b'B' => {}
                // Anything after an unknown letter cannot be read, but its length is known.
                _ if self.has_augmentation => break,
                _ => return None,
            }
        }
        self.instructions = if self.has_augmentation { after } else { at };
        Some(())
    }
}

/// One function's entry.
struct Function {
    common: Common,
    start: u64,
    end: u64,
    instructions: Cursor,
}

impl Function {
    fn find(object: &Object, pc: u64) -> Option<Function> {
        let mut at = object.mapping.cursor(search(object, pc)?);
        at = entry(at)?;
        let id_at = at.at;
        let distance = at.u32()?;
        let common = Common::parse(object.mapping.cursor(id_at.checked_sub(u64::from(distance))?))?;
        let start = pointer(&mut at, common.pointer_encoding, object.eh_frame_hdr)?;
        let length = pointer(&mut at, common.pointer_encoding & 0x0f, 0)?;
        let end = start.checked_add(length)?;
        if common.has_augmentation {
            let bytes = at.uleb()?;
            at.skip(bytes)?;
        }
        (start <= pc && pc < end).then_some(Function { common, start, end, instructions: at })
    }

    /// The row of the virtual table that holds at `pc`.
    fn row(&self, pc: u64) -> Option<Row> {
        let mut machine = Machine {
            row: Row::default(),
            initial: Row::default(),
            saved: [Row::default(); 4],
            n_saved: 0,
            location: self.start,
        };
        machine.run(self.common.instructions, &self.common, u64::MAX)?;
        machine.initial = machine.row;
        machine.location = self.start;
        machine.run(self.instructions, &self.common, pc)?;
        Some(machine.row)
    }
}

/// Reads the length of an entry of `.eh_frame`; the cursor then ends where the entry does.
fn entry(mut at: Cursor) -> Option<Cursor> {
    let length = match at.u32()? {
        0 => return None, // The terminator.
        u32::MAX => at.u64()?,
        length => u64::from(length),
    };
    Some(at.until(at.at.checked_add(length)?))
}

/// Address of the entry for the last function that starts at or before `pc`.
fn search(object: &Object, pc: u64) -> Option<u64> {
    let header = object.eh_frame_hdr;
    let mut at = object.mapping.cursor(header);
    let (version, frame_encoding, count_encoding, table_encoding) = (at.u8()?, at.u8()?, at.u8()?, at.u8()?);
    // 0x3b: offsets from the header, four signed bytes. Every linker writes this.
    if version != 1 || table_encoding != 0x3b {
        return None;
    }
    pointer(&mut at, frame_encoding, header)?;
    let n_rows = pointer(&mut at, count_encoding, header)?;
    let row = |index: u64| -> Option<(u64, u64)> {
        let mut row = object.mapping.cursor(at.at.checked_add(index.checked_mul(8)?)?);
        let (start, entry) = (row.u32()? as i32, row.u32()? as i32);
        Some((header.wrapping_add(start as i64 as u64), header.wrapping_add(entry as i64 as u64)))
    };
    let (mut low, mut high) = (0, n_rows);
    while low < high {
        let middle = low + (high - low) / 2;
        if row(middle)?.0 <= pc { low = middle + 1 } else { high = middle }
    }
    Some(row(low.checked_sub(1)?)?.1)
}

/// A pointer in one of the `DW_EH_PE_` encodings (LSB core, DWARF extensions). Indirect ones are not followed: only
/// personalities are, and they are skipped.
fn pointer(at: &mut Cursor, encoding: u8, data_base: u64) -> Option<u64> {
    let base = match encoding & 0x70 {
        0x00 => 0,
        0x10 => at.at,
        0x30 => data_base,
        _ => return None,
    };
    let value = match encoding & 0x0f {
        0x00 | 0x04 | 0x0c => at.u64()?,
        0x01 => at.uleb()?,
        0x02 => u64::from(at.u16()?),
        0x03 => u64::from(at.u32()?),
        0x09 => at.sleb()? as u64,
        0x0a => at.u16()? as i16 as i64 as u64,
        0x0b => at.u32()? as i32 as i64 as u64,
        _ => return None,
    };
    Some(if value == 0 { 0 } else { base.wrapping_add(value) })
}

/// Where the canonical frame address comes from.
#[derive(Clone, Copy)]
enum Cfa {
    Unknown,
    Register(u64, i64),
    Expression(Cursor),
}

/// Where a register was saved.
#[derive(Clone, Copy)]
enum Saved {
    /// Not said: unchanged for the frame pointer and for a link register; for a return address that has none, an error.
    Unsaid,
    Same,
    Undefined,
    AtCfa(i64),
    AtExpression(Cursor),
    Other,
}

#[derive(Clone, Copy)]
struct Row {
    cfa: Cfa,
    fp: Saved,
    return_address: Saved,
}

impl Default for Row {
    fn default() -> Row {
        Row { cfa: Cfa::Unknown, fp: Saved::Unsaid, return_address: Saved::Unsaid }
    }
}

impl Row {
    fn pack(&self, pc: u64, is_signal_frame: bool) -> Rule {
        let unsupported = Rule { kind: Rule::UNSUPPORTED, ..Rule::default() };
        if matches!(self.return_address, Saved::Undefined) {
            return Rule { kind: Rule::END, ..Rule::default() };
        }
        self.try_pack(pc, is_signal_frame).unwrap_or(unsupported)
    }

    fn try_pack(&self, pc: u64, is_signal_frame: bool) -> Option<Rule> {
        let (kind, cfa) = match self.cfa {
            Cfa::Register(SP, offset) => (Rule::SP, offset),
            Cfa::Register(FP, offset) => (Rule::FP, offset),
            Cfa::Expression(program) => match Value::of(program, pc)? {
                Value::Register(SP, offset) => (Rule::SP, offset),
                Value::Register(FP, offset) => (Rule::FP, offset),
                Value::Word(SP, offset) => (Rule::AT_SP, offset),
                Value::Word(FP, offset) => (Rule::AT_FP, offset),
                _ => return None,
            },
            _ => return None,
        };
        let (fp_base, fp) = match self.fp {
            Saved::Unsaid | Saved::Same | Saved::Undefined => (Rule::FP_SAME, 0),
            Saved::AtCfa(offset) => (Rule::FP_AT_CFA, offset),
            Saved::AtExpression(program) => match Value::of(program, pc)? {
                Value::Register(FP, offset) => (Rule::FP_AT_FP, offset),
                Value::Register(SP, offset) => (Rule::FP_AT_SP, offset),
                _ => return None,
            },
            Saved::Other => return None,
        };
        let (ret, return_mark) = match self.return_address {
            Saved::AtCfa(offset) => (ReturnAt::offset(offset)?, 0),
            Saved::AtExpression(program) => match (Value::of(program, pc)?, kind) {
                (Value::Register(SP, offset), Rule::AT_SP) if offset == cfa.checked_add(8)? => {
                    (ReturnAt::BELOW, Rule::RETURN_AFTER_CFA)
                }
                _ => return None,
            },
            Saved::Unsaid | Saved::Same if arch::HAS_LINK_REGISTER => {
                (ReturnAt::BELOW, Rule::RETURN_IN_REGISTER)
            }
            _ => return None,
        };
        let interrupted = if is_signal_frame { Rule::INTERRUPTED } else { 0 };
        Some(Rule {
            cfa: i32::try_from(cfa).ok()?,
            fp: FpOffset::try_from(fp).ok()?,
            kind,
            marks: fp_base | return_mark | interrupted,
            ret,
        })
    }
}

/// The value of a location expression, as far as a rule can say it.
#[derive(Clone, Copy)]
enum Value {
    Number(u64),
    /// Register plus number.
    Register(u64, i64),
    /// Word at register plus number.
    Word(u64, i64),
}

impl Value {
    /// Evaluates a location expression (DWARF 5 §2.5) with unknown registers and known `pc`. That is enough for the
    /// expressions that exist: procedure linkage tables, the signal trampoline, realigned stacks.
    fn of(mut program: Cursor, pc: u64) -> Option<Value> {
        let mut stack = [Value::Number(0); 8];
        let mut depth = 0usize;
        while !program.is_at_end() {
            let operation = program.u8()?;
            let value = match operation {
                0x08 => Value::Number(u64::from(program.u8()?)),
                0x09 => Value::Number(program.u8()? as i8 as i64 as u64),
                0x0a => Value::Number(u64::from(program.u16()?)),
                0x0b => Value::Number(program.u16()? as i16 as i64 as u64),
                0x0c => Value::Number(u64::from(program.u32()?)),
                0x0d => Value::Number(program.u32()? as i32 as i64 as u64),
                0x10 => Value::Number(program.uleb()?),
                0x11 => Value::Number(program.sleb()? as u64),
                0x30..=0x4f => Value::Number(u64::from(operation - 0x30)),
                0x70..=0x8f => {
                    let offset = program.sleb()?;
                    match u64::from(operation - 0x70) {
                        // The trampoline's and the table's "return address" is the address being unwound.
                        RETURN if !arch::HAS_LINK_REGISTER => Value::Number(pc.wrapping_add(offset as u64)),
                        register => Value::Register(register, offset),
                    }
                }
                0x06 => {
                    let Value::Register(register, offset) = pop(&stack, &mut depth)? else { return None };
                    Value::Word(register, offset)
                }
                0x23 => {
                    let added = program.uleb()?;
                    pop(&stack, &mut depth)?.plus(Value::Number(added))?
                }
                0x1a | 0x1c | 0x22 | 0x24 | 0x25 | 0x2a => {
                    let right = pop(&stack, &mut depth)?;
                    let left = pop(&stack, &mut depth)?;
                    left.with(operation, right)?
                }
                _ => return None,
            };
            *stack.get_mut(depth)? = value;
            depth += 1;
        }
        pop(&stack, &mut depth)
    }

    fn with(self, operation: u8, right: Value) -> Option<Value> {
        if operation == 0x22 {
            return self.plus(right);
        }
        let (Value::Number(left), Value::Number(right)) = (self, right) else { return None };
        Some(Value::Number(match operation {
            0x1a => left & right,
            0x1c => left.wrapping_sub(right),
            0x24 => left.checked_shl(u32::try_from(right).ok()?)?,
            0x25 => left.checked_shr(u32::try_from(right).ok()?)?,
            0x2a => u64::from(left as i64 >= right as i64),
            _ => return None,
        }))
    }

    fn plus(self, right: Value) -> Option<Value> {
        match (self, right) {
            (Value::Number(left), Value::Number(right)) => Some(Value::Number(left.wrapping_add(right))),
            (Value::Register(register, offset), Value::Number(number))
            | (Value::Number(number), Value::Register(register, offset)) => {
                Some(Value::Register(register, offset.wrapping_add(number as i64)))
            }
            _ => None,
        }
    }
}

fn pop(stack: &[Value; 8], depth: &mut usize) -> Option<Value> {
    *depth = depth.checked_sub(1)?;
    stack.get(*depth).copied()
}

/// The call frame machine.
struct Machine {
    row: Row,
    initial: Row,
    /// GCC nests remembered rows once; the binaries of CUDA and PyTorch never more than twice.
    saved: [Row; 4],
    n_saved: usize,
    location: u64,
}

impl Machine {
    /// Runs instructions until the row for `pc` is complete.
    fn run(&mut self, mut at: Cursor, common: &Common, pc: u64) -> Option<()> {
        while !at.is_at_end() && self.location <= pc {
            let byte = at.u8()?;
            let low = u64::from(byte & 0x3f);
            match byte >> 6 {
                1 => self.advance(low, common),
                2 => {
                    let offset = at.uleb()? as i64;
                    self.save(low, Saved::AtCfa(offset.wrapping_mul(common.data_align)));
                }
                3 => self.restore(low),
                _ => self.extended(byte, &mut at, common)?,
            }
        }
        Some(())
    }

    fn extended(&mut self, operation: u8, at: &mut Cursor, common: &Common) -> Option<()> {
        match operation {
            0x00 => {}                                                        // nop
            0x01 => self.location = pointer(at, common.pointer_encoding, 0)?, // set_loc
            0x02 => {
                let delta = u64::from(at.u8()?);
                self.advance(delta, common);
            }
            0x03 => {
                let delta = u64::from(at.u16()?);
                self.advance(delta, common);
            }
            0x04 => {
                let delta = u64::from(at.u32()?);
                self.advance(delta, common);
            }
            0x05 => {
                // offset_extended
                let (register, offset) = (at.uleb()?, at.uleb()? as i64);
                self.save(register, Saved::AtCfa(offset.wrapping_mul(common.data_align)));
            }
            0x06 => {
                let register = at.uleb()?;
                self.restore(register);
            }
            0x07 => {
                let register = at.uleb()?;
                self.save(register, Saved::Undefined);
            }
            0x08 => {
                let register = at.uleb()?;
                self.save(register, Saved::Same);
            }
            0x09 | 0x14 => {
                // register, val_offset
                let register = at.uleb()?;
                at.uleb()?;
                self.save(register, Saved::Other);
            }
            0x15 => {
                // val_offset_sf
                let register = at.uleb()?;
                at.sleb()?;
                self.save(register, Saved::Other);
            }
            0x0a => {
                // remember_state
                *self.saved.get_mut(self.n_saved)? = self.row;
                self.n_saved += 1;
            }
            0x0b => {
                // restore_state
                self.n_saved = self.n_saved.checked_sub(1)?;
                self.row = *self.saved.get(self.n_saved)?;
            }
            0x0c => self.row.cfa = Cfa::Register(at.uleb()?, at.uleb()? as i64), // def_cfa
            0x12 => {
                // def_cfa_sf
                let (register, offset) = (at.uleb()?, at.sleb()?);
                self.row.cfa = Cfa::Register(register, offset.wrapping_mul(common.data_align));
            }
            0x0d => {
                // def_cfa_register
                let register = at.uleb()?;
                let Cfa::Register(_, offset) = self.row.cfa else { return None };
                self.row.cfa = Cfa::Register(register, offset);
            }
            0x0e | 0x13 => {
                // def_cfa_offset and its signed, factored form
                let offset = if operation == 0x0e {
                    at.uleb()? as i64
                } else {
                    at.sleb()?.wrapping_mul(common.data_align)
                };
                let Cfa::Register(register, _) = self.row.cfa else { return None };
                self.row.cfa = Cfa::Register(register, offset);
            }
            0x0f => self.row.cfa = Cfa::Expression(block(at)?), // def_cfa_expression
            0x10 => {
                // expression
                let register = at.uleb()?;
                let program = block(at)?;
                self.save(register, Saved::AtExpression(program));
            }
            0x16 => {
                // val_expression
                let register = at.uleb()?;
                block(at)?;
                self.save(register, Saved::Other);
            }
            0x11 => {
                // offset_extended_sf
                let (register, offset) = (at.uleb()?, at.sleb()?);
                self.save(register, Saved::AtCfa(offset.wrapping_mul(common.data_align)));
            }
            0x2e => drop(at.uleb()?), // GNU_args_size
            0x2f => {
                // GNU_negative_offset_extended
                let (register, offset) = (at.uleb()?, at.uleb()? as i64);
                self.save(register, Saved::AtCfa(offset.wrapping_mul(common.data_align).wrapping_neg()));
            }
            _ if arch::is_idle_instruction(operation) => {}
            _ => return None,
        }
        Some(())
    }

    fn advance(&mut self, delta: u64, common: &Common) {
        self.location = self.location.saturating_add(delta.wrapping_mul(common.code_align));
    }

    fn save(&mut self, register: u64, saved: Saved) {
        match register {
            FP => self.row.fp = saved,
            RETURN => self.row.return_address = saved,
            _ => {}
        }
    }

    fn restore(&mut self, register: u64) {
        match register {
            FP => self.row.fp = self.initial.fp,
            RETURN => self.row.return_address = self.initial.return_address,
            _ => {}
        }
    }
}

/// A counted block: the cursor of its bytes.
fn block(at: &mut Cursor) -> Option<Cursor> {
    let bytes = at.uleb()?;
    let start = *at;
    at.skip(bytes)?;
    Some(start.until(at.at))
}
