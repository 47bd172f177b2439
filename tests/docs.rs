//! The documentation holds what it says: every page is in the book, every link leads somewhere, every command and option is one that
//! the program has, and every variable is explained.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_tests::recorded;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn pages_in(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join(folder)).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    paths.sort();
    paths
}

/// Everything that users read.
fn pages() -> Vec<PathBuf> {
    let examples = fs::read_dir(root().join("examples")).into_iter().flatten().flatten();
    let examples = examples.map(|entry| entry.path().join("README.md")).filter(|path| path.exists());
    ["", "docs", "python", "skills/gputrace"].into_iter().flat_map(pages_in).chain(examples).collect()
}

/// Where the links of a page lead: what stands in round brackets after square ones.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(link, _)| link))
}

/// As GitHub and mdBook make them of headings.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|one| one.is_alphanumeric() || matches!(one, ' ' | '-' | '_'));
    kept.map(|one| if one == ' ' { '-' } else { one }).collect()
}

#[test]
fn every_page_is_in_the_book() {
    let summary = read(&root().join("docs/SUMMARY.md"));
    let listed: BTreeSet<&str> = links(&summary).collect();
    let names = pages_in("docs").into_iter().filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()));
    let forgotten: Vec<String> =
        names.filter(|name| name != "SUMMARY.md" && !listed.contains(&**name)).collect();
    assert!(forgotten.is_empty(), "docs/SUMMARY.md lacks {forgotten:?}");
    assert!(listed.len() > 10, "only {} pages were understood", listed.len());
}

#[test]
fn links_lead_somewhere() {
    let mut n_links = 0;
    for page in pages() {
        for link in links(&read(&page)).map(str::to_owned).collect::<Vec<_>>() {
            let (path, heading) = link.split_once('#').unwrap_or((&link, ""));
            if path.contains("://") {
                continue;
            }
            let to = match path {
                "" => page.clone(),
                path => page.parent().expect("a folder").join(path),
            };
            assert!(to.exists(), "{}: ({link}) leads nowhere", page.display());
            let text = if heading.is_empty() { String::new() } else { read(&to) };
            let headings = text.lines().filter_map(|line| line.strip_prefix('#'));
            let is_there = headings.map(|line| anchor(line.trim_start_matches('#'))).any(|it| it == heading);
            assert!(heading.is_empty() || is_there, "{}: no heading of ({link})", page.display());
            n_links += 1;
        }
    }
    assert!(n_links > 20, "only {n_links} links were understood");
}

/// `gputrace VERB ... --option` in text or in a block of commands: the verb, and its options.
fn commands(text: &str) -> Vec<(String, Vec<String>)> {
    let is_command = |line: &&str| line.starts_with("gputrace ");
    // Every other part is between fences.
    let parts: Vec<&str> = text.split("```").collect();
    let in_text = parts.iter().step_by(2).flat_map(|part| part.split('`').skip(1).step_by(2));
    let in_blocks = parts.iter().skip(1).step_by(2).flat_map(|part| part.lines());
    let in_blocks = in_blocks.map(|line| line.trim_start_matches("$ "));
    in_text.chain(in_blocks).filter(is_command).filter_map(command).collect()
}

fn command(line: &str) -> Option<(String, Vec<String>)> {
    // What follows is the program's own, a comment, or the next command.
    let ours = line.split(" -- ").next()?.split(" # ").next()?.split(" | ").next()?;
    let mut words = ours.split_whitespace().skip(1);
    let verb = words.next().filter(|verb| verb.chars().all(|one| one.is_ascii_lowercase()))?;
    let is_option = |word: &&str| word.starts_with("--") && word.len() > 2;
    let name = |word: &str| {
        word.split('=').next().unwrap_or_default().trim_end_matches([',', ')', '.', ';']).to_owned()
    };
    Some((verb.to_owned(), words.filter(is_option).map(name).collect()))
}

#[test]
fn commands_and_options_are_the_programs() {
    let mut helps: BTreeMap<String, Option<String>> = BTreeMap::new();
    let mut help = |verb: &str| {
        let ask = || {
            let output = Command::new(recorded::built().join("gputrace")).args([verb, "--help"]).output();
            let output = output.expect("gputrace runs");
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
        };
        helps.entry(verb.to_owned()).or_insert_with(ask).clone()
    };
    let mut n_commands = 0;
    for page in pages().into_iter().filter(|page| !page.ends_with("CHANGELOG.md")) {
        for (verb, options) in commands(&read(&page)) {
            let Some(text) = help(&verb) else {
                panic!("{}: `gputrace {verb}` is not a verb", page.display())
            };
            for option in options {
                let has =
                    text.split(|one: char| !(one.is_alphanumeric() || one == '-')).any(|word| word == option);
                assert!(has, "{}: `gputrace {verb}` has no {option}", page.display());
            }
            n_commands += 1;
        }
    }
    assert!(n_commands > 60, "only {n_commands} commands were understood");
}

#[test]
fn every_variable_is_explained() {
    let table = read(&root().join("ring/src/variables.rs"));
    let page = read(&root().join("docs/VARIABLES.md"));
    let rows: Vec<&str> = table.split("= c\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert!(rows.len() > 8, "only {} rows were understood", rows.len());
    let missing: Vec<&&str> = rows.iter().filter(|row| !page.contains(&format!("| `{row}` |"))).collect();
    assert!(missing.is_empty(), "docs/VARIABLES.md does not explain {missing:?}");
    let known = |name: &str| rows.contains(&name);
    let named = page.split('`').skip(1).step_by(2).filter(|span| span.starts_with("GPUTRACE"));
    let unknown: Vec<&str> = named.filter(|name| !known(name.split('=').next().unwrap_or(name))).collect();
    assert!(unknown.is_empty(), "docs/VARIABLES.md explains {unknown:?}, which nobody reads");
}
