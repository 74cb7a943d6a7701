//! Bytes that are allocated, counted as they are asked for: what both indexes need, whatever they say.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};

pub struct Counting;

static BYTES: AtomicI64 = AtomicI64::new(0);
static ON: AtomicBool = AtomicBool::new(false);

fn count(bytes: i64) {
    if ON.load(Relaxed) {
        BYTES.fetch_add(bytes, Relaxed);
    }
}

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Counts only while memory is measured, so that counting does not slow down what is timed.
pub fn start() {
    ON.store(true, Relaxed);
}

pub fn stop() {
    ON.store(false, Relaxed);
}

pub fn bytes() -> i64 {
    BYTES.load(Relaxed)
}
