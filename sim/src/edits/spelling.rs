//! How edits are written on a command line and in answers: one table for each kind.

use super::{Chosen, Edits, Layout, Offload, Optimizer, Precision, Way};

/// Optimizers by name.
pub const OPTIMIZERS: &[(&str, Optimizer)] = &[
    ("sgd", Optimizer::Sgd),
    ("momentum", Optimizer::Momentum),
    ("adam", Optimizer::Adam),
    ("adamw", Optimizer::AdamW),
    ("adafactor", Optimizer::Adafactor),
    ("adam8bit", Optimizer::Adam8bit),
];
/// Ways to update by name.
pub const WAYS: &[(&str, Way)] =
    &[("foreach", Way::Foreach), ("for-loop", Way::ForLoop), ("fused", Way::Fused)];
/// Number formats by name.
pub const PRECISIONS: &[(&str, Precision)] = &[
    ("autocast-bf16", Precision::AutocastBf16),
    ("autocast-fp16", Precision::AutocastFp16),
    ("bf16", Precision::Bf16),
    ("fp32", Precision::Fp32),
];
/// What can be kept in host memory, by name.
pub const OFFLOADS: &[(&str, Offload)] =
    &[("activations", Offload::Activations), ("optimizer", Offload::Optimizer)];

/// The value with this name.
///
/// # Errors
/// Which names there are.
pub fn by_name<T: Copy>(table: &[(&str, T)], name: &str) -> Result<T, String> {
    let names = || table.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let found = table.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    found.ok_or_else(|| format!("`{name}` is not known; write one of {}", names()))
}

fn name_of<T: PartialEq>(table: &[(&'static str, T)], value: &T) -> &'static str {
    table.iter().find(|(_, known)| known == value).map_or("", |(name, _)| name)
}

impl Chosen {
    /// `all`, `every:2` or `layers:0..5`.
    ///
    /// # Errors
    /// How to write it.
    pub fn parse(text: &str) -> Result<Chosen, String> {
        let number = |text: &str| text.parse::<usize>().ok().filter(|number| *number <= 1 << 20);
        let parsed = match text.split_once(':') {
            None if text == "all" => Some(Chosen::All),
            None if text == "selective" => {
                return Err("a trace does not show which operations `selective` would save; write all, every:2 or layers:0..5".into());
            }
            Some(("every", n)) => number(n).filter(|n| *n > 0).map(Chosen::Every),
            Some(("layers", range)) => range.split_once("..").and_then(|(from, to)| {
                let (from, to) = (number(from)?, number(to)?);
                (from <= to).then_some(Chosen::Layers(from, to))
            }),
            _ => None,
        };
        parsed.ok_or_else(|| format!("`{text}` names no layers; write all, every:2 or layers:0..5"))
    }

    fn spelled(self) -> String {
        match self {
            Chosen::All => "all".into(),
            Chosen::Every(n) => format!("every:{n}"),
            Chosen::Layers(from, to) => format!("layers:{from}..{to}"),
        }
    }
}

impl Layout {
    /// `ddp:2`, `zero1:2` or `fsdp:2`.
    ///
    /// # Errors
    /// How to write it.
    pub fn parse(text: &str) -> Result<Layout, String> {
        let wrong = || {
            format!("`{text}` is not a layout; write ddp:2, zero1:2 or fsdp:2, with the number of processes")
        };
        let (name, n) = text.split_once(':').ok_or_else(wrong)?;
        let n = n.parse().ok().filter(|n| (2..=1 << 16).contains(n)).ok_or_else(wrong)?;
        match name {
            "ddp" => Ok(Layout::Ddp(n)),
            "zero1" => Ok(Layout::Zero1(n)),
            "fsdp" => Ok(Layout::Fsdp(n)),
            _ => Err(wrong()),
        }
    }

    fn spelled(self) -> String {
        match self {
            Layout::Ddp(n) => format!("ddp:{n}"),
            Layout::Zero1(n) => format!("zero1:{n}"),
            Layout::Fsdp(n) => format!("fsdp:{n}"),
        }
    }
}

impl Edits {
    /// Each edit as it would be given to `gputrace whatif`.
    #[must_use]
    pub fn spelled(&self) -> Vec<String> {
        let Edits {
            optimizer,
            way,
            set_to_none,
            accumulate,
            freeze,
            lora,
            checkpoint,
            offload,
            precision,
            layout,
        } = self;
        [
            optimizer.map(|it| format!("--optimizer {}", name_of(OPTIMIZERS, &it))),
            way.map(|it| format!("--adam {}", name_of(WAYS, &it))),
            set_to_none.map(|it| format!("--set-to-none {}", if it { "yes" } else { "no" })),
            accumulate.map(|it| format!("--accumulate {it}")),
            freeze.map(|it| format!("--freeze {it}")),
            lora.map(|it| format!("--lora {it}")),
            checkpoint.map(|it| format!("--checkpoint {}", it.spelled())),
            offload.map(|it| format!("--offload {}", name_of(OFFLOADS, &it))),
            precision.map(|it| format!("--precision {}", name_of(PRECISIONS, &it))),
            layout.map(|it| format!("--layout {}", it.spelled())),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}
