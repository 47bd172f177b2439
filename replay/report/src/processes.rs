//! The processes of a job as a tree: who started whom.
//!
//! Launchers and data loaders use no GPU and have no traces; the traces of their descendants name them.

use std::collections::BTreeMap;

use gputrace_schemas::event::Process;
use serde::Serialize;

use crate::model::{Mood, Section};
use gputrace_analyse::story::Story;

/// A process that has a trace.
#[derive(Clone, Debug)]
pub struct Traced<'a> {
    /// The process.
    pub process: &'a Process,
    /// Its trace.
    pub path: &'a str,
    /// Names of its threads that made events; several may have one name.
    pub threads: Vec<&'a str>,
}

impl<'a> Traced<'a> {
    /// The process of a story.
    #[must_use]
    pub fn of(story: &'a Story) -> Traced<'a> {
        let threads = story.threads.values().map(String::as_str).filter(|name| !name.is_empty());
        Traced { process: &story.process, path: &story.path, threads: threads.collect() }
    }
}

/// A process and those that it started.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Node {
    /// Its host.
    pub host: String,
    /// Its id.
    pub pid: u32,
    /// Its rank in the job.
    pub rank: Option<u32>,
    /// Its command line.
    pub command: Vec<String>,
    /// Its traces: none for one that used no GPU, several for one that became another program (`exec`).
    pub traces: Vec<String>,
    /// Names of its threads, and how many have each.
    pub threads: BTreeMap<String, u64>,
    /// Those that it started, in the order in which they began.
    pub children: Vec<Node>,
}

/// Ancestors of a process that are shown: more than any recorder keeps, and no tower for a damaged trace.
const MOST_ANCESTORS: usize = 64;

/// Numbers are used again: a process is named by its boot, when it began and its number.
type Key = (String, u64, u32);

/// The processes and their ancestors; those whose parents are not known first to last as they began.
#[must_use]
pub fn tree(traced: &[Traced<'_>]) -> Vec<Node> {
    let mut nodes: BTreeMap<Key, (Node, Option<Key>)> = BTreeMap::new();
    for Traced { process, path, threads } in traced {
        let boot = if process.boot.is_empty() { &process.host } else { &process.boot };
        let mut below = None;
        let own = (process.began, process.pid, &process.command);
        let above = process.ancestors.iter().take(MOST_ANCESTORS).map(|it| (it.began, it.pid, &it.command));
        for (began, pid, command) in std::iter::once(own).chain(above) {
            let key = (boot.clone(), began, pid);
            if let Some(below) = below.and_then(|below| nodes.get_mut(&below)) {
                below.1 = Some(key.clone());
            }
            let (node, _) = nodes.entry(key.clone()).or_default();
            node.host.clone_from(&process.host);
            node.pid = pid;
            // What it was started as; a trace below says what it became.
            if node.traces.is_empty() {
                node.command.clone_from(command);
            }
            below = Some(key);
        }
        if let Some((node, _)) = nodes.get_mut(&(boot.clone(), process.began, process.pid)) {
            node.rank = node.rank.or(process.rank);
            node.command.clone_from(&process.command);
            node.traces.push((*path).to_owned());
            threads.iter().for_each(|name| *node.threads.entry((*name).to_owned()).or_default() += 1);
        }
    }
    children(&nodes, None)
}

fn children(nodes: &BTreeMap<Key, (Node, Option<Key>)>, parent: Option<&Key>) -> Vec<Node> {
    // A parent began before its children: no chain of processes comes back to where it began.
    let is_child = |(key, (_, of)): &(&Key, &(Node, Option<Key>))| match of {
        Some(of) if (of.1, of.2) < (key.1, key.2) => Some(of) == parent,
        _ => parent.is_none(),
    };
    let below = nodes.iter().filter(is_child);
    below.map(|(key, (node, _))| Node { children: children(nodes, Some(key)), ..node.clone() }).collect()
}

/// The tree for people; none for a single process.
#[must_use]
pub fn section(roots: &[Node]) -> Option<Section> {
    let is_several = roots.len() > 1 || roots.iter().any(|root| !root.children.is_empty());
    is_several.then(|| {
        let section = Section::new("processes", "Processes and their parents");
        roots.iter().fold(section, |section, root| lines(section, root, 0))
    })
}

fn lines(section: Section, node: &Node, depth: usize) -> Section {
    let rank = node.rank.map_or_else(String::new, |rank| format!("rank {rank}: "));
    let command =
        if node.command.is_empty() { "(unknown command)".to_owned() } else { node.command.join(" ") };
    let host = if depth == 0 { format!(" on {}", node.host) } else { String::new() };
    let traces = match node.traces.is_empty() {
        true => String::new(),
        false => format!(" -> {}", node.traces.join(", ")),
    };
    let line = format!("{:indent$}{rank}{command} (pid {}{host}){traces}", "", node.pid, indent = depth * 2);
    let threads = node.threads.iter().map(|(name, n)| match n {
        1 => name.clone(),
        n => format!("{name} x{n}"),
    });
    let threads: Vec<String> = threads.collect();
    let mut section = section.line(Mood::Note, line);
    if !threads.is_empty() {
        let line = format!("{:indent$}threads: {}", "", threads.join(", "), indent = depth * 2 + 2);
        section = section.line(Mood::Note, line);
    }
    node.children.iter().fold(section, |section, child| lines(section, child, depth + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Item;
    use gputrace_schemas::event::Ancestor;

    fn ancestor(pid: u32, command: &str) -> Ancestor {
        Ancestor { pid, began: pid.into(), command: vec![command.to_owned()] }
    }

    fn process(pid: u32, rank: Option<u32>, ancestors: &[Ancestor]) -> Process {
        Process {
            pid,
            rank,
            began: pid.into(),
            host: "node7".to_owned(),
            boot: "b".to_owned(),
            command: vec!["python".to_owned(), "train.py".to_owned()],
            ancestors: ancestors.to_vec(),
            ..Process::default()
        }
    }

    fn shown(processes: &[Process]) -> Vec<String> {
        let paths: Vec<String> = processes.iter().map(|process| format!("{}.gtr", process.pid)).collect();
        let traced = processes.iter().zip(&paths).map(|(process, path)| Traced {
            process,
            path,
            threads: if process.pid == 11 {
                vec!["python", "pt_autograd_0", "pt_autograd_0"]
            } else {
                vec![]
            },
        });
        let line = |item: &Item| match item {
            Item::Line(_, text) => text.clone(),
            other => panic!("{other:?}"),
        };
        let section = section(&tree(&traced.collect::<Vec<_>>()));
        section.map_or_else(Vec::new, |section| section.items.iter().map(line).collect())
    }

    #[test]
    fn ranks_hang_below_their_launcher_and_workers_below_their_rank() {
        let launcher = ancestor(10, "torchrun");
        let rank = ancestor(11, "python");
        assert_eq!(
            shown(&[
                process(12, Some(1), std::slice::from_ref(&launcher)),
                process(13, None, &[rank, launcher.clone()]),
                process(11, Some(0), std::slice::from_ref(&launcher)),
            ]),
            [
                "torchrun (pid 10 on node7)",
                "  rank 0: python train.py (pid 11) -> 11.gtr",
                "    threads: pt_autograd_0 x2, python",
                "    python train.py (pid 13) -> 13.gtr",
                "  rank 1: python train.py (pid 12) -> 12.gtr",
            ]
        );
    }

    #[test]
    fn strangers_stand_side_by_side_and_one_alone_is_no_tree() {
        assert_eq!(shown(&[process(5, None, &[])]), [""; 0]);
        assert_eq!(
            shown(&[process(6, None, &[]), process(5, None, &[])]),
            ["python train.py (pid 5 on node7) -> 5.gtr", "python train.py (pid 6 on node7) -> 6.gtr"]
        );
    }

    #[test]
    fn ancestors_that_cannot_be_true_do_not_go_round() {
        let (a, b) = (process(5, None, &[ancestor(6, "b")]), process(6, None, &[ancestor(5, "a")]));
        assert_eq!(shown(&[a, b]).len(), 2);
    }
}
