//! `gputrace whatif`: the peak under another optimizer, precision, checkpointing, sharding or offload.

use std::process::ExitCode;

use anyhow::{anyhow, bail};
use clap::{ArgMatches, Args};
use gputrace_replay::answers::Answers;
use gputrace_replay::answers::edits::{Asked, whatif};
use gputrace_replay::answers::plans::plan;
use gputrace_replay::import::Requests;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;
use gputrace_sim::edits::spelling::{OFFLOADS, OPTIMIZERS, PRECISIONS, WAYS, by_name};
use gputrace_sim::edits::{Chosen, Edits, Layout, Offload, Optimizer, Precision, Way};
use gputrace_sim::policies;

use super::Verb;
use super::replay::MachineArgs;
use crate::show::{self, FILES, Named, ShowArgs, TRACES, complain};

pub(super) const VERB: Verb = Verb::new::<WhatifArgs>("whatif", run).of_replays();

/// Most micro-batches of a step, and the highest rank of adapters.
const MOST: u64 = 1 << 16;

/// Predict the memory of a training run with another optimizer, precision, checkpointing, sharding or offload
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace whatif --optimizer sgd train.gtr
  gputrace whatif --checkpoint all train.gtr
  gputrace whatif --precision autocast-bf16 --checkpoint every:2 --limit 24GiB train.gtr
  gputrace whatif --layout fsdp:8 --adam fused train.gtr
  gputrace whatif --plan --limit 24GiB train.gtr
  gputrace whatif --accumulate 4 --policy torch:expandable_segments:True train.gtr

Edits combine. How sure (docs/WHATIF.md): certain, PyTorch's code decides every size and moment; range, some are known within \
limits; guess, something unrecorded is assumed.")]
pub(super) struct WhatifArgs {
    #[arg(required = true, value_name = "TRACE|DIR", value_hint = FILES, help = TRACES)]
    traces: Vec<Named>,

    /// Optimizer: sgd, momentum, adam, adamw, adafactor or adam8bit
    #[arg(long, value_name = "NAME", value_parser = |text: &str| by_name(OPTIMIZERS, text))]
    optimizer: Option<Optimizer>,

    /// Updates by Adam and AdamW: foreach, for-loop or fused [default: as recorded, or PyTorch's]
    #[arg(long, value_name = "WAY", value_parser = |text: &str| by_name(WAYS, text))]
    adam: Option<Way>,

    /// Whether zero_grad frees gradients (yes) or zeroes them (no)
    #[arg(long, value_name = "yes|no", value_parser = yes_or_no)]
    set_to_none: Option<bool>,

    /// Micro-batches of the recorded size per optimizer step
    #[arg(long, value_name = "N", value_parser = number)]
    accumulate: Option<u64>,

    /// Layers to recompute in the backward pass: all, every:2 or layers:0..5
    #[arg(long, value_name = "LAYERS", value_parser = Chosen::parse)]
    checkpoint: Option<Chosen>,

    /// Move to the host: activations (torch.autograd.graph.save_on_cpu) or optimizer (state and update)
    #[arg(long, value_name = "WHAT", value_parser = |text: &str| by_name(OFFLOADS, text))]
    offload: Option<Offload>,

    /// Number format: autocast-bf16, autocast-fp16 or bf16 (model, gradients and state)
    #[arg(long, value_name = "FORMAT", value_parser = |text: &str| by_name(PRECISIONS, text))]
    precision: Option<Precision>,

    /// Do not train the first share of the parameter tensors: 0.5 for half
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "lora")]
    freeze: Option<f64>,

    /// Train only adapters of this rank at every matrix product
    #[arg(long, value_name = "RANK", value_parser = number)]
    lora: Option<u64>,

    /// Processes, each with the recorded batch: ddp:2, zero1:2 or fsdp:2
    #[arg(long, value_name = "LAYOUT:N", value_parser = Layout::parse)]
    layout: Option<Layout>,

    /// Try edits that change no result, cheapest first, until the program fits --limit; the given edits are part of each
    #[arg(long, requires = "limit", conflicts_with = "policy")]
    plan: bool,

    /// Allocator to simulate (repeatable); see `gputrace replay --policy help` [default: torch as recorded]
    #[arg(long, value_name = "NAME[:OPTIONS]")]
    policy: Vec<String>,

    #[command(flatten)]
    machine: MachineArgs,

    #[command(flatten)]
    show: ShowArgs,
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("`{text}` is neither yes nor no")),
    }
}

fn number(text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| (1..=MOST).contains(number));
    number.ok_or_else(|| format!("`{text}` is not a whole number from 1 to {MOST}"))
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| *share > 0.0 && *share < 1.0);
    share.ok_or_else(|| format!("`{text}` is not a share between 0 and 1, such as 0.5"))
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: WhatifArgs = super::parsed(matches)?;
    let edits = Edits {
        optimizer: args.optimizer,
        way: args.adam,
        set_to_none: args.set_to_none,
        accumulate: args.accumulate,
        freeze: args.freeze,
        lora: args.lora,
        checkpoint: args.checkpoint,
        offload: args.offload,
        precision: args.precision,
        layout: args.layout,
    };
    if edits == Edits::default() && !args.plan {
        bail!(
            "name an edit, such as --optimizer sgd or --checkpoint all; `gputrace whatif --help` lists them"
        );
    }
    for policy in &args.policy {
        policies::by_name(policy.split(':').next().unwrap_or_default())
            .map_err(|error| anyhow!("--policy: {}", error.0))?;
    }
    let asked = Asked { edits, policies: args.policy, machine: args.machine.machine() };
    let mut answers = vec![];
    let paths = show::paths(&args.traces)?;
    let (report, all_read) = show::parts("whatif", &paths, |path| {
        let shown = path.display().to_string();
        let source = Source::open(path)?;
        let trace = source.requests().map_err(|error| anyhow!("{error}"))?;
        trace.notes.iter().for_each(|note| complain!("{shown}: {note}"));
        let answer = if args.plan { plan } else { whatif };
        let reply = answer(&shown, &source, trace, &asked).map_err(|why| anyhow!("{shown}: {why}"))?;
        answers.push(reply.answer);
        Ok(reply.part)
    });
    if !report.parts.is_empty() {
        let answers = Answers::of(answers, paths.len(), "gputrace.whatif/1");
        show::unless_closed(args.show.write_answer(&report, &answers, out))?;
    }
    Ok(show::exit_code(all_read))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_refused_in_words_that_say_how_to_write_them() {
        assert_eq!(share("0.5"), Ok(0.5));
        for wrong in [
            share("2").map(|_| ()),
            share("x").map(|_| ()),
            number("0").map(|_| ()),
            yes_or_no("1").map(|_| ()),
        ] {
            assert!(wrong.is_err());
        }
        assert_eq!(Chosen::parse("every:2"), Ok(Chosen::Every(2)));
        assert_eq!(Chosen::parse("layers:1..3"), Ok(Chosen::Layers(1, 3)));
        assert_eq!(Layout::parse("fsdp:8"), Ok(Layout::Fsdp(8)));
        for wrong in ["every:0", "layers:3..1", "selective", "none"] {
            assert!(Chosen::parse(wrong).is_err(), "{wrong}");
        }
        for wrong in ["fsdp", "fsdp:1", "tp:2"] {
            assert!(Layout::parse(wrong).is_err(), "{wrong}");
        }
    }
}
