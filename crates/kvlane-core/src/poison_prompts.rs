//! Poison prompts: finds requests that crash the engines they run on.
//!
//! When an engine dies, all its requests in flight are retried elsewhere. If one of them is the cause, it kills the
//! next engine too, and its client's own retries kill more. The other requests are bystanders. So each death is
//! recorded with the prompts that were in flight, and those prompts are suspects until they are answered:
//!
//! - After two deaths a prompt is [`Barred`](Standing::Barred), if no other suspect explains them: no other suspect was
//!   in flight at the second death, and no engine died without this prompt.
//! - Otherwise the cause is unknown, and may be none of the suspects. They are tried [one at a time](Standing::Alone),
//!   which clears all but the cause. A third death bars the prompt.
//!
//! An engine that fails its probes or breaks a stream may be dead or unreachable. That counts as an uncertain death: it
//! makes suspects but bars no prompt, until the engine is known to be [dead or alive](PoisonPrompts::settle).

use std::collections::VecDeque;

use crate::recent::Recent;
use crate::time::Nanos;

/// Deaths from which a prompt is barred, or tried alone.
pub const DEATHS_MIN: usize = 2;
/// Deaths from which a prompt is barred, whatever else may explain them.
pub const DEATHS_MAX: usize = 3;
/// How long a death is remembered.
pub const REMEMBERED: Nanos = Nanos::from_secs(600);
/// Remembered prompts; beyond that the least recently recorded are forgotten.
pub const PROMPTS_MAX: usize = 4096;
/// Remembered deaths; beyond that the oldest are forgotten.
pub const RECORDS_MAX: usize = 64;

/// Identifies a prompt: a hash of the prompt and its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PromptKey(pub u64);

/// Identifies an engine by its address; a restarted engine keeps its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EngineKey(pub u64);

/// A request that was in flight at an engine when the engine died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineDeath {
    /// Its prompt.
    pub prompt: PromptKey,
    /// The engine.
    pub engine: EngineKey,
    /// When the request was placed there.
    pub placed: Nanos,
    /// Whether the engine is dead for sure.
    pub certain: bool,
}

/// How a request with a given prompt may be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// No engine died with it in flight.
    Clear,
    /// One engine died with it and others in flight. The request is placed normally; the caller records
    /// [where](PoisonPrompts::note_placement).
    Suspect,
    /// Several engines died with it in flight, and it may be the cause: place it only while no other such prompt is in
    /// flight.
    Alone {
        /// Whether all of these deaths are certain. If not, it is worth waiting until they are.
        certain: bool,
    },
    /// Barred for this much longer: the prompt kills engines.
    Barred(Nanos),
}

/// Engine deaths by prompt.
pub struct PoisonPrompts {
    suspects: Recent<PromptKey, Suspect>,
    /// Oldest first.
    deaths: VecDeque<Death>,
    /// Id of the next death.
    next: u64,
}

#[derive(Clone, Debug, Default)]
struct Suspect {
    /// Ids of the recent deaths with this prompt in flight.
    deaths: Vec<u64>,
    /// The engine at which it was placed last.
    at: Option<EngineKey>,
    /// Whether another suspect was in flight at a death after its first.
    in_company: bool,
}

#[derive(Clone, Copy, Debug)]
struct Death {
    name: u64,
    engine: EngineKey,
    /// When it was first reported.
    at: Nanos,
    certain: bool,
}

// === impl PoisonPrompts ===

impl Default for PoisonPrompts {
    fn default() -> Self {
        Self { suspects: Recent::new(PROMPTS_MAX), deaths: VecDeque::new(), next: 0 }
    }
}

impl PoisonPrompts {
    /// How a request with this prompt may be placed.
    pub fn standing(&mut self, now: Nanos, prompt: PromptKey) -> Standing {
        if self.deaths.is_empty() {
            return Standing::Clear;
        }
        let Some(suspect) = self.suspects.get(&prompt) else { return Standing::Clear };
        let (mut known, mut certain, mut others, mut last) = (0, 0, 0, Nanos(0));
        for death in self.deaths.iter().filter(|death| now - death.at <= REMEMBERED) {
            if suspect.deaths.contains(&death.name) {
                known += 1;
                if death.certain {
                    (certain, last) = (certain + 1, last.max(death.at));
                }
            } else {
                others += 1;
            }
        }
        let is_explained = suspect.in_company || others > 0;
        match (known, certain) {
            (0, _) => Standing::Clear,
            (1, _) => Standing::Suspect,
            (_, certain) if certain >= if is_explained { DEATHS_MAX } else { DEATHS_MIN } => {
                Standing::Barred(last + REMEMBERED - now)
            }
            _ => Standing::Alone { certain: certain == known },
        }
    }

    /// Records that a request with a suspect prompt is in flight at this engine.
    pub fn note_placement(&mut self, prompt: PromptKey, engine: EngineKey) {
        if let Some(suspect) = self.suspects.get(&prompt) {
            suspect.at = Some(engine);
        }
    }

    /// Records the death of an engine.
    pub fn note_death(&mut self, now: Nanos, report: EngineDeath) {
        let EngineDeath { prompt, engine, placed, certain } = report;
        // All requests in flight there report the same death, each at its own time.
        let told = self.deaths.iter_mut().rfind(|death| death.engine == engine && death.at >= placed);
        let name = match told {
            Some(death) => {
                death.certain |= certain;
                death.name
            }
            None => {
                self.forget(now);
                self.next += 1;
                self.deaths.push_back(Death { name: self.next, engine, at: now, certain });
                self.next
            }
        };
        let was_there = |suspect: &Suspect| {
            suspect.at == Some(engine) || suspect.deaths.len() > 1 && suspect.deaths.last() == Some(&name)
        };
        let in_company = self.suspects.iter().any(|(&other, suspect)| other != prompt && was_there(suspect));
        let suspect = self.suspects.get_or_insert(prompt, Suspect::default);
        suspect.at = None;
        suspect.deaths.retain(|known| self.deaths.iter().any(|death| death.name == *known));
        if !suspect.deaths.contains(&name) {
            suspect.deaths.push(name);
        }
        suspect.in_company = suspect.deaths.len() > 1 && (suspect.in_company || in_company);
    }

    /// Resolves an uncertain death: the engine is dead, or was unreachable and is alive.
    pub fn settle(&mut self, engine: EngineKey, gone: bool) {
        if gone {
            self.deaths
                .iter_mut()
                .filter(|death| death.engine == engine)
                .for_each(|death| death.certain = true);
        } else {
            self.deaths.retain(|death| death.certain || death.engine != engine);
        }
    }

    /// A request with this prompt was answered.
    pub fn answered(&mut self, prompt: PromptKey) {
        if !self.deaths.is_empty()
            && let Some(suspect) = self.suspects.get(&prompt)
        {
            *suspect = Suspect::default();
        }
    }

    /// Drops old deaths, and the oldest death if there is no room for another.
    fn forget(&mut self, now: Nanos) {
        self.deaths.retain(|death| now - death.at <= REMEMBERED);
        if self.deaths.len() == RECORDS_MAX {
            self.deaths.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    const A: EngineKey = EngineKey(1);
    const B: EngineKey = EngineKey(2);
    const C: EngineKey = EngineKey(3);
    const PROMPT: PromptKey = PromptKey(0);

    fn at(seconds: u64) -> Nanos {
        Nanos::from_secs(seconds)
    }

    /// A request with this prompt was placed one second before its engine died. Returns the prompt's standing.
    fn dies(culprits: &mut PoisonPrompts, now: Nanos, prompt: PromptKey, engine: EngineKey) -> Standing {
        culprits.note_death(now, EngineDeath { prompt, engine, placed: now - at(1), certain: true });
        culprits.standing(now, prompt)
    }

    #[test]
    fn a_prompt_under_which_two_engines_died_is_not_placed_until_that_is_long_ago() {
        let mut culprits = PoisonPrompts::default();
        assert_eq!(culprits.standing(at(1), PROMPT), Standing::Clear);
        assert_eq!(dies(&mut culprits, at(1), PROMPT, A), Standing::Suspect, "one death is little evidence");
        assert_eq!(dies(&mut culprits, at(2), PROMPT, B), Standing::Barred(REMEMBERED));
        assert_eq!(culprits.standing(at(3), PROMPT), Standing::Barred(REMEMBERED - at(1)));
        assert_eq!(culprits.standing(at(3), PromptKey(1)), Standing::Clear);
        let later = at(3) + REMEMBERED;
        assert_eq!(culprits.standing(later, PROMPT), Standing::Clear);
        assert_eq!(
            dies(&mut culprits, later, PROMPT, A),
            Standing::Suspect,
            "the earlier deaths are forgotten"
        );
    }

    #[test]
    fn one_death_counts_once_however_many_requests_with_the_prompt_it_took() {
        let mut culprits = PoisonPrompts::default();
        for report in 5..20 {
            culprits.note_death(
                at(report),
                EngineDeath { prompt: PROMPT, engine: A, placed: at(4), certain: true },
            );
            assert_eq!(culprits.standing(at(report), PROMPT), Standing::Suspect, "at {report}");
        }
        let again = dies(&mut culprits, at(30), PROMPT, A);
        assert!(matches!(again, Standing::Barred(_)), "engine A restarted and died again");
    }

    #[test]
    fn suspects_that_died_together_are_tried_alone_and_the_third_death_bars() {
        let (mut culprits, others) = (PoisonPrompts::default(), [PromptKey(1), PromptKey(2)]);
        let all = [others[0], PROMPT, others[1]];
        for (second, engine, stand) in [(1, A, Standing::Suspect), (2, B, Standing::Alone { certain: true })]
        {
            all.iter().for_each(|&prompt| culprits.note_placement(prompt, engine));
            assert_eq!(all.map(|prompt| dies(&mut culprits, at(second), prompt, engine)), [stand; 3]);
        }
        culprits.answered(others[0]);
        assert_eq!(culprits.standing(at(3), others[0]), Standing::Clear);
        assert!(matches!(dies(&mut culprits, at(3), PROMPT, C), Standing::Barred(_)));
        assert_eq!(
            culprits.standing(at(3), others[1]),
            Standing::Alone { certain: true },
            "an engine died without it"
        );
    }

    #[test]
    fn where_engines_die_of_other_causes_two_deaths_do_not_bar() {
        let mut culprits = PoisonPrompts::default();
        dies(&mut culprits, at(1), PromptKey(1), C);
        dies(&mut culprits, at(2), PROMPT, A);
        assert_eq!(dies(&mut culprits, at(3), PROMPT, B), Standing::Alone { certain: true });
        assert!(matches!(dies(&mut culprits, at(4), PROMPT, C), Standing::Barred(_)));
    }

    #[test]
    fn unreachable_engines_reject_no_prompt_until_they_are_known_to_be_dead() {
        for gone in [true, false] {
            let mut culprits = PoisonPrompts::default();
            for (second, engine) in [(1, A), (2, B)] {
                let report = EngineDeath { prompt: PROMPT, engine, placed: Nanos(0), certain: false };
                culprits.note_death(at(second), report);
            }
            assert_eq!(culprits.standing(at(3), PROMPT), Standing::Alone { certain: false });
            culprits.settle(A, true);
            assert_eq!(culprits.standing(at(3), PROMPT), Standing::Alone { certain: false });
            culprits.settle(B, gone);
            let stands = if gone { Standing::Barred(REMEMBERED - at(1)) } else { Standing::Suspect };
            assert_eq!(culprits.standing(at(3), PROMPT), stands);
        }
    }

    #[test]
    fn a_prompt_that_is_answered_is_cleared() {
        let mut culprits = PoisonPrompts::default();
        dies(&mut culprits, at(1), PROMPT, A);
        culprits.answered(PROMPT);
        assert_eq!(culprits.standing(at(1), PROMPT), Standing::Clear);
        assert_eq!(dies(&mut culprits, at(2), PROMPT, B), Standing::Suspect);
    }

    #[test]
    fn many_prompts_and_deaths_are_no_more_memory() {
        let mut culprits = PoisonPrompts::default();
        for n in 0..20_000 {
            dies(&mut culprits, at(1) + Nanos(n), PromptKey(n), EngineKey(n));
            dies(&mut culprits, at(1) + Nanos(n), PROMPT, EngineKey(n));
        }
        assert_eq!(culprits.deaths.len(), RECORDS_MAX);
        assert!((PROMPTS_MAX / 2..=PROMPTS_MAX).contains(&culprits.suspects.iter().count()));
        let all = culprits.suspects.iter().map(|(_, suspect)| suspect.deaths.len());
        assert_eq!(all.max(), Some(RECORDS_MAX), "the prompt present at all deaths");
    }

    /// A fleet in which one prompt kills every engine that it is sent to. The other requests are answered unless their
    /// engine dies first, and are retried elsewhere if it does.
    #[test]
    fn among_any_requests_the_poison_prompt_is_stopped_after_three_deaths_and_no_other() {
        for seed in 0..2_000 {
            let (mut rng, mut culprits) = (Rng::new(seed), PoisonPrompts::default());
            let (crowd, engines) = (1 + rng.below(12) as u64, 2 + rng.below(4));
            let mut waiting: Vec<PromptKey> = (0..=crowd).map(PromptKey).collect();
            let (mut killed, mut now) = (0, at(0));
            while !waiting.is_empty() {
                now += at(1);
                let mut there: Vec<(PromptKey, EngineKey)> = Vec::new();
                let mut alone = false;
                waiting.retain(|&prompt| match culprits.standing(now, prompt) {
                    Standing::Barred(_) => {
                        assert_eq!(prompt, PROMPT, "seed {seed}: a bystander is barred");
                        false
                    }
                    Standing::Alone { .. } if alone => true,
                    standing => {
                        alone |= matches!(standing, Standing::Alone { .. });
                        let engine = EngineKey(rng.below(engines) as u64);
                        culprits.note_placement(prompt, engine);
                        there.push((prompt, engine));
                        false
                    }
                });
                let dead = there.iter().find(|(prompt, _)| *prompt == PROMPT).map(|(_, engine)| *engine);
                killed += usize::from(dead.is_some());
                for (prompt, engine) in there {
                    if Some(engine) == dead {
                        let told = now + Nanos(rng.below(1000) as u64);
                        culprits.note_death(told, EngineDeath { prompt, engine, placed: now, certain: true });
                        waiting.push(prompt);
                    } else {
                        culprits.answered(prompt);
                    }
                }
            }
            assert!((DEATHS_MIN..=DEATHS_MAX).contains(&killed), "seed {seed}: it killed {killed}");
        }
    }
}
