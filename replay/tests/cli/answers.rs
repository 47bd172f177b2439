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
        (
            &["tree", "--range", "99h..100h"],
            "the trace ends at 9.0 µs, before the range begins at 99:00:00 h",
        ),
        (&["diff", "--from", "99h..", "--to", "end"], "before the range begins at 99:00:00 h"),
        (&["stats", "--range", "99h.."], "before the range begins at 99:00:00 h"),
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
    assert_eq!(run(&["leaks", "--error-on-leak=growth", &short]).status.code(), Some(2), "too short to show");
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

/// What is said of golden traces.
fn said(arguments: &[&str]) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    let output = Command::new(env!("CARGO_BIN_EXE_gputrace")).args(arguments).current_dir(folder).output();
    let output = output.unwrap();
    text(&output.stdout) + &text(&output.stderr)
}

#[test]
fn a_replay_and_its_advice_begin_with_the_answer() {
    let policies = ["--policy", "torch", "--policy", "torch:expandable_segments:True", "--policy", "stalloc"];
    expect![[r#"
        caught-oom.gtr

        The requests of cuda:0, replayed
            reserved   allocated  unused  mallocs  frees  retries  sure   policy
          374.00 MiB  353.03 MiB   5.6 %       16      7        4  exact  torch
          342.00 MiB  341.02 MiB   0.3 %       12      2        1  exact  torch:expandable_segments:True
          370.00 MiB  353.03 MiB   4.6 %       19      7        0  bound  stalloc
          torch: does not fit: limit 1.00 GiB = PyTorch 374.00 MiB + CUDA context 520.00 MiB + cuBLAS 128.25 MiB + page rounding 1.75 MiB + free 0 B, and 32.00 MiB more were requested
          torch: out of memory at request 62 of 62: 32.00 MiB requested, 374.00 MiB reserved, 353.03 MiB in use
          torch:expandable_segments:True: does not fit: limit 1.00 GiB = PyTorch 302.00 MiB + CUDA context 520.00 MiB + cuBLAS 128.25 MiB + page rounding 1.75 MiB + free 72.00 MiB, and 64.00 MiB more were requested
          torch:expandable_segments:True: out of memory at request 57 of 62: 64.00 MiB requested, 302.00 MiB reserved, 289.03 MiB in use
          stalloc: does not fit: limit 1.00 GiB = stalloc 370.00 MiB + CUDA context 520.00 MiB + cuBLAS 128.25 MiB + page rounding 1.75 MiB + free 4.00 MiB, and 32.00 MiB more were requested
          stalloc: out of memory at request 62 of 62: 32.00 MiB requested, 370.00 MiB reserved, 353.03 MiB in use
          requests    62
          self-check  60 of 60 addresses match as PyTorch 2.11
          warning: the program ran out of memory once (first at /job/caught-oom/train.py:12 forward) and continued: without these errors it would have behaved differently
          warning: the trace ends at an out-of-memory error (/job/caught-oom/train.py:12 forward): later needs of the program are not in it

        Why more was reserved than in use on cuda:0
          with torch: 374.00 MiB for 353.03 MiB in use when most was reserved
          device      bytes  of reserved  part      meaning
          cuda:0  20.97 MiB        5.6 %  stranded  free beside a block in use
          device  free beside  pins alone     its own  call site that holds segments
          cuda:0    20.97 MiB   20.00 MiB  209.02 MiB  /job/caught-oom/train.py:12 forward
          cuda:0   992.00 KiB         0 B   16.02 MiB  /job/caught-oom/train.py:6 <module>
          these parts are simulated; `gputrace oom` measures stranded and wholly free (cached) bytes at the error, each including its part of isolated
    "#]]
        .assert_eq(&said(&[&["replay", "--limit", "1GiB", "caught-oom.gtr"][..], &policies].concat()));
    expect![[r#"
        varying-lengths.gtr, cuda:0, PyTorch 2.11

        What to set
          PYTORCH_ALLOC_CONF=expandable_segments:True
          ok: 696.00 MiB less reserved
          expandable_segments:True,large_segment_size_mb:12 would save 8.00 MiB more, too little for one more option
          reserved at best                568.00 MiB
          reserved as recorded            1.23 GiB
          the recorded setting, replayed  1.23 GiB  524.55 MiB in use
          how sure                        exact

        Best in memory or in driver calls, of 136 simulated settings
            reserved  mallocs  frees  setting
          560.00 MiB       26      0  expandable_segments:True,large_segment_size_mb:12
          568.00 MiB       25      0  expandable_segments:True,roundup_power2_divisions:16
          584.00 MiB       13      0  expandable_segments:True,large_segment_size_mb:64

        The least that any allocator needs
          as requested                                          523.55 MiB
          rounded to 512 bytes                                  523.55 MiB
          with streams, pools, small and large blocks separate  525.59 MiB
          in pages of 2 MiB                                     528.00 MiB
          if all lifetimes were known in advance                544.55 MiB  would be enough
    "#]]
    .assert_eq(&said(&["tune", "varying-lengths.gtr"]));
    expect![[r#"
        caught-oom.gtr, cuda:0, PyTorch 2.11

        What to set
          no setting makes it fit: any allocator needs 353.03 MiB at once, and the context and others take 650.00 MiB of the limit
          does not fit: limit 1.00 GiB = PyTorch 302.00 MiB + CUDA context 520.00 MiB + cuBLAS 128.25 MiB + page rounding 1.75 MiB + free 72.00 MiB, and 64.00 MiB more were requested
          out of memory at request 57 of 62: 64.00 MiB requested, 302.00 MiB reserved, 289.03 MiB in use
          reserved at best                342.00 MiB
          reserved as recorded            374.00 MiB
          the recorded setting, replayed  374.00 MiB  353.03 MiB in use
          how sure                        exact
          warning: the program ran out of memory once (first at /job/caught-oom/train.py:12 forward) and continued: without these errors it would have behaved differently
          warning: the trace ends at an out-of-memory error (/job/caught-oom/train.py:12 forward): later needs of the program are not in it

        Best in memory or in driver calls, of 232 simulated settings
          none of them fits

        The least that any allocator needs
          as requested                                          353.03 MiB
          rounded to 512 bytes                                  353.03 MiB
          with streams, pools, small and large blocks separate  353.03 MiB
          in pages of 2 MiB                                     354.00 MiB
          if all lifetimes were known in advance                353.03 MiB  would be enough
    "#]].assert_eq(&said(&["tune", "--limit", "1GiB", "caught-oom.gtr"]));
}

/// The rows of each column of each trace.
#[test]
fn the_rows_of_a_budget_add_up_to_the_drivers_figure() {
    let golden = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden"));
    let folders = [golden.to_owned(), golden.join("pools")];
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let mut n_columns = 0;
    for path in
        files.map(|file| file.unwrap().path()).filter(|path| path.extension().is_some_and(|it| it == "gtr"))
    {
        let said = run(&["budget", "--json", "--limit", "100GiB", path.to_str().unwrap()]);
        let said: Value = serde_json::from_slice(&said.stdout).unwrap();
        for column in
            said["devices"].as_array().unwrap().iter().flat_map(|it| it["columns"].as_array().unwrap())
        {
            let rows = column["rows"].as_object().unwrap().values().map(|row| row.as_i64().unwrap());
            assert_eq!(
                rows.sum::<i64>(),
                column["total_bytes"].as_i64().unwrap(),
                "{}: {column}",
                path.display()
            );
            assert_eq!(column["figure"], "nvml_process", "{}", path.display());
            n_columns += 1;
        }
    }
    assert!(n_columns > 30, "{n_columns}");
}

#[test]
fn the_budget_of_a_server_with_graphs() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/pools");
    let rules = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("budget.rules");
    std::fs::write(&rules, "KV cache: site=*serving.py:19*\n").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    let asked = ["budget", "--utilization", "0.5", "--between", "instant 1,instant 9", "--rules"];
    let said = command
        .args(asked)
        .arg(rules)
        .arg("serving.gtr")
        .env("COLUMNS", "80")
        .current_dir(folder)
        .output()
        .unwrap();
    expect![[r#"
        serving.gtr (pid 2812): /opt/torch/.venv/bin/python3 /tmp/pools-work/serving.py…

        Budget of cuda:0 NVIDIA H200
          what                     ready        peak         end
          weights              12.00 MiB   12.00 MiB   12.00 MiB
          KV cache             32.00 MiB   32.00 MiB   32.00 MiB
          activations                0 B    1.11 MiB  256.00 KiB
          other tensors       273.00 KiB  273.00 KiB  273.00 KiB
          CUDA graphs' pools   36.00 MiB   36.00 MiB   36.00 MiB
          workspaces           32.00 MiB   32.00 MiB   32.00 MiB
          libraries            64.13 MiB   64.13 MiB   64.13 MiB
          CUDA context        610.00 MiB  610.00 MiB  610.00 MiB
          kernel code          72.00 MiB   72.00 MiB   72.00 MiB
          free, stranded       31.73 MiB   30.62 MiB   31.48 MiB
          page rounding         1.87 MiB    1.87 MiB    1.87 MiB
          unaccounted                0 B         0 B         0 B
          = the process       892.00 MiB  892.00 MiB  892.00 MiB
          others, reserved      8.81 MiB    8.81 MiB    8.81 MiB
          free on the card    138.92 GiB  138.92 GiB  138.92 GiB
          ready, at 245.0 ms: weights and caches exist, and 20 graphs had been
            captured before the first launch
          peak, at 250.1 ms: allocated memory was at its highest, and within that time
            PyTorch had most in use
          end, at 250.9 ms: the last request, while weights and caches existed; then
            the program ended
          the rows add up to the memory that NVML charged to the process; context,
            code and driver reserves are estimates, and unaccounted is the signed
            remainder
          NVML was not queried at these instants; the figure beyond allocated memory
            is from 342.3 ms (ready), 342.3 ms (peak), 342.3 ms (end)

        CUDA graphs of cuda:0 NVIDIA H200
                                       only it  share
          graph  pool    pool grew       holds   pool  captured at
              1  (0, 1)  34.00 MiB   32.27 MiB     19  <module> (serving.py:27) in CUDA…
              2  (0, 1)        0 B  256.00 KiB     19  <module> (serving.py:27) in CUDA…
              3  (0, 1)        0 B  240.00 KiB     19  <module> (serving.py:27) in CUDA…
              4  (0, 1)        0 B  224.00 KiB     19  <module> (serving.py:27) in CUDA…
              5  (0, 1)        0 B  208.00 KiB     19  <module> (serving.py:27) in CUDA…
              6  (0, 1)        0 B  192.00 KiB     19  <module> (serving.py:27) in CUDA…
              7  (0, 1)        0 B  176.00 KiB     19  <module> (serving.py:27) in CUDA…
              8  (0, 1)        0 B  160.00 KiB     19  <module> (serving.py:27) in CUDA…
              9  (0, 1)   2.00 MiB  144.00 KiB     19  <module> (serving.py:27) in CUDA…
             10  (0, 1)        0 B  128.00 KiB     19  <module> (serving.py:27) in CUDA…
             11  (0, 1)        0 B  112.00 KiB     19  <module> (serving.py:27) in CUDA…
             12  (0, 1)        0 B   96.00 KiB     19  <module> (serving.py:27) in CUDA…
             13  (0, 1)        0 B   80.00 KiB     19  <module> (serving.py:27) in CUDA…
             14  (0, 1)        0 B   64.00 KiB     19  <module> (serving.py:27) in CUDA…
             15  (0, 1)        0 B   48.00 KiB     19  <module> (serving.py:27) in CUDA…
             16  (0, 1)        0 B   32.00 KiB     19  <module> (serving.py:27) in CUDA…
             17  (0, 1)        0 B   16.00 KiB     19  <module> (serving.py:27) in CUDA…
             18  (0, 1)        0 B    8.00 KiB     19  <module> (serving.py:27) in CUDA…
             19  (0, 1)        0 B    4.00 KiB     19  <module> (serving.py:27) in CUDA…
             20  (0, 1)        0 B    2.00 KiB     19  <module> (serving.py:27) in CUDA…
          at `ready`, blocks of single graphs are 34.40 MiB; at most 1.60 MiB more of
            their pools is shared: any graph of a pool may write there

        Memory freed between instant 1 and instant 9
          what                    before       after        freed        kept
          weights              12.00 MiB   12.00 MiB          0 B   12.00 MiB
          KV cache             32.00 MiB   32.00 MiB          0 B   32.00 MiB
          activations                0 B   32.00 KiB          0 B         0 B
          other tensors       272.00 KiB  272.00 KiB          0 B  272.00 KiB
          CUDA graphs' pools         0 B   32.00 MiB          0 B         0 B
          workspaces           32.00 MiB   32.00 MiB          0 B   32.00 MiB
          libraries            64.13 MiB   64.13 MiB          0 B   64.13 MiB
          CUDA context        610.00 MiB  610.00 MiB          0 B  610.00 MiB
          kernel code                0 B   72.00 MiB          0 B         0 B
          free, stranded       29.73 MiB   29.70 MiB    32.00 KiB   29.70 MiB
          page rounding         1.87 MiB    1.87 MiB          0 B    1.87 MiB
          unaccounted                0 B         0 B          0 B         0 B
          = the process       782.00 MiB  886.00 MiB  -104.00 MiB           -
          what                 kept  objects  pins free  line
          libraries       64.13 MiB        3        0 B  <module> (serving.py:23)
          KV cache        32.00 MiB        1        0 B  <module> (…/serving.py:19)
          workspaces      32.00 MiB        1        0 B  <module> (serving.py:23)
          weights         12.00 MiB        6  18.00 MiB  <module> (serving.py:18)
          other tensors  272.00 KiB        1   1.70 MiB  <module> (…/serving.py:21)
          from 230.1 ms to 252.6 ms. `kept` is memory held at both instants. `pins
            free` is the most free memory in one segment that a block of the line keeps
            from empty_cache

        What a setting would free, and the largest KV cache that fits
                                                         frees       when     largest
          setting                          reserved    at peak      ready       cache
          as recorded                    144.00 MiB        0 B        0 B  138.95 GiB
          expandable_segments:True       148.00 MiB  -4.00 MiB  -4.00 MiB  138.95 GiB
          without the largest graph      112.00 MiB  32.00 MiB  32.00 MiB  138.98 GiB
          without the 5 largest graphs   110.00 MiB  34.00 MiB  34.00 MiB  138.98 GiB
          without the 10 largest graphs  110.00 MiB  34.00 MiB  34.00 MiB  138.98 GiB
          without any graph              108.00 MiB  36.00 MiB  36.00 MiB  138.99 GiB
          utilization 0.50               144.00 MiB        0 B        0 B   69.06 GiB
          ok: largest KV cache that fits in 139.79 GiB (the card's 139.80 GiB without
            8.81 MiB of others and the driver): 138.95 GiB, in one block; recorded:
            32.00 MiB
          the run was replayed with each setting. Requests stay as recorded; contexts,
            code and libraries count with their maximum. A dropped graph frees only the
            memory that its capture requested; eager requests that would replace it are
            not counted
    "#]]
    .assert_eq(&(text(&said.stdout) + &text(&said.stderr)));
}

#[test]
fn the_processes_of_a_job_get_one_setting() {
    expect![[r#"
        3 processes: kept-losses.gtr decides

        What to set for all of them
          PYTORCH_ALLOC_CONF=expandable_segments:True
          ok: 624.00 MiB less reserved by the largest process
          at most 8.00 MiB more than the best single setting for all
          reserved at best, at most       640.00 MiB
          by                              kept-losses.gtr
          the recorded setting, replayed  1.23 GiB
          how sure                        exact
          warning: caught-oom.gtr: the program ran out of memory once (first at /job/caught-oom/train.py:12 forward) and continued: without these errors it would have behaved differently
          warning: caught-oom.gtr: the trace ends at an out-of-memory error (/job/caught-oom/train.py:12 forward): later needs of the program are not in it

        Best settings of single processes, tried with all 3
          reserved at most  fit  by                   setting
                640.00 MiB    3  kept-losses.gtr      expandable_segments:True
                  1.23 GiB    3  varying-lengths.gtr  (none)

        Processes that need most
          trace                   with it  fits  as recorded  with its own best  its own best
          kept-losses.gtr      640.00 MiB  yes    760.00 MiB         640.00 MiB  expandable_segments:True
          varying-lengths.gtr  568.00 MiB  yes      1.23 GiB         568.00 MiB  expandable_segments:True
          caught-oom.gtr       482.00 MiB  yes    662.00 MiB         482.00 MiB  expandable_segments:True
    "#]].assert_eq(&said(&["tune", "varying-lengths.gtr", "kept-losses.gtr", "caught-oom.gtr"]));
}
