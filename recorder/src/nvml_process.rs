//! Which of the processes that NVML lists is ours.
//!
//! NVML numbers processes as the host does, on most drivers also inside of a container, where our process has another
//! number, and where a process of its number in the list can be a stranger. So a number is believed where it means the
//! same to both: in the initial PID namespace. Elsewhere a process is ours if it is the only one on a device on which
//! ours has memory, or if its figure changed as what the driver handed out to ours did.

use std::collections::{HashMap, VecDeque};

/// Inode of the namespace that Linux begins with (`include/linux/proc_ns.h`, PROC_PID_INIT_INO).
const INITIAL_NAMESPACE: u64 = 0xEFFF_FFFC;
/// What happens so shortly before or after a list may be in it or not: calls take time, and so does NVML. Nanoseconds.
const BLUR: u64 = 30_000_000;
/// Smallest change that counts: below, the driver's own pages decide (2 MiB each).
const LEAST_CHANGE: i64 = 4 << 20;
/// How far a change may be off: pages, and what the driver needs for itself.
const PAGE: i64 = 2 << 20;
/// Changes that must agree; of a process that has our number besides, fewer.
const ENOUGH: u32 = 3;
const ENOUGH_WITH_NUMBER: u32 = 1;
/// Lists that wait until it is known what had been handed out then.
const MOST_LISTS: usize = 64;
/// Changes of what is handed out that are remembered for them.
const MOST_CHANGES: usize = 1 << 14;
/// Processes whose agreement is counted.
const MOST_PROCESSES: usize = 256;

/// Numbers of our process that NVML may know it by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Numbers {
    /// That of the initial namespace.
    sure: Option<u32>,
    /// Those of other namespaces: the same number in the list may be anybody's.
    likely: Vec<u32>,
}

impl Numbers {
    /// `ours` is the inode of our own namespace, `visible` the process's numbers from there inwards.
    pub(crate) fn new(ours: u64, visible: Vec<u32>) -> Numbers {
        match visible.first() {
            Some(first) if ours == INITIAL_NAMESPACE => Numbers { sure: Some(*first), likely: Vec::new() },
            _ => Numbers { sure: None, likely: visible },
        }
    }

    /// Whether nothing else is needed to find the process.
    pub(crate) fn are_sure(&self) -> bool {
        self.sure.is_some()
    }
}

/// How the process was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    Number,
    OnlyProcess,
    Changes,
}

impl Way {
    /// As a note of the trace says it: `nvml.process=WAY NUMBER`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Number => "by pid",
            Way::OnlyProcess => "only process",
            Way::Changes => "by its changes",
        }
    }
}

/// What the driver has handed out on a device since then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HandedOut {
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub(crate) time: u64,
    pub(crate) device: i16,
    pub(crate) bytes: u64,
}

/// The processes on a device at a time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Listed {
    pub(crate) time: u64,
    pub(crate) device: i16,
    /// Number and bytes, which NVML does not tell everywhere.
    pub(crate) processes: Vec<(u32, Option<u64>)>,
}

/// Looks for the process until it is found.
pub(crate) struct Finder {
    numbers: Numbers,
    found: Option<(u32, Way)>,
    handed_out: HashMap<i16, VecDeque<HandedOut>>,
    /// Everything that was handed out before is known.
    known_until: u64,
    waiting: VecDeque<Listed>,
    /// The last list of a device at whose time nothing was handed out or given back, and what was out then.
    quiet: HashMap<i16, (Listed, u64)>,
    scores: HashMap<u32, Score>,
}

/// How often a process's figure changed as ours should have, and how often not.
#[derive(Clone, Copy, Default)]
struct Score {
    agreed: u32,
    differed: u32,
}

impl Finder {
    pub(crate) fn new(numbers: Numbers) -> Finder {
        Finder {
            numbers,
            found: None,
            handed_out: HashMap::new(),
            known_until: 0,
            waiting: VecDeque::new(),
            quiet: HashMap::new(),
            scores: HashMap::new(),
        }
    }

    /// NVML's number of our process, and how it is known.
    pub(crate) fn found(&self) -> Option<(u32, Way)> {
        self.found
    }

    /// Whether it would help to know what is handed out.
    pub(crate) fn wants_more(&self) -> bool {
        self.found.is_none() && !self.numbers.are_sure()
    }

    /// Everything that was handed out or given back until then.
    pub(crate) fn handed_out(&mut self, until: u64, changes: Vec<HandedOut>) {
        if !self.wants_more() {
            return;
        }
        for change in changes {
            let changes = self.handed_out.entry(change.device).or_default();
            if changes.len() == MOST_CHANGES {
                changes.pop_front();
            }
            changes.push_back(change);
        }
        self.known_until = self.known_until.max(until);
        self.judge();
    }

    /// What NVML lists.
    pub(crate) fn listed(&mut self, listed: &Listed) {
        if self.found.is_some() {
            return;
        }
        let is_listed = |number: &u32| listed.processes.iter().any(|(listed, _)| listed == number);
        if let Some(sure) = self.numbers.sure {
            self.found = is_listed(&sure).then_some((sure, Way::Number));
            return;
        }
        // Nobody else is there whose number it could be.
        if let [(only, _)] = listed.processes.as_slice()
            && self.numbers.likely.contains(only)
        {
            self.found = Some((*only, Way::Number));
            return;
        }
        if self.waiting.len() == MOST_LISTS {
            self.waiting.pop_front();
        }
        self.waiting.push_back(listed.clone());
        self.judge();
    }

    /// Compares the lists of which it is known by now what had been handed out.
    fn judge(&mut self) {
        while self.found.is_none()
            && self.waiting.front().is_some_and(|listed| listed.time.saturating_add(BLUR) <= self.known_until)
            && let Some(listed) = self.waiting.pop_front()
        {
            self.judge_list(listed);
        }
    }

    fn judge_list(&mut self, listed: Listed) {
        let (least, most) = self.out_at(listed.device, listed.time);
        // Whoever has memory is listed, so who is listed alone is who has it.
        if let [(only, Some(bytes))] = listed.processes.as_slice()
            && least > 0
            && *bytes >= least
        {
            self.found = Some((*only, Way::OnlyProcess));
            return;
        }
        if least != most {
            return;
        }
        let before = self.quiet.insert(listed.device, (listed.clone(), most));
        if let Some((before, out_before)) = before {
            self.compare(&before, &listed, most as i64 - out_before as i64);
            self.elect();
        }
    }

    /// Least and most that was out around a time.
    fn out_at(&mut self, device: i16, time: u64) -> (u64, u64) {
        let Some(changes) = self.handed_out.get_mut(&device) else { return (0, 0) };
        // Lists come in the order of their times, so what is older than the newest that is old enough is not needed.
        while changes.get(1).is_some_and(|next| next.time + BLUR <= time) {
            changes.pop_front();
        }
        let began =
            changes.front().map_or(0, |first| if first.time + BLUR <= time { first.bytes } else { 0 });
        let around =
            changes.iter().take_while(|change| change.time <= time + BLUR).map(|change| change.bytes);
        around.fold((began, began), |(least, most), bytes| (least.min(bytes), most.max(bytes)))
    }

    fn compare(&mut self, before: &Listed, now: &Listed, ours: i64) {
        if ours.abs() < LEAST_CHANGE {
            return;
        }
        for (number, bytes) in &now.processes {
            let old = before.processes.iter().find(|(old, _)| old == number);
            let (Some(bytes), Some((_, Some(old)))) = (bytes, old) else { continue };
            if self.scores.len() == MOST_PROCESSES && !self.scores.contains_key(number) {
                continue;
            }
            let differs = (*bytes as i64).wrapping_sub(*old as i64).wrapping_sub(ours);
            let score = self.scores.entry(*number).or_default();
            if differs.saturating_abs() <= PAGE + ours.abs() / 16 {
                score.agreed += 1;
            } else {
                score.differed += 1;
            }
        }
    }

    /// Ours is whose changes agree, if those of nobody else do nearly as often: ranks that share a device work in step.
    fn elect(&mut self) {
        let enough =
            |number: &u32| if self.numbers.likely.contains(number) { ENOUGH_WITH_NUMBER } else { ENOUGH };
        let agrees = |(number, score): &(&u32, &Score)| {
            score.agreed >= enough(number) && score.agreed > 2 * score.differed
        };
        let mut agreeing: Vec<(&u32, &Score)> = self.scores.iter().filter(agrees).collect();
        agreeing.sort_unstable_by_key(|(_, score)| std::cmp::Reverse(score.agreed));
        let Some((best, score)) = agreeing.first() else { return };
        let is_alone =
            self.scores.iter().all(|(number, other)| number == *best || 2 * other.agreed < score.agreed);
        if is_alone {
            let way = if self.numbers.likely.contains(best) { Way::Number } else { Way::Changes };
            self.found = Some((**best, way));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    /// Between two lists.
    const STEP: u64 = 200_000_000;

    fn in_a_container(number: u32) -> Finder {
        Finder::new(Numbers::new(7, vec![number]))
    }

    /// Plays lists of one device, a step after each other: what was handed out to us by then, and who had how much, in MiB.
    fn play(finder: &mut Finder, steps: &[(u64, &[(u32, u64)])]) -> Option<(u32, Way)> {
        for (step, (out, processes)) in (1..).zip(steps) {
            let time = step * STEP;
            let change = HandedOut { time: time - STEP / 2, device: 0, bytes: out * MIB };
            let processes = processes.iter().map(|(number, mib)| (*number, Some(mib * MIB))).collect();
            finder.listed(&Listed { time, device: 0, processes });
            finder.handed_out(time + BLUR, vec![change]);
        }
        finder.found()
    }

    #[test]
    fn on_the_host_a_number_is_enough_and_nothing_else_is() {
        let mut finder = Finder::new(Numbers::new(INITIAL_NAMESPACE, vec![4711, 7]));
        assert_eq!(play(&mut finder, &[(10, &[(7, 100)]), (20, &[(7, 110)])]), None);
        assert_eq!(play(&mut finder, &[(30, &[(7, 120), (4711, 0)])]), Some((4711, Way::Number)));
    }

    #[test]
    fn the_only_process_on_a_device_is_ours_once_we_have_memory_there() {
        assert_eq!(play(&mut in_a_container(7), &[(0, &[(4711, 300)]), (0, &[(4711, 300)])]), None);
        assert_eq!(play(&mut in_a_container(7), &[(301, &[(4711, 300)])]), None, "it has less than we do");
        let found = play(&mut in_a_container(7), &[(0, &[(4711, 300)]), (40, &[(4711, 340)])]);
        assert_eq!(found, Some((4711, Way::OnlyProcess)));
        // Some drivers know the container's numbers.
        assert_eq!(play(&mut in_a_container(7), &[(0, &[(7, 300)])]), Some((7, Way::Number)));
    }

    #[test]
    fn a_number_in_a_container_may_be_a_strangers() {
        let stranger: &[(u64, &[(u32, u64)])] = &[
            (0, &[(7, 9_000), (4711, 300)]),
            (64, &[(7, 9_000), (4711, 364)]),
            (512, &[(7, 9_500), (4711, 812)]),
            (0, &[(7, 8_000), (4711, 300)]),
        ];
        assert_eq!(play(&mut in_a_container(7), &stranger[..3]), None);
        assert_eq!(play(&mut in_a_container(7), stranger), Some((4711, Way::Changes)));
        let ours: &[(u64, &[(u32, u64)])] = &[(0, &[(7, 300), (8, 500)]), (64, &[(7, 364), (8, 500)])];
        assert_eq!(play(&mut in_a_container(7), ours), Some((7, Way::Number)));
    }

    #[test]
    fn processes_that_change_in_step_are_not_told_apart() {
        let twins: Vec<(u64, [(u32, u64); 2])> =
            (1..20).map(|n| (n * 64, [(11, 300 + n * 64), (12, 400 + n * 64)])).collect();
        let steps: Vec<(u64, &[(u32, u64)])> =
            twins.iter().map(|(out, listed)| (*out, &listed[..])).collect();
        assert_eq!(play(&mut in_a_container(7), &steps), None);
    }

    #[test]
    fn what_changes_while_nvml_is_asked_proves_nothing() {
        let mut finder = in_a_container(7);
        for n in 1..20 {
            let time = n * STEP;
            let processes = vec![(11, Some(n * 64 * MIB)), (12, Some(5 * MIB))];
            finder.listed(&Listed { time, device: 0, processes });
            let change = HandedOut { time: time + BLUR / 2, device: 0, bytes: n * 64 * MIB };
            finder.handed_out(time + BLUR, vec![change]);
        }
        assert_eq!(finder.found(), None);
    }
}
