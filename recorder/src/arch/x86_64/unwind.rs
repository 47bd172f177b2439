//! Stack frames from a copy of a thread's registers and stack, by the tables that compilers write for exceptions (`.eh_frame`).
//!
//! The copy was taken while the thread stood still; all work happens after that. Tables come from the files that are mapped in the
//! process, and from its memory for the kernel's own code (the vDSO). Nothing in them is believed: each frame must lie above
//! the one before, each value must lie in the copy, and a stack that cannot be followed to its end says why ([`End`]).
//!
//! x86-64.

use crate::map_file::Mapped;
use crate::process::{self, AddressSpace, Fate, Target};
use crate::thread_stack::End;
use addr2line::gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, Encoding, EndianSlice, EvaluationResult, Expression, Format,
    LittleEndian, Location, Register, RegisterRule, UnwindContext, UnwindSection, UnwindTableRow, Value,
};
use object::{Object, ObjectSection};
use std::collections::HashMap;
use std::ops::Range;

/// Frames of a thread that are followed at most.
const MOST_FRAMES: usize = 256;
/// Steps of an expression in a table; those that compilers write have under twenty.
const MOST_STEPS: u32 = 256;
/// Most instructions of an expression's evaluation, and how often it may ask for something.
const MOST_QUESTIONS: u32 = 64;

/// Bytes of table entries that are followed for all threads of a process, at most. Real entries have some 60, and a frame needs one: 256
/// frames of 1,024 threads have 16 MiB.
const MOST_ENTRIES: usize = 128 << 20;

/// Numbers of registers in DWARF (System V ABI, AMD64, figure 3.36).
pub(crate) const RBX: usize = 3;
pub(crate) const RBP: usize = 6;
pub(crate) const RSP: usize = 7;
/// The return address; of a thread, where it is.
pub(crate) const RIP: usize = 16;
const N_REGISTERS: usize = 17;

/// Registers by their numbers in DWARF; `None` is not known.
pub(crate) type Registers = [Option<u64>; N_REGISTERS];

/// What a thread had at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    pub(crate) registers: Registers,
    /// Address of the first byte of `stack`.
    pub(crate) base: u64,
    pub(crate) stack: Vec<u8>,
}

impl Moment {
    fn word(&self, address: u64) -> Option<u64> {
        let at = usize::try_from(address.checked_sub(self.base)?).ok()?;
        let bytes = self.stack.get(at..at.checked_add(8)?)?;
        bytes.try_into().ok().map(u64::from_le_bytes)
    }
}

/// The tables of a process's modules.
pub(crate) struct Unwinder<'a> {
    target: &'a Target,
    space: &'a AddressSpace,
    vdso: Option<(Range<u64>, Vec<u8>)>,
    tables: HashMap<usize, Option<Tables>>,
    context: UnwindContext<usize>,
    /// Bytes of entries that may still be followed.
    left: usize,
}

enum Bytes {
    File(Mapped),
    Memory(Vec<u8>),
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Bytes::File(mapped) => mapped.bytes(),
            Bytes::Memory(bytes) => bytes,
        }
    }
}

/// `.eh_frame` and its index in one file.
struct Tables {
    bytes: Bytes,
    bias: u64,
    frames: Range<usize>,
    index: Range<usize>,
    bases: BaseAddresses,
}

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// How a frame leads to its caller: the caller's registers, and whether a signal interrupted it.
type Step = Result<(Registers, bool), End>;

impl<'a> Unwinder<'a> {
    /// `vdso` is the kernel's code in the process, with its address.
    pub(crate) fn new(
        target: &'a Target,
        space: &'a AddressSpace,
        vdso: Option<(Range<u64>, Vec<u8>)>,
    ) -> Unwinder<'a> {
        let (tables, context) = (HashMap::new(), UnwindContext::new());
        Unwinder { target, space, vdso, tables, context, left: MOST_ENTRIES }
    }

    /// Addresses of the frames, innermost first: each is one byte behind an instruction of the call, as a return address is.
    pub(crate) fn frames(&mut self, moment: &Moment) -> (Vec<u64>, End) {
        let mut registers = moment.registers;
        let mut frames = vec![];
        // The thread, and who took a signal, are at an instruction; a caller is behind one.
        let mut is_at = true;
        for _ in 0..MOST_FRAMES {
            let Some(at) = registers[RIP] else { return (frames, End::Unknown) };
            let lookup = if is_at { at } else { at.wrapping_sub(1) };
            if lookup < 4096 {
                // A call through a null pointer has no frame of its own; at the outer end it is the last word.
                let end = if frames.is_empty() { End::NoTable } else { End::Whole };
                return (frames, end);
            }
            frames.push(lookup.wrapping_add(1));
            let step =
                self.step(moment, &registers, lookup).unwrap_or_else(|| by_frame_pointer(moment, &registers));
            match step {
                Err(end) => return (frames, end),
                Ok((caller, is_signal)) => {
                    // A handler may run on a stack of its own.
                    if !is_signal && caller[RSP] <= registers[RSP] {
                        return (frames, End::Damaged);
                    }
                    (registers, is_at) = (caller, is_signal);
                }
            }
        }
        (frames, End::TooLarge)
    }

    /// `None` where no table covers the address.
    fn step(&mut self, moment: &Moment, registers: &Registers, address: u64) -> Option<Step> {
        let key = match &self.vdso {
            Some((range, _)) if range.contains(&address) => usize::MAX,
            _ => self.space.modules.iter().rposition(|it| (it.start..it.end).contains(&address))?,
        };
        if !self.tables.contains_key(&key) {
            let tables = self.load(key);
            self.tables.insert(key, tables);
        }
        let tables = self.tables.get(&key)?.as_ref()?;
        let frames = EhFrame::from(Slice::new(tables.bytes.get().get(tables.frames.clone())?, LittleEndian));
        let index = EhFrameHdr::from(Slice::new(tables.bytes.get().get(tables.index.clone())?, LittleEndian));
        let index = index.parse(&tables.bases, 8).ok()?;
        let address = address.wrapping_sub(tables.bias);
        let entry = index.table()?.fde_for_address(&frames, &tables.bases, address, EhFrame::cie_from_offset);
        let entry = entry.ok()?;
        let Some(left) = self.left.checked_sub(entry.entry_len().saturating_add(entry.cie().entry_len()))
        else {
            return Some(Err(End::Damaged));
        };
        self.left = left;
        let encoding = Encoding { address_size: 8, format: Format::Dwarf32, version: 4 };
        let row = entry.unwind_info_for_address(&frames, &tables.bases, &mut self.context, address).ok()?;
        let look = Look { moment, registers, frames: &frames, encoding };
        Some(look.caller(row).map(|caller| (caller, entry.is_signal_trampoline())))
    }

    fn load(&self, key: usize) -> Option<Tables> {
        if key == usize::MAX {
            let (range, bytes) = self.vdso.as_ref()?;
            return Tables::of(Bytes::Memory(bytes.clone()), |_| range.start);
        }
        let module = self.space.modules.get(key)?;
        let fate = if self.space.deleted.contains(&module.start) { Fate::Deleted } else { Fate::There };
        let (file, _) = self.target.open(module, fate)?;
        let mut module = module.clone();
        process::read_module(&mut module, &file);
        Tables::of(Bytes::File(Mapped::of(&file).ok()?), |_| module.bias)
    }
}

impl Tables {
    fn of(bytes: Bytes, bias: impl Fn(&object::File<'_>) -> u64) -> Option<Tables> {
        let elf = object::File::parse(bytes.get()).ok()?;
        let section = |name: &str| {
            let section = elf.section_by_name(name)?;
            let (start, length) = section.file_range()?;
            let start = usize::try_from(start).ok()?;
            Some((section.address(), start..start.checked_add(usize::try_from(length).ok()?)?))
        };
        let ((frames_at, frames), (index_at, index)) = (section(".eh_frame")?, section(".eh_frame_hdr")?);
        let mut bases = BaseAddresses::default().set_eh_frame(frames_at).set_eh_frame_hdr(index_at);
        if let Some((text, _)) = section(".text") {
            bases = bases.set_text(text);
        }
        if let Some((got, _)) = section(".got") {
            bases = bases.set_got(got);
        }
        let bias = bias(&elf);
        Some(Tables { bytes, bias, frames, index, bases })
    }
}

/// What one row of a table needs.
struct Look<'a> {
    moment: &'a Moment,
    registers: &'a Registers,
    frames: &'a EhFrame<Slice<'a>>,
    encoding: Encoding,
}

impl Look<'_> {
    fn caller(&self, row: &UnwindTableRow<usize>) -> Result<Registers, End> {
        let cfa = match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => {
                self.register(*register)?.wrapping_add_signed(*offset)
            }
            CfaRule::Expression(expression) => {
                self.evaluate(expression.get(self.frames).map_err(|_| End::Damaged)?, None)?
            }
        };
        let mut caller: Registers = [None; N_REGISTERS];
        for (number, value) in (0_u16..).zip(&mut caller) {
            *value = match row.register(Register(number)) {
                // A register without a rule keeps its value if the callee saves it. The others may not, but no rule reads them then.
                None if usize::from(number) == RSP => Some(cfa),
                None if usize::from(number) == RIP => return Err(End::Whole),
                None | Some(RegisterRule::SameValue) => self.registers[usize::from(number)],
                Some(RegisterRule::Undefined) if usize::from(number) == RIP => return Err(End::Whole),
                Some(RegisterRule::Undefined | RegisterRule::Architectural) => None,
                Some(RegisterRule::Offset(offset)) => self.moment.word(cfa.wrapping_add_signed(offset)),
                Some(RegisterRule::ValOffset(offset)) => Some(cfa.wrapping_add_signed(offset)),
                Some(RegisterRule::Register(other)) => self.register(other).ok(),
                Some(RegisterRule::Constant(value)) => Some(value),
                Some(RegisterRule::Expression(expression)) => {
                    let expression = expression.get(self.frames).map_err(|_| End::Damaged)?;
                    self.evaluate(expression, Some(cfa)).ok().and_then(|at| self.moment.word(at))
                }
                Some(RegisterRule::ValExpression(expression)) => {
                    let expression = expression.get(self.frames).map_err(|_| End::Damaged)?;
                    self.evaluate(expression, Some(cfa)).ok()
                }
            };
        }
        match caller[RIP] {
            Some(_) => Ok(caller),
            None if cfa.wrapping_sub(self.moment.base) as usize > self.moment.stack.len() => {
                Err(End::TooLarge)
            }
            None => Err(End::Damaged),
        }
    }

    fn register(&self, register: Register) -> Result<u64, End> {
        self.registers.get(usize::from(register.0)).copied().flatten().ok_or(End::Unknown)
    }

    fn evaluate(&self, expression: Expression<Slice<'_>>, first: Option<u64>) -> Result<u64, End> {
        let mut evaluation = expression.evaluation(self.encoding);
        evaluation.set_max_iterations(MOST_STEPS);
        if let Some(first) = first {
            evaluation.set_initial_value(first);
        }
        let mut result = evaluation.evaluate().map_err(|_| End::Damaged)?;
        for _ in 0..MOST_QUESTIONS {
            result = match result {
                EvaluationResult::Complete => {
                    return match evaluation.result().first().map(|piece| &piece.location) {
                        Some(Location::Address { address }) => Ok(*address),
                        _ => Err(End::Damaged),
                    };
                }
                EvaluationResult::RequiresRegister { register, .. } => {
                    evaluation.resume_with_register(Value::Generic(self.register(register)?))
                }
                EvaluationResult::RequiresMemory { address, size: 8, .. } => {
                    let word = self.moment.word(address).ok_or(End::TooLarge)?;
                    evaluation.resume_with_memory(Value::Generic(word))
                }
                _ => return Err(End::Damaged),
            }
            .map_err(|_| End::Damaged)?;
        }
        Err(End::Damaged)
    }
}

/// Code without a table may keep the frame pointer, as code made at run time does: followed once it leads to a return address
/// further up in the copy. Whether that is code, the next step finds out.
fn by_frame_pointer(moment: &Moment, registers: &Registers) -> Step {
    let (Some(pointer), Some(stack)) = (registers[RBP], registers[RSP]) else {
        return Err(End::NoTable);
    };
    let is_above = pointer >= stack && pointer % 8 == 0;
    let (Some(saved), Some(back)) = (moment.word(pointer), moment.word(pointer.wrapping_add(8))) else {
        return Err(End::NoTable);
    };
    if !is_above || saved <= pointer || back < 4096 {
        return Err(End::NoTable);
    }
    let mut caller: Registers = [None; N_REGISTERS];
    (caller[RBP], caller[RIP], caller[RSP]) = (Some(saved), Some(back), Some(pointer.wrapping_add(16)));
    Ok((caller, false))
}
