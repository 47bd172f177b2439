//! One stack out of two: the native frames of the interpreter are replaced by the Python frames that they run.
//!
//! ```text
//! native (innermost first)             Python (innermost first)      merged
//! cudaMalloc caller                                                  cudaMalloc caller
//! torch::empty                                                       torch::empty
//! _PyEval_EvalFrameDefault   <──────── layer, forward (entry)        layer, forward
//! _PyObject_Call                                                     _PyObject_Call
//! _PyEval_EvalFrameDefault   <──────── train, <module> (entry)       train, <module>
//! main                                                               main
//! ```
//!
//! From 3.11 on one interpreter frame runs many Python frames, one inside the other; the outermost of them, the one
//! that C code called, is marked as an entry.

use gputrace_ring::record::StackDef;

/// What marks a native frame as one of the interpreter.
pub(crate) const INTERPRETER_FRAME: u64 = StackDef::INTERPRETER;

/// A frame of the merged stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MergedFrame {
    /// Index of a native frame.
    Native(usize),
    /// Index of a Python frame.
    Python(usize),
}

/// Merges the frames of one stack, innermost first.
///
/// `native` are the words that the shim wrote, interpreter frames marked with [`StackDef::INTERPRETER`]; `is_entry`
/// tells which Python frames were called by C code ([`StackDef::ENTRY`]). Nothing is lost when the two do not fit together, as when one was cut:
/// interpreter frames without Python frames stay native, Python frames without an interpreter frame follow at the outer
/// end.
#[must_use]
pub(crate) fn merge_stack(native: &[u64], is_entry: &[bool]) -> Vec<MergedFrame> {
    let mut merged = Vec::with_capacity(native.len() + is_entry.len());
    let mut next = 0;
    for (index, word) in native.iter().enumerate() {
        if next == is_entry.len() || word & StackDef::INTERPRETER == 0 {
            merged.push(MergedFrame::Native(index));
            continue;
        }
        let entry = is_entry[next..].iter().position(|entry| *entry).unwrap_or(is_entry.len() - next - 1);
        merged.extend((next..=next + entry).map(MergedFrame::Python));
        next += entry + 1;
    }
    merged.extend((next..is_entry.len()).map(MergedFrame::Python));
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Natives as `e` (interpreter) and `c` (other code), Python frames as `E` (entry) and `.` (inlined).
    fn merged(native: &str, python: &str) -> String {
        let native: Vec<u64> =
            native.bytes().map(|kind| if kind == b'e' { 300 | StackDef::INTERPRETER } else { 300 }).collect();
        let is_entry: Vec<bool> = python.bytes().map(|kind| kind == b'E').collect();
        let name = |frame: &MergedFrame| match frame {
            MergedFrame::Native(index) => format!("n{index}"),
            MergedFrame::Python(index) => format!("p{index}"),
        };
        merge_stack(&native, &is_entry).iter().map(name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn an_interpreter_frame_becomes_the_python_frames_up_to_its_entry() {
        assert_eq!(merged("ccecec", "..E.E"), "n0 n1 p0 p1 p2 n3 p3 p4 n5");
    }

    #[test]
    fn before_python_3_11_every_frame_is_an_entry() {
        assert_eq!(merged("cecece", "EEE"), "n0 p0 n2 p1 n4 p2");
    }

    #[test]
    fn a_stack_of_one_kind_stays_as_it_is() {
        assert_eq!([merged("cc", ""), merged("", ".E")], ["n0 n1", "p0 p1"]);
    }

    #[test]
    fn interpreter_frames_of_another_interpreter_stay_native() {
        assert_eq!(merged("ecec", "E"), "p0 n1 n2 n3");
    }

    #[test]
    fn python_frames_beyond_a_cut_native_stack_follow_at_the_outer_end() {
        assert_eq!(merged("ce", "E..E"), "n0 p0 p1 p2 p3");
    }

    #[test]
    fn python_frames_cut_before_their_entry_still_replace_their_interpreter_frame() {
        assert_eq!(merged("cecec", "E.."), "n0 p0 n2 p1 p2 n4");
    }
}
