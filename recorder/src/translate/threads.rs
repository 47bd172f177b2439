//! Threads of the process: which of them writes on which line of the ring, and their numbers and names.

use crate::drain::Lane;
use crate::item::{FreeThreads, Item, RECORDER};
use gputrace_schemas::event::{Thread, ThreadId};
use std::collections::HashMap;

/// What the names of autograd's threads begin with (torch/csrc/autograd/engine.cpp, since 2.4).
const ENGINE_THREAD: &str = "pt_autograd";

/// All threads by number, [`RECORDER`] first.
pub(super) struct Threads {
    known: Vec<Thread>,
    lanes: HashMap<Lane, ThreadId>,
    free: FreeThreads,
    /// Names that the program gave to threads, by kernel thread id.
    named: HashMap<u32, String>,
}

impl Threads {
    pub(super) fn new(items: &mut Vec<Item>) -> Threads {
        let (lanes, named) = (HashMap::new(), HashMap::new());
        let mut threads = Threads { known: Vec::new(), lanes, free: FreeThreads::default(), named };
        threads.add(Thread { tid: RECORDER.0, name: "gputrace recorder".to_owned() }, items);
        threads
    }

    /// From here on, threads get numbers that are given back there.
    pub(super) fn take_numbers_from(&mut self, free: FreeThreads) {
        self.free = free;
    }

    /// Begins a life of a thread.
    pub(super) fn begin(&mut self, lane: Lane, thread: Thread, items: &mut Vec<Item>) {
        let id = self.add(thread, items);
        self.lanes.insert(lane, id);
    }

    /// Nothing more will come of a thread.
    pub(super) fn end(&mut self, lane: Lane, items: &mut Vec<Item>) {
        items.extend(self.lanes.remove(&lane).map(Item::ThreadEnded));
    }

    fn add(&mut self, thread: Thread, items: &mut Vec<Item>) -> ThreadId {
        let free = self.free.lock().ok().and_then(|mut free| free.pop());
        let known = free.and_then(|id| Some((id, self.known.get_mut(id.0 as usize)?)));
        let id = match known {
            Some((id, slot)) => {
                slot.clone_from(&thread);
                id
            }
            None => {
                self.known.push(thread.clone());
                ThreadId(self.known.len() as u32 - 1)
            }
        };
        items.push(Item::Thread(id, thread));
        id
    }

    /// Who writes on a line.
    pub(super) fn of(&self, lane: Lane) -> ThreadId {
        self.lanes.get(&lane).copied().unwrap_or(RECORDER)
    }

    /// The newest thread with this kernel thread id, which may never have written.
    pub(super) fn of_tid(&mut self, tid: u32, name: &str, items: &mut Vec<Item>) -> ThreadId {
        match self.known.iter().rposition(|thread| thread.tid == tid) {
            Some(at) => ThreadId(at as u32),
            None => self.add(Thread { tid, name: name.to_owned() }, items),
        }
    }

    /// Whether it is one of autograd's own.
    pub(super) fn is_of_autograd(&self, id: ThreadId) -> bool {
        self.known.get(id.0 as usize).is_some_and(|thread| thread.name.starts_with(ENGINE_THREAD))
    }

    /// The program names a thread, which says more than the kernel's name.
    pub(super) fn name(&mut self, tid: u32, name: &str, items: &mut Vec<Item>) {
        self.named.insert(tid, name.to_owned());
        self.rename(|_| None, items);
    }

    /// Looks for new names of the threads that write: a process may have had a hundred thousand others before.
    pub(super) fn rename(&mut self, name_of: impl Fn(u32) -> Option<String>, items: &mut Vec<Item>) {
        let mut ids: Vec<ThreadId> = self.lanes.values().copied().collect();
        ids.sort_unstable_by_key(|id| id.0);
        for id in ids {
            let Some(thread) = self.known.get_mut(id.0 as usize) else { continue };
            let name = self.named.get(&thread.tid).cloned().or_else(|| name_of(thread.tid));
            if let Some(name) = name.filter(|name| *name != thread.name) {
                thread.name = name;
                items.push(Item::Thread(id, thread.clone()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(tid: u32, name: &str) -> Thread {
        Thread { tid, name: name.to_owned() }
    }

    #[test]
    fn a_number_that_was_given_back_is_the_next_threads() {
        let mut items = Vec::new();
        let mut threads = Threads::new(&mut items);
        let free = FreeThreads::default();
        threads.take_numbers_from(free.clone());
        threads.begin(Lane(1), thread(10, "a"), &mut items);
        threads.begin(Lane(2), thread(11, "b"), &mut items);
        threads.end(Lane(1), &mut items);
        free.lock().expect("no thread panicked").push(ThreadId(1));
        threads.begin(Lane(3), thread(12, "c"), &mut items);
        let lanes = [1, 2, 3].map(|lane| threads.of(Lane(lane)));
        assert_eq!(lanes, [RECORDER, ThreadId(2), ThreadId(1)]);
    }

    #[test]
    fn the_programs_name_of_a_thread_stands_against_the_kernels() {
        let mut items = Vec::new();
        let mut threads = Threads::new(&mut items);
        threads.begin(Lane(1), thread(10, "python"), &mut items);
        threads.rename(|_| Some("pt_data".to_owned()), &mut items);
        threads.name(10, "loader", &mut items);
        threads.rename(|_| Some("pt_data".to_owned()), &mut items);
        let names = items.iter().filter_map(|item| match item {
            Item::Thread(ThreadId(1), thread) => Some(thread.name.as_str()),
            _ => None,
        });
        assert_eq!(names.collect::<Vec<_>>(), ["python", "pt_data", "loader"]);
    }
}
