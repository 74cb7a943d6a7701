//! Time that this process has computed, on all its threads: others on the machine do not count.

use std::time::Duration;

pub struct Cpu(Duration);

impl Cpu {
    pub fn now() -> Self {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a timespec that outlives the call.
        let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
        assert_eq!(failed, 0, "every Unix since 2001 has this clock");
        Self(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }

    pub fn elapsed(&self) -> Duration {
        Self::now().0 - self.0
    }
}
