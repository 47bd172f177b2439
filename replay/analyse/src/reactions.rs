//! What a replay cannot follow: a program that asks how much memory is free, or runs out of it, and then behaves
//! differently.

use gputrace_sim::ops::{AllocId, Frame, Op, OpStream, StackId};
use rustc_hash::FxHashMap;

/// Something in a trace that might have gone differently under another allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reaction {
    /// Its kind.
    pub kind: Kind,
    /// How often it was seen.
    pub count: u64,
    /// Out of how many: requests for errors, frees for frees; 0 where nothing can be counted.
    pub of: u64,
    /// Where it was seen most, or first.
    pub site: Option<Frame>,
}

/// What a program, or the GPU's timing, may decide differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Requests failed, and the program went on.
    CaughtOom,
    /// The trace ends where memory ran out.
    EndsInOom,
    /// The program asked how much memory is free.
    QueriesMemory,
    /// A library chose an algorithm by how much memory is free.
    Autotunes,
    /// Frees waited for streams while other requests were served.
    DefersFrees,
}

impl Kind {
    /// In JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::CaughtOom => "caught_out_of_memory",
            Kind::EndsInOom => "ends_out_of_memory",
            Kind::QueriesMemory => "queries_free_memory",
            Kind::Autotunes => "autotunes",
            Kind::DefersFrees => "deferred_frees",
        }
    }
}

impl Reaction {
    /// For people: what was seen, where, and what it means for the answer.
    #[must_use]
    pub fn text(&self) -> String {
        let Reaction { kind, count, of, site } = self;
        let at = |how: &str| {
            let line = site.as_ref().map(|it| format!(" ({how}{}:{} {})", it.file, it.line, it.name));
            line.unwrap_or_default()
        };
        let times = match count {
            1 => "once".to_owned(),
            n => format!("{n} times"),
        };
        match kind {
            Kind::CaughtOom => format!(
                "the program ran out of memory {times}{} and continued: without these errors it would have behaved differently",
                at("first at ")
            ),
            Kind::EndsInOom => format!(
                "the trace ends at an out-of-memory error{}: later needs of the program are not in it",
                at("")
            ),
            Kind::QueriesMemory => format!(
                "the program queried free memory {times}{}: its behaviour may depend on the answer",
                at("most at ")
            ),
            Kind::Autotunes => format!(
                "cuDNN chose its algorithms {times} by the amount of free memory{}: their workspaces may depend on it",
                at("most at ")
            ),
            Kind::DefersFrees => format!(
                "{count} of {of} frees waited for other streams while requests were served{}: the replay ends them as recorded, but the GPU's timing may differ",
                at("most bytes of ")
            ),
        }
    }
}

/// All that is true of a trace.
#[must_use]
pub fn reactions(stream: &OpStream) -> Vec<Reaction> {
    let mut found = out_of_memory(stream);
    for (kind, is_autotune) in [(Kind::QueriesMemory, false), (Kind::Autotunes, true)] {
        let mut queries = stream.queries.iter().filter(|query| query.is_autotune == is_autotune).peekable();
        if let Some(most) = queries.peek() {
            let site = stream.stacks.site(most.stack).cloned();
            found.push(Reaction { kind, count: queries.map(|query| query.times).sum(), of: 0, site });
        }
    }
    found.extend(deferred_frees(stream));
    found
}

fn out_of_memory(stream: &OpStream) -> Vec<Reaction> {
    let ooms = || {
        stream.ops.iter().enumerate().filter_map(|(index, op)| match op {
            Op::Oom(oom) => Some((index, stream.ooms[*oom as usize].stack)),
            _ => None,
        })
    };
    let last_served = stream.ops.iter().rposition(|op| matches!(op, Op::Alloc(_))).unwrap_or(0);
    let of = stream.n_requests() as u64;
    let reaction = |kind, count: usize, stack| {
        Some(Reaction { kind, count: count as u64, of, site: stream.stacks.site(stack).cloned() })
    };
    let caught = ooms().filter(|(index, _)| *index < last_served).count();
    let first = ooms().next().filter(|_| caught > 0);
    let last = ooms().next_back().filter(|(index, _)| *index > last_served);
    let caught = first.and_then(|(_, stack)| reaction(Kind::CaughtOom, caught, stack));
    caught.into_iter().chain(last.and_then(|(_, stack)| reaction(Kind::EndsInOom, 1, stack))).collect()
}

/// Only frees count between whose two ends something was asked for: the others make no difference.
fn deferred_frees(stream: &OpStream) -> Option<Reaction> {
    let mut waiting: FxHashMap<AllocId, u64> = FxHashMap::default();
    let mut bytes: FxHashMap<StackId, u64> = FxHashMap::default();
    let (mut n_requests, mut n_frees, mut count) = (0, 0, 0);
    let mut is_late = |id: AllocId, since: u64, n_requests: u64| {
        if n_requests > since {
            count += 1;
            let allocation = stream.allocation(id);
            *bytes.entry(allocation.stack).or_default() += allocation.requested;
        }
    };
    for (index, op) in stream.ops.iter().enumerate() {
        match *op {
            Op::Alloc(_) | Op::Oom(_) => n_requests += 1,
            Op::FreeRequested(id) => {
                n_frees += 1;
                if stream.ops.get(index + 1) != Some(&Op::FreeCompleted(id)) {
                    waiting.insert(id, n_requests);
                }
            }
            Op::FreeCompleted(id) => {
                if let Some(since) = waiting.remove(&id) {
                    is_late(id, since, n_requests);
                }
            }
            Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) => {}
        }
    }
    waiting.into_iter().for_each(|(id, since)| is_late(id, since, n_requests));
    let most = bytes.into_iter().max_by_key(|(stack, bytes)| (*bytes, std::cmp::Reverse(*stack)))?;
    let site = stream.stacks.site(most.0).cloned();
    Some(Reaction { kind: Kind::DefersFrees, count, of: n_frees, site })
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;
    use gputrace_trace::scene::requests;

    const SEGMENT: &str = "Alloc addr=0x40000000 bytes=2M by=libcudart.so,libc10_cuda.so in_allocate=1
        block addr=0x40000000 bytes=512 requested=400 by=load@train.py:3\n";

    fn check(scene: &str, expected: Expect) {
        let trace = requests(&format!("{SEGMENT}{scene}"));
        let found = reactions(&trace.devices[0]);
        let lines = found.iter().map(|it| format!("{} {}: {}\n", it.kind.name(), it.count, it.text()));
        expected.assert_eq(&lines.collect::<String>());
    }

    #[test]
    fn a_program_that_does_not_look_at_memory_is_no_cause_for_doubt() {
        check("free addr=0x40000000 bytes=512", expect![""]);
        check(
            "Alloc addr=b bytes=1M by=libnccl.so.2\nMemInfo bytes=3M extra=24M by=libnccl.so.2",
            expect![""],
        );
    }

    #[test]
    fn an_error_that_was_caught_and_one_that_ends_the_trace_are_two_things() {
        let error = "Alloc bytes=20M result=2 by=libc10_cuda.so in_allocate=1
            MemInfo bytes=3M extra=24M by=libc10_cuda.so in_allocate=1
            oom bytes=20M requested=14M by=forward@train.py:9\n";
        check(
            &format!("{error}block addr=0x40000200 bytes=512 requested=512 by=forward@train.py:11"),
            expect![[r#"
                caught_out_of_memory 1: the program ran out of memory once (first at train.py:9 forward) and continued: without these errors it would have behaved differently
            "#]],
        );
        check(
            error,
            expect![[r#"
                ends_out_of_memory 1: the trace ends at an out-of-memory error (train.py:9 forward): later needs of the program are not in it
            "#]],
        );
    }

    #[test]
    fn questions_for_free_memory_are_the_programs_unless_they_are_for_the_text_of_an_error() {
        let asked = "MemInfo bytes=3M extra=24M by=libcudart.so,libtorch_python.so,mem_get_info@/v/site-packages/torch/cuda/memory.py:1,fit@train.py:20";
        check(
            &format!("{asked}\n{asked}\nblock addr=0x40000200 bytes=512 requested=512"),
            expect![[r#"
                queries_free_memory 2: the program queried free memory 2 times (most at train.py:20 fit): its behaviour may depend on the answer
            "#]],
        );
        let for_the_text = "MemInfo bytes=3M extra=24M by=libc10_cuda.so\noom bytes=20M";
        check(
            for_the_text,
            expect![[r#"
                ends_out_of_memory 1: the trace ends at an out-of-memory error: later needs of the program are not in it
            "#]],
        );
    }

    #[test]
    fn setting_a_limit_is_no_question_and_cudnn_has_its_own() {
        let limit =
            "MemInfo bytes=3M extra=24M by=libc10_cuda.so,set_per_process_memory_fraction@memory.py:1";
        check(limit, expect![""]);
        let search = "MemInfo bytes=3M extra=24M by=libcudart.so,libc10_cuda.so,cudnn_convolution@libtorch_cuda.so,forward@net.py:4";
        check(
            search,
            expect![[r#"
                autotunes 1: cuDNN chose its algorithms once by the amount of free memory (most at net.py:4 forward): their workspaces may depend on it
            "#]],
        );
    }

    #[test]
    fn only_frees_that_waited_while_something_was_asked_for_depend_on_timing() {
        let free = "record event=1\nfree addr=0x40000000 bytes=512\n";
        check(&format!("{free}query event=1"), expect![""]);
        check(
            &format!(
                "{free}query event=1 result=600\nblock addr=0x40000200 bytes=512 requested=512\nquery event=1"
            ),
            expect![[r#"
                deferred_frees 1: 1 of 1 frees waited for other streams while requests were served (most bytes of train.py:3 load): the replay ends them as recorded, but the GPU's timing may differ
            "#]],
        );
    }
}
