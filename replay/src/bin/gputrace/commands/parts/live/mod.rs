//! Processes that are being recorded, as they are now: what `top`, `metrics` and alerts look at.
//!
//! ```text
//!  /proc: recorders and the files they write ── find ──> traces ── follow ──> a Ledger for each ─┐
//!  /proc: control groups, a few variables ──── place ────────────────────────────────────────────┼─ figures ──> Figures
//!  NVML: every process with memory ───────────── recorder's `Gpus` ──────────────────────────────┘
//! ```
//!
//! Nothing here touches a traced process or its ring: files are read, and NVML is asked what it always tells. What is shown is
//! what has reached the trace, which the recorder writes once a second at least.

pub(crate) mod alert;
pub(crate) mod figures;
pub(crate) mod find;
pub(crate) mod follow;
pub(crate) mod hangs;
mod place;

use std::path::PathBuf;

use gputrace_recorder::Gpus;
use gputrace_schemas::event::Nanos;

use figures::{Figures, ProcessFigures};
use find::{Place, Which};
use follow::Live;
use hangs::Hangs;

/// Traces of processes that have ended stay in sight for so many pictures.
const ENDED_SHOWN: u32 = 10;

/// What is followed.
pub(crate) struct Scene {
    which: Which,
    processes: Vec<Followed>,
    gpus: Result<Gpus, String>,
    /// Why a trace is not among them.
    failed: Vec<(PathBuf, String)>,
    watches_growth: bool,
    hangs: Hangs,
}

struct Followed {
    place: Place,
    live: Live,
    /// Pictures since it ended.
    ended: u32,
}

impl Followed {
    /// A bounded recording goes on in other files under its name.
    fn is_of(&self, place: &Place) -> bool {
        let is_bounded = self.live.trace().process().segment > 0 && !self.live.has_ended();
        self.place.key == place.key || (is_bounded && self.place.shown == place.shown)
    }
}

impl Scene {
    /// Follows what `which` names from now on. With `drivers`, NVML is asked for the machine's GPUs too.
    pub(crate) fn new(which: Which, drivers: Drivers) -> Scene {
        let gpus = match drivers {
            Drivers::Asked => Gpus::open(),
            Drivers::NotAsked => Err("not asked".to_owned()),
        };
        Scene {
            which,
            processes: vec![],
            gpus,
            failed: vec![],
            watches_growth: false,
            hangs: Hangs::default(),
        }
    }

    /// Looks who has come, and reads at most so many blocks of each trace. Whether any has more.
    pub(crate) fn advance(&mut self, most: usize) -> bool {
        self.look();
        let now = find::now();
        let mut is_behind = false;
        for followed in &mut self.processes {
            match followed.live.advance(most, now) {
                Ok(behind) => is_behind |= behind,
                Err(error) => followed.live.failed = Some(error.to_string()),
            }
        }
        is_behind
    }

    /// Reads all that is there.
    pub(crate) fn catch_up(&mut self) {
        while self.advance(usize::MAX) {}
    }

    fn look(&mut self) {
        let found = self.which.find();
        for place in found {
            let known = self.processes.iter_mut().find(|followed| followed.is_of(&place));
            if let Some(followed) = known {
                let key = followed.place.key;
                followed.place = place;
                followed.place.key = key;
                continue;
            }
            match Live::open(&place.open) {
                Ok(mut live) => {
                    if self.watches_growth {
                        live.watch_growth();
                    }
                    self.failed.retain(|(path, _)| *path != place.shown);
                    self.processes.push(Followed { place, live, ended: 0 });
                }
                // What has just been begun has no first word yet: it is found again.
                Err(error) => {
                    if !self.failed.iter().any(|(path, _)| *path == place.shown) {
                        self.failed.push((place.shown, error.to_string()));
                    }
                }
            }
        }
    }

    /// From now on it is known how much processes grow by each step.
    pub(crate) fn watch_growth(&mut self) {
        self.watches_growth = true;
    }

    /// How much the process of this trace grows by each step; `None` where its steps are not known.
    pub(crate) fn growth(&self, trace: &str) -> Option<f64> {
        let mut followed = self.processes.iter();
        followed.find(|followed| followed.place.shown.display().to_string() == trace)?.live.growth()
    }

    /// As it is now, by what has been read.
    pub(crate) fn figures(&mut self) -> Figures {
        let gpus = self.gpus.as_ref().map(Gpus::read).map_err(Clone::clone);
        let keeps_all = self.which.keeps_what_ended();
        let now = find::now();
        let mut processes: Vec<ProcessFigures> = vec![];
        for followed in &mut self.processes {
            let figures = figures::of(&followed.place, &followed.live, now);
            if figures.has_ended() && !keeps_all {
                followed.ended += 1;
            }
            processes.push(figures);
        }
        let mut is_kept = self.processes.iter().map(|followed| followed.ended <= ENDED_SHOWN);
        processes.retain(|_| is_kept.next().unwrap_or(true));
        drop(is_kept);
        // Long gone: nothing is remembered but that it was there.
        for followed in self.processes.iter_mut().filter(|followed| followed.ended > ENDED_SHOWN) {
            followed.live.forget();
        }
        let mut figures = Figures::new(processes, gpus);
        figures.hangs = self.hangs.look(self.that_may_hang(now));
        for hang in &mut figures.hangs {
            let of = self.processes.iter().find(|it| it.place.open.display().to_string() == hang.trace);
            if let Some(followed) = of {
                hang.trace = followed.place.shown.display().to_string();
            }
        }
        figures.notes.extend(self.failed.iter().map(|(path, why)| format!("{}: {why}", path.display())));
        figures.notes.extend(self.which.note(figures.processes.len()));
        figures
    }

    /// Waits until it is known which jobs hang: for who looks only once.
    pub(crate) fn find_hangs(&mut self) {
        self.hangs.find(&self.that_may_hang(find::now()));
    }

    /// The traces of all that use NCCL, if one of them is silent: whoever is silent waits for another, or is waited for.
    fn that_may_hang(&self, now: Nanos) -> Vec<PathBuf> {
        let uses_nccl = |followed: &&Followed| followed.live.ledger.communicators().next().is_some();
        let there = self.processes.iter().filter(|followed| followed.ended <= ENDED_SHOWN);
        let those: Vec<&Followed> = there.filter(uses_nccl).collect();
        let is_silent = |followed: &&Followed| {
            let runs = followed.place.is_written && !followed.live.has_ended() && !followed.live.is_behind;
            runs && followed.live.age(now).is_some_and(|age| age > hangs::SILENT)
        };
        match those.iter().any(is_silent) {
            true => those.into_iter().map(|followed| followed.place.open.clone()).collect(),
            false => vec![],
        }
    }

    /// The traces that are followed, and what is known of each.
    pub(crate) fn lives(&self) -> impl Iterator<Item = &Live> {
        self.processes.iter().map(|followed| &followed.live)
    }
}

/// Whether NVML is asked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Drivers {
    Asked,
    NotAsked,
}
