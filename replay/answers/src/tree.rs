//! `gputrace tree`: who held the memory, as a tree of calls.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;
use serde::Serialize;

use super::Reply;
use super::moment::in_words;
use gputrace_analyse::live::{Holder, Level, Line, Lines, Parts, Picture, View, When, owner};
use gputrace_report::model::{Mood, Part, Section};
use gputrace_trace::words::{bytes, time};

/// What the children of the root are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupBy {
    /// Calls, outermost first.
    Stack,
    /// Owners, and calls below them.
    Owner,
    /// Devices, and calls below them.
    Device,
    /// Streams of PyTorch's blocks, and calls below them.
    Stream,
    /// Ranks of a job, and calls below them.
    Rank,
    /// What PyTorch's blocks are for, and other owners; calls below them.
    Category,
    /// Phases of the program (NVTX ranges), and calls below them.
    Phase,
}

impl GroupBy {
    /// All, each with its name and what it means.
    pub const ALL: &[(&str, GroupBy, &str)] = &[
        ("stack", GroupBy::Stack, "Calls, outermost first"),
        ("owner", GroupBy::Owner, "Owners"),
        ("device", GroupBy::Device, "Devices"),
        ("stream", GroupBy::Stream, "Streams of PyTorch's blocks"),
        ("rank", GroupBy::Rank, "Ranks of a job, if several traces are given"),
        (
            "category",
            GroupBy::Category,
            "Roles of PyTorch's blocks (parameters, activations, ...), and other owners",
        ),
        ("phase", GroupBy::Phase, "Phases of the program: NVTX ranges"),
    ];

    /// What has to be known about holders.
    #[must_use]
    pub fn parts(self) -> Parts {
        match self {
            GroupBy::Category => Parts::Roles,
            GroupBy::Phase => Parts::Phases,
            GroupBy::Stack | GroupBy::Owner | GroupBy::Device | GroupBy::Stream | GroupBy::Rank => {
                Parts::None
            }
        }
    }
}

/// A node with everything below it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Node {
    /// All below it.
    pub bytes: Bytes,
    /// Objects of all below it.
    pub objects: u64,
    /// By name.
    pub children: BTreeMap<Line, Node>,
}

impl Node {
    /// Adds the pictures of a process.
    pub fn grow(&mut self, view: &View, lines: &mut Lines, group_by: GroupBy) {
        for picture in &view.pictures {
            for (holder, (bytes, objects)) in &picture.held {
                let group = group(view, holder, group_by);
                let path = group.into_iter().chain(lines.of_holder(holder));
                self.add(*bytes, *objects);
                let mut node = &mut *self;
                for line in path {
                    node = node.children.entry(line).or_default();
                    node.add(*bytes, *objects);
                }
            }
        }
    }

    fn add(&mut self, bytes: Bytes, objects: u64) {
        self.bytes.0 = self.bytes.0.saturating_add(bytes.0);
        self.objects += objects;
    }

    /// Most bytes first.
    #[must_use]
    pub fn sorted(&self) -> Vec<(&Line, &Node)> {
        let mut children: Vec<_> = self.children.iter().collect();
        children.sort_by(|a, b| b.1.bytes.cmp(&a.1.bytes).then(a.0.cmp(b.0)));
        children
    }
}

fn group(view: &View, holder: &Holder, group_by: GroupBy) -> Option<Line> {
    let part = || view.parts.get(holder.part as usize).cloned().unwrap_or_default();
    let name = match group_by {
        GroupBy::Stack => return None,
        GroupBy::Owner => owner(&view.story.ledger, holder).to_owned(),
        GroupBy::Device => format!("cuda:{}", holder.device),
        GroupBy::Stream => match (holder.stream, holder.level) {
            (Some(0), _) => "default stream".into(),
            (Some(stream), _) => format!("stream {stream:#x}"),
            (None, Level::Block) => "stream not seen".into(),
            (None, Level::Driver | Level::Cached | Level::Buffer | Level::Arena) => "no stream".into(),
        },
        GroupBy::Rank => match view.story.process.rank {
            Some(rank) => format!("rank {rank}"),
            None => format!("no rank (pid {})", view.story.process.pid),
        },
        GroupBy::Category => category(view, holder, part),
        GroupBy::Phase if holder.level.is_rest() => "(no phase)".into(),
        GroupBy::Phase => part(),
    };
    Some(Line { name, ..Line::default() })
}

/// Roles are of PyTorch's blocks; other memory is its owner's.
fn category(view: &View, holder: &Holder, role: impl Fn() -> String) -> String {
    match holder.level {
        Level::Block => role(),
        Level::Cached | Level::Arena => "(unused)".into(),
        Level::Buffer => "JAX buffers".into(),
        Level::Driver => format!("({})", owner(&view.story.ledger, holder)),
    }
}

/// What was held, by call stack.
#[derive(Serialize)]
#[serde(tag = "schema", rename = "gputrace.tree/1")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Answer {
    /// The first file.
    trace: Option<String>,
    devices: Vec<OfDevice>,
    bytes: u64,
    /// Smaller nodes are left out.
    min_bytes: u64,
    nodes: Vec<Numbered>,
}

#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct OfDevice {
    trace: String,
    rank: Option<u32>,
    device: i16,
    time_ns: u64,
    bytes: u64,
}

/// Deep stacks do not make deep JSON: nodes by number, parents first.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Numbered {
    /// Its place in `nodes`; null for a root.
    parent: Option<usize>,
    name: String,
    file: String,
    line: u32,
    bytes: u64,
    objects: u64,
}

/// The tree of what was held in all `views`, without nodes of less than `least`.
#[must_use]
pub fn reply(views: &[View], when: When, root: &Node, least: Bytes) -> Reply<Answer> {
    let held = Section::new("moment", "Memory held").lines(views.iter().flat_map(|view| heading(view, when)));
    let mut rows = vec![];
    branches(root, root.bytes, least, "", &mut rows);
    let tree = Section::new("tree", "Who held it").lines(rows.into_iter().map(|row| (Mood::Note, row)));
    let answer = Answer {
        trace: views.first().map(|view| view.story.path.clone()),
        devices: views.iter().flat_map(devices).collect(),
        bytes: root.bytes.0,
        min_bytes: least.0,
        nodes: numbered(root, least),
    };
    Reply { part: Part { sections: vec![held, tree], ..Part::default() }, answer }
}

fn heading(View { story, pictures, .. }: &View, when: When) -> Vec<(Mood, String)> {
    let path = &story.path;
    let line = |picture: &Picture| {
        let (held, at) = (bytes(picture.total()), time(story.since_start(picture.time)));
        (Mood::Note, format!("{path}: cuda:{} held {held} at {at} ({})", picture.device, in_words(when)))
    };
    let nothing = pictures.is_empty().then(|| (Mood::Note, format!("{path}: nothing was held then")));
    let doubts = story.caveats().map(|doubts| (Mood::Warning, doubts));
    pictures.iter().map(line).chain(nothing).chain(doubts).collect()
}

/// A chain of calls without a branch stays at one depth: stacks are deep, and what matters is where they part.
fn branches(node: &Node, total: Bytes, least: Bytes, indent: &str, rows: &mut Vec<String>) {
    let shown: Vec<_> = node.sorted().into_iter().filter(|(_, child)| child.bytes >= least).collect();
    for (idx, (line, child)) in shown.iter().enumerate() {
        let is_last = idx + 1 == shown.len();
        let share = child.bytes.0 as f64 / total.0.max(1) as f64 * 100.0;
        let (corner, below) = if is_last { ("└ ", "  ") } else { ("├ ", "│ ") };
        rows.push(format!("{:>11} {share:>5.1} %  {indent}{corner}{line}", bytes(child.bytes)));
        let mut tail = *child;
        while let Some((only, next)) = only_child(tail) {
            rows.push(format!("{:>20} {indent}{below}{only}", ""));
            tail = next;
        }
        branches(tail, total, least, &format!("{indent}{below}"), rows);
    }
    let hidden: Vec<_> = node.children.values().filter(|child| child.bytes < least).collect();
    let sum = hidden.iter().fold(0u64, |sum, child| sum.saturating_add(child.bytes.0));
    if sum > 0 {
        rows.push(format!("{:>11} {:>7}  {indent}  ({} smaller)", bytes(Bytes(sum)), "", hidden.len()));
    }
}

fn only_child(node: &Node) -> Option<(&Line, &Node)> {
    let mut children = node.children.iter();
    let first = children.next()?;
    (children.next().is_none() && first.1.bytes == node.bytes).then_some(first)
}

fn devices(View { story, pictures, .. }: &View) -> impl Iterator<Item = OfDevice> {
    pictures.iter().map(|picture| OfDevice {
        trace: story.path.clone(),
        rank: story.process.rank,
        device: picture.device,
        time_ns: story.since_start(picture.time).0,
        bytes: picture.total().0,
    })
}

fn numbered(root: &Node, least: Bytes) -> Vec<Numbered> {
    let (mut nodes, mut open) = (vec![], vec![(None, root)]);
    while let Some((parent, node)) = open.pop() {
        for (line, child) in node.sorted().into_iter().filter(|(_, child)| child.bytes >= least) {
            let (Line { name, file, line }, bytes, objects) = (line.clone(), child.bytes.0, child.objects);
            nodes.push(Numbered { parent, name, file, line, bytes, objects });
            open.push((Some(nodes.len() - 1), child));
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_analyse::categories::Categories;
    use gputrace_analyse::live::{Native, view};
    use gputrace_trace::scene::recording;
    use gputrace_trace::source::Source;

    fn shown(group_by: GroupBy) -> Vec<String> {
        let scene = "push text=load
                     block addr=a bytes=3K requested=3K stream=7 by=f@/job/a.py:2,main@/job/a.py:9
                     block addr=b bytes=1K requested=1K stream=0 by=g@/job/a.py:3,main@/job/a.py:9
                     pop
                     Create handle=n bytes=100 by=libnccl.so.2";
        let source = Source::of("train.gtr", recording(scene));
        let view = view(&source, When::Peak, group_by.parts(), &Categories::default());
        let mut root = Node::default();
        root.grow(&view, &mut Lines::new(source.definitions(), Native::Hidden), group_by);
        let mut shown = vec![];
        show(&root, 0, &mut shown);
        shown
    }

    fn show(node: &Node, depth: usize, to: &mut Vec<String>) {
        for (line, child) in node.sorted() {
            to.push(format!("{}{line} {}", " ".repeat(depth), child.bytes.0));
            show(child, depth + 1, to);
        }
    }

    #[test]
    fn calls_add_up_from_the_leaves_to_the_root() {
        assert_eq!(
            shown(GroupBy::Stack),
            [
                "main (a.py:9) 4096",
                " f (a.py:2) 3072",
                " g (a.py:3) 1024",
                "libnccl.so.2+0x10 (libnccl.so.2) 100"
            ]
        );
    }

    #[test]
    fn ranks_phases_and_categories_are_groups_too() {
        assert_eq!(shown(GroupBy::Rank)[0], "rank 3 4196");
        let phases = shown(GroupBy::Phase);
        assert_eq!((&*phases[0], &*phases[4]), ("load 4096", "(outside any range) 100"), "{phases:?}");
        let categories = shown(GroupBy::Category);
        assert_eq!(
            (&*categories[0], &*categories[4]),
            ("unknown (held long) 4096", "(NCCL) 100"),
            "{categories:?}"
        );
    }

    #[test]
    fn groups_are_the_first_level() {
        assert_eq!(shown(GroupBy::Owner)[0], "PyTorch 4096");
        assert_eq!(shown(GroupBy::Device)[0], "cuda:0 4196");
        let streams = shown(GroupBy::Stream);
        assert!(
            streams[0].starts_with("stream 0x7 3072") && streams.contains(&"default stream 1024".to_owned())
        );
    }
}
