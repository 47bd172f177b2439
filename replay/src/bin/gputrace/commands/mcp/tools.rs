//! The tools: a row of [`TOOLS`] is all that the server knows of one.

use std::ffi::OsString;

use serde_json::{Map, Value, json};

use super::allowed::Allowed;

/// Something that a client may call.
pub(super) struct Tool {
    /// What clients call it by.
    pub(super) name: &'static str,
    /// For people.
    pub(super) title: &'static str,
    /// For the model: which question it answers, and what the answer holds.
    pub(super) description: &'static str,
    /// The verb of gputrace that answers.
    pub(super) verb: &'static str,
    /// Fields that are left out of each process of the answer, and the tool that shows them.
    pub(super) leaves_out: Option<(&'static str, &'static str)>,
    /// What it takes beside what all take ([`COMMON`]), in the order of the verb's own positions.
    pub(super) arguments: &'static [Argument],
}

/// An argument of a tool.
pub(super) struct Argument {
    name: &'static str,
    pub(super) goes: Goes,
    kind: Kind,
    description: &'static str,
    required: bool,
}

/// Where an argument goes on the verb's command line.
#[derive(Clone, Copy)]
pub(super) enum Goes {
    /// After `--`, where nothing is an option.
    Position,
    /// In one word with its option, as `--limit=40GiB`: no value can become an option of its own.
    Option(&'static str),
    /// By its form to one of the options for a moment.
    Moment,
}

/// What values it takes. What they mean is the verb's to judge.
#[derive(Clone, Copy)]
enum Kind {
    /// A trace, or a folder of traces.
    Path,
    /// Letters, digits and the marks that sizes, times, addresses and settings are written with.
    Text,
    /// Several of these.
    Texts,
    Count,
    OneOf(&'static [&'static str]),
}

impl Argument {
    const fn new(name: &'static str, goes: Goes, kind: Kind, description: &'static str) -> Argument {
        Argument { name, goes, kind, description, required: false }
    }

    const fn required(self) -> Argument {
        Argument { required: true, ..self }
    }
}

const fn option(name: &'static str, option: &'static str, kind: Kind, description: &'static str) -> Argument {
    Argument::new(name, Goes::Option(option), kind, description)
}

const PATH: Argument = Argument::new(
    "path",
    Goes::Position,
    Kind::Path,
    "A trace (*.gtr), a PyTorch snapshot (*.pickle, *.pickle.gz), or a folder with those of all processes of a job",
)
.required();

const LIMIT: Argument = option(
    "limit",
    "limit",
    Kind::Text,
    "Memory that the process may use, such as 40GiB; CUDA contexts and libraries share it",
);
const DEVICE_MEMORY: Argument = option(
    "device_memory",
    "device-memory",
    Kind::Text,
    "Memory of the device, such as 80GiB, if it is not the recorded one",
);

/// What `how sure` means in answers of replays.
macro_rules! sure {
    ($text:literal) => {
        concat!(
            $text,
            " `confidence` is `exact` (to the byte), `interval` (depends on addresses that were not recorded), `bound` (at best) or \
             `guess` (the replay of the recorded setting differs from the run)."
        )
    };
}

/// Every tool, in the order in which an agent meets them.
pub(super) const TOOLS: &[Tool] = &[
    Tool {
        name: "verdict",
        title: "Verdict",
        description: "What went wrong with GPU memory, why, and the fix: cause, call site, confidence and remedy for each process. \
                      Call this first.",
        verb: "report",
        leaves_out: Some(("sections", "causes")),
        arguments: &[PATH],
    },
    Tool {
        name: "causes",
        title: "Causes and evidence",
        description: "The verdict with the tables behind it: the last out-of-memory error, owners, roles (parameters, gradients, \
                      activations, ...), call sites, fragmentation, losses of the trace.",
        verb: "report",
        leaves_out: None,
        arguments: &[PATH],
    },
    Tool {
        name: "summary",
        title: "Peak memory",
        description: "Peak memory of each process and device: driver, PyTorch (requested, allocated, reserved) and every owner.",
        verb: "summary",
        leaves_out: None,
        arguments: &[PATH],
    },
    Tool {
        name: "oom",
        title: "Out of memory",
        description: sure!(
            "Why the process ran out of memory: the request that failed, what was held then, and which allocator settings would have \
             made it fit, found by replaying the recorded requests."
        ),
        verb: "oom",
        leaves_out: None,
        arguments: &[PATH, LIMIT, DEVICE_MEMORY],
    },
    Tool {
        name: "leaks",
        title: "Leaks and growth",
        description: "Memory that keeps growing and memory that was not freed, by call site, owner and device.",
        verb: "leaks",
        leaves_out: None,
        arguments: &[
            PATH,
            option(
                "min_bytes",
                "min-bytes",
                Kind::Text,
                "Leave out call sites with less than this, such as 1MiB",
            ),
            option("steps", "steps", Kind::Count, "Number of training steps, if known"),
        ],
    },
    Tool {
        name: "memory_at",
        title: "Memory at a moment",
        description: "Who held the memory at a moment (by default the peak), as a tree of calls or by another key.",
        verb: "tree",
        leaves_out: None,
        arguments: &[
            PATH,
            Argument::new(
                "moment",
                Goes::Moment,
                Kind::Text,
                "peak, end, step:3 (the peak of a training step), 12.5s (after the start) or 10s..20s (the peak between)",
            ),
            option(
                "group_by",
                "group-by",
                Kind::OneOf(&["stack", "owner", "device", "stream", "rank", "category", "phase"]),
                "Key of the first level",
            ),
            option(
                "min_bytes",
                "min-bytes",
                Kind::Text,
                "Leave out nodes with less than this, such as 100MiB",
            ),
        ],
    },
    Tool {
        name: "tune",
        title: "Best allocator setting",
        description: sure!(
            "The PYTORCH_CUDA_ALLOC_CONF that reserves least for the recorded requests, of all that this PyTorch knows; for a folder, \
             one setting for all ranks."
        ),
        verb: "tune",
        leaves_out: None,
        arguments: &[PATH, LIMIT, DEVICE_MEMORY],
    },
    Tool {
        name: "replay",
        title: "What if: the allocator",
        description: sure!(
            "The recorded requests under other allocator settings or on another card: peak reserved memory, whether it fits, and the sources of reserved memory that is not in use."
        ),
        verb: "replay",
        leaves_out: None,
        arguments: &[
            PATH,
            option(
                "policies",
                "policy",
                Kind::Texts,
                "Allocators to replay, such as torch, torch:expandable_segments:True or torch:max_split_size_mb:128; \
                 help lists all",
            ),
            LIMIT,
            DEVICE_MEMORY,
        ],
    },
    Tool {
        name: "whatif",
        title: "What if: the program",
        description: "The peak of a recorded training run if its program were changed: another optimizer, precision, activation \
                      checkpointing, offloading, accumulation, adapters, or several GPUs. Changes combine. `confidence` is `certain`, \
                      `range` or `guess`: quote the range.",
        verb: "whatif",
        leaves_out: None,
        arguments: &[
            PATH,
            option(
                "optimizer",
                "optimizer",
                Kind::Text,
                "Another optimizer, with its default arguments: sgd, momentum, adam, adamw, adafactor or adam8bit",
            ),
            option("adam", "adam", Kind::Text, "How Adam and AdamW update: foreach, for-loop or fused"),
            option(
                "accumulate",
                "accumulate",
                Kind::Count,
                "Micro-batches of the recorded size per optimizer step",
            ),
            option(
                "checkpoint",
                "checkpoint",
                Kind::Text,
                "Layers that are recomputed in the backward pass: all, every:2 or layers:0..5",
            ),
            option("offload", "offload", Kind::Text, "Data kept in host memory: activations or optimizer"),
            option(
                "precision",
                "precision",
                Kind::Text,
                "Another number format: autocast-bf16, autocast-fp16 or bf16",
            ),
            option(
                "freeze",
                "freeze",
                Kind::Text,
                "Share of the parameter tensors that is not trained, such as 0.5",
            ),
            option("lora", "lora", Kind::Count, "Rank of adapters, which are the only trained parameters"),
            option("layout", "layout", Kind::Text, "Several GPUs: ddp:2, zero1:2 or fsdp:8"),
            LIMIT,
        ],
    },
    Tool {
        name: "ranks",
        title: "Ranks of a job",
        description: "All ranks of a job side by side: hangs and mismatched NCCL calls with the rank that is missing, stragglers, and which rank holds more memory, and at which line.",
        verb: "ranks",
        leaves_out: None,
        arguments: &[PATH],
    },
    Tool {
        name: "who",
        title: "Owner of an address",
        description: "Every owner that a device address had, with who allocated and freed it, when, and its neighbours: for the address in a CUDA error.",
        verb: "who",
        leaves_out: None,
        arguments: &[
            Argument::new(
                "address",
                Goes::Position,
                Kind::Text,
                "Device address, hexadecimal, such as 0x7f5c40000200",
            )
            .required(),
            PATH,
        ],
    },
    Tool {
        name: "diff",
        title: "Difference of two runs",
        description: "Memory that one run or moment held and another did not: peaks, and by owner, call site and size.",
        verb: "diff",
        leaves_out: None,
        arguments: &[
            Argument::new("before", Goes::Position, Kind::Path, "The trace or snapshot to compare with")
                .required(),
            Argument::new(
                "after",
                Goes::Position,
                Kind::Path,
                "The trace or snapshot that may have changed; without it, `before` at the moment `to`",
            ),
            option("from", "from", Kind::Text, "The moment of `before`: peak, end, step:3, 12.5s, 10s..20s"),
            option("to", "to", Kind::Text, "The moment of `after`"),
        ],
    },
];

/// Length of an answer's JSON: what is shown unless asked, and the bounds of what may be asked for.
const USUAL_BYTES: u64 = 24 << 10;
const LEAST_BYTES: u64 = 1 << 10;
const MOST_BYTES: u64 = 256 << 10;
/// A word of the command line is not longer, and of a list there are not more.
const LONGEST: usize = 4096;
const MOST_TEXTS: usize = 32;

/// Which part of an answer to show: every tool takes these.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shown {
    /// JSON Pointer (RFC 6901).
    pub(super) pointer: String,
    /// Elements of a list to leave out at its beginning.
    pub(super) skip: usize,
    pub(super) max_bytes: usize,
}

/// What every tool takes: name, type, meaning.
const COMMON: [(&str, &str, &str); 3] = [
    (
        "pointer",
        "string",
        "Show only this part of the answer: a JSON Pointer, as a shortened answer names it",
    ),
    ("skip", "integer", "Leave out this many elements of the list that `pointer` names"),
    ("max_bytes", "integer", "Shorten the answer to this many bytes; 24576 unless given, 262144 at most"),
];

/// A call that was understood.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Call {
    /// The verb and its arguments.
    pub(super) words: Vec<OsString>,
    pub(super) shown: Shown,
}

impl Tool {
    pub(super) fn of(name: &str) -> Option<&'static Tool> {
        TOOLS.iter().find(|tool| tool.name == name)
    }

    /// JSON Schema of its arguments.
    pub(super) fn schema(&self) -> Map<String, Value> {
        let mut properties = Map::new();
        for argument in self.arguments {
            let mut schema = match argument.kind {
                Kind::Path | Kind::Text => json!({"type": "string"}),
                Kind::Texts => json!({"type": "array", "items": {"type": "string"}, "maxItems": MOST_TEXTS}),
                Kind::Count => json!({"type": "integer", "minimum": 0}),
                Kind::OneOf(names) => json!({"type": "string", "enum": names}),
            };
            schema["description"] = argument.description.into();
            properties.insert(argument.name.to_owned(), schema);
        }
        for (name, kind, description) in COMMON {
            let mut schema = json!({"type": kind, "description": description});
            match name {
                "skip" => schema["minimum"] = 0.into(),
                "max_bytes" => {
                    schema["minimum"] = LEAST_BYTES.into();
                    schema["maximum"] = MOST_BYTES.into();
                }
                _ => {}
            }
            properties.insert(name.to_owned(), schema);
        }
        let required: Vec<_> = self.arguments.iter().filter(|it| it.required).map(|it| it.name).collect();
        let schema = json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false});
        match schema {
            Value::Object(schema) => schema,
            _ => Map::new(),
        }
    }

    /// What a client's arguments ask of the verb.
    ///
    /// # Errors
    /// Which argument is wrong, and how.
    pub(super) fn call(&self, given: &Map<String, Value>, allowed: &Allowed) -> Result<Call, String> {
        let is_known = |name: &String| {
            self.arguments.iter().any(|it| it.name == name)
                || COMMON.iter().any(|(common, ..)| common == name)
        };
        if let Some(unknown) = given.keys().find(|name| !is_known(name)) {
            let known: Vec<_> =
                self.arguments.iter().map(|it| it.name).chain(COMMON.map(|(name, ..)| name)).collect();
            return Err(format!(
                "`{}` has no argument `{unknown}`: it takes {}",
                self.name,
                known.join(", ")
            ));
        }
        let (mut options, mut positions) = (vec![], vec![]);
        for argument in self.arguments {
            // Models write null for what they leave out.
            let Some(value) = given.get(argument.name).filter(|value| !value.is_null()) else {
                if argument.required {
                    return Err(format!(
                        "`{}` needs `{}`: {}",
                        self.name, argument.name, argument.description
                    ));
                }
                continue;
            };
            for word in argument.words(value, allowed)? {
                match argument.goes {
                    Goes::Position => positions.push(word),
                    Goes::Option(_) | Goes::Moment => options.push(word),
                }
            }
        }
        let mut words = vec![OsString::from(self.verb), "--json".into()];
        words.append(&mut options);
        words.push("--".into());
        words.append(&mut positions);
        Ok(Call { words, shown: Shown::of(given)? })
    }
}

impl Shown {
    fn of(given: &Map<String, Value>) -> Result<Shown, String> {
        let given = |name: &str| given.get(name).filter(|value| !value.is_null());
        let number = |name: &str, usual: u64, least: u64, most: u64| match given(name).map(Value::as_u64) {
            None => Ok(usual as usize),
            Some(Some(number)) if (least..=most).contains(&number) => Ok(number as usize),
            Some(_) => Err(format!("`{name}` is not a whole number from {least} to {most}")),
        };
        let pointer = match given("pointer") {
            None => String::new(),
            Some(Value::String(text)) if text.is_empty() || text.starts_with('/') => text.clone(),
            Some(_) => {
                return Err("`pointer` is not a JSON Pointer, such as /processes/0/sections".to_owned());
            }
        };
        Ok(Shown {
            pointer,
            skip: number("skip", 0, 0, u64::from(u32::MAX))?,
            max_bytes: number("max_bytes", USUAL_BYTES, LEAST_BYTES, MOST_BYTES)?,
        })
    }
}

impl Argument {
    /// The words that a value becomes.
    fn words(&self, value: &Value, allowed: &Allowed) -> Result<Vec<OsString>, String> {
        let wrong = |what: &str| format!("`{}` is not {what}: {}", self.name, self.description);
        let text = |value: &Value| match value {
            Value::String(text) if is_plain(text) => Ok(text.clone()),
            _ => Err(wrong("a text of letters, digits and ._:,-")),
        };
        match self.kind {
            Kind::Path => {
                let name = value.as_str().filter(|name| name.len() <= LONGEST && !name.contains('\0'));
                let path = allowed.find(name.ok_or_else(|| wrong("the name of a file or a folder"))?)?;
                Ok(vec![path.into_os_string()])
            }
            Kind::Text => Ok(vec![self.word(&text(value)?)]),
            Kind::Texts => {
                let values = value.as_array().filter(|values| values.len() <= MOST_TEXTS);
                let values = values.ok_or_else(|| wrong("a list of at most 32 texts"))?;
                values.iter().map(|value| Ok(self.word(&text(value)?))).collect()
            }
            Kind::Count => {
                let number = value.as_u64().ok_or_else(|| wrong("a whole number"))?;
                Ok(vec![self.word(&number.to_string())])
            }
            Kind::OneOf(names) => {
                let name = value.as_str().filter(|name| names.contains(name));
                Ok(vec![self.word(name.ok_or_else(|| wrong(&format!("one of {}", names.join(", "))))?)])
            }
        }
    }

    fn word(&self, value: &str) -> OsString {
        match self.goes {
            Goes::Position => value.into(),
            Goes::Option(option) => format!("--{option}={value}").into(),
            Goes::Moment => moment(value).into(),
        }
    }
}

/// The options by which verbs name a moment.
const MOMENTS: [&str; 5] = ["peak", "end", "step", "range", "at"];

fn moment(text: &str) -> String {
    let [peak, end, step, range, at] = MOMENTS;
    match text.strip_prefix("step:") {
        Some(number) => format!("--{step}={number}"),
        None if text == peak || text == end => format!("--{text}"),
        None if text.contains("..") => format!("--{range}={text}"),
        None => format!("--{at}={text}"),
    }
}

/// What sizes, times, addresses and settings of allocators are written with.
fn is_plain(text: &str) -> bool {
    let is_usual = |c: char| c.is_ascii_alphanumeric() || "._:,-+[]>/% ".contains(c);
    !text.is_empty() && text.len() <= LONGEST && text.chars().all(is_usual)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn golden() -> Allowed {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
        Allowed::new(&[folder]).expect("a folder")
    }

    fn call(tool: &str, given: Value) -> Result<Call, String> {
        let Value::Object(given) = given else { panic!("an object") };
        Tool::of(tool).expect("a tool").call(&given, &golden())
    }

    /// After the verb, with paths as they were given.
    fn words(tool: &str, given: Value) -> String {
        let root = format!("{}/", golden().folders()[0].display());
        let words = call(tool, given).expect("is right").words;
        let words: Vec<_> = words.iter().map(|word| word.to_string_lossy().replace(&root, "")).collect();
        words.join(" ")
    }

    #[test]
    fn the_verb_of_every_tool_exists_and_has_the_options_that_the_tool_uses() {
        let command = crate::commands::command();
        for tool in TOOLS {
            let Some(verb) = command.find_subcommand(tool.verb) else {
                panic!("the tool {} asks `gputrace {}`, which is not a verb", tool.name, tool.verb)
            };
            let has = |option: &str| verb.get_arguments().any(|it| it.get_long() == Some(option));
            let options = tool.arguments.iter().flat_map(|it| match it.goes {
                Goes::Position => vec![],
                Goes::Option(option) => vec![option],
                Goes::Moment => MOMENTS.to_vec(),
            });
            for option in options.chain(["json"]) {
                assert!(
                    has(option),
                    "the tool {} uses --{option}, which `gputrace {}` lacks",
                    tool.name,
                    tool.verb
                );
            }
            let n_positions = verb.get_positionals().count();
            let positions = tool.arguments.iter().filter(|it| matches!(it.goes, Goes::Position)).count();
            assert!(
                positions <= n_positions,
                "{}: more positions than `gputrace {}` has",
                tool.name,
                tool.verb
            );
            for argument in tool.arguments {
                let Kind::OneOf(names) = argument.kind else { continue };
                let Goes::Option(option) = argument.goes else { continue };
                let known =
                    verb.get_arguments().find(|it| it.get_long() == Some(option)).expect("seen above");
                let known: Vec<_> =
                    known.get_possible_values().iter().map(|it| it.get_name().to_owned()).collect();
                assert_eq!(names, known, "{}: {}", tool.name, argument.name);
            }
            if let Some((_, other)) = tool.leaves_out {
                assert!(Tool::of(other).is_some(), "{} names the tool {other}", tool.name);
            }
        }
    }

    #[test]
    fn the_pages_name_every_tool() {
        let page = include_str!("../../../../../../docs/MCP.md");
        for tool in TOOLS {
            let row = format!("| `{}` | `{}` |", tool.name, tool.verb);
            assert!(page.contains(&row), "docs/MCP.md lacks the row {row}");
        }
        let skill = include_str!("../../../../../../skills/gputrace/SKILL.md");
        let unnamed: Vec<_> =
            TOOLS.iter().map(|it| it.name).filter(|it| !skill.contains(&format!("`{it}`"))).collect();
        assert!(unnamed.is_empty(), "skills/gputrace/SKILL.md does not say when to call {unnamed:?}");
    }

    #[test]
    fn arguments_become_words_of_the_command_line() {
        let path = "caught-oom.gtr";
        assert_eq!(words("verdict", json!({"path": path})), "report --json -- caught-oom.gtr");
        assert_eq!(
            words("oom", json!({"path": path, "limit": "40GiB", "device_memory": null})),
            "oom --json --limit=40GiB -- caught-oom.gtr"
        );
        assert_eq!(
            words("who", json!({"path": path, "address": "0x7f"})),
            "who --json -- 0x7f caught-oom.gtr"
        );
        assert_eq!(
            words(
                "replay",
                json!({"path": path, "policies": ["torch", "torch:roundup_power2_divisions:[64:4,>:1]"]})
            ),
            "replay --json --policy=torch --policy=torch:roundup_power2_divisions:[64:4,>:1] -- caught-oom.gtr"
        );
        for (moment, option) in [
            ("peak", "--peak"),
            ("end", "--end"),
            ("step:3", "--step=3"),
            ("1s..2s", "--range=1s..2s"),
            ("9ms", "--at=9ms"),
        ] {
            let expected = format!("tree --json {option} -- caught-oom.gtr");
            assert_eq!(words("memory_at", json!({"path": path, "moment": moment})), expected);
        }
    }

    #[test]
    fn what_is_wrong_is_named_and_nothing_becomes_an_option() {
        let path = "caught-oom.gtr";
        let wrong = |tool: &str, given: Value, says: &str| {
            let error = call(tool, given).expect_err(says);
            assert!(error.contains(says), "{error}");
        };
        wrong("oom", json!({}), "needs `path`");
        wrong("oom", json!({"path": path, "size": 1}), "no argument `size`");
        wrong("oom", json!({"path": "--help"}), "is not in the folders");
        wrong("oom", json!({"path": ""}), "is not in the folders");
        wrong("oom", json!({"path": "/etc/passwd"}), "is not in the folders");
        wrong("oom", json!({"path": "../../Cargo.toml"}), "is not in the folders");
        wrong("oom", json!({"path": "s3://bucket/x.gtr"}), "is not in the folders");
        wrong("oom", json!({"path": path, "limit": "1\u{1b}[2J"}), "`limit` is not a text");
        wrong("oom", json!({"path": path, "limit": 7}), "`limit` is not a text");
        wrong("leaks", json!({"path": path, "steps": -1}), "`steps` is not a whole number");
        wrong("memory_at", json!({"path": path, "group_by": "x"}), "`group_by` is not one of stack, owner");
        wrong("oom", json!({"path": path, "max_bytes": 1 << 30}), "from 1024 to 262144");
        wrong("oom", json!({"path": path, "pointer": "processes"}), "JSON Pointer");
        // One word with its option, or after `--`.
        assert_eq!(
            words("oom", json!({"path": path, "limit": "--json"})),
            "oom --json --limit=--json -- caught-oom.gtr"
        );
        assert_eq!(
            words("who", json!({"path": path, "address": "--json"})),
            "who --json -- --json caught-oom.gtr"
        );
    }
}
