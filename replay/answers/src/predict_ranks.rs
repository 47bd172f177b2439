//! `gputrace predict` of a job: each rank is predicted from its own traces, and the one that needs most decides.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::Reply;
use super::predict::{Answer, Fit, Missing, OfJob, OfProcess, Outcome, Sure};
use super::whatif::name;
use gputrace_report::model::{Mood, Part, Section, Shown, Table, Value};
use gputrace_schemas::event::Bytes;
use gputrace_trace::words::rank_names;

/// Ranks that are shown of each answer, those that need most.
const MOST_RANKS: usize = 16;

/// What is predicted of one rank, or why nothing is.
pub struct Predicted {
    /// Its number in the job.
    pub rank: u32,
    /// The prediction.
    pub reply: Result<Reply<OfProcess>, String>,
}

/// Joins what is predicted of each rank. `missing` says which ranks lack a trace of which run.
///
/// # Errors
/// When nothing is predicted of any rank.
pub fn joined(predicted: Vec<Predicted>, missing: &[(String, Vec<u32>)]) -> Result<Reply<Answer>, String> {
    let (mut ranks, mut parts, mut warnings) = (vec![], vec![], vec![]);
    for (run, ranks) in missing {
        warnings.push(format!("{run} has no trace of {}", rank_names(ranks)));
    }
    for Predicted { rank, reply } in predicted {
        match reply {
            Ok(Reply { part, mut answer }) => {
                answer.rank = Some(rank);
                ranks.push(answer);
                parts.push(part);
            }
            Err(why) => warnings.push(format!("no prediction for rank {rank}: {why}")),
        }
    }
    let fits = ranks.iter().flat_map(|it| it.fits.iter().map(|fit| (it.rank, fit)));
    let mut fits = decided(fits, |it| (&it.with, &it.variable, name(&it.policy, &it.options)), least, fit);
    let outcomes = ranks.iter().flat_map(|it| it.outcomes.iter().map(|outcome| (it.rank, outcome)));
    let mut outcomes = decided(outcomes, |it| (&it.values, it.simulated.figures.named()), most, outcome);
    fits.iter_mut().for_each(|it| doubt(&mut it.of_job.certain, &mut it.of_job.reasons, &warnings));
    for Outcome { certain, reasons, sure, .. } in outcomes.iter_mut().map(|it| &mut it.of_job) {
        doubt(certain, reasons, &warnings);
        *sure = if *sure == Sure::Certain && !*certain { Sure::Range } else { *sure };
    }
    let rank = outcomes.first().map(|it| it.of_job.rank).or(fits.first().map(|it| it.of_job.rank)).flatten();
    let worst = ranks.iter().position(|it| rank.is_some() && it.rank == rank);
    let (Some(rank), Some(worst)) = (rank, worst) else {
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
    let (outcomes, fits) = (outcomes.into_iter().map(|it| it.of_job), fits.into_iter().map(|it| it.of_job));
    let (outcomes, fits) = (outcomes.collect(), fits.collect());
    let mut process = ranks[worst].clone();
    (process.outcomes, process.fits) = (outcomes, fits);
    let missing = missing.iter().cloned().map(|(run, ranks)| Missing { run, ranks });
    let job = OfJob { ranks, missing_ranks: missing.collect() };
    let part = parts.swap_remove(worst);
    sections.extend(part.sections);
    let title = format!("rank {rank}, which needs most: {}", part.title);
    let part = Part { title, sections, rank: Some(rank), ..part };
    Ok(Reply { part, answer: Answer { process, job: Some(job) } })
}

/// An answer of one rank.
type Row<'a, T> = (Option<u32>, &'a T);

/// What every rank says to one question, that which decides first, and what it makes of the job.
struct Decided<'a, T> {
    rows: Vec<Row<'a, T>>,
    of_job: T,
}

/// The answers of all ranks to each question, in the order in which questions were asked.
fn decided<'a, T: Clone, Q: PartialEq, N: Ord>(
    rows: impl Iterator<Item = Row<'a, T>>,
    question: impl Fn(&'a T) -> Q,
    need: impl Fn(&T) -> N,
    of_job: impl Fn(&[Row<T>], Option<u32>, T) -> T,
) -> Vec<Decided<'a, T>> {
    let mut asked: Vec<(Q, Vec<Row<T>>)> = vec![];
    for row in rows {
        let question = question(row.1);
        match asked.iter_mut().find(|(known, _)| *known == question) {
            Some((_, rows)) => rows.push(row),
            None => asked.push((question, vec![row])),
        }
    }
    let one = |(_, mut rows): (Q, Vec<Row<'a, T>>)| {
        rows.sort_by_key(|(rank, row)| (Reverse(need(row)), *rank));
        let (rank, first) = rows[0];
        Decided { of_job: of_job(&rows, rank, first.clone()), rows }
    };
    asked.into_iter().map(one).collect()
}

/// How much a rank needs.
fn most(row: &Outcome) -> (u64, u64) {
    let figures = &row.simulated.figures;
    (figures.peak_reserved_bytes, figures.peak_reserved_range.1)
}

/// How little fits on a rank.
fn least(row: &Fit) -> Reverse<(u64, u64)> {
    Reverse((row.largest.unwrap_or(0), row.largest_range.0.unwrap_or(0)))
}

/// No rank of the job needs more.
fn outcome(rows: &[Row<Outcome>], rank: Option<u32>, mut of_job: Outcome) -> Outcome {
    of_job.rank = rank;
    for (_, row) in rows {
        let (of_job, of_row) = (&mut of_job.simulated.figures, &row.simulated.figures);
        of_job.peak_reserved_range = higher(of_job.peak_reserved_range, of_row.peak_reserved_range);
        of_job.fits &= of_row.fits;
    }
    for (_, row) in rows {
        of_job.peak_allocated_range = higher(of_job.peak_allocated_range, row.peak_allocated_range);
        of_job.needed.range = higher(of_job.needed.range, row.needed.range);
        of_job.fits_at_best &= row.fits_at_best;
        of_job.fits_at_worst &= row.fits_at_worst;
    }
    if of_job.certain && !rows.iter().all(|(_, row)| row.certain) {
        (of_job.certain, of_job.sure) = (false, Sure::Range);
    }
    of_job
}

fn higher(one: (u64, u64), other: (u64, u64)) -> (u64, u64) {
    (one.0.max(other.0), one.1.max(other.1))
}

/// It fits on every rank of the job.
fn fit(rows: &[Row<Fit>], rank: Option<u32>, mut of_job: Fit) -> Fit {
    let ranges = || rows.iter().map(|(_, row)| row.largest_range);
    let range = (ranges().map(|it| it.0).min().flatten(), ranges().map(|it| it.1).min().flatten());
    let is_certain = |(_, row): &Row<Fit>| row.certain || row.largest_range.0 > range.1;
    of_job.certain = range.0 == range.1 && rows.iter().all(is_certain);
    (of_job.rank, of_job.largest_range) = (rank, range);
    of_job
}

/// Another rank may need more: nothing is known of it.
fn doubt(certain: &mut bool, reasons: &mut Vec<String>, warnings: &[String]) {
    reasons.extend_from_slice(warnings);
    *certain &= warnings.is_empty();
}

fn outcomes_section(questions: &[Decided<Outcome>]) -> Section {
    let rows: Vec<&Row<Outcome>> = questions.iter().flat_map(|it| it.rows.iter().take(MOST_RANKS)).collect();
    let bytes = |bytes: u64| Value::Bytes(Bytes(bytes));
    let columns: &[Shown<'_, &Row<Outcome>>] = &[
        ("rank", "rank", &|row| Value::Count(row.0.unwrap_or(0).into())),
        ("at", "at", &|row| Value::text(values(&row.1.values))),
        ("peak_reserved_bytes", "reserved", &|row| bytes(most(row.1).0)),
        ("least_reserved_bytes", "at least", &|row| bytes(row.1.simulated.figures.peak_reserved_range.0)),
        ("most_reserved_bytes", "at most", &|row| bytes(most(row.1).1)),
        ("sure", "sure", &|row| Value::text(<&str>::from(row.1.sure))),
        ("policy", "policy", &|row| Value::text(row.1.simulated.figures.named())),
    ];
    let lines = questions.iter().map(|Decided { rows, of_job }| {
        let text = format!(
            "{}, {}: rank {} needs most, {} of {} ranks {}",
            values(&of_job.values),
            of_job.simulated.figures.named(),
            of_job.rank.unwrap_or(0),
            rows.iter().filter(|(_, row)| row.simulated.figures.fits).count(),
            rows.len(),
            if rows.len() == 1 { "fits" } else { "fit" },
        );
        (if of_job.simulated.figures.fits { Mood::Note } else { Mood::Bad }, text)
    });
    let section = Section::new("ranks", "Predicted memory of each rank, largest first");
    section.table(Table::of("ranks", &rows, columns)).lines(lines.collect::<Vec<_>>())
}

fn fits_section(questions: &[Decided<Fit>]) -> Section {
    let number = |value: Option<u64>| Value::text(value.map_or("none".into(), |value| value.to_string()));
    let table = Table::of(
        "job_fits",
        questions.iter().map(|it| &it.of_job),
        &[
            ("largest", "largest", &|it| number(it.largest)),
            ("at_least", "at least", &|it| number(it.largest_range.0)),
            ("at_most", "at most", &|it| number(it.largest_range.1)),
            ("rank", "decided by rank", &|it| number(it.rank.map(u64::from))),
            ("others", "with", &|it| Value::text(values(&it.with))),
            ("policy", "policy", &|it| Value::text(name(&it.policy, &it.options))),
        ],
    );
    let variable = questions.first().map_or("", |it| &it.of_job.variable);
    Section::new("job_fit", format!("The largest {variable} that fits on every rank")).table(table)
}

fn values(values: &BTreeMap<String, u64>) -> String {
    let pairs = values.iter().map(|(name, value)| format!("{name}={value}"));
    pairs.collect::<Vec<_>>().join(",")
}
