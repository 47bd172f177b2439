//! Questions about other processes and their files, some of which may never be answered.
//!
//! A process can make the kernel wait for a lock of its memory, and a file can lie in a file system that does not respond (FUSE, NFS). Whoever
//! asks then waits, and cannot be interrupted. So threads ask: while one waits, the next goes on, and all of them together have one bound.

use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded, unbounded};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How long the next question waits for a thread that has one, before another thread is started.
const SOON: Duration = Duration::from_millis(100);
/// Threads that wait at once, at most.
const MOST_THREADS: usize = 32;

/// Threads of this process that were started here and have not ended, and of which no more are started: some may never end.
static WAITING: AtomicUsize = AtomicUsize::new(0);
const MOST_WAITING: usize = 4 * MOST_THREADS;

/// What became of a question.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answered<A> {
    Here(A),
    /// It was asked, and not answered in time.
    Late,
    /// It was not asked: the others took all the time.
    NotAsked,
}

/// Asks this of each, and has an answer for each, in their order, when the time is over, or before.
pub(crate) fn ask<Q, A>(
    questions: Vec<Q>,
    patience: Duration,
    look: impl Fn(Q) -> A + Clone + Send + 'static,
) -> Vec<Answered<A>>
where
    Q: Send + 'static,
    A: Send + 'static,
{
    let until = Instant::now() + patience;
    let mut answers: Vec<Answered<A>> = questions.iter().map(|_| Answered::NotAsked).collect();
    let mut put = |at: usize, answer| {
        if let Some(slot) = answers.get_mut(at) {
            *slot = answer;
        }
    };
    // Nothing is kept between the two ends: who takes a question asks it at once.
    let (asks, asked) = bounded::<(usize, Q)>(0);
    let (tells, told) = unbounded::<(usize, A)>();
    let start = || start(asked.clone(), tells.clone(), look.clone());
    let mut n_threads = 0;
    let mut n_open = 0;
    'asking: for (at, question) in questions.into_iter().enumerate() {
        let mut question = Some((at, question));
        while let Some(next) = question.take() {
            if n_threads == 0 && !start() {
                if WAITING.load(Ordering::Relaxed) >= MOST_WAITING {
                    break;
                }
                // No thread to be had: then without a bound.
                put(at, Answered::Here(look(next.1)));
                break;
            }
            n_threads = n_threads.max(1);
            let left = until.saturating_duration_since(Instant::now());
            match asks.send_timeout(next, SOON.min(left)) {
                Ok(()) => {
                    n_open += 1;
                    put(at, Answered::Late);
                }
                Err(SendTimeoutError::Timeout(_)) if left.is_zero() => break 'asking,
                Err(SendTimeoutError::Timeout(next) | SendTimeoutError::Disconnected(next)) => {
                    n_threads += usize::from(n_threads < MOST_THREADS && start());
                    question = Some(next);
                }
            }
        }
        for (at, answer) in told.try_iter() {
            n_open -= 1;
            put(at, Answered::Here(answer));
        }
    }
    // The threads end with their last question.
    drop(asks);
    while n_open > 0
        && let Ok((at, answer)) = told.recv_deadline(until)
    {
        n_open -= 1;
        put(at, Answered::Here(answer));
    }
    answers
}

/// Starts a thread that asks; whether there is one.
fn start<Q: Send + 'static, A: Send + 'static>(
    asked: Receiver<(usize, Q)>,
    tells: Sender<(usize, A)>,
    look: impl Fn(Q) -> A + Send + 'static,
) -> bool {
    if WAITING.fetch_add(1, Ordering::Relaxed) >= MOST_WAITING {
        WAITING.fetch_sub(1, Ordering::Relaxed);
        return false;
    }
    let asks = move || {
        asked.iter().all(|(at, question)| tells.send((at, look(question))).is_ok());
        WAITING.fetch_sub(1, Ordering::Relaxed);
    };
    let is_started = Builder::new().name("look".to_owned()).spawn(asks).is_ok();
    if !is_started {
        WAITING.fetch_sub(1, Ordering::Relaxed);
    }
    is_started
}

#[cfg(test)]
mod tests {
    use super::*;

    fn never(of: u32) -> u32 {
        if of % 2 == 1 {
            loop {
                std::thread::park();
            }
        }
        of
    }

    #[test]
    fn a_question_that_is_never_answered_holds_up_no_other() {
        let hour = Duration::from_secs(3600);
        assert_eq!(ask(vec![2, 4], hour, never), [Answered::Here(2), Answered::Here(4)]);
        // Only the silent one is waited for to the end.
        let short = Duration::from_secs(2);
        let answers = ask(vec![2, 1, 4], short, never);
        assert_eq!(answers, [Answered::Here(2), Answered::Late, Answered::Here(4)]);
    }

    #[test]
    fn many_that_never_answer_have_one_bound_together() {
        // Each on its own would take a second.
        let n = 4 * MOST_THREADS as u32;
        let (tells, told) = bounded(1);
        std::thread::spawn(move || {
            tells.send(ask((0..n).map(|it| 2 * it + 1).collect(), Duration::from_secs(1), never))
        });
        let answers = told.recv_timeout(Duration::from_secs(60)).expect("one bound");
        let n_late = answers.iter().filter(|it| **it == Answered::Late).count();
        assert!(n_late <= MOST_THREADS, "{n_late} threads");
        assert!(answers.iter().skip(n_late).all(|it| *it == Answered::NotAsked));
        assert_eq!(answers.len(), n as usize);
    }
}
