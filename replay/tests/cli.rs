//! The program as users meet it: help, exit statuses, damaged files, becoming another program.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use expect_test::expect;
use gputrace_schemas::event::*;
use gputrace_schemas::writer::Writer;
use serde_json::Value;

#[test]
fn help_of_every_verb() {
    let main = text(&run(&["--help"]).stdout);
    let verbs = main.split("Commands:").nth(1).unwrap().split("\n\n").next().unwrap();
    let verbs =
        verbs.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).filter(|v| !v.is_empty());
    let mut all = main.clone();
    for verb in verbs.filter(|verb| *verb != "help") {
        all += &format!("\n---- gputrace {verb} --help\n{}", text(&run(&[verb, "--help"]).stdout));
    }
    let all: String = all.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    expect![[r#"
        Says where GPU memory went, why it ran out, and what would have made it fit

        Usage: gputrace <COMMAND>

        Commands:
          record     Runs a program and records its GPU memory
          report     Shows where the memory went: the peak, its owners, roles and call sites, what would
                     lower it, and what ran out
          summary    Shows the figures of each process and device: what the driver, PyTorch and each owner
                     held
          stats      Shows counts, sizes and durations of calls and PyTorch blocks
          tree       Shows who held the memory at a moment, as a tree of calls
          leaks      Shows what was never given back and what keeps growing, by call site, owner and device
          oom        Shows why a program ran out of memory: what was asked for, who held what, and what
                     would have made it fit
          diff       Shows what one run held more than another: peaks, and by call site, owner and size
          replay     Replays a trace through simulated allocators
          tune       Finds the PYTORCH_CUDA_ALLOC_CONF line that saves most memory
          predict    Says what a larger batch, sequence or image would need, from runs at smaller ones
          ranks      Shows all ranks of a job side by side: who waits for whom in NCCL and why, and who
                     holds more memory than the others
          export     Writes a trace for other tools
          doctor     Checks whether recording can work here, with a given program, or what is wrong with a
                     trace
          import     Reads PyTorch snapshots and says what they hold and how well they are understood
          recover    Makes a trace from a ring whose recorder is gone
          symbolise  Names the native frames of a trace from files of another machine, a debug package or
                     debuginfod's cache
          help       Print this message or the help of the given subcommand(s)

        Options:
          -h, --help     Print help
          -V, --version  Print version

        ---- gputrace record --help
        Runs a program and records its GPU memory

        The program is not changed, and takes gputrace's place: exit code and signals are the program's own.
        Nothing is written before the program, or a child of it, uses CUDA; then there is one trace for each
        such process.

        Usage: gputrace record [OPTIONS] <COMMAND>...

        Arguments:
          <COMMAND>...
                  The program and its arguments

        Options:
          -o, --output <PATTERN>
                  Where traces go: %e executable, %h host, %p pid, %r rank, %l local rank, %n counter, %t
                  time, %q{ENV}, %% [default: gputrace-%e.%h.r%r.%p.gtr]

          -f, --force
                  Overwrite traces that exist

              --stacks <KIND>
                  Which call stacks to record [default: python]

                  Possible values:
                  - none:   None, only the library that asked
                  - python: Lines of Python, and native functions where a thread runs no Python
                  - all:    Lines of Python and native functions

              --min-size <BYTES>
                  Record no stacks for PyTorch's blocks of fewer bytes: 512, 1M [default: 0]

              --ring-size <BYTES>
                  Memory for events that wait to be written, for each process: 64M, 1GiB

              --nccl-timing
                  Measure how long the GPU works for each call into NCCL: two events around each, none
                  inside graphs

              --no-oom-report
                  Say nothing on the program's standard error when it runs out of memory

          -h, --help
                  Print help (see a summary with '-h')

        Examples:
          gputrace record -- python train.py
          gputrace record -o 'job/%h.r%r.gtr' -- torchrun --nproc-per-node 8 train.py
          gputrace record --nccl-timing -o 'job/%r.gtr' -- torchrun --nproc-per-node 8 train.py

        Exit status: the program's own; 125 if it cannot be traced, 126 if it cannot be run, 127 if it is
        not found.
        Without this command: LD_PRELOAD=libgputrace.so GPUTRACE_OUTPUT=... python train.py

        ---- gputrace report --help
        Shows where the memory went: the peak, its owners, roles and call sites, what would lower it, and
        what ran out

        Usage: gputrace report [OPTIONS] <TRACE|DIR>...

        Arguments:
          <TRACE|DIR>...  Traces made by `gputrace record`, or PyTorch snapshots (plain or .gz); several at
                          once, or folders with them, for the processes of a job

        Options:
              --rules <FILE>  Your own names for memory: NAME: FIELD=PATTERN ..., with the fields site,
                              stack, role, min and max
              --peak          At the device's peak (the default of verbs that show one moment)
              --at <TIME>     This long after the start of the trace: 1.5s, 200ms, or nanoseconds
              --range <A..B>  At the device's peak between two times: 10s..20s; one of them may be left out
              --step <N>      At the device's peak in a step of training, as `report` numbers them
              --end           At the end
              --native        Add the stacks that held most, native frames beside those of Python where they
                              were recorded (--stacks all)
              --json          Write JSON: bytes and nanoseconds as integers
              --color <WHEN>  Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE [default:
                              auto] [possible values: auto, always, never]
          -h, --help          Print help

        Examples:
          gputrace report train.gtr
          gputrace report --step 3 train.gtr
          gputrace report --rules roles.txt --json snapshot.pickle.gz
          gputrace report --native train.gtr

        With a moment (--peak, --at, --range, --step, --end), only what was held then is shown: owners,
        roles and call sites.

        A rules file names memory in your own words, one rule per line; the first that fits counts, before
        gputrace's own roles:
          embeddings: site=*embedding.py* min=1MiB
          paged KV cache: stack=*PagedAttention*
          scratch: role=temporaries max=512KiB

        ---- gputrace summary --help
        Shows the figures of each process and device: what the driver, PyTorch and each owner held

        Usage: gputrace summary [OPTIONS] <TRACE|DIR>...

        Arguments:
          <TRACE|DIR>...  Traces made by `gputrace record`, or PyTorch snapshots (plain or .gz); several at
                          once, or folders with them, for the processes of a job

        Options:
              --peak          At the device's peak (the default of verbs that show one moment)
              --at <TIME>     This long after the start of the trace: 1.5s, 200ms, or nanoseconds
              --range <A..B>  At the device's peak between two times: 10s..20s; one of them may be left out
              --step <N>      At the device's peak in a step of training, as `report` numbers them
              --end           At the end
              --json          Write JSON: bytes and nanoseconds as integers
              --color <WHEN>  Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE [default:
                              auto] [possible values: auto, always, never]
          -h, --help          Print help

        Examples:
          gputrace summary train.gtr
          gputrace summary --json job/*.gtr
          gputrace summary --at 12.5s train.gtr

        With a moment (--peak, --at, --range, --step, --end), what was held then is shown by owner and call
        site; --json then has the shape of `report --json`.

        ---- gputrace stats --help
        Shows counts, sizes and durations of calls and PyTorch blocks

        Usage: gputrace stats [OPTIONS] <TRACE|DIR>...

        Arguments:
          <TRACE|DIR>...  Traces made by `gputrace record`, or PyTorch snapshots (plain or .gz); several at
                          once, or folders with them, for the processes of a job

        Options:
              --peak          At the device's peak (the default of verbs that show one moment)
              --at <TIME>     This long after the start of the trace: 1.5s, 200ms, or nanoseconds
              --range <A..B>  At the device's peak between two times: 10s..20s; one of them may be left out
              --step <N>      At the device's peak in a step of training, as `report` numbers them
              --end           At the end
              --json          Write JSON: bytes and nanoseconds as integers
              --color <WHEN>  Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE [default:
                              auto] [possible values: auto, always, never]
          -h, --help          Print help

        Examples:
          gputrace stats train.gtr
          gputrace stats --range 10s..20s train.gtr
          gputrace stats --step 3 --json train.gtr

        With --range or --step, calls and sizes of that time are counted, and what was held when it held
        most is shown.

        ---- gputrace tree --help
        Shows who held the memory at a moment, as a tree of calls

        Usage: gputrace tree [OPTIONS] <TRACE|DIR>...

        Arguments:
          <TRACE|DIR>...
                  Traces made by `gputrace record`, or PyTorch snapshots (plain or .gz); several at once, or
                  folders with them, for the processes of a job

        Options:
              --peak
                  At the device's peak (the default of verbs that show one moment)

              --at <TIME>
                  This long after the start of the trace: 1.5s, 200ms, or nanoseconds

              --range <A..B>
                  At the device's peak between two times: 10s..20s; one of them may be left out

              --step <N>
                  At the device's peak in a step of training, as `report` numbers them

              --end
                  At the end

              --group-by <WHAT>
                  What the first level is

                  Possible values:
                  - stack:    Calls, outermost first
                  - owner:    Owners
                  - device:   Devices
                  - stream:   Streams of PyTorch's blocks
                  - rank:     Ranks of a job, where several traces are given
                  - category: What PyTorch's blocks are for (parameters, activations, ...), and other owners
                  - phase:    Phases of the program: NVTX ranges

                  [default: stack]

              --device <ORDINAL>
                  Only this device

              --native
                  Show native frames beside those of Python

              --min-bytes <BYTES>
                  Leave out nodes with less [default: one in 200 of everything]

              --json
                  Write JSON: bytes and nanoseconds as integers

              --color <WHEN>
                  Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE

                  [default: auto]
                  [possible values: auto, always, never]

          -h, --help
                  Print help (see a summary with '-h')

        Examples:
          gputrace tree train.gtr
          gputrace tree --at 12.5s --group-by owner train.gtr
          gputrace tree --step 3 --group-by category train.gtr
          gputrace tree --group-by rank job/*.gtr
          gputrace tree --end --min-bytes 100MiB --json snapshot.pickle.gz

        ---- gputrace leaks --help
        Shows what was never given back and what keeps growing, by call site, owner and device

        Growth is what a call site holds at least, window by window, after the warm-up: what goes up and
        down with every step does not count.

        Usage: gputrace leaks [OPTIONS] <TRACE|DIR>...

        Arguments:
          <TRACE|DIR>...
                  Traces made by `gputrace record`, or PyTorch snapshots (plain or .gz); several at once, or
                  folders with them, for the processes of a job

        Options:
              --error-on-leak[=<WHICH>]
                  Exit with status 3 if there is a leak

                  Possible values:
                  - any:       Anything that is shown
                  - growth:    What keeps growing
                  - not-freed: What was not freed at the end

              --suppressions <FILE>
                  Leaks that are known and accepted

              --min-bytes <BYTES>
                  Leave out call sites with less

                  [default: 0]

              --steps <N>
                  Steps that the program made [default: guessed from how often call sites allocated]

              --peak
                  At the device's peak (the default of verbs that show one moment)

              --at <TIME>
                  This long after the start of the trace: 1.5s, 200ms, or nanoseconds

              --range <A..B>
                  At the device's peak between two times: 10s..20s; one of them may be left out

              --step <N>
                  At the device's peak in a step of training, as `report` numbers them

              --end
                  At the end

              --rows <N>
                  Call sites to show in each table

                  [default: 20]

              --json
                  Write JSON: bytes and nanoseconds as integers

              --color <WHEN>
                  Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE

                  [default: auto]
                  [possible values: auto, always, never]

          -h, --help
                  Print help (see a summary with '-h')

        Examples:
          gputrace leaks train.gtr
          gputrace leaks --error-on-leak=growth --suppressions leaks.txt train.gtr
          gputrace leaks --range 60s..120s train.gtr
          gputrace leaks --steps 1000 --min-bytes 1MiB snapshot.pickle.gz

        A suppressions file has one rule per line, `#` begins a comment, `*` stands for anything:
          owner=cuBLAS*
          owner=NCCL site=*init_process_group*

        --at T answers as if the program had ended at T, --range A..B as if it had ended at B, with growth
        from A on. One step shows no growth: for what a later step holds more than an earlier one, `gputrace
        diff --from step:3 --to step:90 train.gtr`.

        Exit status: 3 if there is a leak and --error-on-leak was given.

        ---- gputrace oom --help
        Shows why a program ran out of memory: what was asked for, who held what, and what would have made
        it fit

        Usage: gputrace oom [OPTIONS] <TRACE|DIR>...

        Arguments:
          <TRACE|DIR>...  Traces made by `gputrace record`, or PyTorch snapshots (plain or .gz); several at
                          once, or folders with them, for the processes of a job

        Options:
              --torch-version <X.Y>    PyTorch release to imitate [default: the one that explains the trace
                                       best]
              --device-memory <BYTES>  Memory of the device [default: what the trace says, or unlimited]
              --limit <BYTES>          Memory the process may use; contexts and libraries share it (see
                                       --other)
              --other <BYTES>          What contexts, code and libraries use of --limit or --device-memory
                                       [default: as recorded, moment by moment; a snapshot does not say]
              --json                   Write JSON: bytes and nanoseconds as integers
              --color <WHEN>           Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE
                                       [default: auto] [possible values: auto, always, never]
          -h, --help                   Print help

        Examples:
          gputrace oom train.gtr
          gputrace oom --limit 40GiB --json snapshot.pickle.gz

        What would have made it fit is found by replaying the same requests through PyTorch's allocator with
        other settings.

        ---- gputrace diff --help
        Shows what one run held more than another: peaks, and by call site, owner and size

        Usage: gputrace diff [OPTIONS] <BEFORE> [AFTER]

        Arguments:
          <BEFORE>
                  The trace or snapshot to compare with

          [AFTER]
                  The trace or snapshot that may have changed [default: BEFORE at another moment, named by
                  --from and --to]

        Options:
              --from <MOMENT>
                  The moment of BEFORE, where it is not that of AFTER: peak, end, step:3, 10s..20s (its
                  peak), or a time such as 12.5s

              --to <MOMENT>
                  The moment of AFTER

              --by <WHAT>
                  What to compare; may be given several times

                  Possible values:
                  - stack: Call stacks, whole
                  - site:  Call sites: where the program asked
                  - owner: Owners
                  - size:  Sizes of objects

                  [default: owner site size]

              --fail-on-increase <PERCENT>
                  Exit with status 4 if a peak rose by more than this

              --rows <N>
                  Rows to show in each table

                  [default: 20]

              --peak
                  At the device's peak (the default of verbs that show one moment)

              --at <TIME>
                  This long after the start of the trace: 1.5s, 200ms, or nanoseconds

              --range <A..B>
                  At the device's peak between two times: 10s..20s; one of them may be left out

              --step <N>
                  At the device's peak in a step of training, as `report` numbers them

              --end
                  At the end

              --json
                  Write JSON: bytes and nanoseconds as integers

              --color <WHEN>
                  Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE

                  [default: auto]
                  [possible values: auto, always, never]

          -h, --help
                  Print help (see a summary with '-h')

        Examples:
          gputrace diff before.gtr after.gtr
          gputrace diff --by stack --end before.gtr after.gtr
          gputrace diff --from step:3 --to step:90 train.gtr
          gputrace diff --fail-on-increase 5% main.gtr branch.gtr

        Two steps, or other moments, of one trace are compared by --from and --to with a single file: --by
        then says in what, as `gputrace diff --from step:3 --to step:90 --by site --by size train.gtr`.

        Exit status: 4 if a peak rose by more than --fail-on-increase.

        ---- gputrace replay --help
        Replays a trace through simulated allocators

        Usage: gputrace replay [OPTIONS] <TRACE>...

        Arguments:
          <TRACE>...  gputrace traces or PyTorch snapshots (plain or .gz)

        Options:
              --policy <NAME[:OPTIONS]>  Allocator to simulate, NAME or NAME:OPTIONS; may be given several
                                         times. For `torch`, OPTIONS is what PYTORCH_CUDA_ALLOC_CONF would
                                         hold [default: torch as recorded]. `--policy help` lists them all
              --torch-version <X.Y>      PyTorch release to imitate [default: the one that explains the
                                         trace best]
              --device-memory <BYTES>    Memory of the device [default: what the trace says, or unlimited]
              --limit <BYTES>            Memory the process may use; contexts and libraries share it (see
                                         --other)
              --other <BYTES>            What contexts, code and libraries use of --limit or --device-memory
                                         [default: as recorded, moment by moment; a snapshot does not say]
              --json                     Write JSON: bytes and nanoseconds as integers
              --color <WHEN>             Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE
                                         [default: auto] [possible values: auto, always, never]
          -h, --help                     Print help

        Examples:
          gputrace replay train.gtr
          gputrace replay --policy torch --policy torch:expandable_segments:True train.gtr
          gputrace replay --limit 40GiB train.gtr
          gputrace replay --limit 24GiB --other 1.5GiB snapshot.pickle.gz

        ---- gputrace tune --help
        Finds the PYTORCH_CUDA_ALLOC_CONF line that saves most memory

        Usage: gputrace tune [OPTIONS] <TRACE>

        Arguments:
          <TRACE>  gputrace trace or PyTorch snapshot (plain or .gz)

        Options:
              --torch-version <X.Y>    PyTorch release to imitate [default: the one that explains the trace
                                       best]
              --device-memory <BYTES>  Memory of the device [default: what the trace says, or unlimited]
              --limit <BYTES>          Memory the process may use; contexts and libraries share it (see
                                       --other)
              --other <BYTES>          What contexts, code and libraries use of --limit or --device-memory
                                       [default: as recorded, moment by moment; a snapshot does not say]
              --json                   Write JSON: bytes and nanoseconds as integers
              --color <WHEN>           Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE
                                       [default: auto] [possible values: auto, always, never]
          -h, --help                   Print help

        Examples:
          gputrace tune train.gtr
          gputrace tune --torch-version 2.11 --device-memory 24GiB --json snapshot.pickle.gz

        ---- gputrace predict --help
        Says what a larger batch, sequence or image would need, from runs at smaller ones

        Usage: gputrace predict [OPTIONS] <NAME=N[,NAME=N]:TRACE> <NAME=N[,NAME=N]:TRACE>...

        Arguments:
          <NAME=N[,NAME=N]:TRACE> <NAME=N[,NAME=N]:TRACE>...
                  Runs of the same program, each with the values it had: two at least, and one more for each
                  further variable. gputrace traces or PyTorch snapshots (plain or .gz), one process each

        Options:
              --at <NAME=N[,NAME=N]>     Where to predict; may be given several times. `batch=8..64` doubles
                                         from 8 to 64, `batch=8..64:8` adds 8. What is left out is as in the
                                         largest run
              --fit <NAME>               Find the largest value of this variable that fits (--limit,
                                         --device-memory), under the recorded setting of the allocator and
                                         those that are advised, or under each --policy
              --policy <NAME[:OPTIONS]>  Allocator to simulate, NAME or NAME:OPTIONS; may be given several
                                         times [default: as recorded]. `gputrace replay --policy help` lists
                                         them
              --torch-version <X.Y>      PyTorch release to imitate [default: the one that explains the
                                         trace best]
              --device-memory <BYTES>    Memory of the device [default: what the trace says, or unlimited]
              --limit <BYTES>            Memory the process may use; contexts and libraries share it (see
                                         --other)
              --other <BYTES>            What contexts, code and libraries use of --limit or --device-memory
                                         [default: as recorded, moment by moment; a snapshot does not say]
              --json                     Write JSON: bytes and nanoseconds as integers
              --color <WHEN>             Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE
                                         [default: auto] [possible values: auto, always, never]
          -h, --help                     Print help

        Examples:
          gputrace predict batch=4:small.gtr batch=8:large.gtr --at batch=32
          gputrace predict batch=4,seq=256:a.gtr batch=8,seq=256:b.gtr batch=4,seq=512:c.gtr --at
          batch=32,seq=2048
          gputrace predict batch=4:a.gtr batch=8:b.gtr --at batch=8..128
          gputrace predict batch=4:a.gtr batch=8:b.gtr --fit batch --limit 80GiB

        ---- gputrace ranks --help
        Shows all ranks of a job side by side: who waits for whom in NCCL and why, and who holds more memory
        than the others

        Ranks and communicators are found by NCCL's own records; several jobs and restarts in one folder are
        kept apart. Traces of processes that were killed while they hung are as good as others.

        Usage: gputrace ranks [OPTIONS] <TRACE|DIR>...

        Arguments:
          <TRACE|DIR>...
                  Traces of the processes of a job, or folders with them

        Options:
              --error-on-inconsistent
                  Exit with status 3 if calls of the ranks do not fit together

              --json
                  Write JSON: bytes and nanoseconds as integers

              --color <WHEN>
                  Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE

                  [default: auto]
                  [possible values: auto, always, never]

          -h, --help
                  Print help (see a summary with '-h')

        Examples:
          gputrace record -o 'job/%h.r%r.%p.gtr' -- torchrun --nproc-per-node 8 train.py
          gputrace ranks job/
          gputrace ranks --json job/*.gtr

        Exit status: 3 if calls do not fit together and --error-on-inconsistent was given.

        ---- gputrace export --help
        Writes a trace for other tools

        Usage: gputrace export [OPTIONS] --format <FORMAT> <TRACE>...

        Arguments:
          <TRACE>...
                  Gputrace traces or PyTorch snapshots (plain or .gz); several where the format takes the
                  ranks of a job

        Options:
          -f, --format <FORMAT>
                  What to write

                  Possible values:
                  - folded:       bytes at a moment by stack, for flamegraph.pl, inferno and speedscope
                  - svg:          bytes at a moment by stack as a flame graph, for browsers
                  - speedscope:   bytes at a moment by stack, for speedscope.app
                  - pprof:        objects and bytes at a moment by stack, for go tool pprof, Pyroscope,
                    Parca and Grafana
                  - firefox:      allocations with their stacks and memory over time, for
                    profiler.firefox.com
                  - chrome:       memory over time by owner, for chrome://tracing and ui.perfetto.dev
                  - perfetto:     memory over time by owner, NCCL's calls and stacks, for ui.perfetto.dev
                    and its SQL
                  - csv:          every change of memory, a row each, for spreadsheets, pandas and DuckDB
                  - jsonl:        every change of memory, a JSON object a line, for jq
                  - parquet:      every change of memory with its stack, a row each, for DuckDB, pandas,
                    Polars and Spark
                  - sqlite:       every change of memory with its stack in a database, for sqlite3 and
                    scripts that read Nsight Systems' exports
                  - nccl:         NCCL's communicators, calls and memory, a JSON object a line
                  - torch-pickle: the history as a PyTorch snapshot, with --non-torch other libraries'
                    memory in it, for pytorch.org/memory_viz

          -o, --output <FILE>
                  File to write [default: standard output]

          -F, --force
                  Overwrite a file that exists

              --device <ORDINAL>
                  Only this device

              --diff <OTHER>
                  Show the difference from this trace (svg)

              --non-torch
                  Include memory that is not PyTorch's, as segments of its own (torch-pickle)

              --redact
                  Hide paths, arguments, host names and identifiers of the machine

              --peak
                  At the device's peak (the default of verbs that show one moment)

              --at <TIME>
                  This long after the start of the trace: 1.5s, 200ms, or nanoseconds

              --range <A..B>
                  At the device's peak between two times: 10s..20s; one of them may be left out

              --step <N>
                  At the device's peak in a step of training, as `report` numbers them

              --end
                  At the end

              --native
                  Show native frames beside those of Python

          -h, --help
                  Print help (see a summary with '-h')

        Examples:
          gputrace export --format folded train.gtr | flamegraph.pl > peak.svg
          gputrace export --format speedscope -o peak.speedscope.json train.gtr
          gputrace export --format torch-pickle -o train.pickle train.gtr     # for pytorch.org/memory_viz
          gputrace export --format csv --device 0 snapshot.pickle.gz | head

        ---- gputrace doctor --help
        Checks whether recording can work here, with a given program, or what is wrong with a trace

        Usage: gputrace doctor [OPTIONS] [TRACE|PROGRAM]...

        Arguments:
          [TRACE|PROGRAM]...  Traces to check, and programs to be recorded

        Options:
              --hooks         List every function that is hooked
              --json          Write JSON: bytes and nanoseconds as integers
              --color <WHEN>  Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE [default:
                              auto] [possible values: auto, always, never]
          -h, --help          Print help

        Examples:
          gputrace doctor
          gputrace doctor ./my_program train.gtr

        ---- gputrace import --help
        Reads PyTorch snapshots and says what they hold and how well they are understood

        Usage: gputrace import [OPTIONS] <SNAPSHOT>...

        Arguments:
          <SNAPSHOT>...  PyTorch snapshots (plain or .gz)

        Options:
              --json          Write JSON: bytes and nanoseconds as integers
              --color <WHEN>  Use colours; `auto` asks the terminal, NO_COLOR and CLICOLOR_FORCE [default:
                              auto] [possible values: auto, always, never]
          -h, --help          Print help

        Examples:
          gputrace import snapshot.pickle
          gputrace import --json rank*.pickle.gz

        --json writes one line per snapshot.

        ---- gputrace recover --help
        Makes a trace from a ring whose recorder is gone

        Where no recorder could be started, or it was killed, what was recorded is still in the ring: a file
        that libgputrace.so names on stderr, usually in /dev/shm. If the program still runs, recording
        continues from here.

        Recording of a program in another container can only continue inside of that container. From
        outside, what it left can be read once it has ended, which the ring shows if libgputrace.so could
        lock the file. Only the owner of a ring can read it.

        Usage: gputrace recover [OPTIONS] <RING>...

        Arguments:
          <RING>...
                  The ring

        Options:
          -o, --output <PATTERN>
                  Where the trace goes, as for `record`

          -f, --force
                  Overwrite a trace that exists

              --keep
                  Do not remove the ring afterwards

              --process-is-gone
                  The program has ended: do not look for it (where that cannot be seen from here)

          -h, --help
                  Print help (see a summary with '-h')

        Examples:
          gputrace recover -o train.gtr RING                     # the file that libgputrace.so named
          docker exec train gputrace recover -o train.gtr RING   # its program runs in a container

        ---- gputrace symbolise --help
        Names the native frames of a trace from files of another machine, a debug package or debuginfod's
        cache

        The recorder names what it can when a program ends, from the files that the program ran. What was
        stripped, or had gone by then, can be named later and anywhere: files are found below --sysroot by
        build id and by their recorded paths, and only those count that have the build id of the recorded
        ones. The result is the same trace, with more names.

        Usage: gputrace symbolise [OPTIONS] --output <FILE> <TRACE>

        Arguments:
          <TRACE>
                  A trace made by `gputrace record`

        Options:
              --sysroot <DIR>
                  Folder that stands for / of the traced machine; several are searched in turn [default: /]

          -o, --output <FILE>
                  Where the new trace goes

          -f, --force
                  Overwrite a trace that exists

          -h, --help
                  Print help (see a summary with '-h')

        Examples:
          gputrace symbolise --sysroot /mnt/node7 -o named.gtr train.gtr
          gputrace symbolise --sysroot ~/.cache/debuginfod_client -o named.gtr train.gtr

        Below DIR, in this order; the file that says most is taken:
          usr/lib/debug/.build-id/xx/yyyy.debug, .build-id/xx/yyyy.debug, .build-id/xx/yyyy
          BUILDID/debuginfo, BUILDID/executable, BUILDID, BUILDID.debug
          usr/lib/debug/PATH.debug, PATH
    "#]]
    .assert_eq(&all);
}

#[test]
fn a_moment_that_means_nothing_to_a_verb_is_refused_with_what_to_use_instead() {
    let folder = Folder::new("refused_moments");
    let good = folder.write("good.gtr", &trace(10));
    for (arguments, told) in [
        (&["stats", "--peak"][..], "give --range A..B or --step N"),
        (&["stats", "--at", "1s"], "use `gputrace report`"),
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
fn exit_statuses() {
    let folder = Folder::new("exit_statuses");
    let good = folder.write("good.gtr", &trace(10));
    let bad = folder.write("bad.gtr", b"not a trace at all");
    let code = |arguments: &[&str]| run(arguments).status.code();
    assert_eq!(code(&["report", &good]), Some(0));
    assert_eq!(code(&["report", &bad]), Some(1));
    assert_eq!(code(&["report", "/no/such/file.gtr"]), Some(1));
    assert_eq!(code(&["report", &good, &bad]), Some(1), "what can be read is shown, and the failure told");
    assert_eq!(code(&["report"]), Some(2));
    assert_eq!(code(&["no-such-verb"]), Some(2));
    assert_eq!(code(&["report", "--no-such-option", &good]), Some(2));
}

#[test]
fn what_is_no_trace_is_named_with_a_remedy() {
    let folder = Folder::new("no_trace");
    let bad = folder.write("bad.gtr", b"hello world");
    let output = run(&["summary", &bad]);
    let error = text(&output.stderr).replace(&bad, "bad.gtr");
    expect![[r#"
        gputrace: bad.gtr is not a gputrace trace: it begins with "hello wo"; traces are made by `gputrace record`
    "#]].assert_eq(&error);
    assert!(output.stdout.is_empty());
}

#[test]
fn every_verb_reads_every_prefix_and_every_flipped_byte() {
    let folder = Folder::new("prefixes");
    let whole = trace(100);
    let step = whole.len() / 12;
    let prefixes = (0..=12).map(|n| whole[..(n * step).min(whole.len())].to_vec());
    let flipped = (0..12).map(|n| {
        let mut bytes = whole.clone();
        bytes[9 + n * (whole.len() - 10) / 12] ^= 0x55;
        bytes
    });
    for (idx, bytes) in prefixes.chain(flipped).enumerate() {
        let path = folder.write("damaged.gtr", &bytes);
        for verb in ["report", "summary", "stats", "doctor", "leaks", "oom", "tree"] {
            let output = run(&[verb, &path, "--json"]);
            let code = output.status.code();
            assert!(matches!(code, Some(0 | 1)), "{verb} of case {idx}: {code:?}: {}", text(&output.stderr));
            assert!(!text(&output.stderr).contains("panicked"), "{verb} of case {idx}");
            if code == Some(0) {
                serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON");
            }
        }
    }
}

#[test]
fn a_trace_that_was_cut_says_so_beside_its_numbers() {
    let folder = Folder::new("cut");
    let whole = trace(100);
    let path = folder.write("cut.gtr", &whole[..whole.len() - 30]);
    let shown = text(&run(&["report", &path]).stdout);
    let memory = shown.split("\n\n").find(|part| part.starts_with("Memory\n")).expect("a section");
    assert!(memory.contains("the trace has no end"), "{memory}");
    let json: serde_json::Value =
        serde_json::from_slice(&run(&["summary", "--json", &path]).stdout).expect("JSON");
    assert_eq!(json["processes"][0]["complete"], false);
}

#[test]
fn several_traces_are_shown_in_order() {
    let folder = Folder::new("several");
    let paths: Vec<_> = (0..5).map(|n| folder.write(&format!("{n}.gtr"), &trace(n))).collect();
    let mut arguments = vec!["summary", "--json"];
    arguments.extend(paths.iter().map(String::as_str));
    let json: serde_json::Value = serde_json::from_slice(&run(&arguments).stdout).expect("JSON");
    let events: Vec<_> = json["processes"].as_array().unwrap().iter().map(|p| p["events"].as_u64()).collect();
    assert_eq!(events, (0..5).map(Some).collect::<Vec<_>>());
}

#[test]
fn colours_are_for_those_who_want_them() {
    let folder = Folder::new("colours");
    let path = folder.write("a.gtr", &trace(3));
    let has_color = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut command = gputrace();
        command.args(["report", &path]).args(arguments).envs(variables.iter().copied());
        command.output().unwrap().stdout.contains(&0x1b)
    };
    assert!(!has_color(&[], &[]), "a pipe");
    assert!(has_color(&["--color", "always"], &[("NO_COLOR", "1")]), "said so");
    assert!(has_color(&[], &[("CLICOLOR_FORCE", "1")]));
    assert!(!has_color(&[], &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
}

#[test]
fn record_becomes_the_program() {
    let library = libc();
    let status = |script: &str| {
        let mut command = gputrace();
        command.env("GPUTRACE_LIBRARY", &library).args(["record", "--", "sh", "-c", script]);
        command.output().unwrap()
    };
    assert_eq!(status("exit 7").status.code(), Some(7));
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(status("kill -9 $$").status.signal(), Some(9));
    let output = status("echo $0; echo $LD_PRELOAD; echo ${GPUTRACE_OUTPUT-unset}");
    assert_eq!(text(&output.stdout), format!("sh\n{}\nunset\n", library.display()));
}

#[test]
fn an_amount_of_memory_is_read_alike_everywhere() {
    let ring = |text: &str| {
        let mut command = gputrace();
        command.env("GPUTRACE_LIBRARY", libc()).args(["record", "--ring-size", text, "--"]);
        let output = command.args(["sh", "-c", "echo $GPUTRACE_RING_BYTES"]).output().unwrap();
        self::text(&output.stdout).trim().to_owned()
    };
    let read = ["4096", "64m", "1.5G", "1GiB", "2GB"].map(ring);
    assert_eq!(read, ["4096", "67108864", "1610612736", "1073741824", "2000000000"]);
}

#[test]
fn record_hands_its_options_on() {
    let mut command = gputrace();
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("GPUTRACE_")) {
        command.env_remove(name); // what this test run itself was told
    }
    command.env("GPUTRACE_LIBRARY", libc()).env("LD_PRELOAD", libc());
    command.args(["record", "-o", "out/%p.gtr", "-f", "--stacks", "python", "--ring-size", "64M"]);
    command.args([
        "sh",
        "-c",
        "env | grep ^GPUTRACE_ | grep -v -e LIBRARY -e JOB_BEGAN | sort; echo $LD_PRELOAD",
    ]);
    let shown = text(&command.output().unwrap().stdout);
    let shown = shown
        .replace(env!("CARGO_BIN_EXE_gputrace"), "GPUTRACE")
        .replace(&*libc().to_string_lossy(), "LIBRARY");
    expect![[r#"
        GPUTRACE_FORCE=1
        GPUTRACE_OUTPUT=out/%p.gtr
        GPUTRACE_RECORDER=GPUTRACE
        GPUTRACE_RING_BYTES=67108864
        GPUTRACE_STACKS=python
        LIBRARY
    "#]]
    .assert_eq(&shown);
}

#[test]
fn record_says_what_cannot_be_run() {
    let folder = Folder::new("cannot_run");
    let plain = folder.write("plain", b"data");
    let mut static_elf = fs::read("/proc/self/exe").unwrap();
    // Without its PT_INTERP segment a program is static.
    let entry = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let (table, n) = (entry(&static_elf, 32), usize::from(static_elf[56]));
    for header in (0..n)
        .map(|idx| table + idx * 56)
        .filter(|at| static_elf[*at..].starts_with(&[3, 0, 0, 0]))
        .collect::<Vec<_>>()
    {
        static_elf[header] = 0;
    }
    let static_elf = folder.executable("static", &static_elf);
    let mut foreign = fs::read("/proc/self/exe").unwrap();
    foreign[18] = 0x15; // EM_PPC64
    let foreign = folder.executable("foreign", &foreign);
    let script = folder.executable("script", format!("#!{static_elf}\n").as_bytes());
    let mut all = String::new();
    for command in ["/no/such/program", "no-such-program-at-all", &plain, &static_elf, &foreign, &script] {
        let output =
            gputrace().env("GPUTRACE_LIBRARY", libc()).args(["record", "--", command]).output().unwrap();
        all += &format!("{}: {}", output.status.code().unwrap(), text(&output.stderr));
    }
    let output =
        gputrace().env("GPUTRACE_LIBRARY", "/no/library.so").args(["record", "--", "true"]).output().unwrap();
    all += &format!("{}: {}", output.status.code().unwrap(), text(&output.stderr));
    let all =
        all.replace(&*folder.0.to_string_lossy(), "FOLDER").replace(&*libc().to_string_lossy(), "LIBRARY");
    expect![[r#"
        127: gputrace: /no/such/program: no such command
        127: gputrace: no-such-program-at-all: no such command
        126: gputrace: FOLDER/plain is not executable: chmod +x it, or name its interpreter
        125: gputrace: FOLDER/static is statically linked, and nothing can be preloaded into it: link it dynamically
        125: gputrace: FOLDER/foreign is for another kind of processor than LIBRARY: use the gputrace built for it
        125: gputrace: FOLDER/static is statically linked, and nothing can be preloaded into it: link it dynamically
        125: gputrace: GPUTRACE_LIBRARY names /no/library.so, which is not a file
    "#]].assert_eq(&all);
}

#[test]
fn doctor_looks_at_programs_and_traces() {
    let folder = Folder::new("doctor");
    let path = folder.write("a.gtr", &trace(3));
    let output = gputrace().args(["doctor", "--json", &path]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["schema"], "gputrace.doctor/1");
    assert_eq!(json["processes"][0]["sections"][0]["name"], "trace");
    let output =
        gputrace().env("GPUTRACE_LIBRARY", libc()).args(["doctor", "sh", "/no/such"]).output().unwrap();
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    assert!(shown.contains("ok: libgputrace.so will be loaded into it"), "{shown}");
    assert!(shown.contains("no such trace or program"), "{shown}");
    assert!(shown.contains("hooks no function of CUDA"), "{shown}");
}

#[test]
fn leaks_are_found_suppressed_and_told_by_the_exit_status() {
    let folder = Folder::new("leaks");
    let path = folder.write("a.gtr", &trace(30));
    let all = folder.write("all.txt", b"# everything\nowner=*\n");
    let code = |arguments: &[&str]| run(&[&["leaks", &path], arguments].concat()).status.code();
    assert_eq!(code(&[]), Some(0));
    assert_eq!(code(&["--error-on-leak"]), Some(3));
    assert_eq!(code(&["--error-on-leak=not-freed"]), Some(3));
    let few = folder.write("few.gtr", &trace(24));
    let status = run(&["leaks", "--error-on-leak=growth", &few]).status;
    assert_eq!(status.code(), Some(0), "so few rises may be stages");
    let long = folder.write("long.gtr", &trace(90));
    let status = run(&["leaks", "--error-on-leak=growth", &long]).status;
    assert_eq!(status.code(), Some(3), "it keeps every second object");
    let short = folder.write("short.gtr", &trace(6));
    assert_eq!(run(&["leaks", "--error-on-leak=growth", &short]).status.code(), Some(0), "too short to tell");
    assert_eq!(code(&["--error-on-leak", "--suppressions", &all]), Some(0));
    assert_eq!(code(&["--error-on-leak", "--min-bytes", "1GiB"]), Some(0));
    assert_eq!(code(&["--suppressions", "/no/such/file"]), Some(1));
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
    assert_eq!(code(&[&small, &large, "--fail-on-increase", "5%"]), Some(4));
    assert_eq!(code(&[&small, &large, "--fail-on-increase", "50%"]), Some(0));
    assert_eq!(code(&[&large, &small, "--fail-on-increase", "0"]), Some(0));
    assert_eq!(code(&[&small, &large, "--fail-on-increase", "much"]), Some(2));
    assert_eq!(code(&[&small, "/no/such/file"]), Some(1));
}

#[test]
fn exports_go_to_files_that_do_not_exist() {
    let folder = Folder::new("exports");
    let path = folder.write("a.gtr", &trace(30));
    let output = folder.0.join("a.folded").display().to_string();
    let export =
        |arguments: &[&str]| run(&[&["export", "-f", "folded", "-o", &output, &path], arguments].concat());
    assert_eq!(export(&[]).status.code(), Some(0));
    let again = export(&[]);
    assert_eq!(again.status.code(), Some(1));
    assert!(text(&again.stderr).contains("exists; -F overwrites it"), "{}", text(&again.stderr));
    assert_eq!(export(&["-F"]).status.code(), Some(0));
    let written = fs::read_to_string(&output).unwrap();
    assert_eq!(written, "cuda:0;unknown;(no stack recorded) 11534336\n");
    let shown = run(&["export", "-f", "folded", &path, "--at", "1us"]);
    assert_eq!(text(&shown.stdout), "cuda:0;unknown;(no stack recorded) 2097152\n");
}

#[test]
fn snapshots_are_read_wherever_traces_are() {
    let folder = Folder::new("snapshots");
    let path = folder.write("a.gtr", &trace(30));
    let pickle = folder.write("a.pickle", &run(&["export", "-f", "torch-pickle", &path]).stdout);
    for verb in ["report", "summary", "stats", "leaks", "oom", "tree"] {
        let output = run(&[verb, "--json", &pickle]);
        assert_eq!(output.status.code(), Some(0), "{verb}: {}", text(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(json["schema"], format!("gputrace.{verb}/1"));
    }
    let cut = fs::read(&pickle).unwrap();
    for length in [1, 3, 20, cut.len() / 2, cut.len() - 1] {
        let cut = folder.write("cut.pickle", &cut[..length]);
        let output = run(&["summary", &cut]);
        assert_eq!(output.status.code(), Some(1));
        assert!(!text(&output.stderr).contains("panicked"), "{}", text(&output.stderr));
    }
}

/// A trace of `n` events: a small program that allocates and frees.
fn trace(n: u64) -> Vec<u8> {
    let mut writer = Writer::new(Cursor::new(Vec::new())).unwrap();
    writer.process(&Process { pid: 42, command: vec!["train".into()], ..Process::default() });
    writer.device(&Device {
        ordinal: 0,
        name: "NVIDIA H200".into(),
        uuid: "GPU-0".into(),
        total: Bytes(1 << 37),
    });
    writer.thread(ThreadId(0), &Thread { tid: 42, name: "train".into() });
    writer.api(ApiId(0), &Api { name: "cuMemAlloc_v2".into(), runtime_name: "cudaMalloc".into() });
    for idx in 0..n {
        let action = if idx % 3 == 2 { Action::Free } else { Action::Alloc };
        let call = Call {
            api: ApiId(0),
            action,
            device: 0,
            result: Some(0),
            addr: 0x1000 * (idx - u64::from(action == Action::Free)),
            bytes: Bytes(1 << 20),
            stream: 0,
            handle: 0,
            extra: 0,
            duration: Nanos(10),
            captured: false,
            in_allocate: false,
            comm: CommId(0),
            nccl_call: 0,
            nccl_thread: false,
        };
        let kind = EventKind::Call(call);
        writer
            .event(&Event { time: Nanos(1000 * idx), thread: ThreadId(0), stack: StackId(0), kind })
            .unwrap();
        if idx % 10 == 9 {
            writer.flush().unwrap();
        }
    }
    writer.finish().unwrap().into_inner()
}

fn gputrace() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    for name in ["NO_COLOR", "CLICOLOR_FORCE", "LD_PRELOAD", "GPUTRACE_LIBRARY"] {
        command.env_remove(name);
    }
    command.env("COLUMNS", "100").env("TERM", "xterm");
    command
}

fn run(arguments: &[&str]) -> Output {
    gputrace().args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A library that may be preloaded into anything.
fn libc() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path =
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("/libc.so"));
    PathBuf::from(path.expect("the test is linked to a C library"))
}

/// A folder that is gone after the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path.display().to_string()
    }

    fn executable(&self, name: &str, bytes: &[u8]) -> String {
        use std::os::unix::fs::PermissionsExt;
        let path = self.write(name, bytes);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
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
          PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,large_segment_size_mb:12
          ok: 704.00 MiB less reserved
          reserved at best      560.00 MiB
          reserved as recorded  1.23 GiB  524.55 MiB in use
          how sure              exact

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
          reserved at best      342.00 MiB
          reserved as recorded  374.00 MiB  353.03 MiB in use
          how sure              exact
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
