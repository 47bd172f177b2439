use expect_test::{Expect, expect, expect_file};

use super::model::Report;
use super::part;
use super::render::{json, text};
use super::sections::{FIGURES, SECTIONS, STATISTICS, SectionEntry};
use gputrace_analyse::story::Story;
use gputrace_trace::scene::recording;
use gputrace_trace::source::Source;

/// A report of `verb` about these traces: every section of `sections` that has something to say about each.
fn about(verb: &'static str, sections: &[SectionEntry], stories: &[Story]) -> Report {
    let sections = |story| sections.iter().flat_map(|entry| (entry.build)(story)).collect();
    Report { verb, parts: stories.iter().map(|story| part(story, sections(story))).collect() }
}

/// PyTorch grows until it fails; NCCL holds memory beside it.
const OOM: &str = "
    Init
    Create handle=n bytes=256M by=/x/libnccl.so.2! thread=1 thread_name=NCCL_Service_0
    sample used=800M
    Alloc addr=0x100000000 bytes=20M by=/x/libcudart.so.13!,/x/libc10_cuda.so,forward@/job/train.py:12 in_allocate=1
    block addr=0x100000000 bytes=15M requested=15728000 allocated=15M reserved=20M by=/x/libc10_cuda.so,conv2d@/v/site-packages/torch/nn/functional.py:9,forward@/job/train.py:12
    Alloc addr=0x200000000 bytes=30M by=/x/libcudart.so.13!,/x/libc10_cuda.so,loss@/job/train.py:40 in_allocate=1
    block addr=0x200000000 bytes=30M requested=30M allocated=45M reserved=50M by=/x/libc10_cuda.so,loss@/job/train.py:40
    free addr=0x100000000 bytes=15M allocated=30M reserved=50M
    sample used=900M
    Alloc bytes=40M result=2 duration=900 by=/x/libcudart.so.13!,/x/libc10_cuda.so,forward@/job/train.py:12 in_allocate=1
    MemInfo bytes=10M extra=140G
    oom bytes=40M requested=40000000 allocated=30M reserved=50M by=/x/libc10_cuda.so,forward@/job/train.py:12";

//  20M (stream 0)  | kept 4M | free 16M     |  stranded
//  12M (stream 7)  | free                   |  isolated
//  30M (stream 0)  | 29.5M            | .5  |  not split off
#[test]
fn the_gap_between_reserved_and_in_use_is_taken_apart() {
    let by = "by=/x/libcudart.so.13!,/x/libc10_cuda.so";
    let block = |addr: &str, bytes: &str, rest: &str| format!("block addr={addr} bytes={bytes} {rest}\n");
    let scene = [
        format!("Alloc addr=0x100000000 bytes=20M {by} in_allocate=1\n"),
        block("0x100000000", "4M", "requested=4M allocated=4M reserved=20M by=kept@/job/train.py:3"),
        format!("Alloc addr=0x200000000 bytes=12M {by} in_allocate=1\n"),
        block(
            "0x200000000",
            "12M",
            "requested=12M stream=7 allocated=16M reserved=32M by=copied@/job/train.py:5",
        ),
        "free addr=0x200000000 bytes=12M allocated=4M reserved=32M\n".to_owned(),
        format!("Alloc addr=0x300000000 bytes=30M {by} in_allocate=1\n"),
        block("0x300000000", "30M", "requested=30932992 allocated=34M reserved=62M by=loss@/job/train.py:9"),
    ];
    let scene = scene.concat();
    let story = story(&scene).with_gaps(&Source::of("train.gtr", recording(&scene)));
    check_one(
        "gap",
        &story,
        expect![[r#"
            train.gtr (rank 3, pid 42): ./train --big

            Why PyTorch reserved more than was in use
              cuda:0 NVIDIA H200: 62.00 MiB for 33.50 MiB in use when most was reserved, found by replaying the
                requests: 3 of 3 addresses match
              device       bytes  of reserved  part      meaning
              cuda:0  512.00 KiB        0.8 %  surplus   not split off blocks
              cuda:0   12.00 MiB       19.4 %  isolated  free, of other streams or pools
              cuda:0   16.00 MiB       25.8 %  stranded  free beside a block in use
              device  free beside  pins alone   its own  call site that holds segments
              cuda:0    16.00 MiB   16.00 MiB  4.00 MiB  /job/train.py:3 kept
        "#]],
    );
}

/// Every section of the report.
fn all() -> Vec<SectionEntry> {
    SECTIONS.iter().map(|(_, entry)| *entry).collect()
}

fn story(scene: &str) -> Story {
    Story::of("train.gtr", &recording(scene))
}

fn check(sections: &[SectionEntry], scene: &str, width: Option<usize>, expected: Expect) {
    check_report(&about("report", sections, &[story(scene)]), width, expected);
}

/// Of a report, the section of this name.
fn check_one(name: &str, story: &Story, expected: Expect) {
    let mut sections: Vec<_> = SECTIONS.iter().flat_map(|(_, entry)| entry.of(story)).collect();
    sections.retain(|section| section.name == name);
    assert_eq!(sections.len(), 1, "the report has a section {name}");
    let report = Report { verb: "report", parts: vec![super::part(story, sections)] };
    check_report(&report, Some(110), expected);
}

fn check_report(report: &Report, width: Option<usize>, expected: Expect) {
    let mut shown = Vec::new();
    text::render(report, text::Style { width, color: false, letters: text::Letters::Unicode }, &mut shown)
        .unwrap();
    expected.assert_eq(&String::from_utf8(shown).unwrap());
}

#[test]
fn the_first_screen_says_why_the_job_died() {
    check(
        &all(),
        OOM,
        Some(110),
        expect![[r#"
            train.gtr (rank 3, pid 42): ./train --big

            OUT OF MEMORY
              PyTorch could not get 38.15 MiB on cuda:0 NVIDIA H200 at 11.0 µs
              device                                   cuda:0 NVIDIA H200
              at                                       11.0 µs
              PyTorch requested                        40.00 MiB
              the program requested                    38.15 MiB
              allocated by PyTorch                     30.00 MiB
              reserved by PyTorch                      50.00 MiB  20.00 MiB of it unused
              held by other libraries in this process  256.00 MiB
              free on the device                       10.00 MiB
              size of the device                       140.00 GiB
              held elsewhere                           139.69 GiB
                                                       CUDA context, code, other processes (total - free - allocations of
                                                       this process)
              from                                     forward (/job/train.py:12)
              nothing was allocated after it, and the trace ends 0 ns later: it probably ended the program
              `gputrace reproduce` writes a program that fails the same way, without your code

            End
              events            12
              last event after  11.0 µs

            Memory
              device                    peak      at  share  live at end  torch allocated  torch reserved  refused
              cuda:0 NVIDIA H200  306.00 MiB  5.0 µs  0.2 %   306.00 MiB        45.00 MiB       50.00 MiB        1
              cuda:0 NVIDIA H200: PyTorch's peaks: requested 45.00 MiB, allocated 45.00 MiB, reserved 50.00 MiB

            Memory by owner
              device  owner       at peak   share    own peak  live at end
              cuda:0  NCCL     256.00 MiB  83.7 %  256.00 MiB   256.00 MiB
              cuda:0  PyTorch   50.00 MiB  16.3 %   50.00 MiB    50.00 MiB

            The driver's own figures (sampled from NVML)
              device  moment            at     charged   allocated  page rounding  CUDA context  kernel code  unaccounted
              cuda:0  first sample  2.0 µs  800.00 MiB  256.00 MiB            0 B    544.00 MiB          0 B          0 B
              cuda:0  most charged  8.0 µs  900.00 MiB  306.00 MiB            0 B    544.00 MiB          0 B    50.00 MiB
              cuda:0  last sample   8.0 µs  900.00 MiB  306.00 MiB            0 B    544.00 MiB          0 B    50.00 MiB
              context, code, pools, graphs and peers are estimates: the increase in charged memory when the process
                created or loaded them; unaccounted is the signed remainder
              cuda:0 NVIDIA H200: unaccounted: 50.00 MiB at the peak, 50.00 MiB at the end; it does not grow after the
                warm-up

            Top call sites
              cuda:0 NVIDIA H200, at its last out-of-memory error
              device       bytes  number  owner          call site
              cuda:0  256.00 MiB       1  NCCL           libnccl.so.2+0x10
              cuda:0   30.00 MiB       1  PyTorch block  loss (/job/train.py:40)

            Next
              gputrace stats train.gtr
        "#]],
    );
}

#[test]
fn a_narrow_terminal_cuts_names_not_numbers() {
    check(
        &all(),
        OOM,
        Some(72),
        expect![[r#"
            train.gtr (rank 3, pid 42): ./train --big

            OUT OF MEMORY
              PyTorch could not get 38.15 MiB on cuda:0 NVIDIA H200 at 11.0 µs
              device                 cuda:0 NVIDIA H200
              at                     11.0 µs
              PyTorch requested      40.00 MiB
              the program requested  38.15 MiB
              allocated by PyTorch   30.00 MiB
              reserved by PyTorch    50.00 MiB  20.00 MiB of it unused
              held by other libraries in this process
                                     256.00 MiB
              free on the device     10.00 MiB
              size of the device     140.00 GiB
              held elsewhere         139.69 GiB
                                     CUDA context, code, other processes (total -
                                     free - allocations of this process)
              from                   forward (/job/train.py:12)
              nothing was allocated after it, and the trace ends 0 ns later: it
                probably ended the program
              `gputrace reproduce` writes a program that fails the same way,
                without your code

            End
              events            12
              last event after  11.0 µs

            Memory
                                                       live      torch      torch
              device        peak      at  share      at end  allocated   reserved
              cuda:0  306.00 MiB  5.0 µs  0.2 %  306.00 MiB  45.00 MiB  50.00 MiB
              (no room for: refused)
              cuda:0 NVIDIA H200: PyTorch's peaks: requested 45.00 MiB, allocated
                45.00 MiB, reserved 50.00 MiB

            Memory by owner
              device  owner       at peak   share    own peak  live at end
              cuda:0  NCCL     256.00 MiB  83.7 %  256.00 MiB   256.00 MiB
              cuda:0  PyTorch   50.00 MiB  16.3 %   50.00 MiB    50.00 MiB

            The driver's own figures (sampled from NVML)
                                                                        page
              device  moment            at     charged   allocated  rounding
              cuda:0  first sample  2.0 µs  800.00 MiB  256.00 MiB       0 B
              cuda:0  most charged  8.0 µs  900.00 MiB  306.00 MiB       0 B
              cuda:0  last sample   8.0 µs  900.00 MiB  306.00 MiB       0 B
              (no room for: CUDA context, kernel code, unaccounted)
              context, code, pools, graphs and peers are estimates: the increase
                in charged memory when the process created or loaded them;
                unaccounted is the signed remainder
              cuda:0 NVIDIA H200: unaccounted: 50.00 MiB at the peak, 50.00 MiB at
                the end; it does not grow after the warm-up

            Top call sites
              cuda:0 NVIDIA H200, at its last out-of-memory error
              device       bytes  number  owner          call site
              cuda:0  256.00 MiB       1  NCCL           libnccl.so.2+0x10
              cuda:0   30.00 MiB       1  PyTorch block  loss (/job/train.py:40)

            Next
              gputrace stats train.gtr
        "#]],
    );
}

#[test]
fn losses_are_told_where_the_numbers_are() {
    check(
        &all(),
        "Alloc addr=a bytes=1M by=/job/train!
         lost events=1203
         Free addr=b by=/job/train!
         Free addr=a result=none by=/x/libcudart.so.13!,/job/train
         note process.end=killed",
        None,
        expect![[r#"
            train.gtr (rank 3, pid 42): ./train --big

            End
              events            5
              last event after  4.0 µs
              the process was killed, crashed, or called `_exit`
              the process ended inside cudaFree on thread 'main' at 3.0 µs, called from train+0x10: it crashed, was killed or exited there

            Memory
              device                  peak    at  share  live at end  torch allocated  torch reserved  refused
              cuda:0 NVIDIA H200  1.00 MiB  0 ns  0.0 %     1.00 MiB                -               -        0
              warning: numbers may be wrong: 1203 events lost (ring full)

            Memory by owner
              device  owner         at peak    share  own peak  live at end
              cuda:0  application  1.00 MiB  100.0 %  1.00 MiB     1.00 MiB
              warning: numbers may be wrong: 1203 events lost (ring full)

            Top call sites
              cuda:0 NVIDIA H200, at the peak, at 0 ns
              device     bytes  number  owner        call site
              cuda:0  1.00 MiB       1  application  train+0x10
              warning: numbers may be wrong: 1203 events lost (ring full)

            Limits of these numbers
              warning: 1203 events were lost: ring full
              times  problem                                                                                      first at  first address  thread
                  1  freed without a recorded allocation (allocated before the trace began, or events were lost)    2.0 µs  0x20000000000  main
              1 note of the recording: `gputrace doctor train.gtr`

            Next
              gputrace stats train.gtr
              gputrace doctor train.gtr
        "#]],
    );
}

#[test]
fn a_request_refused_to_somebody_else_than_pytorch_is_an_out_of_memory_error() {
    check(
        &all(),
        "Alloc addr=a bytes=1G by=run@/job/train!
         Create bytes=2G result=2 by=/x/libnccl.so.2!",
        None,
        expect![[r#"
            train.gtr (rank 3, pid 42): ./train --big

            OUT OF MEMORY
              The driver was out of memory for these requests (newest first):
                  at  device              requested  times  held then  by    call         from
              1.0 µs  cuda:0 NVIDIA H200   2.00 GiB      1   1.00 GiB  NCCL  cuMemCreate  libnccl.so.2+0x10
              nothing was allocated on the device after the last of them
              `gputrace reproduce --cuda` writes a program that fails the same way, without your code

            End
              events            2
              last event after  1.0 µs

            Memory
              device                  peak    at  share  live at end  torch allocated  torch reserved  refused
              cuda:0 NVIDIA H200  1.00 GiB  0 ns  0.7 %     1.00 GiB                -               -        1

            Memory by owner
              device  owner         at peak    share  own peak  live at end
              cuda:0  application  1.00 GiB  100.0 %  1.00 GiB     1.00 GiB

            Top call sites
              cuda:0 NVIDIA H200, at its last out-of-memory error
              device     bytes  number  owner        call site
              cuda:0  1.00 GiB       1  application  run (train)

            Next
              gputrace stats train.gtr
        "#]],
    );
}

#[test]
fn statistics_count_by_function_and_size() {
    check(
        STATISTICS,
        OOM,
        None,
        expect![[r#"
            train.gtr (rank 3, pid 42): ./train --big

            Overview
              events                    12
              lost                      0
              first to last event       11.0 µs
              driver calls              6
              PyTorch blocks allocated  2

            Driver calls, by the function that the program called
              function     calls  failed  bytes requested     largest  time in it  median <=  99 % <=  longest
              cudaMalloc       3       1        50.00 MiB   30.00 MiB      900 ns       0 ns   900 ns   900 ns
              cuMemCreate      1       0       256.00 MiB  256.00 MiB        0 ns       0 ns     0 ns     0 ns
              init             1       0                -           -        0 ns       0 ns     0 ns     0 ns
              mem_info         1       0                -           -        0 ns       0 ns     0 ns     0 ns

            Requested sizes
              what                 from          to  number
              PyTorch block    8.00 MiB   16.00 MiB       1
              PyTorch block   16.00 MiB   32.00 MiB       1
              cuMemCreate    256.00 MiB  512.00 MiB       1
              cudaMalloc      16.00 MiB   32.00 MiB       2

            Memory by kind
              device  kind                             peak      at      at end  meaning
              cuda:0  linear                      50.00 MiB  5.0 µs   50.00 MiB  cudaMalloc and similar calls
              cuda:0  virtual memory management  256.00 MiB  1.0 µs  256.00 MiB  cuMemCreate

            Memory by owner
              device  owner       at peak   share    own peak  live at end
              cuda:0  NCCL     256.00 MiB  83.7 %  256.00 MiB   256.00 MiB
              cuda:0  PyTorch   50.00 MiB  16.3 %   50.00 MiB    50.00 MiB

            The driver's own figures (sampled from NVML)
              device  moment            at     charged   allocated  page rounding  CUDA context  kernel code  unaccounted
              cuda:0  first sample  2.0 µs  800.00 MiB  256.00 MiB            0 B    544.00 MiB          0 B          0 B
              cuda:0  most charged  8.0 µs  900.00 MiB  306.00 MiB            0 B    544.00 MiB          0 B    50.00 MiB
              cuda:0  last sample   8.0 µs  900.00 MiB  306.00 MiB            0 B    544.00 MiB          0 B    50.00 MiB
              context, code, pools, graphs and peers are estimates: the increase in charged memory when the process created or loaded them; unaccounted is the signed remainder
              cuda:0 NVIDIA H200: unaccounted: 50.00 MiB at the peak, 50.00 MiB at the end; it does not grow after the warm-up

            Top call sites
              cuda:0 NVIDIA H200, at its last out-of-memory error
              device       bytes  number  owner          call site
              cuda:0  256.00 MiB       1  NCCL           libnccl.so.2+0x10
              cuda:0   30.00 MiB       1  PyTorch block  loss (/job/train.py:40)
        "#]],
    );
}

#[test]
fn the_summary_has_a_line_for_each_figure() {
    check(
        FIGURES,
        OOM,
        None,
        expect![[r#"
            train.gtr (rank 3, pid 42): ./train --big

            Figures
              events                          12
              lost events                     0
              cuda:0 NVIDIA H200
                driver allocs                 3
                driver frees                  0
                refused by the driver         1
                peak                          306.00 MiB
                live at end                   306.00 MiB
                PyTorch allocations           2
                PyTorch frees                 1
                PyTorch peak requested        45.00 MiB
                PyTorch peak allocated        45.00 MiB
                PyTorch peak reserved         50.00 MiB
                PyTorch device allocs         2
                PyTorch device frees          0
                PyTorch out-of-memory errors  1

            Memory by owner
              device  owner       at peak   share    own peak  live at end
              cuda:0  NCCL     256.00 MiB  83.7 %  256.00 MiB   256.00 MiB
              cuda:0  PyTorch   50.00 MiB  16.3 %   50.00 MiB    50.00 MiB

            The driver's own figures (sampled from NVML)
              device  moment            at     charged   allocated  page rounding  CUDA context  kernel code  unaccounted
              cuda:0  first sample  2.0 µs  800.00 MiB  256.00 MiB            0 B    544.00 MiB          0 B          0 B
              cuda:0  most charged  8.0 µs  900.00 MiB  306.00 MiB            0 B    544.00 MiB          0 B    50.00 MiB
              cuda:0  last sample   8.0 µs  900.00 MiB  306.00 MiB            0 B    544.00 MiB          0 B    50.00 MiB
              context, code, pools, graphs and peers are estimates: the increase in charged memory when the process created or loaded them; unaccounted is the signed remainder
              cuda:0 NVIDIA H200: unaccounted: 50.00 MiB at the peak, 50.00 MiB at the end; it does not grow after the warm-up
        "#]],
    );
}

#[test]
fn a_limit_is_told_from_a_full_device() {
    // The driver's refusal decides; where it was not asked, what was free does, against the segment that was needed.
    let scene = OOM
        .replace("MemInfo bytes=10M", "MemInfo bytes=10G")
        .replace("    Alloc bytes=40M result=2", "    Free addr=0");
    let report = about("report", &all(), &[story(&scene)]);
    let json = json::render(&report);
    let remark = &json["processes"][0]["sections"][0]["free_bytes_remark"];
    assert_eq!(
        remark,
        "enough for a segment of 40.00 MiB: a limit stopped PyTorch (set_per_process_memory_fraction)"
    );
    let remark = |free: &str, asked: &str| {
        let scene = format!("MemInfo bytes={free} extra=140G\noom bytes={asked} allocated=30M reserved=50M");
        let report = about("report", &all(), &[story(&scene)]);
        json::render(&report)["processes"][0]["sections"][0]["free_bytes_remark"]
            .as_str()
            .unwrap_or("")
            .to_owned()
    };
    assert_eq!(remark("1M", "512"), "PyTorch needed a segment of 2.00 MiB");
    assert_eq!(remark("19M", "3M"), "PyTorch needed a segment of 20.00 MiB");
    assert!(remark("2M", "512").contains("a limit stopped PyTorch"));
    assert_eq!(remark("19M", "30M"), "");
}

#[test]
fn nothing_happened() {
    check(
        &all(),
        "Init",
        None,
        expect![[r#"
        train.gtr (rank 3, pid 42): ./train --big

        End
          events            1
          last event after  0 ns

        Memory
          no device memory was allocated

        Next
          gputrace stats train.gtr
    "#]],
    );
}

#[test]
fn json_has_the_same_as_text() {
    let report = about("report", &all(), &[story(OOM)]);
    let json = serde_json::to_string_pretty(&json::render(&report)).unwrap() + "\n";
    expect_file!["tests.json"].assert_eq(&json);
}

#[test]
fn memory_that_is_given_back_in_a_loop_is_told_with_the_line_that_does_it() {
    let mut scene = String::from("Init");
    for step in 0..4 {
        scene += &format!(
            "
            Alloc addr=s{step} bytes=20M duration=300K by=/x/libc10_cuda.so,step@/job/a.py:3 in_allocate=1
            block addr=s{step} bytes=15M requested=15M allocated=15M reserved=20M by=/x/libc10_cuda.so,step@/job/a.py:3
            free addr=s{step} bytes=15M allocated=0 reserved=20M
            Free addr=s{step} duration=100K by=/x/libc10_cuda.so,empty_cache@/v/site-packages/torch/cuda/memory.py:1,main@/job/a.py:9"
        );
    }
    check_one(
        "emptied",
        &story(&scene),
        expect![[r#"
            train.gtr (rank 3, pid 42): ./train --big

            Released and reserved again
              cuda:0 NVIDIA H200: main (/job/a.py:9) in empty_cache released memory 4 times, and PyTorch reserved
                60.00 MiB of it again: 1.3 ms in the driver; remove the call
              device  times  segments   released      took  call site
              cuda:0      4         4  80.00 MiB  409.6 µs  main (/job/a.py:9) in empty_cache
        "#]],
    );
}

#[test]
fn segments_bought_beside_unused_ones_are_told_with_the_lines_that_asked() {
    // Each step asks for more than any segment has; the old ones stay.
    let (mut scene, mut reserved) = (String::from("Init"), 0);
    for step in 1..9 {
        let bytes = 20 + 4 * step;
        reserved += bytes;
        scene += &format!(
            "
            Alloc addr=s{step} bytes={bytes}M by=/x/libc10_cuda.so,step@/job/a.py:3 in_allocate=1
            block addr=s{step} bytes={bytes}M allocated={bytes}M reserved={reserved}M by=/x/libc10_cuda.so,step@/job/a.py:3
            free addr=s{step} bytes={bytes}M allocated=0 reserved={reserved}M"
        );
    }
    check_one(
        "misfits",
        &story(&scene),
        expect![[r#"
            train.gtr (rank 3, pid 42): ./train --big

            Segments reserved while enough memory was free (external fragmentation)
              cuda:0 NVIDIA H200: 6 of 8 segments (252.00 MiB) were reserved while PyTorch had that much free, but in
                blocks too small or on other streams. It reserved up to 304.00 MiB for at most 52.00 MiB allocated
              device  segments    reserved  sizes       from         to  call site
              cuda:0         6  252.00 MiB      6  32.00 MiB  52.00 MiB  step (/job/a.py:3)
              sizes keep changing, so requests do not fit the segments of the previous step; to see what would help:
              gputrace tune train.gtr
        "#]],
    );
}

#[test]
fn a_device_that_holds_more_than_its_neighbour_is_told_with_what_it_has_more() {
    check_one(
        "imbalance",
        &story(
            "Init
         Alloc addr=a dev=0 bytes=20M by=/x/libc10_cuda.so,main@/job/a.py:1
         block addr=a dev=0 bytes=10M by=/x/libc10_cuda.so,main@/job/a.py:1
         block addr=g dev=0 bytes=8M by=/x/libc10_cuda.so,gather@/v/site-packages/torch/nn/parallel.py:3,main@/job/a.py:2
         Alloc addr=b dev=1 bytes=20M by=/x/libc10_cuda.so,main@/job/a.py:1
         block addr=b dev=1 bytes=10M by=/x/libc10_cuda.so,main@/job/a.py:1
         Alloc addr=c dev=1 bytes=1M by=/x/libnccl.so.2",
        ),
        expect![[r#"
            train.gtr (rank 3, pid 42): ./train --big

            Uneven devices
              cuda:0 NVIDIA H200 held up to 18.00 MiB, cuda:1 NVIDIA H200 up to 11.00 MiB: 7.00 MiB less. Held on the
                first and not on the second:
                  more     there  here  call site
              8.00 MiB  8.00 MiB   0 B  main (/job/a.py:2) in gather
        "#]],
    );
}
