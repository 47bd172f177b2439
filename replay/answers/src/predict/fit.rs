//! The largest value of a variable that fits, for each setting of the allocator.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use gputrace_schemas::event::Bytes;
use gputrace_sim::bytes::iec;
use gputrace_sim::cores::on_all_cores;
use gputrace_sim::effort;
use gputrace_sim::policies::OptionError;
use gputrace_sim::predict::{Model, Prediction};
use gputrace_sim::tune;
use gputrace_sim::whatif::Question;
use serde::Serialize;

use super::super::checked::Checked;
use super::super::largest::{Around, End, Largest, ends, is_decided, largest};
use super::super::whatif::named;
use super::{Asked, Oracle, Setting};
use gputrace_report::model::{Mood, Section, Table, Value};

/// Bytes of predictions that `--fit` keeps, to ask them of the next setting.
const MOST_KEPT: usize = 512 << 20;
/// What is larger than the run that is extrapolated by more than this is not certain (chosen, not measured): libraries and programs may
/// do something else at a size that no run came near.
const FAR: u64 = 16;

/// The largest value of a variable that fits under a setting.
#[derive(Clone, Default, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Fit {
    /// Of a job: the rank on which least fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in super::super) rank: Option<u32>,
    device: u32,
    pub(in super::super) variable: String,
    /// The other variables.
    pub(in super::super) with: BTreeMap<String, u64>,
    pub(in super::super) policy: String,
    pub(in super::super) options: String,
    limit_bytes: Option<u64>,
    device_memory_bytes: Option<u64>,
    /// As was run if `checked` is true, else as predicted; null if not even 1 fits.
    pub largest: Option<u64>,
    /// Up to the first it fits for all that is known, above the second it does not.
    pub(in super::super) largest_range: (Option<u64>, Option<u64>),
    /// Larger values fit, too: the search ended.
    is_lower_bound: bool,
    /// Values that do not fit below the largest, or fit above it.
    out_of_order: Vec<u64>,
    pub(in super::super) certain: bool,
    /// The largest value was run, and the next, which did not fit.
    checked: bool,
    /// With a command: the values that were run or recorded, ascending; null for settings that were not run.
    ran: Option<Vec<Ran>>,
    pub(in super::super) reasons: Vec<String>,
}

/// A value that was run or recorded.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Ran {
    value: u64,
    fits: bool,
}

impl Fit {
    /// Whether a value fits, as predicted.
    #[must_use]
    pub fn covers(&self, value: u64) -> bool {
        self.largest.is_some_and(|largest| (value <= largest) != self.out_of_order.contains(&value))
    }
}

/// What was found under a setting.
struct Row {
    at: Vec<u64>,
    question: Question,
    found: Largest,
    is_sure: bool,
    checked: Option<Checked>,
}

impl Row {
    /// The same, as running showed it.
    fn proved_by(self, checked: &Checked) -> Row {
        let (best, is_sure) = (checked.largest(), checked.is_exact());
        let at_most = if is_sure { best } else { self.found.at_most.max(best) };
        let found = match self.found.best == best {
            true => self.found,
            false => Largest { holes: vec![], further: vec![], ..self.found },
        };
        let found = Largest { best, at_least: best, at_most, has_no_end: false, ..found };
        Row { found, is_sure, checked: Some(checked.clone()), ..self }
    }
}

/// What is predicted at values of one variable, for all settings.
struct Kept<'a> {
    model: &'a Model<'a>,
    at: &'a [u64],
    index: usize,
    of_value: Mutex<HashMap<u64, Arc<Prediction<'a>>>>,
}

impl<'a> Kept<'a> {
    fn predict(&self, value: u64) -> Result<Arc<Prediction<'a>>, String> {
        if let Some(known) = self.of_value.lock().ok().and_then(|kept| kept.get(&value).cloned()) {
            return Ok(known);
        }
        let mut point = self.at.to_vec();
        point[self.index] = value;
        let prediction = Arc::new(self.model.predict(&point).map_err(|why| why.to_string())?);
        if let Ok(mut kept) = self.of_value.lock() {
            if (kept.len() + 1) * prediction.bytes() > MOST_KEPT {
                kept.clear();
            }
            kept.insert(value, prediction.clone());
        }
        Ok(prediction)
    }
}

/// Whether it fits at an end of what is not known.
fn fits_at(prediction: &Prediction, question: &Question, end: End) -> Result<bool, OptionError> {
    match end {
        End::AtLeast => prediction.fits_at_worst(question),
        End::AtMost => prediction.fits_at_best(question),
    }
}

/// The memory that a value has to fit into, in parentheses.
fn room(question: &Question) -> String {
    match (question.limit, question.device_memory) {
        (Some(limit), Some(device)) if limit < device => {
            format!(" (limit {}, device memory {})", iec(limit), iec(device))
        }
        (_, Some(device)) => format!(" (device memory {})", iec(device)),
        (Some(limit), None) => format!(" (limit {})", iec(limit)),
        (None, None) => String::new(),
    }
}

/// The largest value of all settings, if it is larger than under the recorded one, which is the first; and the settings that allow it.
fn largest_of(rows: &[Row]) -> Option<(u64, Vec<&Question>)> {
    let most = rows.iter().filter_map(|row| row.found.best).max()?;
    let is_more = rows.first()?.found.best.is_none_or(|best| best < most);
    let allow = rows.iter().filter(|row| row.found.best == Some(most)).map(|row| &row.question);
    is_more.then(|| (most, allow.collect()))
}

impl Oracle<'_> {
    /// The largest value of a variable that fits, for each setting.
    pub(super) fn fit(
        &self,
        variable: &str,
        targets: &[Vec<u64>],
        settings: &[Setting],
        asked: &Asked,
    ) -> Result<(Section, Vec<Fit>), String> {
        let known = || format!("no run has a value of `{variable}`; known values: {}", self.names.join(", "));
        let index = self.names.iter().position(|name| name == variable).ok_or_else(known)?;
        let machine = asked.machine;
        let is_bounded = machine.limit.is_some()
            || machine.device_memory.or(self.bench.stream.settings.device_memory.map(Bytes)).is_some();
        if !is_bounded {
            return Err(
                "--fit needs --limit or --device-memory: the traces do not show how much memory the card has"
                    .into(),
            );
        }
        let are_advised = asked.policies.is_empty() && !asked.is_as_recorded;
        let settings = match are_advised && self.bench.stream.settings.is_torch() {
            false => settings.to_vec(),
            true => {
                let version = self.bench.self_check.torch_version;
                let advised = tune::advised(version, &settings[0].1).map_err(|error| error.to_string())?;
                advised.into_iter().map(|options| (settings[0].0.clone(), options)).collect()
            }
        };
        let mut rows = vec![];
        for at in targets {
            let kept = Kept { model: self.model, at, index, of_value: Mutex::default() };
            let found = on_all_cores(settings.len(), |it| Some(self.row(&kept, &settings[it])));
            rows.extend(found.into_iter().collect::<Result<Vec<Row>, String>>()?);
        }
        if let Some(checked) = &asked.checked
            && !rows.is_empty()
        {
            let recorded = rows.remove(0).proved_by(checked);
            rows.insert(0, recorded);
        }
        let section = self.fit_section(index, &rows);
        Ok((section, rows.into_iter().map(|row| self.fitting(index, row)).collect()))
    }

    fn row(&self, kept: &Kept, (policy, options): &Setting) -> Result<Row, String> {
        let question = self.bench.question(policy, options);
        let may_choose = Cell::new(false);
        let ask = |value: u64, ask: &dyn Fn(&Prediction) -> Result<bool, OptionError>| {
            let prediction = kept.predict(value)?;
            may_choose.set(may_choose.get() || prediction.known.may_choose);
            ask(&prediction).map_err(|error| format!("{}: {error}", named(&question)))
        };
        let start = kept.at[kept.index];
        let likely = |value: u64| ask(value, &|prediction| prediction.fits_likely(&question));
        let takes_long = !effort::NEIGHBOURS.covers(self.bench.stream.ops.len());
        let around = |value: u64| {
            Ok(match kept.predict(value)?.known.is_lawful() {
                _ if takes_long => Around::Nowhere,
                true => Around::Above,
                false => Around::BothSides,
            })
        };
        let mut found = largest(start, around, likely)?;
        let is_open = !found.is_sure() || may_choose.get() || !self.doubts.reasons.is_empty();
        let is_at = |value, end| ask(value, &|prediction| fits_at(prediction, &question, end));
        if is_open || !is_decided(&found, is_at)? {
            found = ends(found, |value, end| {
                ask(value, &|prediction| self.fits_surely(prediction, &question, end))
            })?;
        }
        let is_lawful = match found.best {
            Some(best) => kept.predict(best)?.known.is_lawful(),
            None => true,
        };
        let is_sure = found.is_sure() && is_lawful && self.doubts.reasons.is_empty();
        Ok(Row { at: kept.at.to_vec(), question, is_sure, found, checked: None })
    }

    /// Whether it fits where as much less may be reserved as what is reserved may lie above the replays, or where as much more.
    fn fits_surely(
        &self,
        prediction: &Prediction,
        question: &Question,
        end: End,
    ) -> Result<bool, OptionError> {
        let factor = prediction.known.beyond() * self.doubts.factor;
        let by = if end == End::AtLeast { 1.0 / factor } else { factor };
        let scaled = |bytes: Option<u64>| bytes.map(|bytes| (bytes as f64 * by) as u64);
        let (limit, device_memory) = (scaled(question.limit), scaled(question.device_memory));
        fits_at(prediction, &Question { limit, device_memory, ..question.clone() }, end)
    }

    fn fit_section(&self, index: usize, rows: &[Row]) -> Section {
        let variable = &self.names[index];
        let others = |at: &[u64]| {
            let others = self.names.iter().zip(at).enumerate().filter(|(it, _)| *it != index);
            others.map(|(_, (name, value))| format!("{name}={value}")).collect::<Vec<_>>().join(",")
        };
        let mut table = Table::of(
            "fits",
            rows,
            &[
                ("largest", "largest", &|row| Value::text(row.found.words())),
                ("sure", "sure", &|row| Value::text(self.sure_of_row(index, row))),
                ("others", "with", &|row| Value::text(others(&row.at))),
                ("policy", "policy", &|row| Value::text(named(&row.question))),
            ],
        );
        if self.names.len() == 1 {
            table.columns.remove(2);
            table.rows.iter_mut().for_each(|row| drop(row.remove(2)));
        }
        let device = self.bench.stream.device;
        let room = rows.first().map_or_else(String::new, |row| room(&row.question));
        let title = format!("The largest {variable} that fits on cuda:{device}{room}");
        let line = largest_of(rows).map(|(value, questions)| {
            let first = questions.first().map_or_else(String::new, |question| named(question));
            let line = match questions.len() - 1 {
                0 => format!("{first} allows the largest value: {variable}={value}"),
                1 => format!("{first} and one other allow the largest value: {variable}={value}"),
                others => format!("{first} and {others} others allow the largest value: {variable}={value}"),
            };
            (Mood::Good, line)
        });
        let holes = rows.iter().filter_map(|Row { question, found, .. }| {
            Some((Mood::Warning, format!("{}: {}", named(question), found.disorder()?)))
        });
        let base = self.model.base().at[index];
        // Of the first setting, which is the recorded one: a run there fits for all that is known.
        let near = rows.first().filter(|row| row.found.at_least < row.found.at_most);
        let near =
            near.and_then(|row| row.found.at_least).filter(|near| *near > base && !self.doubts.is_guess);
        let near = near.map(|near| {
            (Mood::Note, format!("one more run near the largest value would narrow this; {variable}={near} fits in every case"))
        });
        let far = rows.iter().any(|row| row.checked.is_none() && self.is_far(index, row)).then(|| {
            let between = base.saturating_mul(FAR / 2);
            let text = format!(
                "the largest value is more than {FAR} times the recorded {variable}={base}: run {variable}={between} before you trust it"
            );
            (Mood::Note, text)
        });
        let ran = rows.iter().filter_map(|row| row.checked.as_ref());
        let ran = ran.map(|checked| {
            let mood = if checked.is_exact() { Mood::Good } else { Mood::Warning };
            (mood, checked.words(variable))
        });
        Section::new("fit", title)
            .table(table)
            .lines(ran)
            .lines(line)
            .lines(far)
            .lines(holes)
            .lines(near)
            .warn(self.doubts.reasons.iter().cloned())
    }

    /// Whether its largest value is far from the run that is extrapolated.
    fn is_far(&self, index: usize, row: &Row) -> bool {
        let base = self.model.base().at[index];
        row.found.best.is_some_and(|best| best > base.saturating_mul(FAR))
    }

    fn sure_of_row(&self, index: usize, row: &Row) -> &'static str {
        match (self.doubts.is_guess, row.is_sure) {
            (_, true) if row.checked.is_some() => "checked",
            (true, _) => "guess",
            (false, true) if self.is_far(index, row) => "likely",
            (false, true) => "certain",
            (false, false) => "range",
        }
    }

    fn fitting(&self, index: usize, row: Row) -> Fit {
        let certain = row.is_sure && (row.checked.is_some() || !self.is_far(index, &row));
        let Row { at, question, found, checked, .. } = row;
        let ran = checked.as_ref().map(|it| it.values().map(|(value, fits)| Ran { value, fits }).collect());
        let others = self.names.iter().cloned().zip(at).enumerate().filter(|(it, _)| *it != index);
        Fit {
            rank: None,
            device: self.bench.stream.device,
            variable: self.names[index].clone(),
            with: others.map(|(_, other)| other).collect(),
            policy: question.policy,
            options: question.options,
            limit_bytes: question.limit,
            device_memory_bytes: question.device_memory,
            largest: found.best,
            largest_range: (found.at_least, found.at_most),
            is_lower_bound: found.has_no_end,
            out_of_order: found.out_of_order().collect(),
            certain,
            checked: checked.as_ref().is_some_and(Checked::is_exact),
            ran,
            reasons: self.doubts.reasons.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_fits_up_to_the_largest_and_where_it_is_out_of_order() {
        let found = Fit { largest: Some(40), out_of_order: vec![38, 42], ..Fit::default() };
        let covered = [37, 38, 40, 41, 42].map(|value| found.covers(value));
        assert_eq!(covered, [true, false, true, false, true]);
        assert!(!Fit::default().covers(1));
    }
}
