//! `gputrace leaks`: what was never given back, and what keeps growing.

use std::cmp::Reverse;

use gputrace_schemas::event::{Bytes, HOST};

use crate::analyse::growth::{Growing, Growth, Place};
use crate::ledger::{Books, StepSource};
use crate::report::model::{Mood, Section, Table, Value};
use crate::report::words;
use crate::rules::{self, is_like};
use crate::story::Story;
use crate::trace::owners::TORCH;

/// What counts, apart from what the suppressions take out.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Less than this is left out.
    pub least: Bytes,
    /// Steps that the program made, where the user knows.
    pub n_steps: Option<u64>,
    /// Rows of a table to show.
    pub n_rows: usize,
}

/// The leaks of one process.
#[derive(Clone, Debug)]
pub struct Leaks {
    /// Grew to the end, most first.
    pub growing: Vec<GrowingSite>,
    /// Never given back, most first.
    pub not_freed: Vec<Unfreed>,
    /// What suppressions took out: rows and bytes.
    pub suppressed: (u64, Bytes),
    /// Bytes that PyTorch's cache held at the end without anybody using them.
    pub cached: Bytes,
    /// How they were counted, where --steps did not say how many there were.
    counted: Option<StepSource>,
    n_steps: Option<u64>,
    can_tell: bool,
    n_rows: usize,
}

/// A call site, by its names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named {
    /// `cuda:0` or `host`.
    pub device: String,
    /// Whose.
    pub owner: String,
    /// Where.
    pub site: String,
}

/// A call site that keeps growing.
#[derive(Clone, PartialEq, Debug)]
pub struct GrowingSite {
    /// Which.
    pub named: Named,
    /// Bytes by which it grew after the warm-up.
    pub growth: Bytes,
    /// Bytes for each step, where the number of steps is known.
    pub per_step: Option<Bytes>,
    /// 0 to 1; see [`crate::analyse::growth`].
    pub confidence: f64,
}

/// A call site whose memory was never given back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unfreed {
    /// Which.
    pub named: Named,
    /// How much.
    pub bytes: Bytes,
    /// How many objects.
    pub objects: u64,
}

impl Leaks {
    /// Finds the leaks in a story that `growth` has watched.
    #[must_use]
    pub fn find(story: &Story, growth: &Growth, wanted: &Wanted, suppressions: &mut Suppressions) -> Leaks {
        let training = story.ledger.training.as_ref();
        let n_steps = wanted.n_steps.or(training.map(|training| training.n_steps));
        let mut leaks = Leaks {
            growing: vec![],
            not_freed: vec![],
            suppressed: (0, Bytes(0)),
            cached: cached(story),
            counted: training.filter(|_| wanted.n_steps.is_none()).map(|training| training.source.clone()),
            n_steps,
            can_tell: growth.can_tell(),
            n_rows: wanted.n_rows,
        };
        for growing in growth.growing() {
            let bytes = Bytes(growing.trend.growth);
            if let Some(named) = leaks.kept(story, growing.place, bytes, wanted, suppressions) {
                let per_step = n_steps.filter(|n| *n > 0).map(|n| per_step(&growing, n));
                let confidence = growing.trend.confidence;
                leaks.growing.push(GrowingSite { named, growth: bytes, per_step, confidence });
            }
        }
        for (place, bytes, objects) in unfreed(story) {
            if let Some(named) = leaks.kept(story, place, bytes, wanted, suppressions) {
                leaks.not_freed.push(Unfreed { named, bytes, objects });
            }
        }
        leaks.not_freed.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.named.site.cmp(&b.named.site)));
        leaks
    }

    /// The names of a place whose leak is to be shown.
    fn kept(
        &mut self,
        story: &Story,
        place: Place,
        bytes: Bytes,
        wanted: &Wanted,
        suppressions: &mut Suppressions,
    ) -> Option<Named> {
        if is_segment(story, place) || bytes < wanted.least {
            return None;
        }
        let named = named(story, place);
        if suppressions.cover(&named) {
            self.suppressed.0 += 1;
            self.suppressed.1.0 = self.suppressed.1.0.saturating_add(bytes.0);
            return None;
        }
        Some(named)
    }

    /// What there is to say.
    #[must_use]
    pub fn sections(&self, story: &Story) -> Vec<Section> {
        vec![self.growth_section(story), self.not_freed_section(story)]
    }

    fn growth_section(&self, story: &Story) -> Section {
        let mut table = Table::new(
            "growth",
            &[
                ("device", "device"),
                ("growth_bytes", "grew by"),
                ("bytes_per_step", "each step"),
                ("confidence", "confidence"),
                ("owner", "owner"),
                ("call_site", "call site"),
            ],
        );
        for growing in &self.growing {
            table.rows.push(vec![
                Value::text(&*growing.named.device),
                Value::Bytes(growing.growth),
                growing.per_step.map_or(Value::Missing, Value::Bytes),
                Value::Share(growing.confidence),
                Value::text(&*growing.named.owner),
                Value::text(&*growing.named.site),
            ]);
        }
        let section = Section::new("growth", "Growing to the end");
        let section = match (self.can_tell, self.growing.is_empty()) {
            (false, _) => section.line(Mood::Note, "the trace is too short, or gives back too little, to tell growth from warm-up"),
            (true, true) => section.line(Mood::Good, "nothing keeps growing"),
            (true, false) => section.line(
                Mood::Bad,
                "What these call sites hold at least keeps rising after the warm-up (the first quarter of the trace):",
            ),
        };
        let n = self.n_rows;
        let section = section.table(table.keep(n, 1));
        let section = match (&self.counted, self.n_steps) {
            (Some(source), Some(n)) if !self.growing.is_empty() => {
                let text = format!("taking it for {n} steps: {source} (--steps says otherwise)");
                section.line(Mood::Note, text)
            }
            (None, None) if !self.growing.is_empty() => {
                section.line(Mood::Note, "the number of steps is not known: give it with --steps N")
            }
            _ => section,
        };
        section
            .fact("n_steps", "steps", self.n_steps.map_or(Value::Missing, Value::Count))
            .warn(story.doubts())
    }

    fn not_freed_section(&self, story: &Story) -> Section {
        let total = self.not_freed.iter().fold(0u64, |sum, row| sum.saturating_add(row.bytes.0));
        let mut table = Table::new(
            "not_freed",
            &[
                ("device", "device"),
                ("bytes", "bytes"),
                ("objects", "number"),
                ("owner", "owner"),
                ("call_site", "call site"),
            ],
        );
        for row in &self.not_freed {
            table.rows.push(vec![
                Value::text(&*row.named.device),
                Value::Bytes(row.bytes),
                Value::Count(row.objects),
                Value::text(&*row.named.owner),
                Value::text(&*row.named.site),
            ]);
        }
        let title = if story.complete { "Not freed at the end" } else { "Not freed where the trace ends" };
        let section = Section::new("not_freed", title);
        let section = match self.not_freed.is_empty() {
            true => section.line(Mood::Good, "everything was given back"),
            false => section.fact("not_freed_bytes", "together", Value::Bytes(Bytes(total))),
        };
        let section = section.table(table.keep(self.n_rows, 1));
        let section = match self.cached {
            Bytes(0) => section,
            cached => section.remark(
                "cached_bytes",
                "PyTorch's cache",
                Value::Bytes(cached),
                "reserved but unused: kept for the next request, not a leak",
            ),
        };
        let section = match self.suppressed {
            (0, _) => section,
            (n, bytes) => {
                section.line(Mood::Note, format!("{n} suppressed, {} together", words::bytes(bytes)))
            }
        };
        section.warn(story.doubts())
    }
}

/// Growth is spread over the windows that were judged; so are the steps.
fn per_step(growing: &Growing, n_steps: u64) -> Bytes {
    Bytes((growing.trend.per_window * growing.n_windows as f64 / n_steps as f64).round() as u64)
}

fn named(story: &Story, place: Place) -> Named {
    let sites = &story.ledger.sites;
    let site = sites.site(place.site);
    let device = if place.device == HOST { "host".into() } else { format!("cuda:{}", place.device) };
    let owner = match place.is_block {
        true => "PyTorch block",
        false => site.map_or("", |site| sites.owner(site.owner)),
    };
    Named { device, owner: owner.to_owned(), site: site.map(ToString::to_string).unwrap_or_default() }
}

/// PyTorch's segments are shown by the blocks in them, where these were seen.
fn is_segment(story: &Story, place: Place) -> bool {
    let sites = &story.ledger.sites;
    let torch = story.ledger.devices.get(&place.device).and_then(|books| books.torch.as_ref());
    let has_blocks = torch.is_some_and(|torch| torch.blocks.peak().0 > 0);
    let is_torch = sites.site(place.site).is_some_and(|site| sites.owner(site.owner) == TORCH);
    !place.is_block && has_blocks && is_torch
}

fn unfreed(story: &Story) -> Vec<(Place, Bytes, u64)> {
    let mut found = vec![];
    let mut add = |device: i16, is_block: bool, books: &Books| {
        for part in books.sites().filter(|part| part.live.objects > 0) {
            found.push((Place { device, is_block, site: part.id }, part.live.bytes, part.live.objects));
        }
    };
    for (device, books) in &story.ledger.devices {
        add(*device, false, &books.physical);
        add(*device, false, &books.managed);
        if let Some(torch) = &books.torch {
            add(*device, true, &torch.blocks);
        }
    }
    add(HOST, false, &story.ledger.host);
    found.sort_by_key(|(place, bytes, _)| (Reverse(*bytes), *place));
    found
}

/// What PyTorch had reserved at the end and nobody used.
fn cached(story: &Story) -> Bytes {
    let torch = story.ledger.devices.values().filter_map(|books| books.torch.as_ref());
    let cached = torch.map(|torch| torch.reserved.now.0.saturating_sub(torch.blocks.now().bytes.0));
    Bytes(cached.fold(0, u64::saturating_add))
}

/// Leaks that are known and accepted: one rule per line.
///
/// ```text
/// # what cuBLAS keeps until the process ends
/// owner=cuBLAS*
/// owner=NCCL site=*ncclCommInitRank*
/// device=cuda:1
/// ```
/// All fields of a line must match the whole of what they are about; `*` stands for anything. A line without `=` is about
/// the call site, and matches any part of it.
#[derive(Clone, Debug, Default)]
pub struct Suppressions {
    rules: Vec<SuppressionRule>,
}

#[derive(Clone, Debug)]
struct SuppressionRule {
    line: usize,
    fields: Vec<(Field, String)>,
    is_used: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Field {
    Device,
    Owner,
    Site,
}

impl Suppressions {
    /// Reads rules.
    ///
    /// # Errors
    /// A line that is not a rule, with its number.
    pub fn parse(text: &str) -> Result<Suppressions, String> {
        let rule = |(line, fields)| SuppressionRule { line, fields, is_used: false };
        Ok(Suppressions { rules: rules::read(text, suppression)?.into_iter().map(rule).collect() })
    }

    fn cover(&mut self, named: &Named) -> bool {
        let mut covered = false;
        for rule in &mut self.rules {
            let fits = rule.fields.iter().all(|(field, pattern)| {
                let text = match field {
                    Field::Device => &named.device,
                    Field::Owner => &named.owner,
                    Field::Site => &named.site,
                };
                is_like(text, pattern)
            });
            rule.is_used |= fits;
            covered |= fits;
        }
        covered
    }

    /// Numbers of the lines that nothing matched.
    pub fn unused(&self) -> impl Iterator<Item = usize> {
        self.rules.iter().filter(|rule| !rule.is_used).map(|rule| rule.line)
    }
}

fn suppression(line: &str) -> Result<Vec<(Field, String)>, String> {
    const FIELDS: [(&str, Field); 3] =
        [("device", Field::Device), ("owner", Field::Owner), ("site", Field::Site)];
    rules::fields(line, &FIELDS).or_else(|word| {
        let is_field = word.split_once('=').is_some_and(|(name, _)| name.chars().all(char::is_alphabetic));
        match is_field {
            true => Err(format!("`{word}`: a rule has device=, owner= and site=")),
            false => Ok(vec![(Field::Site, format!("*{line}*"))]),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scene::recording;
    use crate::trace::source::Source;

    fn leaks(scene: &str, suppressions: &str) -> (Leaks, Vec<usize>) {
        let source = Source::of("train.gtr", recording(scene));
        let mut growth = Growth::default();
        let story = Story::watched(&source, &mut growth);
        let mut suppressions = Suppressions::parse(suppressions).unwrap();
        let wanted = Wanted { n_rows: 10, ..Wanted::default() };
        let leaks = Leaks::find(&story, &growth, &wanted, &mut suppressions);
        (leaks, suppressions.unused().collect())
    }

    fn rows(leaks: &Leaks) -> Vec<(&str, u64, u64)> {
        leaks.not_freed.iter().map(|row| (&*row.named.owner, row.bytes.0, row.objects)).collect()
    }

    #[test]
    fn what_is_never_given_back_is_shown_by_call_site() {
        let (leaks, _) = leaks(
            "Alloc addr=s bytes=2M by=libc10_cuda.so
             block addr=s bytes=512 allocated=512 reserved=2M by=f@a.py:3
             Alloc addr=b bytes=100 by=main@/job/train
             Alloc addr=c bytes=100 by=main@/job/train
             Alloc addr=d bytes=7 by=main@/job/train
             Free addr=d
             AllocHost addr=h bytes=64 by=libnccl.so.2",
            "",
        );
        assert_eq!(rows(&leaks), [("PyTorch block", 512, 1), ("application", 200, 2), ("NCCL", 64, 1)]);
        assert_eq!(leaks.cached, Bytes((2 << 20) - 512));
        assert!(leaks.growing.is_empty() && !leaks.can_tell);
    }

    #[test]
    fn suppressed_leaks_are_counted_and_rules_that_fit_nothing_are_told() {
        let scene = "Alloc addr=b bytes=100 by=main@/job/train
                     AllocHost addr=h bytes=64 by=libnccl.so.2";
        let (leaks, unused) =
            leaks(scene, "# known\nowner=NC*\n\nsite=*nowhere*\ndevice=host owner=cuBLAS\n");
        assert_eq!(rows(&leaks), [("application", 100, 1)]);
        assert_eq!((leaks.suppressed, unused), ((1, Bytes(64)), vec![4, 5]));
        assert!(Suppressions::parse("a\nwho=me").unwrap_err().starts_with("line 2: `who=me`"));
    }

    #[test]
    fn patterns() {
        for (text, pattern, fits) in [
            ("abc", "abc", true),
            ("abc", "ab", false),
            ("abc", "a*", true),
            ("abc", "*b*", true),
            ("abcabc", "a*c", true),
            ("abc", "*d*", false),
            ("", "*", true),
        ] {
            assert_eq!(is_like(text, pattern), fits, "{text} {pattern}");
        }
    }

    #[test]
    fn growth_for_each_step_is_found_under_what_steps_do() {
        // Each step: two activations that are freed, one list entry that is kept; before it, parameters.
        let mut scene = String::new();
        for n in 0..20 {
            scene += &format!("block addr=p{n} bytes=1M requested=1M by=init@/job/a.py:1\n");
        }
        for step in 0..200 {
            for site in 2..5 {
                scene +=
                    &format!("block addr=a{step}_{site} bytes=4M requested=4M by=fwd@/job/a.py:{site}\n");
            }
            scene += &format!("block addr=k{step} bytes=1K requested=1K by=log@/job/a.py:9\n");
            for site in 2..5 {
                scene += &format!("free addr=a{step}_{site} bytes=4M\n");
            }
        }
        let (leaks, _) = leaks(&scene, "");
        assert_eq!(leaks.n_steps, Some(200));
        let [growing] = &leaks.growing[..] else { panic!("{:?}", leaks.growing) };
        assert_eq!(growing.named.site, "log (/job/a.py:9)");
        assert!(growing.confidence > 0.999);
        let per_step = growing.per_step.unwrap().0;
        assert!((950..1100).contains(&per_step), "{per_step}");
    }
}
