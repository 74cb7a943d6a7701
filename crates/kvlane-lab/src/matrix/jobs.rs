//! The jobs of a matrix: names that must differ, and threads that run them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The first value that occurs a second time.
pub(crate) fn twice<T: Ord + Copy>(values: impl IntoIterator<Item = T>) -> Option<T> {
    let mut seen = BTreeSet::new();
    values.into_iter().find(|value| !seen.insert(*value))
}

/// Runs the jobs `0..count` on `threads` threads, each of which has a state of its own. The results are in the order of
/// the jobs, so they do not depend on the number of threads. After a failure no further job is started.
///
/// # Errors
/// Of the first job, in their order, that fails.
pub(crate) fn run<S: Default, T: Send, E: Send>(
    count: usize,
    threads: usize,
    job: &(impl Fn(usize, &mut S) -> Result<T, E> + Sync),
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let work = || {
        let (mut state, mut found) = (S::default(), Vec::new());
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            if place >= count {
                return found;
            }
            let result = job(place, &mut state);
            if result.is_err() {
                next.store(count, Ordering::Relaxed);
            }
            found.push((place, result));
        }
    };
    let mut found: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.clamp(1, count.max(1))).map(|_| scope.spawn(work)).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.flat_map(|found| found.unwrap_or_else(|why| std::panic::resume_unwind(why))).collect()
    });
    found.sort_unstable_by_key(|(place, _)| *place);
    found.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_occurs_twice_is_named() {
        assert_eq!((twice([1, 2, 3]), twice([1, 2, 1, 2])), (None, Some(1)));
    }

    #[test]
    fn results_are_in_the_order_of_the_jobs_and_the_first_failure_counts() {
        for threads in [0, 1, 4, 100] {
            let double = |job: usize, (): &mut ()| Ok::<_, usize>(job * 2);
            assert_eq!(run(5, threads, &double), Ok(vec![0, 2, 4, 6, 8]));
            let from_three = |job: usize, (): &mut ()| if job < 3 { Ok(job) } else { Err(job) };
            assert_eq!(run(50, threads, &from_three), Err(3));
        }
        assert_eq!(run(0, 4, &|_, (): &mut ()| Ok::<(), ()>(())), Ok(Vec::new()));
    }
}
