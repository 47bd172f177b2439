//! Independent simulations on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::progress;

/// What `work` makes of each number below `n`, in their order; where it makes nothing, nothing. The result does not depend on
/// the number of cores.
pub fn on_all_cores<T: Send>(n: usize, work: impl Fn(usize) -> Option<T> + Sync) -> Vec<T> {
    let (next, n_done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let made = Mutex::new(Vec::new());
    let told = progress::told();
    let worker = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= n {
                return;
            }
            if let Some(result) = work(index)
                && let Ok(mut made) = made.lock()
            {
                made.push((index, result));
            }
            let n_done = n_done.fetch_add(1, Ordering::Relaxed) + 1;
            told.iter().for_each(|told| told(n_done, n));
        }
    };
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(n);
    std::thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(worker);
        }
    });
    let mut made = made.into_inner().unwrap_or_default();
    made.sort_by_key(|(index, _)| *index);
    made.into_iter().map(|(_, result)| result).collect()
}

/// Sets each of `all` to what `make` makes of its index, on all cores.
pub fn fill<T: Send>(all: &mut [T], make: impl Fn(usize) -> T + Sync) {
    /// Shorter lists are not worth a thread.
    const LEAST: usize = 1 << 12;
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let length = all.len().div_ceil(4 * n_threads).max(LEAST);
    let tasks = (0..).zip(all.chunks_mut(length)).map(|(number, chunk)| {
        let make = &make;
        Box::new(move || {
            for (idx, slot) in (number * length..).zip(chunk) {
                *slot = make(idx);
            }
        }) as Task<'_>
    });
    at_once(tasks.collect());
}

/// Work that others do not wait for.
pub type Task<'a> = Box<dyn FnOnce() + Send + 'a>;

/// Does all of these on all cores, beginning with the first.
pub fn at_once(tasks: Vec<Task<'_>>) {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(tasks.len());
    let tasks = Mutex::new(tasks.into_iter());
    let next = || tasks.lock().ok()?.next();
    let worker = || {
        while let Some(task) = next() {
            task();
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..n_threads {
            // Where no thread can be had, this one does it all.
            let _ = std::thread::Builder::new().spawn_scoped(scope, worker);
        }
        worker();
    });
}

/// Does two things at once, where a thread can be had; else one after the other.
pub fn both<A: Send, B>(one: impl Fn() -> A + Sync, other: impl FnOnce() -> B) -> (A, B) {
    std::thread::scope(|scope| match std::thread::Builder::new().spawn_scoped(scope, &one) {
        Ok(thread) => {
            let other = other();
            match thread.join() {
                Ok(one) => (one, other),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Err(_) => (one(), other()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_are_done() {
        assert_eq!(both(|| 1, || "two"), (1, "two"));
    }

    #[test]
    fn all_slots_are_filled() {
        for n in [0, 1, 5000, 100_000] {
            let mut squares = vec![0; n];
            fill(&mut squares, |idx| idx * 2);
            assert!(squares.iter().enumerate().all(|(idx, it)| *it == idx * 2));
        }
    }

    #[test]
    fn all_tasks_are_done() {
        let mut done = [false; 7];
        at_once(done.iter_mut().map(|done| Box::new(move || *done = true) as Task<'_>).collect());
        assert_eq!(done, [true; 7]);
    }

    #[test]
    fn results_come_in_the_order_of_their_numbers() {
        assert_eq!(on_all_cores(5, |n| (n != 2).then_some(n * n)), [0, 1, 9, 16]);
        assert_eq!(on_all_cores(0, Some), Vec::<usize>::new());
    }
}
