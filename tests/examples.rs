//! The solved examples: what each README shows is what gputrace answers about its golden trace, and names the faulty line.
//!
//! `UPDATE_EXPECT=1` writes the answers into the READMEs. Which sections are shown, the README says: those that it has.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded;

/// Most bytes of a golden trace.
const MOST_BYTES: u64 = 200_000;
/// What is not shown.
const LEFT_OUT: &str = "…";

struct Example {
    name: String,
    folder: PathBuf,
    readme: String,
    /// Where the answer stands in the README: after the line of the second command, before the block's end.
    answer: std::ops::Range<usize>,
    /// The program's file.
    program: String,
    /// What gputrace is asked, without its name.
    question: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn examples() -> Vec<Example> {
    let folder = root().join("examples");
    let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut folders: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    folders.into_iter().map(example).collect()
}

fn example(folder: PathBuf) -> Example {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let path = folder.join("README.md");
    let readme = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (mut program, mut question, mut answer) = (String::new(), vec![], 0..0);
    let mut at = 0;
    for line in readme.split_inclusive('\n') {
        at += line.len();
        let Some(command) = line.trim_end().strip_prefix("$ gputrace ") else { continue };
        match command.split_once(" -- python ") {
            Some((_, script)) => program = script.to_owned(),
            None => {
                question = command.split(' ').map(str::to_owned).collect();
                answer = at..at + readme[at..].find("```").expect("the end of the block");
            }
        }
    }
    assert!(!program.is_empty() && !question.is_empty(), "{}: no `$ gputrace` commands", path.display());
    Example { name, folder, readme, answer, program, question }
}

impl Example {
    /// The answer's sections, as shown in a terminal of 110 columns.
    fn asked(&self) -> Vec<String> {
        let output = Command::new(recorded::built().join("gputrace"))
            .args(&self.question)
            .current_dir(root().join("tests/golden"))
            .env("COLUMNS", "110")
            .env("NO_COLOR", "1")
            .output()
            .expect("gputrace can be run");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}: {}", self.name, String::from_utf8_lossy(&output.stderr));
        said.trim_end().split("\n\n").map(str::to_owned).collect()
    }

    /// The verdict, and the sections that the README shows, from the answer.
    fn shown(&self, sections: &[String]) -> String {
        let titles = self.readme[self.answer.clone()].lines().skip_while(|line| *line != LEFT_OUT);
        let titles = titles.filter(|line| !line.starts_with(' ') && !line.is_empty() && *line != LEFT_OUT);
        let mut shown = format!("{}\n{LEFT_OUT}\n", sections[0]);
        for title in titles {
            let section = sections.iter().find(|section| section.lines().next() == Some(title));
            let section = section.unwrap_or_else(|| panic!("{}: the answer has no `{title}`", self.name));
            shown += &format!("{section}\n{LEFT_OUT}\n");
        }
        shown
    }

    /// The number of the line marked in the program.
    fn fault(&self) -> usize {
        let path = self.folder.join(&self.program);
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let lines = text.lines().zip(1..).filter(|(line, _)| line.ends_with("# <- fault"));
        let [(_, number)] = lines.collect::<Vec<_>>()[..] else {
            panic!("{}: one line should be marked `# <- fault`", path.display())
        };
        number
    }
}

#[test]
fn every_readme_shows_what_gputrace_answers() {
    for example in examples() {
        let shown = example.shown(&example.asked());
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            let mut readme = example.readme.clone();
            readme.replace_range(example.answer.clone(), &shown);
            fs::write(example.folder.join("README.md"), readme).expect("a README that can be written");
        } else {
            let expected = &example.readme[example.answer.clone()];
            assert_eq!(expected, shown, "{}/README.md (UPDATE_EXPECT=1 rewrites it)", example.name);
        }
    }
}

#[test]
fn every_answer_names_the_faulty_line() {
    for example in examples() {
        let place = format!("/{}:{})", example.program, example.fault());
        let shown = example.shown(&example.asked());
        assert!(shown.contains(&place), "{}: nothing shown names {place}:\n{shown}", example.name);
    }
}

#[test]
fn golden_traces_are_small_whole_and_of_no_particular_machine() {
    let names: Vec<_> = examples().into_iter().map(|example| example.name).collect();
    for name in &names {
        let path = root().join(format!("tests/golden/{name}.gtr"));
        let trace = Trace::open(&path).unwrap_or_else(|e| panic!("{e}"));
        assert!(trace.is_complete() && trace.damages().is_empty(), "{name}");
        assert!(fs::metadata(&path).expect("a file").len() <= MOST_BYTES, "{name}: too large to be kept");
        assert_eq!(trace.process().host, "gpu", "{name}: make it with the program `golden`");
    }
    assert!(names.len() >= 8, "{names:?}");
}
