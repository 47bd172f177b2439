//! `gputrace leaks`: what was never given back, and what keeps growing.

use std::cmp::Reverse;

use gputrace_schemas::event::Bytes;

use serde::{Deserialize, Serialize};

use gputrace_analyse::growth::{Course, Growth, Place};
use gputrace_analyse::repetition::{By, Repeated};
use gputrace_analyse::rules::{self, is_like};
use gputrace_analyse::story::Story;
use gputrace_report::model::{Mood, Section, Table, Value};
use gputrace_trace::Definitions;
use gputrace_trace::ledger::{Account, StepSource};
use gputrace_trace::words;

pub mod found;

pub use found::Found;
use found::RisingSite;
pub use found::abandoned;

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
    /// Rose, and it cannot be told whether to the end, most first.
    pub rose: Vec<RoseSite>,
    /// Never freed, most first.
    pub not_freed: Vec<Unfreed>,
    /// Pools of PyTorch's that keep memory and that no graph can use, most first.
    pub abandoned: Vec<AbandonedPool>,
    /// What suppressions took out: rows and bytes.
    pub suppressed: (u64, Bytes),
    /// How they were counted, where --steps did not say how many there were.
    counted: Option<StepSource>,
    n_steps: Option<u64>,
    n_rows: usize,
    /// All that was found.
    pub found: Found,
}

/// A call site, by its names.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub struct Named {
    /// `cuda:0` or `host`.
    pub device: String,
    /// Its owner.
    pub owner: String,
    /// Its place.
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
    /// 0 to 1; see [`gputrace_analyse::growth`].
    pub confidence: f64,
    /// How often memory was left.
    pub repeated: Option<Repeated>,
    /// Which line it is in the books, while these are there.
    pub place: Option<Place>,
}

impl GrowingSite {
    /// All that the line left, as far as that is known: what grew after the warm-up is less.
    #[must_use]
    pub fn left(&self) -> Bytes {
        self.repeated.as_ref().map_or(self.growth, |repeated| repeated.bytes.max(self.growth))
    }
}

/// A call site that rose, though nothing shows that it continues.
#[derive(Clone, PartialEq, Debug)]
pub struct RoseSite {
    /// Which.
    pub named: Named,
    /// Bytes by which it rose after the warm-up.
    pub growth: Bytes,
    /// Why it is not called growth.
    pub course: Course,
}

/// A call site whose memory was never freed.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub struct Unfreed {
    /// Which.
    pub named: Named,
    /// How much.
    pub bytes: Bytes,
    /// How many objects.
    pub objects: u64,
}

/// A pool of PyTorch's that nobody can use any more, and that was not released.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub struct AbandonedPool {
    /// Where the last capture into it began.
    pub named: Named,
    /// `segment_pool_id`, as PyTorch writes it.
    pub pool: String,
    /// What it keeps.
    pub bytes: Bytes,
    /// The fate of its graphs.
    pub why: String,
}

impl Leaks {
    /// Finds the leaks in a story that `growth` has watched.
    #[must_use]
    pub fn find(
        story: &Story,
        definitions: &dyn Definitions,
        growth: &Growth,
        wanted: &Wanted,
        suppressions: &mut Suppressions,
    ) -> Leaks {
        Leaks::of(Found::of(story, definitions, growth), wanted, suppressions)
    }

    /// What of all that was found is wanted and not known.
    #[must_use]
    pub fn of(found: Found, wanted: &Wanted, suppressions: &mut Suppressions) -> Leaks {
        let n_steps = wanted.n_steps.or(found.n_steps);
        let mut leaks = Leaks {
            growing: vec![],
            rose: vec![],
            not_freed: vec![],
            abandoned: vec![],
            suppressed: (0, Bytes(0)),
            counted: found.counted.clone().filter(|_| wanted.n_steps.is_none()),
            n_steps,
            n_rows: wanted.n_rows,
            found: Found::default(),
        };
        for site in &found.spread {
            if leaks.keeps(site.account, &site.known_as, site.bytes(), wanted, suppressions) {
                leaks.growing.push(growing(site, n_steps));
            }
        }
        for site in &found.rising {
            if !leaks.keeps(site.account, &site.known_as, site.bytes(), wanted, suppressions) {
                continue;
            }
            if site.course.goes_on() {
                leaks.growing.push(growing(site, n_steps));
            } else if site.account != Account::Imported {
                let (named, course) = (site.named.clone(), site.course);
                leaks.rose.push(RoseSite { named, growth: site.bytes(), course });
            }
        }
        leaks.growing.sort_by_key(|growing| Reverse(growing.growth));
        for (account, row) in &found.not_freed {
            if leaks.keeps(*account, &row.named, row.bytes, wanted, suppressions) {
                leaks.not_freed.push(row.clone());
            }
        }
        for pool in &found.abandoned {
            if leaks.keeps(Account::Blocks, &pool.named, pool.bytes, wanted, suppressions) {
                leaks.abandoned.push(pool.clone());
            }
        }
        leaks.abandoned.sort_by_key(|it| Reverse(it.bytes));
        leaks.not_freed.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.named.site.cmp(&b.named.site)));
        Leaks { found, ..leaks }
    }

    /// Whether a leak is to be shown.
    fn keeps(
        &mut self,
        account: Account,
        named: &Named,
        bytes: Bytes,
        wanted: &Wanted,
        suppressions: &mut Suppressions,
    ) -> bool {
        // Mappings of what others own have a number, and no bytes.
        let is_less = account != Account::Imported && bytes < wanted.least;
        !is_less && !self.suppresses(named, bytes, suppressions)
    }

    fn suppresses(&mut self, named: &Named, bytes: Bytes, suppressions: &mut Suppressions) -> bool {
        let is_known = suppressions.cover(named);
        if is_known {
            self.suppressed.0 += 1;
            self.suppressed.1.0 = self.suppressed.1.0.saturating_add(bytes.0);
        }
        is_known
    }

    /// Whether the trace shows growth where there is any: it is long enough, and gives memory back.
    #[must_use]
    pub fn can_tell(&self) -> bool {
        self.found.can_tell
    }

    /// The sections of the answer.
    #[must_use]
    pub fn sections(&self) -> Vec<Section> {
        let mut sections = vec![self.growth_section(), self.not_freed_section()];
        // Of a program that gave nothing back, what it did not give back is the answer.
        if !self.found.can_tell && self.growing.is_empty() && !self.not_freed.is_empty() {
            sections.reverse();
        }
        if !self.rose.is_empty() {
            sections.push(self.rose_section());
        }
        if !self.abandoned.is_empty() {
            sections.push(self.abandoned_section());
        }
        sections
    }

    /// Pools that keep memory for nobody.
    fn abandoned_section(&self) -> Section {
        let table = Table::of(
            "abandoned_pools",
            &self.abandoned,
            &[
                ("device", "device", &|it| Value::text(&*it.named.device)),
                ("bytes", "keeps", &|it| Value::Bytes(it.bytes)),
                ("pool", "pool", &|it| Value::text(&*it.pool)),
                ("why", "why it is unusable", &|it| Value::text(&*it.why)),
                ("call_site", "captured at", &|it| Value::text(&*it.named.site)),
            ],
        );
        Section::new("abandoned_pools", "PyTorch's pools without a graph")
            .line(Mood::Bad, "They were not released, and `empty_cache` frees none of their memory:")
            .table(table.keep(self.n_rows, 1))
            .warn(self.found.doubts.clone())
    }

    fn growth_section(&self) -> Section {
        let table = Table::of(
            "growth",
            &self.growing,
            &[
                ("device", "device", &|it| Value::text(&*it.named.device)),
                ("growth_bytes", "grew by", &|it| Value::Bytes(it.left())),
                ("bytes_per_step", "per step", &|it| it.per_step.map_or(Value::Missing, Value::Bytes)),
                ("confidence", "confidence", &|it| Value::Share(it.confidence)),
                ("owner", "owner", &|it| Value::text(&*it.named.owner)),
                ("call_site", "call site", &|it| Value::text(&*it.named.site)),
            ],
        );
        let section = Section::new("growth", "Growing to the end");
        let section = match (self.found.can_tell, self.growing.is_empty(), self.rose.is_empty()) {
            (false, ..) => section.line(Mood::Note, "the trace is too short, or has too few frees, to tell growth from warm-up"),
            (true, true, true) => section.line(Mood::Good, "nothing keeps growing"),
            (true, true, false) => section.line(Mood::Good, "nothing was seen to grow to the end"),
            (true, false, _) => section.line(
                Mood::Bad,
                "The minimum held by these call sites keeps rising after the warm-up (the first quarter of the trace):",
            ),
        };
        let n = self.n_rows;
        let section = section.table(table.keep(n, 1));
        let section = match (&self.counted, self.n_steps) {
            (Some(source), Some(_)) if !self.growing.is_empty() => {
                let text = format!("steps are counted from {source} (--steps sets another number)");
                section.line(Mood::Note, text)
            }
            (None, None) if !self.growing.is_empty() => {
                let text = match words::loops(&self.found.loops) {
                    Some(loops) => {
                        format!("the number of steps is not known, {loops}: set it with --steps N")
                    }
                    None => "the number of steps is not known: set it with --steps N".into(),
                };
                section.line(Mood::Note, text)
            }
            _ => section,
        };
        section
            .fact("n_steps", "steps", self.n_steps.map_or(Value::Missing, Value::Count))
            .warn(self.found.doubts.clone())
    }

    /// What rose, and why that is not called growth.
    fn rose_section(&self) -> Section {
        let mut table = Table::new(
            "rose",
            &[
                ("device", "device"),
                ("growth_bytes", "rose by"),
                ("why", "then"),
                ("owner", "owner"),
                ("call_site", "call site"),
            ],
        );
        for rose in &self.rose {
            table.rows.push(vec![
                Value::text(&*rose.named.device),
                Value::Bytes(rose.growth),
                Value::text(why(rose.course)),
                Value::text(&*rose.named.owner),
                Value::text(&*rose.named.site),
            ]);
        }
        Section::new("rose", "Rose, but may be warm-up")
            .table(table.keep(self.n_rows, 1))
            .line(Mood::Note, "a longer run would decide: a leak keeps rising, a full cache does not")
    }

    fn not_freed_section(&self) -> Section {
        let total = self.not_freed.iter().fold(0u64, |sum, row| sum.saturating_add(row.bytes.0));
        let table = Table::of(
            "not_freed",
            &self.not_freed,
            &[
                ("device", "device", &|it| Value::text(&*it.named.device)),
                ("bytes", "bytes", &|it| Value::Bytes(it.bytes)),
                ("objects", "number", &|it| Value::Count(it.objects)),
                ("owner", "owner", &|it| Value::text(&*it.named.owner)),
                ("call_site", "call site", &|it| Value::text(&*it.named.site)),
            ],
        );
        let title =
            if self.found.is_complete { "Not freed at the end" } else { "Not freed when the trace ends" };
        let section = Section::new("not_freed", title);
        let section = match (self.not_freed.is_empty(), self.found.is_complete) {
            (true, true) => section.line(Mood::Good, "everything was freed"),
            (true, false) => section.line(Mood::Note, "nothing is known to be held there"),
            (false, _) => section.fact("not_freed_bytes", "together", Value::Bytes(Bytes(total))),
        };
        let section = section.table(table.keep(self.n_rows, 1));
        let section = match self.found.cached {
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
            (n, bytes) => section.line(
                Mood::Note,
                format!("{} suppressed, {} in total", words::count(n), words::bytes(bytes)),
            ),
        };
        section.warn(self.found.doubts.clone())
    }
}

fn growing(site: &RisingSite, n_steps: Option<u64>) -> GrowingSite {
    let RisingSite { named, trend, .. } = site;
    let (named, confidence, repeated) = (named.clone(), trend.confidence, site.repeated.clone());
    if site.account == Account::Imported {
        let text = format!("{}: {} more mappings", named.site, trend.growth);
        return GrowingSite {
            named: Named { site: text, ..named },
            growth: Bytes(0),
            per_step: None,
            confidence,
            repeated: None,
            place: site.place,
        };
    }
    // Growth is spread over the windows that were judged; so are the steps.
    let per_step = |n: u64| Bytes((trend.per_window * site.n_windows as f64 / n as f64).round() as u64);
    let per_step = n_steps.filter(|n| *n > 0 && site.n_windows > 0).map(per_step);
    GrowingSite { named, growth: Bytes(trend.growth), per_step, confidence, repeated, place: site.place }
}

/// The median of what turns left is shown if it differs from the mean by no more than this part of it: one in so many.
const UNEVEN: u64 = 20;

/// How much, how often: `31.25 MiB per call of evaluate (eval.py:40), 8 calls`.
pub(crate) fn rate(repeated: &Repeated) -> String {
    let mean = Bytes(repeated.bytes.0 / repeated.left.max(1));
    // Times the number of turns it is what was left, as a reader would reckon.
    let each = if repeated.each.0.abs_diff(mean.0) <= mean.0 / UNEVEN { repeated.each } else { mean };
    // A mean says little where a few turns left most of it.
    let is_usual = mean.0 / 2 <= repeated.each.0 && repeated.each.0 / 2 <= mean.0;
    let each = if is_usual { words::bytes(each) } else { format!("{} on average", words::bytes(mean)) };
    let n = words::count(repeated.left);
    let of = match repeated.turns {
        Some(turns) if turns > repeated.left => format!("{n} of {}", words::count(turns)),
        _ => n.clone(),
    };
    match &repeated.by {
        By::Call(line) => {
            let file = line.file.rsplit('/').next().unwrap_or_default();
            format!("{each} per call of {file}:{}, {of} calls", line.line)
        }
        By::Round => format!("{each} each time, {n} times, with steps or model calls in between"),
        By::Own => format!("{each} each time, {n} times"),
    }
}

/// Why a rise is not called growth.
fn why(course: Course) -> String {
    match course {
        Course::GoesOn => "continues".into(),
        Course::Stopped(at) => format!("stopped after {:.0} % of the run", at * 100.0),
        Course::Slows => "slows down".into(),
        Course::TooFew(n) => format!("only in {n} stages"),
        Course::Preparing => "the program was starting up, and no work was seen afterwards".into(),
        Course::Once(1) => "allocated once: in one step, or in one model call".into(),
        Course::Once(n) => format!("remained only {n} times"),
        Course::OnlyTakes => "memory was only allocated to the end, as by a program that loads data".into(),
    }
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
    use gputrace_trace::scene::recording;
    use gputrace_trace::source::Source;

    fn leaks(scene: &str, suppressions: &str) -> (Leaks, Vec<usize>) {
        let source = Source::of("train.gtr", recording(scene));
        let mut growth = Growth::default();
        let story = Story::watched(&source, &mut growth);
        let mut suppressions = Suppressions::parse(suppressions).unwrap();
        let wanted = Wanted { n_rows: 10, ..Wanted::default() };
        let leaks = Leaks::find(&story, source.definitions(), &growth, &wanted, &mut suppressions);
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
        assert_eq!(leaks.found.cached, Bytes((2 << 20) - 512));
        assert!(leaks.growing.is_empty() && !leaks.can_tell());
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
    fn a_pool_that_a_failed_capture_left_is_a_leak_by_the_line_that_captured() {
        let capture = "TorchPoolBegin handle=1
            CaptureBegin stream=5 by=warm_up@/job/serve.py:40
            Alloc addr=0x50000000 bytes=20M by=libcudart.so,libc10_cuda.so in_allocate=1
            block addr=0x50000000 bytes=2M requested=2M stream=5 by=forward@/job/serve.py:12
            free addr=0x50000000 bytes=2M
            TorchPoolEnd handle=1";
        let failed = format!("{capture}\nCaptureEnd stream=5 result=901");
        let (found, _) = leaks(&failed, "");
        let [pool] = &found.abandoned[..] else { panic!("{:?}", found.abandoned) };
        assert_eq!((&*pool.named.site, pool.bytes), ("warm_up (/job/serve.py:40)", Bytes(20 << 20)));
        assert_eq!((&*pool.pool, &*pool.why), ("(1, 0)", "the capture into it failed"));
        let (known, unused) = leaks(&failed, "owner=PyTorch*pool site=*serve.py:40*");
        assert_eq!((known.abandoned.len(), known.suppressed, unused.len()), (0, (1, Bytes(20 << 20)), 0));
        for healthy in
            ["CaptureEnd stream=5 handle=g", "CaptureEnd stream=5 result=901\nTorchPoolRelease handle=1"]
        {
            assert_eq!(leaks(&format!("{capture}\n{healthy}"), "").0.abandoned, [], "{healthy}");
        }
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

    /// A loop of a hundred steps with two activations, and what `also` adds to each.
    fn steps(also: impl Fn(usize) -> String) -> String {
        let mut scene = String::new();
        for step in 0..100 {
            scene += &format!("block addr=a{step} bytes=4M requested=4M by=fwd@/job/a.py:2\n");
            scene += &format!("block addr=b{step} bytes=2M requested=2M by=fwd@/job/a.py:3\n");
            scene += &also(step);
            scene += &format!("free addr=b{step} bytes=2M\nfree addr=a{step} bytes=4M\n");
        }
        scene
    }

    fn growing(scene: &str) -> Vec<(String, String)> {
        let names = |row: &GrowingSite| (row.named.owner.clone(), row.named.site.clone());
        leaks(scene, "").0.growing.iter().map(names).collect()
    }

    #[test]
    fn what_levels_off_is_no_growth_but_is_said_to_have_risen() {
        for full in [60, 80, 85, 90, 95, 97] {
            let scene = steps(|step| match step < full {
                true => format!("block addr=c{step} bytes=1M requested=1M by=cache@/job/a.py:9\n"),
                false => String::new(),
            });
            let (leaks, _) = leaks(&scene, "");
            assert!(leaks.growing.is_empty(), "{full}: {:?}", leaks.growing);
            let stopped = leaks.rose.iter().all(|rose| matches!(rose.course, Course::Stopped(_)));
            assert!(stopped && (full < 75 || leaks.rose.len() == 1), "{full}: {:?}", leaks.rose);
        }
    }

    #[test]
    fn a_model_that_was_loaded_through_a_buffer_and_serves_since_does_not_grow() {
        let mut scene = String::new();
        for layer in 0..120 {
            scene += &format!("block addr=s{layer} bytes=4M requested=4M by=stage@/job/a.py:1\n");
            scene += &format!("block addr=w{layer} bytes=4M requested=4M by=load@/job/a.py:2\n");
            scene += &format!("free addr=s{layer} bytes=4M\n");
        }
        for request in 0..10 {
            scene += &format!("block addr=r{request} bytes=1M requested=1M by=serve@/job/a.py:7\n");
            scene += &format!("free addr=r{request} bytes=1M\n");
        }
        assert_eq!(growing(&scene), []);
    }

    /// A server that starts: tries its device, loads shards through a buffer, and makes a cache.
    fn server([check, load, cache]: [&str; 3]) -> String {
        let mut scene = String::new();
        for n in 0..3 {
            scene +=
                &format!("block addr=t{n} bytes=2M requested=2M by=ones@/job/a.py:9,{check}@/job/a.py:8\n");
            scene += &format!("free addr=t{n} bytes=2M\n");
        }
        for n in 0..120 {
            scene +=
                &format!("block addr=s{n} bytes=4M requested=4M by=copy@/job/a.py:1,{load}@/job/a.py:2\n");
            scene +=
                &format!("block addr=w{n} bytes=4M requested=4M by=new@/job/a.py:3,{load}@/job/a.py:2\n");
            scene += &format!("free addr=s{n} bytes=4M\n");
        }
        scene + &format!("block addr=c bytes=64M requested=64M by=zeros@/job/a.py:5,{cache}@/job/a.py:6\n")
    }

    #[test]
    fn a_server_that_has_only_started_does_not_grow() {
        let known = server(["Worker.init_device", "Worker.load_model", "initialize_kv_cache"]);
        let ones_own = server(["setup", "load_shards", "build_cache"]);
        for scene in [known, ones_own] {
            let (leaks, _) = leaks(&scene, "");
            assert!(leaks.can_tell() && leaks.growing.is_empty(), "{:?}", leaks.growing);
            assert!(leaks.rose.iter().all(|rose| rose.course == Course::Preparing), "{:?}", leaks.rose);
            assert_eq!(leaks.rose.len(), 1);
        }
    }

    #[test]
    fn the_same_by_functions_that_work_is_growth_and_so_is_what_they_keep_after_a_start() {
        let scene = server(["connect", "handle", "answer"]);
        assert_eq!(growing(&scene).len(), 1);
        let mut scene = server(["setup", "load_shards", "build_cache"]);
        for request in 0..400 {
            scene += &format!("block addr=r{request} bytes=1M requested=1M by=handle@/job/a.py:20\n");
            scene += &format!("block addr=k{request} bytes=1M requested=1M by=remember@/job/a.py:21\n");
            scene += &format!("free addr=r{request} bytes=1M\n");
        }
        let names: Vec<String> = growing(&scene).into_iter().map(|(_, site)| site).collect();
        assert_eq!(names, ["remember (/job/a.py:21)"]);
    }

    #[test]
    fn every_kind_of_memory_is_watched() {
        for (call, owner) in [
            ("AllocManaged addr=k# bytes=1M by=keep@/job/a.py:9", "application"),
            ("AllocHost addr=k# bytes=1M by=keep@/job/a.py:9", "application"),
            ("AllocAsync addr=k# bytes=1M by=keep@/job/a.py:9", "application"),
            ("IpcOpen addr=k# bytes=1M by=keep@/job/a.py:9", "another process"),
        ] {
            let scene = steps(|step| call.replace('#', &step.to_string()) + "\n");
            let found = growing(&scene);
            assert!(
                found.iter().any(|(by, site)| by == owner && site.starts_with("keep (/job/a.py:9)")),
                "{call}: {found:?}"
            );
            let (leaks, _) = leaks(&scene, "");
            let kept: u64 = leaks.not_freed.iter().map(|row| row.objects).sum();
            assert_eq!(kept, 100, "{call}");
        }
    }

    #[test]
    fn growth_over_many_lines_is_found_by_what_the_device_holds() {
        // Each of the lines is reached three times.
        let scene = steps(|step| {
            let kept = |n: usize| {
                format!(
                    "block addr=k{step}_{n} bytes=64K requested=64K by=f@/job/b.py:{}\n",
                    (step * 2 + n) * 37 % 66
                )
            };
            kept(0) + &kept(1)
        });
        let found = growing(&scene);
        let [(owner, site)] = &found[..] else { panic!("{found:?}") };
        assert_eq!(owner, "PyTorch block");
        assert!(site.contains(" call sites, none of them large") && site.contains("f (/job/b.py:"), "{site}");
    }

    #[test]
    fn the_callers_of_a_line_that_several_use_are_named() {
        let scene = steps(|step| {
            let caller = if step % 4 == 0 { 30 } else { 20 };
            format!(
                "block addr=k{step} bytes=1M requested=1M by=new@/job/pool.py:5,train@/job/a.py:{caller}\n"
            )
        });
        let found = growing(&scene);
        let [(_, site)] = &found[..] else { panic!("{found:?}") };
        assert_eq!(
            site,
            "new (/job/pool.py:5), called from train (/job/a.py:20) 75 %, train (/job/a.py:30) 25 %"
        );
    }

    /// Leaks at line 5 of a pool, of which others are served too.
    fn site_of_leak(also: impl Fn(usize) -> String) -> String {
        let found = growing(&steps(also));
        let [(_, site)] = &found[..] else { panic!("{found:?}") };
        site.clone()
    }

    #[test]
    fn the_one_caller_that_leaks_through_a_helper_is_named() {
        // All take their memory by `new`: weights before the run, a step's scratch, and a log that is kept.
        let of = |step: usize, name: &str, by: &str| {
            format!("block addr={name}{step} bytes=1M requested=1M by=new@/job/pool.py:5,{by}\n")
        };
        let main = "main@/job/a.py:90";
        let site = site_of_leak(|step| {
            let weights =
                if step < 20 { of(step, "w", &format!("load@/job/a.py:10,{main}")) } else { String::new() };
            let scratch = of(step, "s", &format!("train@/job/a.py:20,{main}"));
            let log = of(step, "k", &format!("log@/job/a.py:30,{main}"));
            weights + &scratch + &format!("free addr=s{step} bytes=1M\n") + &log
        });
        assert_eq!(site, "new (/job/pool.py:5), called from log (/job/a.py:30) 100 %");
    }

    #[test]
    fn the_caller_is_named_behind_helpers_of_helpers() {
        let main = "main@/job/a.py:90";
        let site = site_of_leak(|step| {
            let by = |outer: &str| format!("by=new@/job/pool.py:5,zeros@/job/pool.py:9,{outer},{main}");
            format!(
                "block addr=s{step} bytes=1M requested=1M {}\nfree addr=s{step} bytes=1M\n\
                 block addr=k{step} bytes=1M requested=1M {}\n",
                by("train@/job/a.py:20"),
                by("log@/job/a.py:30")
            )
        });
        assert_eq!(site, "new (/job/pool.py:5), called from log (/job/a.py:30) 100 %");
        let site = site_of_leak(|step| {
            let by = |outer: &str| format!("by=new@/job/pool.py:5,{outer},{main}");
            format!(
                "block addr=s{step} bytes=1M requested=1M {}\nfree addr=s{step} bytes=1M\n\
                 block addr=t{step} bytes=1M requested=1M {}\nfree addr=t{step} bytes=1M\n\
                 block addr=k{step} bytes=1M requested=1M {}\n",
                by("empty@/job/pool.py:12,train@/job/a.py:20"),
                by("zeros@/job/pool.py:9,train@/job/a.py:21"),
                by("zeros@/job/pool.py:9,log@/job/a.py:30")
            )
        });
        assert_eq!(
            site,
            "new (/job/pool.py:5), called from zeros (/job/pool.py:9) 100 %, that from log (/job/a.py:30) 100 %"
        );
    }

    #[test]
    fn callers_of_native_helpers_are_named_too() {
        let site = site_of_leak(|step| {
            let by = |outer: &str| format!("by=new_buffer@/job/train,{outer}@/job/train,main@/job/train");
            format!(
                "AllocManaged addr=s{step} bytes=1M {}\nFree addr=s{step}\nAllocManaged addr=k{step} bytes=1M {}\n",
                by("scratch"),
                by("history")
            )
        });
        assert!(site.ends_with(", called from history 100 %"), "{site}");
    }
}
