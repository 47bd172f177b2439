#!/usr/bin/env python3
"""first_use.py BUILT DRIVER PYTHON: what a new user met, point for point, as it is now: a table, and status 1 where one is wrong again.

BUILT has gputrace, libgputrace.so and fake-cuda, DRIVER the fake libcuda.so.1, PYTHON is one with pytest. Each point is a class of
mistake that was met once: what to type, what was seen then, and what must be seen now. It takes half a minute, and no GPU.
"""
import glob, os, pty, re, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GOLDEN = f"{ROOT}/tests/golden"
POINTS = []
# A program on the fake device: asks for memory that there is not, as often as its argument says.
REFUSED = """
import ctypes, sys
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)
cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64 << 20))
for _ in range(int(sys.argv[1])):
    cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 50))
"""
TESTS_1 = """
import ctypes, pytest
@pytest.fixture(scope="module")
def module():
    yield 1
def test_plain(module): pass
@pytest.mark.limit_gpu_memory("8 MiB")
def test_limited(module, request):
    assert request.config.getoption("--dev") == "cuda"
    cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)
    cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(6 << 20))
"""


def forget(process):
    """Removes the ring that a program without a recorder left."""
    for ring in glob.glob(f"/dev/shm/gputrace.{process.pid}.*.ring"):
        os.unlink(ring)


class Seen:
    """What a command said, and its status."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err, self.all = code, out, err, out + err

    def line(self, *words):
        """The first line with these words, or nothing."""
        lines = (line.strip() for line in self.all.splitlines())
        return next((line for line in lines if all(word in line for word in words)), "")


class Desk:
    """Where the commands are typed."""

    def __init__(self, built, driver, python, folder):
        inherited = ("GPUTRACE", "PYTHON", "PYTEST", "LD_PRELOAD", "NVTX_")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
        self.environment |= {"LD_LIBRARY_PATH": driver, "PATH": f"{built}:{os.environ['PATH']}", "COLUMNS": "80", "NO_COLOR": "1"}
        # As an installed package brings them.
        self.environment |= {"PYTHONPATH": f"{ROOT}/python/src", "PYTEST_PLUGINS": "gputrace.pytest_plugin", "PYTHONDONTWRITEBYTECODE": "1"}
        self.environment |= {"GOLDEN": GOLDEN, "LIBRARY": f"{built}/libgputrace.so", "PY": python}
        self.folder, self.typed = folder, []

    def sh(self, command, **variables):
        self.typed.append(command)
        environment = {**self.environment, **variables}
        process = subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        out, err = process.communicate()
        forget(process)
        return Seen(process.returncode, out, err)

    def terminal(self, command):
        """The same at a terminal: (status, what it showed)."""
        self.typed.append(f"{command}   (at a terminal)")
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(self.folder)
            os.execvpe("bash", ["bash", "-c", command], self.environment)
        shown = b""
        while True:
            try:
                data = os.read(terminal, 65536)
            except OSError:
                break
            if not data:
                break
            shown += data
        return Seen(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode(errors="replace"), "")

    def writes(self, command):
        """What each write to the standard error was: a pipe of packets keeps them apart."""
        self.typed.append(command)
        receive, send = os.pipe2(os.O_DIRECT)
        process = subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL, stderr=send)
        os.close(send)
        packets = iter(lambda: os.read(receive, 65536), b"")
        found = [packet.decode(errors="replace") for packet in packets]
        os.close(receive)
        process.wait()
        forget(process)
        return found

    def file(self, name, text, mode="w"):
        with open(f"{self.folder}/{name}", mode) as file:
            file.write(text)


def point(rank, before):
    def register(function):
        POINTS.append((rank, before, function))
        return function
    return register


def must(holds, seen):
    assert holds, seen.all if isinstance(seen, Seen) else seen


# ---- High


@point("high 1", "`previous item was not torn down properly`")
def a_limited_test_disturbs_no_other(desk):
    desk.file("conftest.py", "def pytest_addoption(parser): parser.addoption('--dev', default='cpu')\n")
    desk.file("test_1.py", TESTS_1)
    desk.file("test_2.py", "def test_other(): pass\n")
    seen = desk.sh('"$PY" -m pytest -q -p no:cacheprovider --dev cuda test_1.py test_2.py')
    must(seen.code == 0 and "3 passed" in seen.out, seen)
    return seen.line("passed")


@point("high 2", "a conftest's `--dev cuda` is unknown; `GPUTRACE_PROGRAM=/nonexist` ends the session; the trace is deleted")
def options_reach_a_limited_test_and_a_bad_program_fails_it_alone(desk):
    seen = desk.sh('"$PY" -m pytest -q --dev cuda test_1.py test_2.py', GPUTRACE_PROGRAM="/nonexist")
    must(seen.code == 1 and "1 failed, 2 passed" in seen.out and "INTERNALERROR" not in seen.all, seen)
    shown = seen.line("passed")
    desk.file("test_3.py", TESTS_1.replace("8 MiB", "1 MiB"))
    seen = desk.sh('"$PY" -m pytest -q --dev cuda test_3.py')
    command = re.search(r"gputrace report (\S+\.gtr)", seen.out)
    must(command is not None and os.path.exists(os.path.join(desk.folder, command[1])), seen)
    return f"{shown}; trace kept, `gputrace report .../{os.path.basename(command[1])}`"


@point("high 3", "`as recorded 1.99 GiB`, truth 22.26 GiB; without PyTorch `no setting makes it fit`")
def tune_says_what_was_recorded(desk):
    plain, limited = (desk.sh(f"gputrace tune {limit} $GOLDEN/varying-lengths.gtr") for limit in ["", "--limit 600MiB"])
    row = plain.line("reserved as recorded")
    must(row == limited.line("reserved as recorded") and "1.23 GiB" in row, limited)
    desk.sh("gputrace record -q -F -o demo.gtr -- fake-cuda demo")
    other = desk.sh("gputrace tune demo.gtr")
    must(other.code == 2 and "its memory is not PyTorch's" in other.err, other)
    return f"{row}; {other.line('PyTorch')}"


@point("high 4", "`ok: everything was freed`, status 0")
def no_gate_passes_on_what_cannot_be_read(desk):
    desk.sh("head -c -100 $GOLDEN/empty-cache-loop.gtr > cut.gtr")
    gates = ["leaks --error-on-leak", "diff --fail-on-increase 5% $GOLDEN/empty-cache-loop.gtr", "ranks --error-on-inconsistent", "doctor"]
    for gate in gates:
        seen = desk.sh(f"gputrace {gate} cut.gtr")
        must(seen.code == 2, seen)
    return f"all four: status 2; {desk.sh('gputrace leaks --error-on-leak cut.gtr').err.strip()}"


@point("high 5", "runs unrecorded, status 0; an old file stays under the name of the new run; `-o dir/` makes `dir.PID`")
def what_cannot_be_recorded_is_not_started(desk):
    desk.sh("mkdir -m 555 closed; echo old > old.gtr")
    said = []
    for pattern in ["%x.gtr", "old.gtr", "/proc/a.gtr"]:
        seen = desk.sh(f"gputrace record -o {pattern} -- touch started")
        must(seen.code == 125 and not os.path.exists(f"{desk.folder}/started"), seen)
        said.append(seen.err.strip())
    seen = desk.sh("gputrace record -o job/ -- fake-cuda demo")
    must(len(os.listdir(f"{desk.folder}/job")) == 1, seen)
    return f"125 each: {said[0]}; -o job/: {os.listdir(f'{desk.folder}/job')[0]}"


@point("high 6", "nothing is said when all went well, nor when no CUDA was used")
def record_says_where_the_trace_is_or_why_there_is_none(desk):
    well = desk.sh("gputrace record -F -o a.gtr -- fake-cuda demo")
    must("a.gtr" in well.err.splitlines()[-1] and "next: gputrace report a.gtr" in well.err, well)
    none = desk.sh("gputrace record -- true")
    must("nothing was recorded: neither true nor" in none.err, none)
    return f"{well.err.splitlines()[-1]}; {none.err.splitlines()[0]}"


@point("high 7", "`report` has neither the setting nor `oom`, and no word of kept losses")
def report_begins_with_what_happened_and_what_to_do(desk):
    shown = []
    for name, words in [("varying-lengths", "expandable_segments:True"), ("kept-losses", "train.py:"), ("running-total", "train.py:"), ("caught-oom", "train.py:")]:
        seen = desk.sh(f"gputrace report $GOLDEN/{name}.gtr")
        verdict = seen.out.split("\n\n")[1] if seen.out.startswith(("/", name)) else seen.out.split("\n\n")[0]
        verdict = re.search(r"(?s)Verdict: .*?\n\n", seen.out + "\n\n")[0]
        must(words in verdict and "next" in verdict and len(verdict.splitlines()) <= 10, seen)
        shown.append(f"{name}: {verdict.splitlines()[0][9:]}")
    return "; ".join(shown)


@point("high 8", "tables wrap in mid-word, names are `t…ries`, sites are `for…py:12)`")
def at_80_columns_nothing_wraps_and_no_line_is_cut(desk):
    for verb in ["report --all", "oom", "leaks", "tree", "tune", "stats", "summary", "ranks"]:
        seen = desk.sh(f"gputrace {verb} $GOLDEN/caught-oom.gtr")
        to_copy = ("gputrace ", "export ", "PYTORCH_CUDA")
        wide = [line for line in seen.out.splitlines() if len(line) > 80 and not any(word in line for word in to_copy)]
        must(not [line for line in wide if " " in line.strip()] and not re.search(r"\w…\w*\.?py|\.p…|\w…\w", seen.out), "\n".join(wide))
    live = desk.sh("gputrace record -F -o a.gtr -- fake-cuda demo").err.splitlines()
    wide = [line for line in live if len(line) > 80 and "next: " not in line and "(pid" not in line and "NVML" not in line]
    must(not wide, "\n".join(wide))
    return f"{desk.sh('gputrace leaks $GOLDEN/kept-losses.gtr').line('train.py:')} (79 wide at most; live text too)"


@point("high 9", "no wheel; glibc 2.34; `make dist` has 51 MB")
def the_packages_are_small_and_old_systems_have_what_they_need(desk):
    library = desk.sh('readelf --version-info --wide "$LIBRARY"')
    newest = max((tuple(map(int, it.split("."))) for it in re.findall(r"Name: GLIBC_([0-9.]+)", library.out)), default=(0,))
    must(newest <= (2, 17), library)
    pack = f'python3 {ROOT}/packaging/pack.py wheel --any-glibc --program "$(command -v gputrace)" --library "$LIBRARY" --out .'
    seen = desk.sh(pack)
    must(seen.code == 0 and "py3-none-manylinux_2_17_x86_64" in seen.out, seen)
    return f"{seen.out.split(',')[0].strip()} (`make wheel` refuses what needs more than glibc 2.17; tests/packages.rs)"


@point("high 10", "silent, status 0, and a ring of 32 MiB stays")
def a_recorder_that_ends_at_once_is_said(desk):
    seen = desk.sh("LD_PRELOAD=$LIBRARY GPUTRACE_RECORDER=/no/such GPUTRACE_OUTPUT=instead.gtr exec fake-cuda demo")
    must(os.path.exists(f"{desk.folder}/instead.gtr"), seen)
    ring = r"sed -n 's/.*ended before it had read anything; the events stay in \(\S*\): `gputrace recover`.*/\1/p' said.txt"
    at_once = desk.sh("LD_PRELOAD=$LIBRARY GPUTRACE_RECORDER=/bin/false GPUTRACE_OUTPUT=no.gtr fake-cuda demo 2> said.txt && "
                      f"gputrace recover \"$({ring})\" -o recovered.gtr")
    must(at_once.code == 0 and os.path.exists(f"{desk.folder}/recovered.gtr"), at_once)
    return "one that is not there: the one beside the library records; one that ends at once: said, and `recover` has its events"


# ---- Medium


@point("medium 1", "`no such command`")
def a_misspelt_option_is_not_the_command(desk):
    seen = desk.sh("gputrace record --stack python -- true")
    must(seen.code == 125 and "'--stacks'" in seen.err, seen)
    return seen.line("tip")


@point("medium 2", "silent; no table of them")
def misspelt_variables_are_said(desk):
    seen = desk.sh("gputrace record -q -- true", GPUTRACE_STACK="all", GPUTRACE_STACKS="pyhton")
    must("did you mean GPUTRACE_STACKS?" in seen.err and "pyhton" in seen.err, seen)
    doctor = desk.sh("gputrace doctor", GPUTRACE_STACK="all")
    must("GPUTRACE_STACK " in doctor.all, doctor)
    return "; ".join(seen.err.strip().splitlines())


@point("medium 3", "ignored")
def oom_heeds_its_limit(desk):
    with_it, without = (desk.sh(f"gputrace oom {limit} $GOLDEN/caught-oom.gtr") for limit in ["--limit 2GiB", ""])
    must(with_it.out != without.out, with_it)
    none = desk.sh("gputrace oom --limit 400MiB $GOLDEN/varying-lengths.gtr")
    must("gputrace replay --limit 400MiB" in none.out, none)
    return f"{with_it.line('at most')} (without: {without.line('at most')})"


@point("medium 4", "needs a trace")
def the_list_of_policies_needs_no_trace(desk):
    seen = desk.sh("gputrace replay --policy help")
    must(seen.code == 0 and "expandable_segments:True" in seen.out, seen)
    return seen.out.splitlines()[0]


@point("medium 5", "printed twice")
def an_error_is_said_once(desk):
    for verb in ["report", "leaks", "oom", "tune", "replay", "tree", "stats", "ranks", "export -f csv", "diff $GOLDEN/kept-losses.gtr"]:
        seen = desk.sh(f"gputrace {verb} /no/such.gtr")
        must(seen.code == 2 and seen.err.count("/no/such.gtr: ") <= 1 and seen.err.count("such.gtr") == 1, seen)
    return seen.err.strip().splitlines()[-1]


@point("medium 6", "`PERSID, which would run code`")
def a_picture_is_no_pickle(desk):
    desk.file("a.png", b"\x89PNG\r\n\x1a\n0000000000", "wb")
    seen = desk.sh("gputrace report a.png")
    must(seen.code == 2 and "is not a gputrace trace" in seen.err, seen)
    return seen.err.strip()


@point("medium 7", "no suggestion, status 1")
def a_misspelt_policy_gets_a_suggestion(desk):
    seen = desk.sh("gputrace replay --policy torch:expandble_segments:True $GOLDEN/kept-losses.gtr")
    must(seen.code == 2 and "did you mean `expandable_segments`?" in seen.err, seen)
    return f"{seen.err.strip()[:90]}, status 2"


@point("medium 8", "`10` is ten bytes; `80G` is GiB and `80GB` is not, undocumented")
def amounts_have_one_syntax_and_a_limit_a_unit(desk):
    seen = desk.sh("gputrace tune --limit 10 $GOLDEN/kept-losses.gtr")
    must(seen.code == 2 and "write a unit, such as 10GB" in seen.err, seen)
    said = {desk.sh(f"gputrace replay --json --limit 2{unit} $GOLDEN/kept-losses.gtr").out for unit in ["G", "GB", "GiB", "g"]}
    must(len(said) == 1, "they differ")
    return f"{seen.err.splitlines()[0]}; 2G = 2GB = 2GiB everywhere (docs/EXIT-CODES.md)"


@point("medium 9", "status 0, undocumented")
def what_does_not_fit_can_be_a_gate(desk):
    answer = desk.sh("gputrace replay --limit 600MiB $GOLDEN/varying-lengths.gtr")
    must(answer.code == 0 and "does not fit" in answer.out, answer)
    gate = desk.sh("gputrace replay --limit 600MiB --error-on-oom $GOLDEN/varying-lengths.gtr")
    must(gate.code == 1, gate)
    return f"an answer, so 0 (documented); --error-on-oom: {gate.code}"


@point("medium 10", "go to a terminal")
def binary_formats_refuse_a_terminal(desk):
    for form in ["parquet", "torch-pickle", "pprof"]:
        seen = desk.terminal(f"gputrace export -f {form} $GOLDEN/kept-losses.gtr")
        must(seen.code == 2 and "is binary" in seen.out, seen)
    return seen.out.strip()


@point("medium 11", "leaves a partial file under the final name")
def an_export_appears_when_it_is_complete(desk):
    command = "timeout -s KILL 0.05 gputrace export -f jsonl -o part.jsonl $GOLDEN/kept-losses.gtr; ls | grep -c '^part.jsonl$'"
    killed = desk.sh(command)
    whole = desk.sh("gputrace export -f jsonl -o whole.jsonl -F $GOLDEN/kept-losses.gtr")
    must(whole.code == 0, whole)
    if "1" in killed.out:
        same = desk.sh("cmp part.jsonl whole.jsonl")
        must(same.code == 0, same)
    full = desk.sh("gputrace export -f jsonl -F -o /dev/full $GOLDEN/kept-losses.gtr")
    must(full.code == 2, full)
    return full.err.strip()


@point("medium 12", "22 s of silence for 3 M events")
def what_takes_long_says_so_on_a_terminal(desk):
    commands = f"{ROOT}/replay/src/bin/gputrace"
    sources = {os.path.relpath(path, commands): open(path).read() for folder, _, names in os.walk(commands) for path in
               (os.path.join(folder, name) for name in names) if path.endswith(".rs")}
    users = sorted(name for name, text in sources.items() if "Working" in text)
    must("show.rs" in users and "Duration::from_secs(1)" in sources["working.rs"], str(users))
    return f"a line that moves, after a second, for whatever reads traces or replays ({', '.join(users)}); 3 M events: docs/COST.md"


@point("medium 13", "folders are refused by four verbs, snapshots in folders by all")
def folders_and_snapshots_go_wherever_a_trace_goes(desk):
    desk.sh("mkdir -p mixed; cp $GOLDEN/kept-losses.gtr mixed; gputrace export -f torch-pickle -o mixed/snapshot.pickle $GOLDEN/varying-lengths.gtr")
    for verb in ["report", "summary", "stats", "leaks", "oom", "tree", "tune", "ranks"]:
        seen = desk.sh(f"gputrace {verb} mixed")
        must(seen.code == 0 and "snapshot.pickle" in seen.all or verb in ("ranks", "tree"), seen)
    one = desk.sh("gputrace budget mixed")
    must(one.code == 2 and "name one of them" in one.err, one)
    return one.err.strip()


@point("medium 14", "the same 20 lines three times")
def a_burst_of_one_error_is_shown_once(desk):
    desk.file("refused.py", REFUSED)
    counts = []
    for n in [1, 5]:
        seen = desk.sh(f'gputrace record -F -o r.gtr -- "$PY" refused.py {n}')
        counts.append((seen.err.count("OUT OF MEMORY"), seen.err.count("1.00 PiB")))
    must(counts[0] == (1, 1) and counts[1][0] <= 2 and counts[1][1] <= 4, seen)
    return f"one report, then a line: {seen.line('out of memory for the')}"


@point("medium 15", "`0 bytes skipped`, doctor `ok`")
def a_flipped_bit_is_damage(desk):
    data = bytearray(open(f"{GOLDEN}/empty-cache-loop.gtr", "rb").read())
    data[len(data) // 2] ^= 0x10
    desk.file("flipped.gtr", bytes(data), "wb")
    seen = desk.sh("gputrace doctor flipped.gtr")
    must(seen.code == 2 and "0 bytes skipped" not in seen.all, seen)
    return f"status 2; {desk.sh('gputrace leaks --error-on-leak flipped.gtr').err.strip()}"


# ---- Low


@point("low 1", "exit codes only in four helps")
def every_help_says_its_statuses(desk):
    verbs = re.findall(r"(?m)^  ([a-z]+) ", desk.sh("gputrace --help").out.split("Options:")[0])
    without = [verb for verb in verbs if verb != "help" and "xit status" not in desk.sh(f"gputrace {verb} --help").out]
    must(not without, str(without))
    return f"in all {len(verbs) - 1}"


@point("low 2", "no completions, no manual pages")
def there_are_completions_and_manual_pages(desk):
    seen = desk.sh("gputrace manual m && ls m m/man1 | wc -l")
    must(seen.code == 0 and os.path.exists(f"{desk.folder}/m/completions/_gputrace"), seen)
    return f"{len(os.listdir(f'{desk.folder}/m/man1'))} manual pages, bash, zsh and fish"


@point("preload", "`LD_PRELOAD=libgputrace.so` failed as typed: no such file")
def the_library_is_found_by_name(desk):
    path = desk.sh("gputrace library").out.strip()
    must(os.path.isabs(path) and os.path.isfile(path), path)
    seen = desk.sh("LD_PRELOAD=$(gputrace library) GPUTRACE_OUTPUT=p.gtr fake-cuda demo && gputrace summary p.gtr")
    must("p.gtr" in seen.out, seen)
    return "`LD_PRELOAD=$(gputrace library) python train.py`"


@point("install", "no `make install`")
def what_is_installed_records(desk):
    made = desk.sh(f"make -s -C {ROOT} install RELEASE=$(dirname $(command -v gputrace)) DESTDIR=$PWD/there PREFIX=/usr")
    must(made.code == 0, made)
    seen = desk.sh("there/usr/bin/gputrace record -o i.gtr -- fake-cuda demo && there/usr/bin/gputrace library")
    must(os.path.exists(f"{desk.folder}/i.gtr") and seen.out.strip().endswith("/there/usr/lib/libgputrace.so"), seen)
    files = [os.path.exists(f"{desk.folder}/there/usr/share/{name}") for name in (
        "man/man1/gputrace-report.1", "bash-completion/completions/gputrace", "zsh/site-functions/_gputrace", "fish/vendor_completions.d/gputrace.fish")]
    must(all(files), str(files))
    return "bin, lib, manual pages and completions below PREFIX"


@point("low 3", "no `-q`")
def record_can_be_quiet(desk):
    quiet = desk.sh("gputrace record -q -- true")
    must(quiet.err == "" and quiet.code == 0, quiet)
    return "`record -q` says nothing"


@point("low 4", "`-f` here and `-F` there for force")
def force_is_one_letter(desk):
    verbs = ["record", "export", "html", "recover", "symbolise"]
    lines = [desk.sh(f"gputrace {verb} --help").line("--force") for verb in verbs]
    must({line.split(",")[0] for line in lines if line} == {"-F"}, str(lines))
    old = desk.sh("gputrace record -q -f -o a.gtr -- true")
    must(old.code == 0, old)
    return f"{lines[0]} in all; record's -f goes on"


@point("low 5", "`symbolize`: no such verb")
def both_spellings_are_understood(desk):
    seen = desk.sh("gputrace symbolize --help")
    must(seen.code == 0 and "Name the native frames" in seen.out, seen)
    return seen.out.splitlines()[0]


@point("low 6", "minutes are refused in `--at`")
def times_may_be_minutes(desk):
    said = [desk.sh(f"gputrace tree --at {time} $GOLDEN/kept-losses.gtr") for time in ["1m", "60s", "1min", "1:00"]]
    must(all(seen.code == said[0].code and seen.all == said[0].all and "is not a time" not in seen.all for seen in said), said[0])
    return "1m = 1min = 1:00 = 60s"


@point("low 7", "`warning:` for advice")
def advice_is_no_warning(desk):
    lines = [line for name in sorted(os.listdir(GOLDEN)) if name.endswith(".gtr")
             for line in desk.sh(f"gputrace report --all $GOLDEN/{name}; gputrace oom $GOLDEN/{name}").all.splitlines() if "warning:" in line]
    advice = [line for line in lines if re.search(r"warning: (?:try|use|set|consider|see|run|add)\b", line)]
    must(lines and not advice, "\n".join(advice))
    return f"{len(lines)} warnings in the reports of the golden traces, none of them advice"


@point("low 8", "`sure: interval` unexplained")
def how_sure_is_explained(desk):
    words = open(f"{ROOT}/docs/VERDICTS.md").read()
    must(all(f"`{word}`" in words or f"**{word}**" in words for word in ["exact", "interval", "guess"]), words[:400])
    seen = desk.sh("gputrace oom --help; gputrace tune --help; gputrace replay --help")
    must(seen.all.count("exact") >= 3, seen)
    return seen.line("exact")


@point("low 9", "`68.5%` and `91 %`, `10411` and `10,411`")
def numbers_have_one_style(desk):
    text = "".join(desk.sh(f"gputrace {verb} $GOLDEN/{name}.gtr").out for verb in ["report --all", "stats", "oom", "tune", "replay", "leaks", "tree"]
                   for name in ["caught-oom", "varying-lengths"])
    text = re.sub(r"(?m)^.*(?:gputrace |PYTORCH_CUDA|--).*$", "", text)
    bad = re.findall(r"\d%|(?<![\w./:+,-])\d{5,}(?![\w./:])", text)
    must(not bad, str(bad[:10]))
    return f"{len(re.findall('[0-9] %', text))} percents with a space, {len(re.findall('[0-9],[0-9]{3}', text))} numbers with commas"


@point("low 10", "`large_segment_size_mb:12` for 4 of 398 MiB")
def tune_takes_the_plain_setting_where_another_hardly_saves_more(desk):
    seen = desk.sh("gputrace tune $GOLDEN/varying-lengths.gtr")
    setting = seen.out.split("What to set\n")[1].splitlines()[0].strip()
    must("large_segment" not in setting, seen)
    return setting


@point("low 11", "three writes a message")
def a_message_is_one_write(desk):
    packets = desk.writes("gputrace record -F -o a.gtr -- fake-cuda demo")
    packets += desk.writes("gputrace report /no/such.gtr")
    packets += desk.writes("LD_PRELOAD=$LIBRARY GPUTRACE_RECORDER=/no/such exec fake-cuda demo")
    must(packets and all(packet.endswith("\n") for packet in packets), repr(packets))
    return f"{len(packets)} writes, each of whole lines"


@point("low 12", "PyTorch 2.11 calls the variable that `tune` and `report` print deprecated")
def the_variable_is_the_one_that_the_release_recommends(desk):
    for verb in ["tune", "report"]:
        seen = desk.sh(f"gputrace {verb} $GOLDEN/varying-lengths.gtr")
        must(seen.line("PYTORCH_ALLOC_CONF=expandable_segments:True") and "PYTORCH_CUDA" not in seen.out, seen)
    return seen.line("PYTORCH_ALLOC_CONF")


# ---- Met by the second new user


@point("second 6", "`--limit 180GiB` becomes the card's 139.80 GiB, and `--at 99h` becomes 3.364 s, without a word")
def nothing_that_was_asked_is_changed_silently(desk):
    limit = desk.sh("gputrace replay --limit 180GiB $GOLDEN/varying-lengths.gtr")
    must(limit.line("warning: a limit of 180.00 GiB is more than the card has"), limit)
    for verb in ["report", "tree"]:
        moment = desk.sh(f"gputrace {verb} --at 99h $GOLDEN/kept-losses.gtr")
        must("99:00:00 h" in moment.out, moment)
    return f"{limit.line('more than the card')}; {moment.line('99:00:00 h')}"


@point("second 7", "the largest batch is `certain` from two small runs, of a card that is not named")
def a_search_names_the_card_and_doubts_a_long_way(desk):
    seen = desk.sh("gputrace predict --fit batch batch=4:$GOLDEN/predict/gpt.batch4.gtr batch=8:$GOLDEN/predict/gpt.batch8.gtr")
    must("device memory 139.80 GiB" in seen.out and "certain" not in seen.out and seen.line("before you trust it"), seen)
    return seen.line("device memory")


@point("second 8", "`doctor` has status 0 where nothing can be recorded")
def doctor_fails_without_a_driver(desk):
    seen = desk.sh("gputrace doctor", LD_LIBRARY_PATH="")
    must((seen.code == 1) == ("not recorded" in seen.all), seen)
    return f"status {seen.code}: {seen.line('driver')}"


@point("second 9", "`cannot write` a name that nobody typed; three warnings for half a trace; did you mean `stalloc`?")
def messages_say_what_to_do(desk):
    desk.sh("mkdir -m 555 nowhere; head -c 3000 $GOLDEN/kept-losses.gtr > half.gtr")
    half = desk.sh("gputrace report half.gtr")
    must(half.code == 2 and len(half.err.splitlines()) == 1 and "copy it again" in half.err, half)
    policy = desk.sh("gputrace replay --policy tcmalloc $GOLDEN/kept-losses.gtr")
    must("did you mean" not in policy.err and "policies are" in policy.err, policy)
    if os.geteuid() != 0:
        name = desk.sh("cd nowhere && LD_PRELOAD=$LIBRARY exec fake-cuda demo")
        must("choose another place with GPUTRACE_OUTPUT" in name.err, name)
    return half.err.strip()


@point("second 14", "`report` needs a trace")
def without_a_name_the_newest_trace_is_read(desk):
    seen = desk.sh("mkdir newest && cd newest && cp $GOLDEN/kept-losses.gtr . && gputrace report")
    must(seen.code == 0 and "the newest trace here" in seen.err, seen)
    return seen.err.strip()


# ---- Not written anywhere


@point("not written", "how to read a report; words; cost; no trace; containers; Kubernetes, Jupyter; variables; exit codes; schemas; examples")
def it_is_written(desk):
    book = open(f"{ROOT}/docs/SUMMARY.md").read() + open(f"{ROOT}/README.md").read()
    pages = ["FRAGMENTATION", "GLOSSARY", "COST", "NO-TRACE", "CONTAINERS", "VARIABLES", "EXIT-CODES", "JSON", "WHICH-COMMAND", "RECIPES"]
    missing = [page for page in pages if page not in book]
    recipes = open(f"{ROOT}/docs/RECIPES.md").read()
    missing += [word for word in ["Kubernetes", "Jupyter", "Slurm", "Ray"] if word not in recipes]
    words = open(f"{ROOT}/docs/GLOSSARY.md").read()
    missing += [word for word in ["reserved", "allocated", "stranded", "surplus", "pool"] if word not in words]
    missing += [name for name in os.listdir(f"{ROOT}/examples") if f"examples/{name}" not in book]
    must(not missing, str(missing))
    return ", ".join(f"docs/{page}.md" for page in pages)


def main():
    built, driver, python = map(os.path.abspath, sys.argv[1:4])
    wrong = still_open = 0
    print("| point | what | typed | then | now |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="gputrace-first-use-") as folder:
        desk = Desk(built, driver, python, folder)
        for rank, before, function in POINTS:
            desk.typed = []
            try:
                now = function(desk)
                still_open += "STILL " in now
            except AssertionError as error:
                wrong += 1
                now = f"WRONG: {error}"[:3000]
            typed = "; ".join(f"`{command.replace('|', ' ¦ ')}`" for command in desk.typed[:3]) or "(read)"
            now = now.replace(folder, "...").replace(GOLDEN, "golden").replace(ROOT, "...").replace("|", "¦")
            print(f"| {rank} | {function.__name__.replace('_', ' ')} | {typed} | {before} | {now} |", flush=True)
    well = len(POINTS) - wrong - still_open
    print(f"\n{well} of {len(POINTS)} points are as they should be, {still_open} known to be open.")
    sys.exit(1 if wrong else 0)


main()
