//! `gputrace predict` of a job: each rank is predicted from its own traces, and the one that needs most decides.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::Reply;
use gputrace_report::model::{Mood, Part, Section, Shown, Table, Value};
use gputrace_trace::words::rank_names;

/// Ranks that are shown of each answer, those that need most.
const MOST_RANKS: usize = 16;

/// What is predicted of one rank, or why nothing is.
pub struct Predicted {
    /// Its number in the job.
    pub rank: u32,
    /// The prediction.
    pub reply: Result<Reply, String>,
}

/// Joins what is predicted of each rank. `missing` says which ranks lack a trace of which run.
///
/// # Errors
/// When nothing is predicted of any rank.
pub fn joined(predicted: Vec<Predicted>, missing: &[(String, Vec<u32>)]) -> Result<Reply, String> {
    let (mut ranks, mut warnings) = (vec![], vec![]);
    for (run, ranks) in missing {
        warnings.push(format!("{run} has no trace of {}", rank_names(ranks)));
    }
    for Predicted { rank, reply } in predicted {
        match reply {
            Ok(reply) => ranks.push((rank, reply)),
            Err(why) => warnings.push(format!("no prediction for rank {rank}: {why}")),
        }
    }
    let mut fits = decided(rows(&ranks, "fits"), least, fit);
    let mut outcomes = decided(rows(&ranks, "outcomes"), most, outcome);
    outcomes.iter_mut().chain(&mut fits).for_each(|it| doubt(&mut it.json, &warnings));
    let worst = outcomes.first().or(fits.first()).and_then(|it| it.json["rank"].as_u64());
    let Some(worst) = worst.and_then(|worst| ranks.iter().position(|(rank, _)| u64::from(*rank) == worst))
    else {
        return Err(match warnings.is_empty() {
            true => "no rank has traces of all runs".into(),
            false => warnings.join("; "),
        });
    };
    let mut sections = vec![];
    sections.extend((!fits.is_empty()).then(|| fits_section(&fits)));
    sections.extend((!outcomes.is_empty()).then(|| outcomes_section(&outcomes)));
    if let Some(first) = sections.first_mut() {
        first.items.extend(Section::new("", "").warn(warnings).items);
    }
    let of_rank = |(rank, reply): &(u32, Reply)| {
        let mut json = reply.json.clone();
        json.as_object_mut().into_iter().for_each(|it| drop(it.remove("schema")));
        json["rank"] = (*rank).into();
        json
    };
    let missing = missing.iter().map(|(run, ranks)| json!({"run": run, "ranks": ranks}));
    let mut all = json!({
        "ranks": ranks.iter().map(of_rank).collect::<Vec<_>>(),
        "missing_ranks": missing.collect::<Vec<_>>(),
    });
    all["outcomes"] = outcomes.into_iter().map(|it| it.json).collect();
    all["fits"] = fits.into_iter().map(|it| it.json).collect();
    let (rank, Reply { part, mut json }) = ranks.swap_remove(worst);
    json["rank"] = rank.into();
    for key in ["outcomes", "fits", "ranks", "missing_ranks"] {
        json[key] = all[key].take();
    }
    sections.extend(part.sections);
    let title = format!("rank {rank}, which needs most: {}", part.title);
    Ok(Reply { part: Part { title, sections, rank: Some(rank), ..part }, json })
}

/// An answer of one rank: the rank, and the JSON.
type Row<'a> = (u32, &'a Json);

/// What every rank says to one question, that which decides first, and what it makes of the job.
struct Decided<'a> {
    rows: Vec<Row<'a>>,
    json: Json,
}

/// The answers of all ranks to each question, in the order in which questions were asked.
fn rows<'a>(ranks: &'a [(u32, Reply)], kind: &str) -> Vec<Vec<Row<'a>>> {
    let mut order: BTreeMap<String, usize> = BTreeMap::new();
    let mut found: Vec<Vec<Row<'a>>> = vec![];
    for (rank, reply) in ranks {
        for row in reply.json[kind].as_array().into_iter().flatten() {
            let question =
                ["values", "with", "variable", "policy", "options"].map(|key| row[key].to_string()).join(" ");
            let index = *order.entry(question).or_insert(found.len());
            if index == found.len() {
                found.push(vec![]);
            }
            found[index].push((*rank, row));
        }
    }
    found
}

fn decided<'a>(
    questions: Vec<Vec<Row<'a>>>,
    need: impl Fn(&Json) -> (u64, u64),
    of_job: impl Fn(&[Row]) -> Json,
) -> Vec<Decided<'a>> {
    let one = |mut rows: Vec<Row<'a>>| {
        rows.sort_by_key(|(rank, row)| (std::cmp::Reverse(need(row)), *rank));
        let mut json = of_job(&rows);
        json["rank"] = rows.first().map(|(rank, _)| *rank).into();
        Decided { rows, json }
    };
    questions.into_iter().map(one).collect()
}

/// How much a rank needs.
fn most(row: &Json) -> (u64, u64) {
    (row["peak_reserved_bytes"].as_u64().unwrap_or(0), end(row, "peak_reserved_range", 1).unwrap_or(0))
}

/// How little fits on a rank.
fn least(row: &Json) -> (u64, u64) {
    let little = |value: Option<u64>| u64::MAX - value.unwrap_or(0);
    (little(row["largest"].as_u64()), little(end(row, "largest_range", 0)))
}

fn end(row: &Json, range: &str, index: usize) -> Option<u64> {
    row[range][index].as_u64()
}

/// No rank of the job needs more.
fn outcome(rows: &[Row]) -> Json {
    let mut json = rows.first().map(|(_, row)| (*row).clone()).unwrap_or_default();
    for range in ["peak_reserved_range", "peak_allocated_range", "needed_reserved_range"] {
        let most = |index: usize| rows.iter().filter_map(|(_, row)| end(row, range, index)).max();
        json[range] = json!([most(0), most(1)]);
    }
    let is = |key: &str| rows.iter().all(|(_, row)| row[key] == true);
    for key in ["fits", "fits_at_best", "fits_at_worst"] {
        json[key] = is(key).into();
    }
    if json["certain"] == true && !is("certain") {
        (json["certain"], json["sure"]) = (false.into(), "range".into());
    }
    json
}

/// It fits on every rank of the job.
fn fit(rows: &[Row]) -> Json {
    let mut json = rows.first().map(|(_, row)| (*row).clone()).unwrap_or_default();
    let least = |index: usize| rows.iter().map(|(_, row)| end(row, "largest_range", index)).min().flatten();
    let range = (least(0), least(1));
    json["largest_range"] = json!([range.0, range.1]);
    let is_above = |row: &Json| end(row, "largest_range", 0) > range.1;
    let is_certain = |(_, row): &Row| row["certain"] == true || is_above(row);
    json["certain"] = (range.0 == range.1 && rows.iter().all(is_certain)).into();
    json
}

/// Another rank may need more: nothing is known of it.
fn doubt(json: &mut Json, warnings: &[String]) {
    if warnings.is_empty() {
        return;
    }
    let reasons = json["reasons"].as_array().into_iter().flatten().cloned();
    json["reasons"] = reasons.chain(warnings.iter().map(|it| it.as_str().into())).collect();
    json["certain"] = false.into();
    if json["sure"] == "certain" {
        json["sure"] = "range".into();
    }
}

fn outcomes_section(questions: &[Decided]) -> Section {
    let rows: Vec<&Row> = questions.iter().flat_map(|it| it.rows.iter().take(MOST_RANKS)).collect();
    let bytes = |bytes: Option<u64>| Value::bytes(bytes);
    let range = |row: &Row, index: usize| bytes(end(row.1, "peak_reserved_range", index));
    let columns: &[Shown<'_, &Row>] = &[
        ("rank", "rank", &|row| Value::Count(row.0.into())),
        ("at", "at", &|row| Value::text(values(&row.1["values"]))),
        ("peak_reserved_bytes", "reserved", &|row| bytes(row.1["peak_reserved_bytes"].as_u64())),
        ("least_reserved_bytes", "at least", &|row| range(row, 0)),
        ("most_reserved_bytes", "at most", &|row| range(row, 1)),
        ("sure", "sure", &|row| Value::text(row.1["sure"].as_str().unwrap_or_default())),
        ("policy", "policy", &|row| Value::text(policy(row.1))),
    ];
    let lines = questions.iter().map(|it| {
        let text = format!(
            "{}, {}: rank {} needs most, {} of {} ranks {}",
            values(&it.json["values"]),
            policy(&it.json),
            it.json["rank"],
            it.rows.iter().filter(|(_, row)| row["fits"] == true).count(),
            it.rows.len(),
            if it.rows.len() == 1 { "fits" } else { "fit" },
        );
        (if it.json["fits"] == true { Mood::Note } else { Mood::Bad }, text)
    });
    let section = Section::new("ranks", "Predicted memory of each rank, largest first");
    section.table(Table::of("ranks", &rows, columns)).lines(lines.collect::<Vec<_>>())
}

fn fits_section(questions: &[Decided]) -> Section {
    let range = |it: &Decided, index: usize| Value::text(number(&it.json["largest_range"][index]));
    let table = Table::of(
        "job_fits",
        questions,
        &[
            ("largest", "largest", &|it| Value::text(number(&it.json["largest"]))),
            ("at_least", "at least", &|it| range(it, 0)),
            ("at_most", "at most", &|it| range(it, 1)),
            ("rank", "decided by rank", &|it| Value::text(it.json["rank"].to_string())),
            ("others", "with", &|it| Value::text(values(&it.json["with"]))),
            ("policy", "policy", &|it| Value::text(policy(&it.json))),
        ],
    );
    let variable = questions.first().and_then(|it| it.json["variable"].as_str()).unwrap_or_default();
    Section::new("job_fit", format!("The largest {variable} that fits on every rank")).table(table)
}

fn number(value: &Json) -> String {
    value.as_u64().map_or("none".into(), |value| value.to_string())
}

fn values(values: &Json) -> String {
    let pairs = values.as_object().into_iter().flatten().map(|(name, value)| format!("{name}={value}"));
    pairs.collect::<Vec<_>>().join(",")
}

fn policy(row: &Json) -> String {
    let word = |key: &str| row[key].as_str().unwrap_or_default();
    match word("options") {
        "" => word("policy").into(),
        options => format!("{}:{options}", word("policy")),
    }
}
