//! The torture: programs that do to a library what production does, each alone and recorded. A recorded program ends as it does
//! alone, says what it says alone, and the losses that its traces show are the losses they had.
//!
//! A scenario is a row of [`SCENARIOS`] and a program beside this file; nothing else has to know of it. What attaching can do to a
//! process is a row of `ATTACHES` (`attaches.rs`), whose test stands elsewhere. The programs count their own
//! calls on a page of shared memory (`torture.h`), and each size and address carries who asked for it and when, so that a
//! record that is torn, missing or there twice is seen.
//!
//! `GPUTRACE_TORTURE=long` runs for a quarter of an hour instead of half a minute, `GPUTRACE_TORTURE_ONLY=WORD` runs the scenarios with that word
//! in their names, `GPUTRACE_TORTURE_SEED=N` repeats the random instants of a run.

mod attaches;
mod emulation;
mod processes;
mod scenarios;
mod traces;
mod workshop;

use emulation::*;
use gputrace_skip::skip;
use processes::*;
use scenarios::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Instant, SystemTime};
use traces::*;
use workshop::*;

/// A recorded program may take this many times the processor time that it takes alone, and [`SLACK`] beside it: far more than
/// a call costs, so that it is no question of how busy the machine is, and far less than what an unlucky search costs.
const FACTOR: f64 = 10.0;
/// Seconds of a processor: a program whose memory is all locked took 0.7 here, and 3.7 beside two builds on two processors.
const SLACK: f64 = 6.0;
/// Seconds of a processor for a session, of which a process has one: its ring, and its recorder, which reads the symbols of all
/// libraries (40 ms of a processor here).
const SESSION: f64 = 0.1;

/// One line of the summary.
#[derive(Default)]
struct Row {
    name: String,
    rounds: u32,
    calls: u64,
    recorded: u64,
    lost: u64,
    torn: u64,
    recovered: u32,
    alone: f64,
    with: f64,
    failures: Vec<String>,
    skipped: Option<String>,
}

/// How the recorded run differs from the one alone.
fn differences(with: &Run, alone: &Run) -> Vec<String> {
    let mut found = Vec::new();
    let mut hold = |is_so: bool, what: String| {
        if !is_so {
            found.push(what);
        }
    };
    hold(with.hung.is_none(), with.hung.clone().unwrap_or_default());
    let ending = |run: &Run| {
        run.status
            .code()
            .map_or_else(|| format!("signal {:?}", run.status.signal()), |code| format!("exit {code}"))
    };
    hold(with.status == alone.status, format!("ends with {}, alone with {}", ending(with), ending(alone)));
    hold(with.stdout == alone.stdout, format!("prints {:?}, alone {:?}", with.stdout, alone.stdout));
    hold(with.stderr == alone.stderr, format!("complains {:?}, alone {:?}", with.stderr, alone.stderr));
    let sessions: BTreeSet<u64> = with.lines.iter().map(|line| line.process).collect();
    let most = FACTOR * alone.cpu + SLACK + SESSION * sessions.len() as f64;
    // An emulator translates each recorder anew, and takes twenty times as long for a signal: that is its time, not ours.
    hold(
        with.cpu <= most || is_emulated(),
        format!("takes {:.1} s of a processor, alone {:.1} s", with.cpu, alone.cpu),
    );
    found
}

/// How what the traces say differs from what happened.
fn untruths(scenario: &Scenario, run: &Run, found: &Found) -> Vec<String> {
    let asked: u64 = run.lines.iter().map(|line| line.asked).sum();
    let needed = |line: &&Line| line.process & ASIDE == 0;
    let completed: u64 = run.lines.iter().filter(needed).map(|line| line.completed).sum();
    let (recorded, lost) = (found.recorded(), found.lost());
    let numbers = format!("asked {asked}, came back {completed}, recorded {recorded}, lost {:?}", found.lost);
    let mut wrong = Vec::new();
    if !found.torn.is_empty() {
        let some: Vec<_> = found.torn.iter().take(3).collect();
        wrong.push(format!("{} torn: {some:?}", found.torn.len()));
    }
    let is_too_much =
        recorded > asked || (matches!(scenario.truth, Whole | Shown) && recorded + lost > asked);
    if is_too_much {
        wrong.push(format!("more than there was: {numbers}"));
    }
    // A jump out of the library may cost what was being recorded then.
    let broken_off = if matches!(scenario.truth, Shown | Part) { asked.saturating_sub(completed) } else { 0 };
    if matches!(scenario.truth, Whole | Shown | Part) && recorded + lost + broken_off < completed {
        wrong.push(format!("{} calls are neither recorded nor lost: {numbers}", completed - recorded - lost));
    }
    if scenario.truth == Whole {
        if lost > 0 {
            wrong.push(format!("lost: {numbers}"));
        }
        let missing = |(at, line): (usize, &Line)| {
            let kept = found.by_line.get(&(at as u64 + 1)).copied().unwrap_or(0);
            line.completed.saturating_sub(kept)
        };
        let missing: u64 = run.lines.iter().enumerate().map(missing).sum();
        if missing > found.unfinished && recorded + lost >= completed {
            wrong.push(format!("{missing} calls that came back are not in the trace: {numbers}"));
        }
    }
    if recorded < scenario.least {
        wrong.push(format!("fewer than {}: {numbers}", scenario.least));
    }
    if scenario.truth == Nothing && found.traces > 0 {
        wrong.push(format!("{} traces", found.traces));
    }
    wrong
}

fn try_scenario(workshop: &Workshop, scenario: &Scenario, program: &[PathBuf], name: String) -> Row {
    let rounds = scenario.rounds[usize::from(is_long())];
    let mut row = Row { name, rounds, ..Row::default() };
    let alone = match workshop.run(scenario, program, false) {
        Ok(alone) => alone,
        Err(reason) => return Row { skipped: Some(reason), ..row },
    };
    if let Some(hung) = &alone.hung {
        row.failures.push(format!("alone: {hung}"));
    }
    row.alone = alone.cpu;
    for round in 1..=rounds {
        let with = match workshop.run(scenario, program, true) {
            Ok(with) => with,
            Err(reason) => return Row { skipped: Some(reason), ..row },
        };
        let found = workshop.find(scenario, &with);
        let mut wrong = differences(&with, &alone);
        for _ in 0..if wrong.is_empty() { 0 } else { scenario.tries } {
            // CPython 3.10 crashes at its end, now and then, on its own.
            let again = workshop.run(scenario, program, false);
            if again.is_ok_and(|again| again.status == with.status) {
                wrong.clear();
                break;
            }
        }
        wrong.extend(untruths(scenario, &with, &found));
        row.calls += with.lines.iter().map(|line| line.asked).sum::<u64>();
        row.recorded += found.recorded();
        row.lost += found.lost();
        row.torn += found.torn.len() as u64;
        row.recovered += found.recovered;
        row.with += with.cpu / f64::from(rounds);
        if wrong.is_empty() {
            let _ = fs::remove_dir_all(with.traces.parent().unwrap_or(&with.traces));
        } else {
            let said =
                if with.said.is_empty() { String::new() } else { format!("\n    it said: {}", with.said) };
            row.failures.extend(wrong.into_iter().map(|what| format!("round {round}: {what}{said}")));
            if row.failures.len() > 8 {
                break;
            }
        }
    }
    let _ = fs::remove_dir_all(alone.traces.parent().unwrap_or(&alone.traces));
    row
}

fn summary(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(8);
    let mut text = format!(
        "{:width$} {:>6} {:>9} {:>9} {:>8} {:>5} {:>5} {:>8} {:>8}  verdict\n",
        "scenario", "rounds", "calls", "recorded", "lost", "torn", "rings", "alone s", "with s"
    );
    for row in rows {
        let verdict = match (&row.skipped, row.failures.is_empty()) {
            (Some(reason), _) => format!("skipped: {reason}"),
            (None, true) => "as alone".to_owned(),
            (None, false) => "DIFFERS".to_owned(),
        };
        let Row { name, rounds, calls, recorded, lost, torn, recovered, alone, with, .. } = row;
        let _ = writeln!(
            text,
            "{name:width$} {rounds:>6} {calls:>9} {recorded:>9} {lost:>8} {torn:>5} {recovered:>5} {alone:>8.2} {with:>8.2}  {verdict}"
        );
    }
    for row in rows {
        for failure in &row.failures {
            let _ = writeln!(text, "{}: {failure}", row.name);
        }
    }
    text
}

#[test]
fn every_scenario_ends_as_it_does_alone_and_shows_the_losses_it_had() {
    let only = std::env::var("GPUTRACE_TORTURE_ONLY").unwrap_or_default();
    let scenarios: Vec<&Scenario> =
        SCENARIOS.iter().filter(|scenario| scenario.name.contains(&only)).collect();
    let began = SystemTime::now();
    let workshop = Workshop::new();
    let built = workshop.build_all(&scenarios);
    let rows = Mutex::new(BTreeMap::new());
    let is_emulated = is_emulated();
    in_parallel(scenarios.len(), |at| {
        let (scenario, began) = (scenarios[at], Instant::now());
        let mut mine = Vec::new();
        if let Some(why) = not_emulated(scenario.name).filter(|_| is_emulated) {
            let (name, skipped) = (scenario.name.to_owned(), Some(why.to_owned()));
            mine.push(Row { name, skipped, ..Row::default() });
        } else if scenario.program.ends_with(".py") {
            // `tests/setup.sh` makes one that has greenlets.
            let prepared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/python/bin/python");
            let prepared = Some(prepared).filter(|it| scenario.program == "greenlets.py" && it.exists());
            for python in workshop.pythons.iter().chain(&prepared) {
                let version = python.display().to_string();
                let name = format!("{} ({})", scenario.name, short_version(&version));
                let program = [python.clone(), sources().join(scenario.program)];
                mine.push(try_scenario(&workshop, scenario, &program, name));
            }
        } else {
            let library = |name: String| &built[&(format!("{name}.c"), "-shared -fPIC".to_owned())];
            let program = &built[&(scenario.program.to_owned(), scenario.options.to_owned())];
            let problem = libraries(scenario)
                .into_iter()
                .map(library)
                .chain([program])
                .find_map(|it| it.as_ref().err());
            mine.push(match (problem, program) {
                (None, Ok(program)) => {
                    try_scenario(&workshop, scenario, std::slice::from_ref(program), scenario.name.to_owned())
                }
                // Not every compiler has every sanitizer.
                (Some(problem), _) if scenario.options.contains("-fsanitize") => Row {
                    name: scenario.name.to_owned(),
                    skipped: Some(problem.lines().next().unwrap_or_default().to_owned()),
                    ..Row::default()
                },
                (problem, _) => Row {
                    name: scenario.name.to_owned(),
                    failures: vec![problem.cloned().unwrap_or_default()],
                    ..Row::default()
                },
            });
        }
        for row in mine.iter().filter(|row| !row.failures.is_empty()) {
            say(&format!("torture: {} DIFFERS: {}", row.name, row.failures[0]));
        }
        if is_emulated {
            // It takes minutes.
            say(&format!("torture: {} took {:.0} s", scenario.name, began.elapsed().as_secs_f64()));
        }
        rows.lock().expect("no panic").insert(at, mine);
    });
    remove_rings_of_nobody(began);
    let rows: Vec<Row> = rows.into_inner().expect("no panic").into_values().flatten().collect();
    let failed = rows.iter().filter(|row| !row.failures.is_empty()).count();
    let skipped = rows.iter().filter(|row| row.skipped.is_some()).count();
    say(&summary(&rows));
    let attacks = attaches::try_attaches(&only);
    for row in &rows {
        if let Some(why) = &row.skipped {
            // Without the version of Python.
            let name = row.name.split(" (3.").next().unwrap_or_default();
            skip(&format!("torture: {name}"), why);
        }
    }
    say(&format!("torture: {} scenarios, {failed} differ, {skipped} skipped", rows.len()));
    if failed == 0 {
        let _ = fs::remove_dir_all(&workshop.folder);
    } else {
        say(&format!("torture: the runs that differ are kept in {}", workshop.folder.display()));
    }
    assert!(failed == 0 && attacks.is_empty(), "see above, and: {}", attacks.join("\n"));
}

fn short_version(python: &str) -> String {
    let output =
        Command::new(python).args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).output();
    output.map_or_else(
        |_| python.to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

#[test]
fn every_program_of_the_torture_is_in_a_scenario() {
    let mut known: BTreeSet<String> =
        ["torture.h", "driver.c", "launch.c", "torture.py"].map(str::to_owned).into();
    for scenario in SCENARIOS {
        known.insert(scenario.program.to_owned());
        known.extend(libraries(scenario).into_iter().map(|name| format!("{name}.c")));
    }
    for entry in fs::read_dir(sources()).expect("a folder").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_part_of_the_test = name.ends_with(".rs");
        assert!(
            is_part_of_the_test || known.contains(&name),
            "tests/torture/{name} is not in any row of SCENARIOS (tests/torture/scenarios.rs)"
        );
    }
    let names: BTreeSet<_> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
    assert_eq!(names.len(), SCENARIOS.len(), "two scenarios have the same name");
}
