//! Verbs that answer a question: what they refuse, what they say, and the exit status that says it to scripts.

use std::process::Command;

use expect_test::expect;
use serde_json::Value;

use crate::support::{Folder, run, text, trace};

#[test]
fn a_moment_that_means_nothing_to_a_verb_is_refused_with_what_to_use_instead() {
    let folder = Folder::new("refused_moments");
    let good = folder.write("good.gtr", &trace(10));
    for (arguments, told) in [
        (&["stats", "--peak"][..], "give --range A..B or --step N"),
        (&["stats", "--end"], "use `gputrace report`"),
        (&["leaks", "--step", "3"], "gputrace diff --from step:3 --to step:90"),
        (&["leaks", "--peak"], "gputrace tree"),
        (&["report", "--step", "99"], "no step 99"),
        (&["stats", "--step", "99"], "no step 99"),
        (&["tree", "--group-by", "phase"], "opened no NVTX range"),
        (&["report", "--at", "1s", "--end"], "cannot be used with"),
    ] {
        let output = run(&[arguments, &[&good]].concat());
        let stderr = text(&output.stderr);
        assert!(!output.status.success() && stderr.contains(told), "{arguments:?}: {stderr}");
    }
    for arguments in [
        &["report", "--peak"][..],
        &["summary", "--at", "1s"],
        &["stats", "--range", "0s.."],
        &["stats", "--at", "1s"],
        &["leaks", "--range", "..1s"],
    ] {
        let output = run(&[arguments, &[&good]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    }
}

#[test]
fn whether_it_fits_and_what_a_replay_cannot_follow_are_told_with_the_numbers() {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/caught-oom.gtr");
    for verb in ["replay", "tune"] {
        let said = text(&run(&[verb, "--limit", "3GiB", trace]).stdout);
        assert!(said.contains("fits: limit 3.00 GiB = PyTorch "), "{said}");
        assert!(said.contains(" + CUDA context 520.00 MiB + cuBLAS 128.25 MiB"), "{said}");
        assert!(
            said.contains(
                "warning: the program ran out of memory once (first at /job/caught-oom/train.py:12"
            ),
            "{said}"
        );

        let said: Value =
            serde_json::from_slice(&run(&[verb, "--json", "--limit", "1GiB", trace]).stdout).unwrap();
        let answer = if verb == "replay" { &said["outcomes"][0] } else { &said };
        let kinds =
            answer["warnings"].as_array().unwrap().iter().map(|warning| warning["kind"].as_str().unwrap());
        assert_eq!(kinds.collect::<Vec<_>>(), ["caught_out_of_memory", "ends_out_of_memory"]);
        assert_eq!(answer["warnings"][0]["call_site"]["line"], 12);
        let shares = &answer["shares"];
        assert_eq!(shares["limit_bytes"], 1u64 << 30);
        assert!(
            shares["others"].as_array().unwrap().iter().any(|other| other["owner"] == "cuBLAS"),
            "{shares}"
        );
        let all = shares["others"]
            .as_array()
            .unwrap()
            .iter()
            .map(|other| other["bytes"].as_u64().unwrap())
            .sum::<u64>()
            + shares["reserved_bytes"].as_u64().unwrap()
            + shares["free_bytes"].as_u64().unwrap();
        assert_eq!(all, 1 << 30, "every byte is somebody's: {shares}");
    }
    let unasked = run(&["replay", "--json", trace]);
    let unasked: Value = serde_json::from_slice(&unasked.stdout).unwrap();
    assert!(unasked["outcomes"][0]["shares"].is_null());
}

#[test]
fn leaks_are_found_suppressed_and_told_by_the_exit_status() {
    let folder = Folder::new("leaks");
    let path = folder.write("a.gtr", &trace(30));
    let all = folder.write("all.txt", b"# everything\nowner=*\n");
    let code = |arguments: &[&str]| run(&[&["leaks", &path], arguments].concat()).status.code();
    assert_eq!(code(&[]), Some(0));
    assert_eq!(code(&["--error-on-leak"]), Some(1));
    assert_eq!(code(&["--error-on-leak=not-freed"]), Some(1));
    let few = folder.write("few.gtr", &trace(24));
    let status = run(&["leaks", "--error-on-leak=growth", &few]).status;
    assert_eq!(status.code(), Some(0), "so few rises may be stages");
    let long = folder.write("long.gtr", &trace(90));
    let status = run(&["leaks", "--error-on-leak=growth", &long]).status;
    assert_eq!(status.code(), Some(1), "it keeps every second object");
    let short = folder.write("short.gtr", &trace(6));
    assert_eq!(run(&["leaks", "--error-on-leak=growth", &short]).status.code(), Some(2), "too short to tell");
    assert_eq!(code(&["--error-on-leak", "--suppressions", &all]), Some(0));
    assert_eq!(code(&["--error-on-leak", "--min-bytes", "1GiB"]), Some(0));
    assert_eq!(code(&["--suppressions", "/no/such/file"]), Some(2));
    let json: serde_json::Value = serde_json::from_slice(&run(&["leaks", "--json", &path]).stdout).unwrap();
    assert_eq!(json["schema"], "gputrace.leaks/1");
    assert_eq!(json["processes"][0]["sections"][1]["not_freed"][0]["bytes"], 10 << 20);
}

#[test]
fn increases_are_told_by_the_exit_status() {
    let folder = Folder::new("diff");
    let (small, large) = (folder.write("a.gtr", &trace(30)), folder.write("b.gtr", &trace(33)));
    let code = |arguments: &[&str]| run(&[&["diff"], arguments].concat()).status.code();
    assert_eq!(code(&[&small, &large]), Some(0));
    assert_eq!(code(&[&small, &large, "--fail-on-increase", "5%"]), Some(1));
    assert_eq!(code(&[&small, &large, "--fail-on-increase", "50%"]), Some(0));
    assert_eq!(code(&[&large, &small, "--fail-on-increase", "0"]), Some(0));
    assert_eq!(code(&[&small, &large, "--fail-on-increase", "much"]), Some(2));
    assert_eq!(code(&[&small, "/no/such/file"]), Some(2));
}

#[test]
fn a_replay_and_its_advice_begin_with_the_answer() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    let said = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_gputrace")).args(arguments).current_dir(folder).output();
        let output = output.unwrap();
        text(&output.stdout) + &text(&output.stderr)
    };
    let policies = ["--policy", "torch", "--policy", "torch:expandable_segments:True", "--policy", "stalloc"];
    expect![[r#"
        caught-oom.gtr

        The requests of cuda:0, replayed
            reserved   allocated  unused  mallocs  frees  retries  sure   policy
          374.00 MiB  353.03 MiB   5.6 %       16      7        4  exact  torch
          342.00 MiB  341.02 MiB   0.3 %       12      2        1  exact  torch:expandable_segments:True
          370.00 MiB  353.03 MiB   4.6 %       19      7        0  bound  stalloc
          torch: does not fit: limit 1.00 GiB = PyTorch 374.00 MiB + CUDA context 520.00 MiB + cuBLAS 128.25 MiB + page rounding 1.75 MiB + free 0 B, and 32.00 MiB more were asked for
          torch: out of memory at request 62 of 62: 32.00 MiB asked for, 374.00 MiB reserved, 353.03 MiB in use
          torch:expandable_segments:True: does not fit: limit 1.00 GiB = PyTorch 302.00 MiB + CUDA context 520.00 MiB + cuBLAS 128.25 MiB + page rounding 1.75 MiB + free 72.00 MiB, and 64.00 MiB more were asked for
          torch:expandable_segments:True: out of memory at request 57 of 62: 64.00 MiB asked for, 302.00 MiB reserved, 289.03 MiB in use
          stalloc: does not fit: limit 1.00 GiB = stalloc 370.00 MiB + CUDA context 520.00 MiB + cuBLAS 128.25 MiB + page rounding 1.75 MiB + free 4.00 MiB, and 32.00 MiB more were asked for
          stalloc: out of memory at request 62 of 62: 32.00 MiB asked for, 370.00 MiB reserved, 353.03 MiB in use
          requests    62
          self-check  60 of 60 addresses match as PyTorch 2.11
          warning: the program ran out of memory once (first at /job/caught-oom/train.py:12 forward) and went on: where those requests do not fail, it would have gone another way
          warning: the trace ends where memory ran out (/job/caught-oom/train.py:12 forward): what the program would have needed after that is not in it

        Why more was reserved than in use on cuda:0
          with torch: 374.00 MiB for 353.03 MiB in use when most was reserved
          device      bytes  of reserved  part      meaning
          cuda:0  20.97 MiB        5.6 %  stranded  free beside something in use
          device  free beside  held alone     its own  call site that holds segments
          cuda:0    20.97 MiB   20.00 MiB  209.02 MiB  /job/caught-oom/train.py:12 forward
          cuda:0   992.00 KiB         0 B   16.02 MiB  /job/caught-oom/train.py:6 <module>
          these parts are simulated; `gputrace oom` measures, when memory ran out, stranded and wholly free (cached) bytes, each with its part of isolated
    "#]]
        .assert_eq(&said(&[&["replay", "--limit", "1GiB", "caught-oom.gtr"][..], &policies].concat()));
    expect![[r#"
        varying-lengths.gtr, cuda:0, PyTorch 2.11

        What to set
          PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
          ok: 696.00 MiB less reserved
          expandable_segments:True,large_segment_size_mb:12 would save 8.00 MiB more: too little for one more option
          PyTorch may call this name deprecated and heeds it; PYTORCH_ALLOC_CONF is heeded from 2.10 on
          reserved at best                568.00 MiB
          reserved as recorded            1.23 GiB
          the recorded setting, replayed  1.23 GiB  524.55 MiB in use
          how sure                        exact

        Best in memory or in calls of the driver, of 136 settings that were simulated
            reserved  mallocs  frees  setting
          560.00 MiB       26      0  expandable_segments:True,large_segment_size_mb:12
          568.00 MiB       25      0  expandable_segments:True,roundup_power2_divisions:16
          584.00 MiB       13      0  expandable_segments:True,large_segment_size_mb:64

        The least that any allocator needs
          as requested                                     523.55 MiB
          rounded to 512 bytes                             523.55 MiB
          with streams, pools, small and large kept apart  525.59 MiB
          in pages of 2 MiB                                528.00 MiB
          if all lifetimes were known in advance           544.55 MiB  would be enough
    "#]]
    .assert_eq(&said(&["tune", "varying-lengths.gtr"]));
    expect![[r#"
        caught-oom.gtr, cuda:0, PyTorch 2.11

        What to set
          no setting makes it fit: 353.03 MiB must be in use at once, whatever the allocator
          does not fit: limit 1.00 GiB = PyTorch 302.00 MiB + CUDA context 520.00 MiB + cuBLAS 128.25 MiB + page rounding 1.75 MiB + free 72.00 MiB, and 64.00 MiB more were asked for
          out of memory at request 57 of 62: 64.00 MiB asked for, 302.00 MiB reserved, 289.03 MiB in use
          reserved at best                342.00 MiB
          reserved as recorded            374.00 MiB
          the recorded setting, replayed  374.00 MiB  353.03 MiB in use
          how sure                        exact
          warning: the program ran out of memory once (first at /job/caught-oom/train.py:12 forward) and went on: where those requests do not fail, it would have gone another way
          warning: the trace ends where memory ran out (/job/caught-oom/train.py:12 forward): what the program would have needed after that is not in it

        Best in memory or in calls of the driver, of 232 settings that were simulated
          none of them fits

        The least that any allocator needs
          as requested                                     353.03 MiB
          rounded to 512 bytes                             353.03 MiB
          with streams, pools, small and large kept apart  353.03 MiB
          in pages of 2 MiB                                354.00 MiB
          if all lifetimes were known in advance           353.03 MiB  would be enough
    "#]].assert_eq(&said(&["tune", "--limit", "1GiB", "caught-oom.gtr"]));
    expect![[r#"
        caught-oom.gtr

        cuda:0
          requests              62
          streams               1
          pools                 1
          driver calls          23
          cache flushes         0
          out-of-memory errors  2
          history               complete
          self-check            60 of 60 addresses match as PyTorch 2.11
    "#]]
    .assert_eq(&said(&["import", "caught-oom.gtr"]));
}
