//! `gputrace tree`: who held the memory, as a tree of calls.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;

use crate::live::{Holder, Level, Line, Lines, Picture, owner};
use crate::story::Story;

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
    /// The tree of some pictures.
    pub fn of(story: &Story, pictures: &[Picture], lines: &mut Lines, group_by: GroupBy) -> Node {
        let mut root = Node::default();
        for picture in pictures {
            for (holder, (bytes, objects)) in &picture.held {
                let group = group(story, holder, group_by);
                let path = group.into_iter().chain(lines.of_holder(holder));
                root.add(*bytes, *objects);
                let mut node = &mut root;
                for line in path {
                    node = node.children.entry(line).or_default();
                    node.add(*bytes, *objects);
                }
            }
        }
        root
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

fn group(story: &Story, holder: &Holder, group_by: GroupBy) -> Option<Line> {
    let name = match group_by {
        GroupBy::Stack => return None,
        GroupBy::Owner => owner(&story.ledger, holder).to_owned(),
        GroupBy::Device => format!("cuda:{}", holder.device),
        GroupBy::Stream => match (holder.stream, holder.level) {
            (Some(0), _) => "default stream".into(),
            (Some(stream), _) => format!("stream {stream:#x}"),
            (None, Level::Block) => "stream not seen".into(),
            (None, Level::Driver | Level::Cached) => "no stream".into(),
        },
    };
    Some(Line { name, ..Line::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::{Native, When, pictures};
    use crate::scene::recording;
    use crate::source::Source;

    fn shown(group_by: GroupBy) -> Vec<String> {
        let scene = "block addr=a bytes=3K requested=3K stream=7 by=f@/job/a.py:2,main@/job/a.py:9
                     block addr=b bytes=1K requested=1K stream=0 by=g@/job/a.py:3,main@/job/a.py:9
                     Create handle=n bytes=100 by=libnccl.so.2";
        let source = Source::of("train.gtr", recording(scene));
        let (story, pictures) = pictures(&source, When::Peak);
        let root =
            Node::of(&story, &pictures, &mut Lines::new(source.definitions(), Native::Hidden), group_by);
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
    fn groups_are_the_first_level() {
        assert_eq!(shown(GroupBy::Owner)[0], "PyTorch 4096");
        assert_eq!(shown(GroupBy::Device)[0], "cuda:0 4196");
        let streams = shown(GroupBy::Stream);
        assert!(
            streams[0].starts_with("stream 0x7 3072") && streams.contains(&"default stream 1024".to_owned())
        );
    }
}
