//! The short form of a report, for a terminal on which its sections would scroll away: the verdict, and five lines about the fullest device.

use gputrace_trace::words;

use crate::model::{Item, Mood, Part, Section, Table, Value};
use crate::sections::memory::TORCH_PEAKS;

/// Entries of a line; the others are counted.
const MOST: usize = 3;

/// The verdict and five lines; `more` is the command that shows the rest.
#[must_use]
pub fn brief(part: &Part, more: &str) -> Part {
    let devices = Rows::of(part, "memory", "devices");
    let peak = |row: &&[Value]| bytes(devices.get(row, "peak_bytes"));
    let mut section = match devices.all().max_by_key(peak) {
        None => Section::new("brief", "No memory of a device was handed out"),
        Some(row) => of_device(part, &devices, row),
    };
    // What makes these numbers doubtful stands beside them.
    let doubts = part.sections.iter().filter(|section| ["trust", "health"].contains(&&*section.name));
    let is_warning = |item: &&Item| matches!(item, Item::Line(Mood::Warning | Mood::Bad, _));
    section.items.extend(doubts.flat_map(|section| &section.items).find(is_warning).cloned());
    section.items.push(Item::Line(Mood::Command, more.to_owned()));
    Part { sections: vec![section], ..part.clone() }
}

fn of_device(part: &Part, devices: &Rows<'_>, row: &[Value]) -> Section {
    let name = text(devices.get(row, "device"));
    let others = match devices.all().count() - 1 {
        0 => String::new(),
        1 => "; one more device with --all".to_owned(),
        n => format!("; {n} more devices with --all"),
    };
    let when = match (devices.get(row, "peak_time_ns"), devices.get(row, "peak_share")) {
        (Value::Time(at), Value::Share(share)) => {
            format!("at {}, {:.1} % of the device", words::time(*at), share * 100.0)
        }
        (Value::Time(at), _) => format!("at {}", words::time(*at)),
        _ => String::new(),
    };
    let peak = devices.get(row, "peak_bytes").clone();
    let mut section =
        Section::new("brief", format!("Memory of {name}{others}")).remark("peak_bytes", "peak", peak, when);
    if let Some(peaks) = line_of(part, "memory", &format!("{name}: {TORCH_PEAKS}: ")) {
        section = section.fact("torch", TORCH_PEAKS, Value::text(peaks));
    }
    let held =
        |table, column, bytes, most| listed(&Rows::of(part, table, table), name, (column, bytes), most);
    let lists = [
        ("owners", "owners", held("owners", "owner", "bytes_at_peak", MOST)),
        ("roles", "used for", held("roles", "role", "bytes_at_peak", MOST)),
        ("call_site", "top call site", held("call_sites", "call_site", "bytes", 1)),
    ];
    for (name, label, list) in lists {
        if !list.is_empty() {
            section = section.fact(name, label, Value::Text(list));
        }
    }
    section
}

/// What follows `begin` in a line of a section. Columns show other figures of PyTorch: those at the device's peak.
fn line_of<'a>(part: &'a Part, section: &str, begin: &str) -> Option<&'a str> {
    let items = part.sections.iter().filter(|it| it.name == section).flat_map(|it| &it.items);
    items
        .filter_map(|item| if let Item::Line(_, line) = item { line.strip_prefix(begin) } else { None })
        .next()
}

/// What holds most on a device, in one line.
fn listed(rows: &Rows<'_>, device: &str, (column, held): (&str, &str), most: usize) -> String {
    let is_own = |row: &&[Value]| {
        let rest = device.strip_prefix(text(rows.get(row, "device")));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' ')) && bytes(rows.get(row, held)) > 0
    };
    let mut own: Vec<&[Value]> = rows.all().filter(is_own).collect();
    own.sort_by_key(|row| std::cmp::Reverse(bytes(rows.get(row, held))));
    let entry = |row: &&[Value]| match rows.get(row, held) {
        Value::Bytes(bytes) => format!("{} {}", words::bytes(*bytes), text(rows.get(row, column))),
        _ => String::new(),
    };
    let mut list: Vec<String> = own.iter().take(most).map(entry).collect();
    if own.len() > most && most > 1 {
        list.push(format!("{} more", own.len() - most));
    }
    list.join(", ")
}

fn bytes(value: &Value) -> u64 {
    if let Value::Bytes(bytes) = value { bytes.0 } else { 0 }
}

fn text(value: &Value) -> &str {
    if let Value::Text(text) = value { text } else { "" }
}

/// A table of a report, by the names of its columns; empty where the report does not have it.
struct Rows<'a>(Vec<&'a Table>);

impl<'a> Rows<'a> {
    fn of(part: &'a Part, section: &str, name: &str) -> Rows<'a> {
        let items = part.sections.iter().filter(|it| it.name == section).flat_map(|it| &it.items);
        let tables = items.filter_map(|item| match item {
            Item::Table(table) if table.name == name => Some(table),
            Item::Table(_) | Item::Fact { .. } | Item::Chart(_) | Item::Line(..) => None,
        });
        Rows(tables.collect())
    }

    fn all(&self) -> impl Iterator<Item = &'a [Value]> {
        self.0.iter().flat_map(|table| table.rows.iter().map(Vec::as_slice))
    }

    fn get(&self, row: &'a [Value], column: &str) -> &'a Value {
        let at = self.0.first().and_then(|table| table.columns.iter().position(|it| it.name == column));
        at.and_then(|at| row.get(at)).unwrap_or(&Value::Missing)
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use gputrace_schemas::event::{Bytes, Nanos};

    use super::*;
    use crate::model::Report;
    use crate::render::text;

    fn mib(n: u64) -> Value {
        Value::Bytes(Bytes(n << 20))
    }

    fn section(
        name: &'static str,
        columns: &[(&'static str, &'static str)],
        rows: Vec<Vec<Value>>,
    ) -> Section {
        Section::new(if name == "devices" { "memory" } else { name }, "")
            .table(Table { rows, ..Table::new(name, columns) })
    }

    #[test]
    fn the_fullest_device_has_five_lines_and_its_doubts() {
        let device = [("device", ""), ("peak_bytes", ""), ("peak_time_ns", ""), ("peak_share", "")];
        let of = |name: &str, n| {
            let time = Value::Time(Nanos(1_500_000));
            vec![Value::text(name), mib(n), time, Value::Share(0.25)]
        };
        let held = |device: &str, what: &str, n| vec![Value::text(device), Value::text(what), mib(n)];
        let owner = [("device", ""), ("owner", ""), ("bytes_at_peak", "")];
        let owners = [("a", 1), ("b", 4), ("c", 3), ("d", 2), ("gone", 0)];
        let owners = owners.map(|(what, n)| held("cuda:1", what, n)).into_iter();
        let sites = [("device", ""), ("call_site", ""), ("bytes", "")];
        let sections = vec![
            section("devices", &device, vec![of("cuda:0 A", 10), of("cuda:1 A", 40), of("cuda:11 A", 20)])
                .lines(vec![
                    (
                        Mood::Note,
                        "cuda:11 A: PyTorch's peaks: requested 1 B, allocated 2 B, reserved 3 B".to_owned(),
                    ),
                    (
                        Mood::Note,
                        "cuda:1 A: PyTorch's peaks: requested 4 B, allocated 5 B, reserved 6 B".to_owned(),
                    ),
                ]),
            section("owners", &owner, owners.chain([held("cuda:11", "else", 9)]).collect()),
            section("call_sites", &sites, vec![held("cuda:1", "main (a.py:2)", 8)]),
            Section::new("trust", "").line(Mood::Warning, "3 events were lost"),
        ];
        let part = Part { sections, ..Part::default() };
        let report = Report { verb: "report", parts: vec![brief(&part, "gputrace report --all a.gtr")] };
        let style = text::Style { width: None, color: false, letters: text::Letters::Unicode };
        let mut shown = vec![];
        text::render(&report, style, &mut shown).expect("memory can be written to");
        expect![[r#"
            Memory of cuda:1 A; 2 more devices with --all
              peak             40.00 MiB  at 1.5 ms, 25.0 % of the device
              PyTorch's peaks  requested 4 B, allocated 5 B, reserved 6 B
              owners           4.00 MiB b, 3.00 MiB c, 2.00 MiB d, 1 more
              top call site    8.00 MiB main (a.py:2)
              warning: 3 events were lost
              gputrace report --all a.gtr
        "#]]
        .assert_eq(&String::from_utf8(shown).expect("text"));
        assert!(brief(&Part::default(), "").sections[0].title.contains("No memory"));
    }
}
