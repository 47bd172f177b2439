//! What the first screen says of a scene: shared by the tests of verdicts.

use gputrace_analyse::categories::Categories;
use gputrace_analyse::growth::Growth;
use gputrace_analyse::story::Story;
use gputrace_answers::postmortem::Postmortem;
use gputrace_answers::verdict::verdict;
use gputrace_report::model::{Item, Value};
use gputrace_trace::scene::recording;
use gputrace_trace::source::Source;

pub(crate) const MODULE: &str = "Module._call_impl@/v/site-packages/torch/nn/modules/module.py:1790";
pub(crate) const LINEAR: &str = "Linear.forward@/v/site-packages/torch/nn/modules/linear.py:134";

/// The title and the lines of the verdict on a scene, with the remarks.
pub(crate) fn told(scene: &str) -> String {
    let source = Source::of("job/train.gtr", recording(scene));
    let mut growth = Growth::default();
    let story = Story::with_lifetimes_and(&source, &Categories::default(), &mut growth);
    let found = Postmortem::of_story(story, &source, &growth);
    let verdict = verdict(&found, &source);
    let lines = verdict.section.items.iter().map(|item| match item {
        Item::Fact { label, value: Value::Text(text) | Value::Command(text), remark, .. } => {
            format!("\n{label}: {text}; {remark}")
        }
        other => panic!("{other:?}"),
    });
    verdict.section.title.clone() + &lines.collect::<String>()
}

/// A block: its name, MiB, and its stack.
pub(crate) fn block(name: &str, mib: u64, by: &str) -> String {
    format!("block addr={name} bytes={mib}M requested={mib}M by={by}\n")
}

/// The block is freed.
pub(crate) fn free(name: &str, mib: u64) -> String {
    format!("free addr={name} bytes={mib}M\n")
}
