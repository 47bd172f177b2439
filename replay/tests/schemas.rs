//! What `--json` writes is what `docs/schemas` says, for every verb that has it. Schemas of answers that are structs are written from their types.

use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_replay::answers::{Answers, budget, edits, predict, replay, tree, tune};
use gputrace_replay::ranks::report::Ranks;
use gputrace_replay::report::summary::Summary;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

/// Verbs with what they need beside the trace.
const ASKED: [(&str, &[&str]); 21] = [
    ("report", &[]),
    ("summary", &[]),
    ("stats", &[]),
    ("tree", &[]),
    ("leaks", &[]),
    ("oom", &[]),
    ("diff", &["empty-cache-loop.gtr"]),
    ("replay", &["--policy", "torch", "--policy", "bfc", "--limit", "1GiB", "--device-memory", "2GiB"]),
    ("reproduce", &["-F", "-o", concat!(env!("CARGO_TARGET_TMPDIR"), "/schemas.py")]),
    (
        "whatif",
        &["--optimizer", "momentum", "--policy", "torch", "--policy", "torch:expandable_segments:True"],
    ),
    ("whatif", &["--plan", "--limit", "2GiB"]),
    ("layers", &[]),
    ("who", &["0x7f5c40000200"]),
    ("tune", &["--limit", "300MiB"]),
    ("tune", &["caught-oom.gtr", "varying-lengths.gtr"]),
    ("budget", &["--limit", "2GiB", "--utilization", "0.9", "--between", "10ms,20ms"]),
    ("predict", &["--at", "batch=4", "batch=1:varying-lengths.gtr"]),
    ("ranks", &[]),
    ("doctor", &[]),
    ("top", &["--once"]),
    ("ps", &[]),
];

/// What asks the machine, and takes no trace.
const OF_THE_MACHINE: &str = "ps";

/// Verbs whose answer is a struct, and its schema. Answers with sections (`report`, `stats`, `leaks`, `oom`, `diff`, `doctor`, `layers`, `who`) have
/// the tables that the trace has something for: their schemas are written by hand.
const TYPED: [(&str, Schema); 8] = [
    ("ranks", of::<Ranks>),
    ("summary", of::<Summary>),
    ("tree", of::<tree::Answer>),
    ("replay", of::<Answers<replay::Answer>>),
    ("tune", of::<tune::Answer>),
    ("whatif", of::<Answers<edits::Answer>>),
    ("budget", of::<budget::Answer>),
    ("predict", of::<predict::Answer>),
];

type Schema = fn(&str) -> Value;

/// The schema of a verb's answer, from its type. `schema` itself is a tag, which `schemars` does not know.
fn of<T: JsonSchema>(verb: &str) -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    plain(&mut schema);
    schema["type"] = json!("object");
    schema["title"] = json!(format!("gputrace {verb} --json"));
    schema["properties"]["schema"] = json!({"const": format!("gputrace.{verb}/1")});
    let required = schema["required"].as_array().cloned().unwrap_or_default().into_iter();
    schema["required"] = required.filter(|name| name != "schema").chain([json!("schema")]).collect();
    schema
}

/// In the words that these schemas have: no bounds of Rust's types, ranges as lists of a kind.
fn plain(schema: &mut Value) {
    if let Some(words) = schema.as_object_mut() {
        let is_of_rust = |word: &str, says: &Value| match word {
            "format" => says.is_string(),
            "minimum" | "maximum" => says.is_number() && says != &json!(0),
            "default" => says.is_null(),
            _ => false,
        };
        words.retain(|word, says| !is_of_rust(word, says));
        if let Some(Value::Array(all)) = words.remove("prefixItems") {
            assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
            words.insert("items".into(), all[0].clone());
        }
        if let Some(all) = words.remove("oneOf") {
            words.insert("anyOf".into(), all);
        }
        // Of keys that are numbers.
        if let Some(Value::Object(of_keys)) = words.remove("patternProperties") {
            words
                .insert("additionalProperties".into(), of_keys.into_iter().next().expect("a kind of keys").1);
        }
        words.values_mut().for_each(plain);
    }
    schema.as_array_mut().into_iter().flatten().for_each(plain);
}

#[test]
fn schemas_of_typed_answers_are_those_of_their_types() {
    for (verb, schema) in TYPED {
        let path = folder().join(format!("docs/schemas/{verb}.v1.json"));
        let wanted = format!("{:#}\n", schema(verb));
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            std::fs::write(&path, &wanted).expect("a file of the project");
        }
        let found = std::fs::read_to_string(&path).expect("a schema");
        assert!(found == wanted, "{verb}: UPDATE_EXPECT=1 writes its schema from the type");
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn gputrace(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    let output = command.args(arguments).current_dir(folder().join("tests/golden")).output();
    String::from_utf8(output.expect("gputrace can be run").stdout).expect("text")
}

fn schema(verb: &str) -> Value {
    let path = folder().join(format!("docs/schemas/{verb}.v1.json"));
    let text = std::fs::read_to_string(&path);
    let text =
        text.unwrap_or_else(|error| panic!("{verb} --json has no schema: {}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Where a value is not what a schema says. Only what our schemas use is understood; anything else is an error of theirs.
fn faults(schema: &Value, root: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut found = vec![];
    let fault = |what: String| vec![format!("{at}: {what}")];
    for (keyword, says) in schema.as_object().expect("a schema is an object") {
        found.extend(match keyword.as_str() {
            "$schema" | "$defs" | "title" | "description" => vec![],
            "$ref" => {
                let place = says.as_str().and_then(|it| it.strip_prefix('#')).and_then(|it| root.pointer(it));
                faults(place.expect("a local reference"), root, value, at)
            }
            "type" => {
                let types = says.as_array().cloned().unwrap_or_else(|| vec![says.clone()]);
                let fits = types.iter().any(|name| is_a(value, name.as_str().expect("a name")));
                if fits { vec![] } else { fault(format!("{value} is not of type {says}")) }
            }
            "const" if value != says => fault(format!("{value} is not {says}")),
            "enum" if !says.as_array().expect("a list").contains(value) => {
                fault(format!("{value} is not of {says}"))
            }
            "minimum" if value.as_f64().is_some_and(|it| it < says.as_f64().expect("a number")) => {
                fault(format!("{value} is less than {says}"))
            }
            "const" | "enum" | "minimum" => vec![],
            "minItems" | "maxItems" => {
                let (n, bound) =
                    (value.as_array().map_or(0, Vec::len), says.as_u64().expect("a number") as usize);
                let fits = !value.is_array() || if keyword == "minItems" { n >= bound } else { n <= bound };
                if fits { vec![] } else { fault(format!("{n} items")) }
            }
            "items" => {
                let items = value.as_array().into_iter().flatten().enumerate();
                items.flat_map(|(n, item)| faults(says, root, item, &format!("{at}[{n}]"))).collect()
            }
            "required" => {
                let names = says.as_array().expect("a list").iter().filter_map(Value::as_str);
                let lacks = names.filter(|name| value.is_object() && value.get(name).is_none());
                lacks.map(|name| format!("{at}: lacks {name}")).collect()
            }
            "properties" => {
                let known = says.as_object().expect("an object").iter();
                known
                    .flat_map(|(name, says)| {
                        let inner = value.get(name).map(|it| faults(says, root, it, &format!("{at}.{name}")));
                        inner.unwrap_or_default()
                    })
                    .collect()
            }
            "additionalProperties" => {
                let members = value.as_object().into_iter().flatten();
                let others = members.filter(|(name, _)| schema["properties"].get(name).is_none());
                others.flat_map(|(name, it)| faults(says, root, it, &format!("{at}.{name}"))).collect()
            }
            "anyOf" => {
                let all = says.as_array().expect("a list").iter().map(|says| faults(says, root, value, at));
                all.min_by_key(Vec::len).unwrap_or_default()
            }
            _ => panic!("`{keyword}` is not understood by this test"),
        });
    }
    found
}

fn is_a(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64(),
        _ => panic!("`{name}` is not a type"),
    }
}

#[test]
fn every_verb_writes_what_its_schema_says() {
    for (verb, more) in ASKED {
        let schema = schema(verb);
        assert_eq!(schema["properties"]["schema"], json!({"const": format!("gputrace.{verb}/1")}));
        for trace in ["caught-oom.gtr", "dataparallel.gtr", "varying-lengths.gtr", "version1.gtr"] {
            let named = if verb == "predict" { format!("batch=2:{trace}") } else { trace.to_owned() };
            let named = (verb != OF_THE_MACHINE).then_some(&*named);
            let arguments: Vec<&str> =
                [verb, "--json"].into_iter().chain(more.iter().copied()).chain(named).collect();
            let text = gputrace(&arguments);
            // What cannot be answered of a trace is said on standard error.
            let Ok(answer) = serde_json::from_str(&text) else {
                assert!(text.is_empty(), "{arguments:?} wrote no JSON: {text}");
                continue;
            };
            let wrong = faults(&schema, &schema, &answer, verb);
            assert!(wrong.is_empty(), "{arguments:?}: {wrong:#?}");
        }
        let named: &[&str] = match verb {
            "predict" => &["batch=2:varying-lengths.gtr"],
            OF_THE_MACHINE => &[],
            _ => &["varying-lengths.gtr"],
        };
        let answered = gputrace(&[&[verb, "--json"], more, named].concat());
        assert!(!answered.is_empty(), "{verb} answered nothing");
    }
}

#[test]
fn the_list_that_map_writes_is_as_its_schema_says() {
    let folder = std::env::temp_dir().join(format!("gputrace-schemas.{}", std::process::id()));
    let named = folder.display().to_string();
    gputrace(&["map", "-o", &named, "summary", "--", "varying-lengths.gtr"]);
    let text = std::fs::read_to_string(folder.join("map.json")).expect("a list");
    std::fs::remove_dir_all(&folder).expect("a folder of our own");
    let schema = schema("map");
    let wrong = faults(&schema, &schema, &serde_json::from_str(&text).expect("JSON"), "map.json");
    assert!(wrong.is_empty() && text.contains("varying-lengths"), "{wrong:#?}");
}

#[test]
fn every_verb_with_json_is_asked() {
    let help = gputrace(&["--help"]);
    let listed =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let listed = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let verbs = listed.filter_map(|line| line.split_whitespace().next()).filter(|verb| *verb != "help");
    let with_json: Vec<&str> =
        verbs.filter(|verb| gputrace(&[verb, "--help"]).contains("\n      --json")).collect();
    let asked: std::collections::BTreeSet<&str> = ASKED.iter().map(|(verb, _)| *verb).collect();
    assert!(with_json.len() >= asked.len(), "only {with_json:?} were found");
    for verb in with_json {
        assert!(ASKED.iter().any(|(asked, _)| *asked == verb), "{verb} --json is not held against a schema");
    }
}

#[test]
fn what_is_not_as_the_schema_says_is_found() {
    let schema = schema("summary");
    let fault = |value: Value| faults(&schema, &schema, &value, "it");
    let lacking = fault(json!({"schema": "gputrace.summary/2", "processes": [{"pid": "4"}]}));
    assert!(lacking.iter().any(|it| it.contains("\"gputrace.summary/2\" is not")), "{lacking:?}");
    assert!(lacking.iter().any(|it| it == "it: lacks tree"), "{lacking:?}");
    assert!(
        lacking.iter().any(|it| it.starts_with("it.processes[0].pid: \"4\" is not of type")),
        "{lacking:?}"
    );
}
