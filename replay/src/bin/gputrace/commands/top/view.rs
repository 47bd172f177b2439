//! A picture as lines of text: a function of the figures, of what the user chose, and of the size of the screen.
//!
//! Nothing here asks anybody anything, so a test holds whole pictures. Names of a trace are made printable on their way in.

use std::collections::BTreeMap;

use gputrace_replay::trace::words::{bytes, count, ranks_wait, time};
use gputrace_schemas::event::{Bytes, Nanos};
use gputrace_schemas::printable::printable;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::commands::parts::live::figures::{Card, DeviceFigures, Figures, ProcessFigures};

/// How a piece of a line looks; a terminal without colours shows all alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Look {
    Plain,
    Bold,
    Dim,
    Warning,
    /// The row that the cursor is on.
    Chosen,
    /// A part of a bar, by its place in [`FILLS`].
    Part(usize),
}

/// A line, in pieces.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Line(pub(super) Vec<(String, Look)>);

impl Line {
    fn of(text: impl Into<String>, look: Look) -> Line {
        Line(vec![(text.into(), look)])
    }

    fn and(mut self, text: impl Into<String>, look: Look) -> Line {
        self.0.push((text.into(), look));
        self
    }

    /// Without looks.
    pub(super) fn text(&self) -> String {
        self.0.iter().map(|(text, _)| text.as_str()).collect::<String>().trim_end().to_owned()
    }

    /// Cut to so many columns.
    fn cut(mut self, width: usize) -> Line {
        let mut left = width;
        for (text, _) in &mut self.0 {
            let n = text.width();
            if n > left {
                *text = shortened(text, left);
            }
            left = left.saturating_sub(n);
        }
        self
    }
}

/// By what rows are sorted, the largest first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Sort {
    #[default]
    Held,
    Reserved,
    Unused,
    Unaccounted,
    Rate,
    Pid,
}

impl Sort {
    pub(super) const ALL: [Sort; 6] =
        [Sort::Held, Sort::Reserved, Sort::Unused, Sort::Unaccounted, Sort::Rate, Sort::Pid];

    fn name(self) -> &'static str {
        match self {
            Sort::Held => "held",
            Sort::Reserved => "reserved",
            Sort::Unused => "unused",
            Sort::Unaccounted => "unaccounted",
            Sort::Rate => "requests",
            Sort::Pid => "pid",
        }
    }
}

/// What the user chose.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct View {
    pub(super) sort: Sort,
    /// Only rows with this in program, trace, pod or job.
    pub(super) filter: String,
    /// The filter is being typed.
    pub(super) is_typing: bool,
    /// Row of the cursor.
    pub(super) chosen: usize,
    /// The process that is shown alone: its trace.
    pub(super) inside: Option<String>,
    pub(super) is_frozen: bool,
    pub(super) is_help: bool,
}

/// What the parts of a bar are drawn with, so that they differ without colours too.
const FILLS: [char; 8] = ['█', '▓', '▒', '░', '#', '=', '+', '-'];
/// Lines of a process that are shown in a picture of all.
const FEW_LINES: usize = 5;

/// A row: a process on one of its devices, or on none yet.
pub(super) type Row<'a> = (&'a ProcessFigures, Option<&'a DeviceFigures>);

/// The rows in the order in which they are shown.
pub(super) fn rows<'a>(figures: &'a Figures, view: &View) -> Vec<Row<'a>> {
    let wanted = |process: &&ProcessFigures| is_wanted(process, &view.filter);
    let mut rows: Vec<Row<'_>> = vec![];
    for process in figures.processes.iter().filter(wanted) {
        rows.extend(process.devices.iter().map(|device| (process, Some(device))));
        if process.devices.is_empty() {
            rows.push((process, None));
        }
    }
    let value = |(process, device): &Row<'_>| -> i64 {
        let of = |get: fn(&DeviceFigures) -> Option<i64>| device.and_then(get).unwrap_or(-1);
        match view.sort {
            Sort::Held => of(|device| Some(device.driver_bytes as i64)),
            Sort::Reserved => of(|device| Some(device.torch.as_ref()?.reserved_bytes as i64)),
            Sort::Unused => of(|device| {
                let torch = device.torch.as_ref()?;
                Some(torch.reserved_bytes.saturating_sub(torch.allocated_bytes) as i64)
            }),
            Sort::Unaccounted => of(|device| device.unaccounted_bytes),
            Sort::Rate => process.requests_per_s as i64,
            Sort::Pid => -i64::from(process.pid),
        }
    };
    rows.sort_by_key(|row| (row.0.has_ended(), std::cmp::Reverse(value(row)), row.0.pid));
    rows
}

fn is_wanted(process: &ProcessFigures, filter: &str) -> bool {
    let filter = filter.to_lowercase();
    let place = &process.surroundings;
    let named = [&place.pod, &place.container, &place.slurm_job, &place.namespace];
    let texts = [process.program(), process.trace.clone(), process.pid.to_string()];
    let named = named.into_iter().flatten().cloned();
    texts.into_iter().chain(named).any(|text| text.to_lowercase().contains(&filter))
}

/// The picture. Without a height nothing is left out, and every process is shown with its parts.
pub(super) fn frame(figures: &Figures, view: &View, width: usize, height: Option<usize>) -> Vec<Line> {
    let mut lines = vec![header(figures, view, height.is_some())];
    if view.is_help {
        lines.extend(help());
        return fit(lines, width, height);
    }
    for note in figures.notes.iter().chain(&figures.driver_missing.as_deref().map(no_driver)) {
        lines.extend(wrapped(&clean(note), width).into_iter().map(|text| Line::of(text, Look::Warning)));
    }
    for hang in &figures.hangs {
        let (word, look) = if hang.hangs { ("HANG", Look::Warning) } else { ("waits", Look::Dim) };
        let waiting = match hang.waiting.as_slice() {
            [] => String::new(),
            waiting => format!("; {} for it", ranks_wait(waiting)),
        };
        let text = format!("{word}  {}, for {}{waiting}", hang.what, time(Nanos(hang.for_ns)));
        lines.extend(wrapped(&clean(&text), width).into_iter().map(|text| Line::of(text, look)));
    }
    let alone = view.inside.as_ref().and_then(|trace| figures.processes.iter().find(|it| it.trace == *trace));
    if let Some(process) = alone {
        lines.extend(parts(process, usize::MAX));
        return fit(lines, width, height);
    }
    for card in &figures.cards {
        lines.extend(card_lines(figures, card, width));
    }
    let rows = rows(figures, view);
    if !rows.is_empty() {
        lines.push(Line::default());
        lines.extend(table(&rows, view, width, height.is_some()));
    }
    if height.is_none() {
        for process in figures.processes.iter().filter(|process| is_wanted(process, &view.filter)) {
            lines.push(Line::default());
            lines.extend(parts(process, FEW_LINES));
        }
    }
    fit(lines, width, height)
}

fn no_driver(why: &str) -> String {
    // Which library loads another is nothing that a user knows.
    let why = why.trim_start_matches("a libloading error occurred: ");
    format!("the driver could not be queried ({why}): processes that are not recorded are not shown")
}

/// A sentence in lines of so many columns, between its words.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line =
            lines.last_mut().filter(|line| line.is_empty() || line.width() + 1 + word.width() <= width);
        match line {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => *line = format!("{line} {word}"),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

fn fit(lines: Vec<Line>, width: usize, height: Option<usize>) -> Vec<Line> {
    let n = lines.len();
    let mut lines: Vec<Line> = lines.into_iter().map(|line| line.cut(width)).collect();
    if let Some(height) = height.filter(|height| n > *height) {
        lines.truncate(height.saturating_sub(1));
        let left = n - lines.len();
        lines.push(Line::of(
            format!("{left} more lines: a larger window, / to filter, --once for all"),
            Look::Dim,
        ));
    }
    lines
}

fn header(figures: &Figures, view: &View, has_keys: bool) -> Line {
    let seconds = figures.time_ns / 1_000_000_000;
    let clock = format!("{:02}:{:02}:{:02}", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let n = figures.processes.len();
    let processes = if n == 1 { "1 process".to_owned() } else { format!("{} processes", count(n as u64)) };
    let mut line = Line::of("gputrace top", Look::Bold)
        .and(format!("  {}  {clock} UTC  {processes}", clean(&figures.host)), Look::Plain);
    if view.is_typing || !view.filter.is_empty() {
        let cursor = if view.is_typing { "_" } else { "" };
        line = line.and(format!("  filter: {}{cursor}", clean(&view.filter)), Look::Bold);
    }
    if has_keys {
        line = line.and(format!("  by {}", view.sort.name()), Look::Dim);
        line = match view.is_frozen {
            true => line.and("  frozen", Look::Warning),
            false => line.and("  ? keys", Look::Dim),
        };
    }
    line
}

fn help() -> Vec<Line> {
    let keys = [
        ("q, ctrl-c", "end"),
        ("up, down, j, k", "choose a row"),
        ("enter, esc", "show only its process, or all again"),
        ("s", "sort by the next column: held, reserved, unused, unaccounted, requests, pid"),
        ("/", "filter by program, trace, pod, container, job; enter ends, esc clears"),
        ("space, f", "freeze the picture"),
        ("?", "these keys"),
    ];
    let mut lines = vec![Line::default()];
    lines.extend(keys.map(|(key, what)| Line::of(format!("  {key:<16}"), Look::Bold).and(what, Look::Plain)));
    lines.push(Line::default());
    let words = [
        "held: allocated from the driver; allocated, reserved: PyTorch's own figures",
        "unused: reserved and not allocated; stranded: of that, in segments with live blocks",
        "unaccounted: charged to the process by the driver, and not explained",
        "seen: age of the newest event in the trace",
    ];
    lines.extend(words.map(|text| Line::of(format!("  {text}"), Look::Dim)));
    lines
}

/// What holds memory of a card, the most first.
fn card_parts(figures: &Figures, card: &Card) -> Vec<(String, u64)> {
    let mut parts: BTreeMap<String, u64> = BTreeMap::new();
    let mut add = |name: &str, bytes: u64| *parts.entry(name.to_owned()).or_default() += bytes;
    let devices = figures.processes.iter().filter(|process| !process.has_ended()).flat_map(|it| &it.devices);
    for device in devices.filter(|device| device.uuid.as_deref().is_some_and(|uuid| card.is(uuid))) {
        for owner in &device.owners {
            add(&owner.owner, owner.bytes);
        }
        add("CUDA context", device.context_bytes.unwrap_or(0));
    }
    for other in card.unrecorded.iter().flatten() {
        add("not recorded", other.used_bytes.unwrap_or(0));
    }
    let known: u64 = parts.values().sum();
    if let Some(rest) = card.used_bytes.and_then(|used| used.checked_sub(known)) {
        parts.insert("rest".to_owned(), rest);
    }
    let mut parts: Vec<_> = parts.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
    parts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    parts
}

fn card_lines(figures: &Figures, card: &Card, width: usize) -> Vec<Line> {
    let parts = card_parts(figures, card);
    let used = card.used_bytes.unwrap_or_else(|| parts.iter().map(|(_, bytes)| bytes).sum());
    let number = card.number().map(|number| format!("{number}  ")).unwrap_or_default();
    let of = match card.total_bytes {
        Some(total) if total > 0 => {
            let share = used as f64 / total as f64 * 100.0;
            format!("{} of {}, {share:.0} %", iec(used), iec(total))
        }
        _ => iec(used),
    };
    let known = if card.used_bytes.is_some() { "used" } else { "recorded" };
    let mut lines = vec![
        Line::default(),
        Line::of(format!("{number}{}", clean(&card.name)), Look::Bold)
            .and(format!("  {known} {of}  {}", clean(&card.uuid)), Look::Plain),
    ];
    let room = width.saturating_sub(4);
    let total = card.total_bytes.unwrap_or(used).max(used).max(1);
    let mut bar = Line::of("  [", Look::Plain);
    let mut filled = 0;
    for (n, (_, bytes)) in parts.iter().enumerate() {
        let n = n.min(FILLS.len() - 1);
        let cells = (*bytes as f64 / total as f64 * room as f64).round() as usize;
        let cells = cells.min(room - filled);
        filled += cells;
        bar = bar.and(FILLS[n].to_string().repeat(cells), Look::Part(n));
    }
    lines.push(bar.and(" ".repeat(room - filled), Look::Plain).and("]", Look::Plain));
    let mut legend = Line::of("  ", Look::Plain);
    for (n, (name, bytes)) in parts.iter().enumerate() {
        let n = n.min(FILLS.len() - 1);
        legend = legend.and(FILLS[n].to_string(), Look::Part(n));
        legend = legend.and(format!(" {} {}  ", clean(name), iec(*bytes)), Look::Plain);
    }
    lines.push(legend);
    if let Some(clients) = card.mps_clients.as_ref().filter(|clients| !clients.is_empty()) {
        let clients: Vec<String> = clients.iter().map(ToString::to_string).collect();
        let text = format!(
            "  under MPS: {}; no process is charged with its server's own memory",
            clients.join(", ")
        );
        lines.push(Line::of(text, Look::Dim));
    }
    let others = card.unrecorded.iter().flatten().map(|other| {
        let name = other.name.as_deref().unwrap_or("?");
        let used = other.used_bytes.map_or("unknown".to_owned(), iec);
        format!("{} {} {used}", other.pid, clean(name))
    });
    let others: Vec<String> = others.collect();
    if !others.is_empty() {
        lines.push(Line::of(format!("  not recorded: {}", others.join(", ")), Look::Dim));
    }
    lines
}

/// A column: heading, width (0 the rest), the least width of screen that has it, and what is in it.
type Column = (&'static str, usize, usize, fn(&Row<'_>) -> String);

const COLUMNS: [Column; 14] = [
    ("pid", 8, 0, |(process, _)| process.pid.to_string()),
    ("rank", 5, 0, |(process, _)| process.rank.map_or("-".into(), |rank| rank.to_string())),
    ("gpu", 4, 0, |(_, device)| device.map_or("-".into(), |device| device.device.to_string())),
    ("held", 12, 0, |(_, device)| device.map_or("-".into(), |device| iec(device.driver_bytes))),
    ("allocated", 12, 0, |row| of_torch(row, |torch| iec(torch.allocated_bytes))),
    ("reserved", 12, 0, |row| of_torch(row, |torch| iec(torch.reserved_bytes))),
    ("unused", 8, 0, |row| of_torch(row, |torch| format!("{:.1} %", torch.unused_share * 100.0))),
    ("stranded", 12, 120, |row| of_torch(row, |torch| iec(torch.stranded_bytes))),
    ("unaccounted", 13, 100, |(_, device)| {
        device.and_then(|device| device.unaccounted_bytes).map_or("-".into(), signed)
    }),
    ("req/s", 8, 0, |(process, _)| rate(process.requests_per_s)),
    ("bytes/s", 12, 130, |(process, _)| iec(process.requested_bytes_per_s as u64)),
    ("nccl", 5, 110, |(process, _)| process.nccl.in_flight.to_string()),
    ("seen", 9, 100, |(process, _)| seen(process)),
    ("program", 0, 0, |(process, _)| clean(&process.program())),
];

fn of_torch(
    row: &Row<'_>,
    value: fn(&crate::commands::parts::live::figures::TorchFigures) -> String,
) -> String {
    row.1.and_then(|device| device.torch.as_ref()).map_or("-".to_owned(), value)
}

fn seen(process: &ProcessFigures) -> String {
    match process.age_ns {
        _ if process.has_ended() || process.suspended.is_some() => process.state.to_owned(),
        _ if process.behind => "reading".to_owned(),
        Some(age) if age < 600_000_000_000 => format!("{:.1} s", age as f64 / 1e9),
        Some(age) => format!("{} min", age / 60_000_000_000),
        None => "-".to_owned(),
    }
}

fn table(rows: &[Row<'_>], view: &View, width: usize, has_cursor: bool) -> Vec<Line> {
    let columns = || COLUMNS.iter().filter(|(_, _, least, _)| width >= *least);
    let cell = |text: String, room: usize| match room {
        0 => format!("  {text}"),
        // The program is the only one that is read from the left.
        _ => format!("{:>room$}", shortened(&text, room - 1)),
    };
    let heading: String = columns().map(|(name, room, ..)| cell((*name).to_owned(), *room)).collect();
    let mut lines = vec![Line::of(heading, Look::Bold)];
    for (n, row) in rows.iter().enumerate() {
        let text: String = columns().map(|(_, room, _, value)| cell(value(row), *room)).collect();
        let look = match (has_cursor && n == view.chosen, row.0.has_ended()) {
            (true, _) => Look::Chosen,
            (false, true) => Look::Dim,
            (false, false) => Look::Plain,
        };
        lines.push(Line::of(text, look));
    }
    lines
}

/// One process with all that is known of it.
fn parts(process: &ProcessFigures, most: usize) -> Vec<Line> {
    let rank = process.rank.map(|rank| format!(" rank {rank}")).unwrap_or_default();
    let mut lines = vec![
        Line::of(format!("process {}{rank}", process.pid), Look::Bold)
            .and(format!("  {}", clean(&process.program())), Look::Plain),
    ];
    let fact = |name: &str, text: String| Line::of(format!("  {name:<13}"), Look::Dim).and(text, Look::Plain);
    lines.push(fact(
        "trace",
        format!("{}  {} events, {}", clean(&process.trace), count(process.events), seen(process)),
    ));
    let place = place_of(process);
    if !place.is_empty() {
        lines.push(fact("where", place));
    }
    for doubt in doubts(process) {
        lines.push(Line::of(format!("  warning: {doubt}"), Look::Warning));
    }
    if process.host_bytes > 0 {
        lines.push(fact("pinned host", iec(process.host_bytes)));
    }
    for device in &process.devices {
        lines.extend(device_lines(device, most, &fact));
    }
    let nccl = &process.nccl;
    if nccl.communicators > 0 {
        let memory = iec(nccl.device_bytes);
        let text =
            format!("{memory}; communicators: {}, calls in flight: {}", nccl.communicators, nccl.in_flight);
        lines.push(fact("NCCL", text));
    }
    for call in nccl.calls.iter().take(most) {
        let time = call.for_ns.map(|ns| format!(" for {:.1} s", ns as f64 / 1e9)).unwrap_or_default();
        lines.push(fact("  in", format!("{}{time}  {}", clean(&call.operation), clean(&call.at))));
    }
    lines
}

fn device_lines(device: &DeviceFigures, most: usize, fact: &dyn Fn(&str, String) -> Line) -> Vec<Line> {
    let mut held = format!("{} held, at most {}", iec(device.driver_bytes), iec(device.driver_peak_bytes));
    if let Some(used) = device.process_used_bytes {
        held += &format!("; the driver charges {}", iec(used));
        held += &device.context_bytes.map(|it| format!(", context about {}", iec(it))).unwrap_or_default();
        held +=
            &device.unaccounted_bytes.map(|it| format!(", unaccounted {}", signed(it))).unwrap_or_default();
    }
    let mut lines = vec![fact(&format!("cuda:{}", device.device), held)];
    let owners: Vec<String> =
        device.owners.iter().map(|it| format!("{} {}", clean(&it.owner), iec(it.bytes))).collect();
    if !owners.is_empty() {
        lines.push(fact("  owners", owners.join(", ")));
    }
    if let Some(torch) = &device.torch {
        lines.push(fact(
            "  PyTorch",
            format!(
                "{} allocated ({} requested) of {} reserved; {:.1} % unused",
                iec(torch.allocated_bytes),
                iec(torch.requested_bytes),
                iec(torch.reserved_bytes),
                torch.unused_share * 100.0
            ),
        ));
        lines.push(fact(
            "  pieces",
            format!(
                "{} segments, {} stranded, largest free block {}",
                count(torch.segments),
                iec(torch.stranded_bytes),
                iec(torch.largest_free_bytes)
            ),
        ));
        for pool in &torch.pools {
            let gone = if pool.abandoned { "; nothing can use it" } else { "" };
            let (reserved, allocated) = (iec(pool.reserved_bytes), iec(pool.allocated_bytes));
            lines.push(fact(
                "  pool",
                format!("{} {reserved} reserved, {allocated} allocated{gone}", pool.pool),
            ));
        }
        if torch.ooms > 0 {
            lines.push(Line::of(
                format!("  warning: PyTorch ran out of memory {} times", torch.ooms),
                Look::Warning,
            ));
        }
    }
    if let Some(buffers) = device.jax_buffer_bytes {
        lines.push(fact("  JAX buffers", iec(buffers)));
    }
    for line in device.lines.iter().take(most) {
        lines.push(fact(
            "  line",
            format!("{:>11}  {}  {}", iec(line.bytes), clean(&line.owner), clean(&line.site)),
        ));
    }
    lines
}

fn place_of(process: &ProcessFigures) -> String {
    let place = &process.surroundings;
    let short = |id: &String| clean(&id.chars().take(12).collect::<String>());
    let named = [
        ("host ", Some(clean(&process.host)).filter(|host| !host.is_empty())),
        ("container ", place.container.as_ref().map(short)),
        ("pod ", place.pod.as_deref().map(clean)),
        ("namespace ", place.namespace.as_deref().map(clean)),
        ("Slurm job ", place.slurm_job.as_deref().map(clean)),
        ("pid here ", process.pid_here.map(|pid| pid.to_string())),
        ("not known: ", place.unknown.as_deref().map(clean)),
    ];
    let parts = named.into_iter().filter_map(|(name, value)| Some(format!("{name}{}", value?)));
    parts.collect::<Vec<_>>().join(", ")
}

fn doubts(process: &ProcessFigures) -> Vec<String> {
    let mut doubts: Vec<String> =
        process.suspended.iter().chain(&process.gpu_faults).map(|it| clean(it)).collect();
    if process.lost_events > 0 {
        doubts.push(format!("{} events were lost: figures may be wrong", count(process.lost_events)));
    }
    doubts.extend(process.damage.iter().map(|damage| clean(damage)));
    if process.behind {
        doubts.push("more of the trace has not been read yet".to_owned());
    }
    if process.state == "not written" {
        doubts.push("its recorder is not visible, and the trace has no end: it may be from another host, or its recorder was killed".to_owned());
    }
    doubts
}

fn iec(amount: u64) -> String {
    bytes(Bytes(amount))
}

fn signed(amount: i64) -> String {
    let sign = if amount < 0 { "-" } else { "" };
    format!("{sign}{}", iec(amount.unsigned_abs()))
}

fn rate(rate: f64) -> String {
    if rate < 10_000.0 { format!("{rate:.0}") } else { format!("{:.0}k", rate / 1e3) }
}

fn clean(text: &str) -> String {
    printable(text).into_owned()
}

/// Cut to so many columns: letters of Chinese or Japanese take two, accents none.
fn shortened(text: &str, room: usize) -> String {
    if text.width() <= room {
        return text.to_owned();
    }
    let mut left = room.saturating_sub(1);
    let fits = |letter: &char| {
        let width = letter.width().unwrap_or(0);
        let fits = width <= left;
        left = left.saturating_sub(width);
        fits
    };
    let mut short: String = text.chars().take_while(fits).collect();
    if room > 0 {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::{Line, Look, shortened};

    #[test]
    fn columns_of_the_screen_are_counted_and_not_letters() {
        assert_eq!(shortened("python3 訓練.py", 11), "python3 訓…");
        assert_eq!(shortened("python3 訓練.py", 12), "python3 訓…");
        assert_eq!(shortened("python3 訓練.py", 15), "python3 訓練.py");
        assert_eq!(shortened("e\u{301}te\u{301}", 3), "e\u{301}te\u{301}");
        assert_eq!((shortened("abc", 0), shortened("abc", 1)), (String::new(), "…".to_owned()));
        let line = Line::of("訓練 ", Look::Bold).and("python3", Look::Plain).cut(8);
        assert_eq!(line.text(), "訓練 py…");
    }
}
