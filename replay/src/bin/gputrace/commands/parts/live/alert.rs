//! Conditions on the figures of a process, as people write them: `used>90%`, `reserved>60GiB`, `growth>10MiB/step`.

use std::collections::BTreeMap;
use std::str::FromStr;

use gputrace_replay::trace::words;
use gputrace_schemas::event::{Bytes, Nanos};
use gputrace_sim::bytes;

use super::figures::{DeviceFigures, Figures, ProcessFigures};

/// A condition that has come true holds until the figure is this part below its bound: one that lies on it is one crossing.
const SLACK: f64 = 0.98;

/// A condition.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Alert {
    /// As it was written.
    pub(crate) text: String,
    quantity: Quantity,
    bound: Bound,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Quantity {
    Used,
    Held,
    Reserved,
    Allocated,
    Unused,
    Unaccounted,
    Nccl,
    Hang,
    Growth,
}

const QUANTITIES: [(&str, Quantity); 9] = [
    ("used", Quantity::Used),
    ("held", Quantity::Held),
    ("reserved", Quantity::Reserved),
    ("allocated", Quantity::Allocated),
    ("unused", Quantity::Unused),
    ("unaccounted", Quantity::Unaccounted),
    ("nccl", Quantity::Nccl),
    ("hang", Quantity::Hang),
    ("growth", Quantity::Growth),
];

#[derive(Clone, Copy, PartialEq, Debug)]
enum Bound {
    Bytes(u64),
    /// Of the device; of what is reserved for `unused`.
    Percent(f64),
    PerStep(u64),
    Time(Nanos),
}

impl FromStr for Alert {
    type Err = String;

    fn from_str(text: &str) -> Result<Alert, String> {
        const HELP: &str = "write used>90%, held>60GiB, reserved>80%, allocated>40GiB, unused>30%, unaccounted>1GiB, nccl>60s, hang>120s or growth>10MiB/step";
        let wrong = || format!("`{text}` is not a condition; {HELP}");
        let (name, bound) = text.split_once('>').ok_or_else(wrong)?;
        let (name, bound) = (name.trim(), bound.trim());
        let quantity = QUANTITIES.iter().find(|(known, _)| *known == name).ok_or_else(wrong)?.1;
        let number = |text: &str| text.trim().parse::<f64>().ok().filter(|it| it.is_finite() && *it >= 0.0);
        let bound = match quantity {
            Quantity::Growth => {
                let step = bound.strip_suffix("/step").ok_or_else(wrong)?;
                Bound::PerStep(bytes::parse(step.trim()).map_err(|_| wrong())?)
            }
            Quantity::Nccl | Quantity::Hang => {
                let (amount, unit) =
                    bound.split_at(bound.find(|c: char| c.is_alphabetic()).ok_or_else(wrong)?);
                let seconds = match unit {
                    "s" => 1.0,
                    "min" => 60.0,
                    _ => return Err(wrong()),
                };
                Bound::Time(Nanos((number(amount).ok_or_else(wrong)? * seconds * 1e9) as u64))
            }
            _ => match bound.strip_suffix('%') {
                Some(_) if quantity == Quantity::Unaccounted => return Err(wrong()),
                Some(share) => {
                    Bound::Percent(number(share).filter(|share| *share <= 100.0).ok_or_else(wrong)?)
                }
                None => Bound::Bytes(bytes::parse(bound).map_err(|_| wrong())?),
            },
        };
        Ok(Alert { text: text.to_owned(), quantity, bound })
    }
}

/// A condition that has come true.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Crossing {
    /// The condition, as it was written.
    pub(crate) alert: String,
    /// The figure, in words.
    pub(crate) value: String,
    pub(crate) pid: u32,
    pub(crate) rank: Option<u32>,
    pub(crate) trace: String,
    /// Of the process; `None` where it is not of one device.
    pub(crate) device: Option<i16>,
}

/// Which conditions hold, of which process and device.
#[derive(Default)]
pub(crate) struct Judge {
    alerts: Vec<Alert>,
    held: BTreeMap<(usize, (u64, u64), i16), Held>,
    /// Conditions that could be judged at least once.
    judged: Vec<bool>,
}

#[derive(Clone, Copy, Default)]
struct Held {
    is_over: bool,
    /// The largest amount that was seen.
    most: f64,
}

/// What a condition is about, now.
struct Now {
    value: f64,
    bound: f64,
    /// The largest ever, where that is known: what lay between two looks.
    peak: Option<f64>,
}

impl Judge {
    pub(crate) fn new(alerts: Vec<Alert>) -> Judge {
        let judged = vec![false; alerts.len()];
        Judge { alerts, held: BTreeMap::new(), judged }
    }

    /// Whether growth is asked for, which costs more to know.
    pub(crate) fn wants_growth(&self) -> bool {
        self.alerts.iter().any(|alert| alert.quantity == Quantity::Growth)
    }

    /// What has come true since it was asked last. `growth` is what a process grows by each step, where that is known.
    pub(crate) fn judge(
        &mut self,
        figures: &Figures,
        growth: impl Fn(&ProcessFigures) -> Option<f64>,
    ) -> Vec<Crossing> {
        let mut crossings = vec![];
        for (n, alert) in self.alerts.iter().enumerate() {
            for process in &figures.processes {
                let places: Vec<(Option<&DeviceFigures>, Option<Now>)> = match alert.quantity {
                    Quantity::Nccl => vec![(None, alert.of_nccl(process))],
                    Quantity::Hang => vec![(None, alert.of_hang(figures, process))],
                    Quantity::Growth => vec![(None, alert.of_growth(growth(process)))],
                    _ => {
                        process.devices.iter().map(|device| (Some(device), alert.of_device(device))).collect()
                    }
                };
                for (device, now) in places {
                    let Some(now) = now else { continue };
                    self.judged[n] = true;
                    let ordinal = device.map(|device| device.device);
                    let key = (n, process.key, ordinal.unwrap_or(i16::MIN));
                    let held = self.held.entry(key).or_default();
                    let Some(value) = held.crosses(&now) else { continue };
                    crossings.push(Crossing {
                        alert: alert.text.clone(),
                        value: alert.shown(value),
                        pid: process.pid,
                        rank: process.rank,
                        trace: process.trace.clone(),
                        device: ordinal,
                    });
                }
            }
        }
        crossings
    }

    /// Conditions that nothing was ever known of.
    pub(crate) fn never_judged(&self) -> impl Iterator<Item = &str> {
        let all = self.alerts.iter().zip(&self.judged);
        all.filter(|(_, judged)| !**judged).map(|(alert, _)| alert.text.as_str())
    }
}

impl Held {
    /// The figure, if it has gone over its bound since the last look.
    fn crosses(&mut self, now: &Now) -> Option<f64> {
        let spike = now.peak.filter(|peak| *peak > self.most && *peak > now.bound);
        self.most = self.most.max(now.peak.unwrap_or(now.value));
        let was_over = self.is_over;
        self.is_over = now.value > now.bound || (was_over && now.value > now.bound * SLACK);
        match (was_over, self.is_over) {
            (false, true) => Some(now.value),
            // It came and went between two looks.
            (false, false) => spike,
            (true, _) => None,
        }
    }
}

impl Alert {
    fn of_device(&self, device: &DeviceFigures) -> Option<Now> {
        let torch = device.torch.as_ref();
        let (value, peak, whole) = match self.quantity {
            Quantity::Used => (device.device_used_bytes?, None, device.total_bytes),
            Quantity::Held => (device.driver_bytes, Some(device.driver_peak_bytes), device.total_bytes),
            Quantity::Reserved => {
                (torch?.reserved_bytes, Some(torch?.peak_reserved_bytes), device.total_bytes)
            }
            Quantity::Allocated => {
                (torch?.allocated_bytes, Some(torch?.peak_allocated_bytes), device.total_bytes)
            }
            Quantity::Unused => {
                let torch = torch?;
                (torch.reserved_bytes.saturating_sub(torch.allocated_bytes), None, Some(torch.reserved_bytes))
            }
            Quantity::Unaccounted => (u64::try_from(device.unaccounted_bytes?).unwrap_or(0), None, None),
            Quantity::Nccl | Quantity::Hang | Quantity::Growth => return None,
        };
        let scale = match self.bound {
            Bound::Percent(_) => 100.0 / whole.filter(|whole| *whole > 0)? as f64,
            Bound::Bytes(_) | Bound::PerStep(_) | Bound::Time(_) => 1.0,
        };
        let peak = peak.map(|peak| peak as f64 * scale);
        Some(Now { value: value as f64 * scale, bound: self.limit(), peak })
    }

    fn of_nccl(&self, process: &ProcessFigures) -> Option<Now> {
        let oldest = process.nccl.calls.iter().filter_map(|call| call.for_ns).max();
        // A process that does not use NCCL waits for nobody.
        Some(Now { value: oldest.unwrap_or(0) as f64, bound: self.limit(), peak: None })
    }

    /// Of the rank that is at fault, so that a hang is one crossing and not one for each that waits.
    fn of_hang(&self, figures: &Figures, process: &ProcessFigures) -> Option<Now> {
        let hang = figures.hangs.iter().find(|hang| hang.hangs && hang.trace == process.trace);
        Some(Now { value: hang.map_or(0, |hang| hang.for_ns) as f64, bound: self.limit(), peak: None })
    }

    fn of_growth(&self, growth: Option<f64>) -> Option<Now> {
        Some(Now { value: growth?, bound: self.limit(), peak: None })
    }

    fn limit(&self) -> f64 {
        match self.bound {
            Bound::Bytes(bytes) | Bound::PerStep(bytes) => bytes as f64,
            Bound::Percent(share) => share,
            Bound::Time(time) => time.0 as f64,
        }
    }

    fn shown(&self, value: f64) -> String {
        match self.bound {
            Bound::Bytes(_) => words::bytes(Bytes(value as u64)),
            Bound::Percent(_) => format!("{value:.1} %"),
            Bound::PerStep(_) => format!("{} a step", words::bytes(Bytes(value as u64))),
            Bound::Time(_) => words::time(Nanos(value as u64)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_read_and_others_are_refused_with_examples() {
        let read = |text: &str| text.parse::<Alert>().map(|alert| (alert.quantity, alert.limit()));
        assert_eq!(read("used>90%"), Ok((Quantity::Used, 90.0)));
        assert_eq!(read(" reserved > 1GiB "), Ok((Quantity::Reserved, (1u64 << 30) as f64)));
        assert_eq!(read("growth>10MiB/step"), Ok((Quantity::Growth, (10u64 << 20) as f64)));
        assert_eq!(read("nccl>1.5min"), Ok((Quantity::Nccl, 90e9)));
        assert_eq!(read("hang>120s"), Ok((Quantity::Hang, 120e9)));
        for wrong in [
            "",
            "used",
            "used<90%",
            "used>",
            "used>101%",
            "used>x",
            "free>1GiB",
            "growth>1MiB",
            "unaccounted>5%",
            "nccl>5",
            "nccl>5h",
            "hang>5%",
            "used>-1%",
            "used>nan%",
        ] {
            let said = read(wrong).expect_err(wrong);
            assert!(said.contains("growth>10MiB/step"), "{said}");
        }
    }

    #[test]
    fn a_crossing_is_told_once_and_again_after_it_was_below() {
        let mut held = Held::default();
        let mut look = |value: f64, peak: f64| held.crosses(&Now { value, bound: 100.0, peak: Some(peak) });
        let told: Vec<Option<f64>> = [
            (50.0, 50.0),   // below
            (101.0, 101.0), // over
            (105.0, 105.0),
            (99.0, 105.0), // on the bound is no new crossing
            (101.0, 105.0),
            (90.0, 105.0),  // below
            (102.0, 105.0), // over again
            (10.0, 105.0),
            (10.0, 300.0), // came and went between two looks
            (10.0, 300.0),
        ]
        .into_iter()
        .map(|(value, peak)| look(value, peak))
        .collect();
        let expected = [None, Some(101.0), None, None, None, None, Some(102.0), None, Some(300.0), None];
        assert_eq!(told, expected);
    }
}
