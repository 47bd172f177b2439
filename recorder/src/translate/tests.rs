//! Records as the trace has them.

use super::*;

fn code(id: u64, name: &str) -> Record {
    let (name, file) = (name.to_owned(), "a.py".to_owned());
    Record::Code(Code { id, name, file, lines: Vec::new(), first_line: 1, python: 0x30c })
}

#[test]
fn python_frames_stand_where_the_interpreter_ran_them() {
    let mut translator = Translator::new();
    for (id, name) in [(1, "f"), (2, "g")] {
        translator.define(code(id, name));
    }
    let native = vec![0x10, 0x20 | StackDef::INTERPRETER, 0x30];
    translator.define(Record::Stack {
        id: 5,
        native,
        python: vec![(1, 0), (2, StackDef::ENTRY)],
        truncated: false,
    });
    let stack = translator.stacks[&5].stack.clone().expect("just defined");
    let name = |id: &FrameId| match &translator.frames[id.0 as usize] {
        Frame::Native { address, .. } => format!("{address:#x}"),
        Frame::Python { function, .. } => function.clone(),
    };
    assert_eq!(stack.frames.iter().map(name).collect::<Vec<_>>(), ["0x10", "f", "g", "0x30"]);
}

#[test]
fn every_action_of_the_ring_has_the_same_number_in_the_trace() {
    for ring in RingAction::ALL {
        assert_eq!(*ring as u8, action(*ring) as u8, "{ring:?}");
    }
    assert_eq!(RingAction::ALL.len(), Action::ALL.len());
    for ring in RingNcclOp::ALL {
        assert_eq!(*ring as u8, nccl_op(*ring) as u8, "{ring:?}");
    }
    assert_eq!(RingNcclOp::ALL.len(), NcclOp::ALL.len());
    for ring in RingPjrtAction::ALL {
        assert_eq!(*ring as u8, pjrt_action(*ring) as u8, "{ring:?}");
    }
    for ring in RingPjrtOrigin::ALL {
        assert_eq!(*ring as u8, pjrt_origin(*ring) as u8, "{ring:?}");
    }
    for ring in RingNcclTimed::ALL {
        assert_eq!(*ring as u32, nccl_timed(*ring).map_or(0, |timed| timed as u32), "{ring:?}");
    }
}
