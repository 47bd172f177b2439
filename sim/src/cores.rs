//! Independent simulations on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What `work` makes of each number below `n`, in their order; where it makes nothing, nothing. The result does not depend on
/// the number of cores.
pub fn on_all_cores<T: Send>(n: usize, work: impl Fn(usize) -> Option<T> + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let made = Mutex::new(Vec::new());
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
    fn results_come_in_the_order_of_their_numbers() {
        assert_eq!(on_all_cores(5, |n| (n != 2).then_some(n * n)), [0, 1, 9, 16]);
        assert_eq!(on_all_cores(0, Some), Vec::<usize>::new());
    }
}
