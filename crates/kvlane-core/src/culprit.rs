//! Prompts under which engines died: which request may be the one that kills them.
//!
//! An engine that dies takes all its requests with it, and each of them is repeated elsewhere. If one of them is the cause,
//! it kills the next engine too, and its client's own retries the ones after that. So each death is noted with the prompts
//! that were in flight, and a prompt that has seen [`DEATHS_MAX`] of them within [`REMEMBERED`] is not placed again until
//! the last one is that long ago. A prompt that is answered is cleared.

use crate::recent::Recent;
use crate::time::Nanos;

/// Deaths under one prompt from which on it is not placed.
pub const DEATHS_MAX: u32 = 2;
/// How long a death is remembered.
pub const REMEMBERED: Nanos = Nanos::from_secs(600);
/// Prompts that are remembered; beyond that the ones noted least recently are forgotten.
pub const PROMPTS_MAX: usize = 4096;

/// Names a prompt: a hash of it and of its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PromptKey(pub u64);

/// The deaths of engines, by prompt.
pub struct Culprits {
    by_prompt: Recent<PromptKey, Deaths>,
    /// Whether any is remembered: mostly not, and then nobody need look.
    any: bool,
}

#[derive(Clone, Copy, Debug)]
struct Deaths {
    count: u32,
    last: Nanos,
}

// === impl Culprits ===

impl Default for Culprits {
    fn default() -> Self {
        Self { by_prompt: Recent::new(PROMPTS_MAX), any: false }
    }
}

impl Culprits {
    /// An engine died while a request with this prompt was in flight there. Whether that was one too many.
    pub fn died(&mut self, now: Nanos, prompt: PromptKey) -> bool {
        self.any = true;
        let deaths = self.by_prompt.get_or_insert(prompt, || Deaths { count: 0, last: now });
        if now - deaths.last > REMEMBERED {
            deaths.count = 0;
        }
        (deaths.count, deaths.last) = (deaths.count.saturating_add(1), now);
        deaths.count >= DEATHS_MAX
    }

    /// For how much longer a request with this prompt is not to be placed, if it is not.
    pub fn barred(&mut self, now: Nanos, prompt: PromptKey) -> Option<Nanos> {
        if !self.any {
            return None;
        }
        let deaths = self.by_prompt.get(&prompt)?;
        let until = deaths.last + REMEMBERED;
        (deaths.count >= DEATHS_MAX && now < until).then(|| until - now)
    }

    /// A request with this prompt was answered.
    pub fn answered(&mut self, prompt: PromptKey) {
        if self.any
            && let Some(deaths) = self.by_prompt.get(&prompt)
        {
            deaths.count = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_under_which_two_engines_died_is_not_placed_until_that_is_long_ago() {
        let (mut culprits, prompt, other) = (Culprits::default(), PromptKey(1), PromptKey(2));
        let (second, at) = (Nanos::from_secs(1), Nanos::from_secs);
        assert_eq!(culprits.barred(second, prompt), None);
        assert!(!culprits.died(second, prompt));
        assert_eq!(culprits.barred(second, prompt), None, "one death says little");
        assert!(culprits.died(at(2), prompt));
        assert_eq!(culprits.barred(at(3), prompt), Some(REMEMBERED - second));
        assert_eq!(culprits.barred(at(3), other), None);
        assert_eq!(culprits.barred(at(2) + REMEMBERED, prompt), None);
        assert!(!culprits.died(at(3) + REMEMBERED, prompt), "those before are forgotten");
    }

    #[test]
    fn a_prompt_that_is_answered_is_cleared() {
        let (mut culprits, prompt) = (Culprits::default(), PromptKey(1));
        culprits.died(Nanos(1), prompt);
        culprits.answered(prompt);
        assert!(!culprits.died(Nanos(2), prompt));
    }

    #[test]
    fn many_prompts_are_no_more_memory() {
        let mut culprits = Culprits::default();
        (0..100_000).for_each(|n| _ = culprits.died(Nanos(n), PromptKey(n)));
        assert!(culprits.died(Nanos(100_000), PromptKey(99_999)), "the last ones are there");
        assert!(!culprits.died(Nanos(100_000), PromptKey(0)), "the first ones are not");
    }
}
