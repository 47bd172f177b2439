//! What `--help` says. `help.txt` holds all of it.

use expect_test::expect_file;

use crate::support::{run, text};

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
    expect_file!["help.txt"].assert_eq(&all);
}
