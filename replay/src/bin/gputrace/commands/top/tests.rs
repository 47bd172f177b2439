//! Whole pictures at two sizes of screen, and what keys make of them.

use expect_test::{Expect, expect};

use super::keys::{Key, Next, press};
use super::view::{Sort, View, frame};
use crate::commands::parts::live::figures::*;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn torch(allocated: u64, reserved: u64) -> TorchFigures {
    TorchFigures {
        allocated_bytes: allocated,
        reserved_bytes: reserved,
        requested_bytes: allocated - MIB,
        peak_allocated_bytes: allocated,
        peak_reserved_bytes: reserved,
        allocations: 12_345,
        ooms: 0,
        unused_share: (reserved - allocated) as f64 / reserved as f64,
        stranded_bytes: 700 * MIB,
        largest_free_bytes: 512 * MIB,
        segments: 321,
        pools: vec![PoolFigures {
            pool: "(0, 1)".into(),
            reserved_bytes: 96 * MIB,
            allocated_bytes: 64 * MIB,
            active_bytes: 64 * MIB,
            abandoned: true,
        }],
    }
}

fn process(pid: u32, rank: u32, allocated: u64, reserved: u64) -> ProcessFigures {
    let owner = |owner: &str, bytes| OwnerFigures { owner: owner.into(), bytes };
    ProcessFigures {
        key: (0, u64::from(pid)),
        trace: format!("/job/r{rank}.gtr"),
        pid,
        pid_here: None,
        rank: Some(rank),
        host: "node7".into(),
        command: vec!["/usr/bin/python3".into(), "train.py".into(), "--name=\u{1b}[2J".into()],
        state: "running",
        suspended: None,
        gpu_faults: vec![],
        age_ns: Some(400_000_000),
        behind: false,
        events: 1_234_567,
        lost_events: if rank == 1 { 3 } else { 0 },
        damage: vec![],
        surroundings: Default::default(),
        requests_per_s: 1234.5,
        requested_bytes_per_s: 3.5 * GIB as f64,
        host_bytes: 64 * MIB,
        nccl: NcclFigures {
            communicators: 1,
            device_bytes: 2 * GIB,
            in_flight: 1,
            calls: vec![NcclCall {
                operation: "all_reduce".into(),
                for_ns: Some(12_300_000_000),
                at: "step (/job/train.py:41)".into(),
            }],
        },
        devices: vec![DeviceFigures {
            device: 0,
            uuid: Some("GPU-1".into()),
            name: Some("NVIDIA H200".into()),
            total_bytes: Some(140 * GIB),
            driver_bytes: reserved + 2 * GIB,
            driver_peak_bytes: reserved + 3 * GIB,
            managed_bytes: 0,
            graphs_kept_bytes: 0,
            allocations: 400,
            refused: 0,
            device_used_bytes: Some(70 * GIB),
            process_used_bytes: Some(reserved + 3 * GIB),
            context_bytes: Some(518 * MIB),
            unaccounted_bytes: Some(-3 * MIB as i64),
            sample_age_ns: Some(1),
            owners: vec![owner("PyTorch", reserved), owner("NCCL", 2 * GIB)],
            torch: Some(torch(allocated, reserved)),
            jax_buffer_bytes: None,
            lines: vec![LineFigures {
                site: "step (/job/train.py:32) in cross_entropy".into(),
                owner: "PyTorch".into(),
                bytes: 2 * GIB,
            }],
        }],
    }
}

fn figures() -> Figures {
    Figures {
        schema: "gputrace.top/1",
        host: "node7".into(),
        time_ns: (12 * 3600 + 34 * 60 + 56) * 1_000_000_000,
        driver_missing: None,
        cards: vec![Card {
            instance: None,
            mps_clients: None,
            index: Some(0),
            uuid: "GPU-1".into(),
            name: "NVIDIA H200".into(),
            total_bytes: Some(140 * GIB),
            used_bytes: Some(70 * GIB),
            free_bytes: Some(70 * GIB),
            reserved_bytes: Some(0),
            unrecorded: Some(vec![Unrecorded { pid: 99, name: Some("Xorg".into()), used_bytes: Some(GIB) }]),
        }],
        processes: vec![process(4711, 0, 20 * GIB, 24 * GIB), process(4712, 1, 30 * GIB, 31 * GIB)],
        hangs: vec![],
        notes: vec![],
    }
}

fn picture(view: &View, width: usize, height: Option<usize>) -> String {
    let lines: Vec<String> = frame(&figures(), view, width, height).iter().map(|line| line.text()).collect();
    for line in &lines {
        assert!(line.chars().count() <= width, "{line}");
        assert!(!line.contains('\u{1b}'), "{line}");
    }
    assert!(height.is_none_or(|height| lines.len() <= height));
    lines.join("\n") + "\n"
}

fn check(view: &View, width: usize, height: Option<usize>, expected: Expect) {
    expected.assert_eq(&picture(view, width, height));
}

#[test]
fn why_nothing_is_known_of_the_driver_is_said_to_its_end() {
    let why = "a libloading error occurred: libnvidia-ml.so.1: cannot open shared object file: No such file or directory";
    let figures =
        Figures { driver_missing: Some(why.to_owned()), processes: vec![], cards: vec![], ..figures() };
    let lines: Vec<String> =
        frame(&figures, &View::default(), 60, None).iter().map(|line| line.text()).collect();
    assert!(lines.iter().all(|line| line.chars().count() <= 60), "{lines:?}");
    let said = "the driver could not be queried (libnvidia-ml.so.1: cannot open shared object file: No such file or directory): processes that are not recorded are not shown";
    assert_eq!(lines[1..].join(" "), said);
}

#[test]
fn a_small_screen_has_cards_and_the_first_columns() {
    check(
        &View::default(),
        80,
        Some(24),
        expect![[r#"
        gputrace top  node7  12:34:56 UTC  2 processes  by held  ? keys

        GPU 0  NVIDIA H200  used 70.00 GiB of 140.00 GiB, 50 %  GPU-1
          [██████████████████████████████▓▓▓▓▓▒▒░#                                     ]
          █ PyTorch 55.00 GiB  ▓ rest 8.99 GiB  ▒ NCCL 4.00 GiB  ░ CUDA context 1.01 Gi…
          not recorded: 99 Xorg 1.00 GiB

             pid rank gpu        held   allocated    reserved  unused   req/s  program
            4712    1   0   33.00 GiB   30.00 GiB   31.00 GiB   3.2 %    1234  python3 …
            4711    0   0   26.00 GiB   20.00 GiB   24.00 GiB  16.7 %    1234  python3 …
    "#]],
    );
}

#[test]
fn a_large_screen_has_all_columns() {
    check(
        &View { sort: Sort::Pid, chosen: 1, ..View::default() },
        140,
        Some(50),
        expect![[r#"
        gputrace top  node7  12:34:56 UTC  2 processes  by pid  ? keys

        GPU 0  NVIDIA H200  used 70.00 GiB of 140.00 GiB, 50 %  GPU-1
          [█████████████████████████████████████████████████████▓▓▓▓▓▓▓▓▓▒▒▒▒░#                                                                    ]
          █ PyTorch 55.00 GiB  ▓ rest 8.99 GiB  ▒ NCCL 4.00 GiB  ░ CUDA context 1.01 GiB  # not recorded 1.00 GiB
          not recorded: 99 Xorg 1.00 GiB

             pid rank gpu        held   allocated    reserved  unused    stranded  unaccounted   req/s     bytes/s nccl     seen  program
            4711    0   0   26.00 GiB   20.00 GiB   24.00 GiB  16.7 %  700.00 MiB    -3.00 MiB    1234    3.50 GiB    1    0.4 s  python3 train.py …
            4712    1   0   33.00 GiB   30.00 GiB   31.00 GiB   3.2 %  700.00 MiB    -3.00 MiB    1234    3.50 GiB    1    0.4 s  python3 train.py …
    "#]],
    );
}

#[test]
fn enter_shows_one_process_alone() {
    let mut view = View::default();
    assert_eq!(press(&mut view, Key::Down, &figures()), Next::Stay);
    assert_eq!(press(&mut view, Key::Enter, &figures()), Next::Stay);
    check(
        &view,
        100,
        Some(24),
        expect![[r#"
            gputrace top  node7  12:34:56 UTC  2 processes  by held  ? keys
            process 4711 rank 0  python3 train.py --name=\u{1b}[2J
              trace        /job/r0.gtr  1,234,567 events, 0.4 s
              where        host node7
              pinned host  64.00 MiB
              cuda:0       26.00 GiB held, at most 27.00 GiB; the driver charges 27.00 GiB, context about 518.0…
                owners     PyTorch 24.00 GiB, NCCL 2.00 GiB
                PyTorch    20.00 GiB allocated (20.00 GiB requested) of 24.00 GiB reserved; 16.7 % unused
                pieces     321 segments, 700.00 MiB stranded, largest free block 512.00 MiB
                pool       (0, 1) 96.00 MiB reserved, 64.00 MiB allocated; nothing can use it
                line          2.00 GiB  PyTorch  step (/job/train.py:32) in cross_entropy
              NCCL         2.00 GiB; communicators: 1, calls in flight: 1
                in         all_reduce for 12.3 s  step (/job/train.py:41)
        "#]],
    );
    press(&mut view, Key::Escape, &figures());
    assert_eq!(view, View { chosen: 1, ..View::default() });
}

#[test]
fn a_filter_leaves_rows_and_a_cursor_that_is_on_one() {
    let mut view = View { chosen: 1, ..View::default() };
    for key in [Key::Letter('/'), Key::Letter('R'), Key::Letter('1'), Key::Letter('.'), Key::Enter] {
        press(&mut view, key, &figures());
    }
    let shown = picture(&view, 80, Some(24));
    assert!(shown.contains("4712") && !shown.contains("4711") && shown.contains("filter: R1."), "{shown}");
    assert_eq!(view.chosen, 0);
    press(&mut view, Key::Escape, &figures());
    assert_eq!(view.filter, "");
    assert_eq!(press(&mut view, Key::Letter('q'), &figures()), Next::End);
}

#[test]
fn what_does_not_fit_is_said() {
    check(
        &View::default(),
        60,
        Some(6),
        expect![[r#"
        gputrace top  node7  12:34:56 UTC  2 processes  by held  ? …

        GPU 0  NVIDIA H200  used 70.00 GiB of 140.00 GiB, 50 %  GPU…
          [██████████████████████▓▓▓▓▒▒                            ]
          █ PyTorch 55.00 GiB  ▓ rest 8.99 GiB  ▒ NCCL 4.00 GiB  ░ …
        5 more lines: a larger window, / to filter, --once for all
    "#]],
    );
    let help = picture(&View { is_help: true, ..View::default() }, 80, Some(24));
    assert!(help.contains("space, f") && help.contains("stranded"), "{help}");
}
