//! Executes a plan against a live server.

use std::time::{Duration, Instant};

use kvlane_core::rng::Rng;
use tokio::task::JoinSet;

use super::server::{Server, ServerError};
use super::{Pick, Plan, Planned, Point, Probe, Timeline, Work};

/// Ids below this are often special tokens.
const ID_FIRST: u32 = 256;

/// Warm-up prompts: engines compile, allocate and fill caches at first.
const WARM_UP: [Probe; 3] = [
    Probe::Prefill { prompt_tokens: 64 },
    Probe::Prefill { prompt_tokens: 1024 },
    Probe::Decode { seqs: 8, prompt_tokens: 32, output_tokens: 48 },
];

/// Words of the text that shows the number of tokens per word.
const SAMPLE_WORDS: u32 = 200;

/// Rounds in which a probe may fail before it is left out.
const FAILURES_MAX: usize = 2;

/// Settings of the measurement.
#[derive(Clone, Debug)]
pub struct MeasureConfig {
    /// The model's name in requests.
    pub model: String,
    /// Size of its vocabulary: token ids of prompts are drawn from it.
    pub vocab: u32,
    /// Seed of the prompts. The server must not have cached the prompts of this one.
    pub seed: u64,
    /// The round that is used.
    pub pick: Pick,
    /// Timeout of a probe.
    pub timeout: Duration,
}

/// Measurements, and failures.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// In the plan's order.
    pub points: Vec<Point>,
    /// Measurements left out, with the cause.
    pub notes: Vec<String>,
}

/// Form of a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Prompts {
    /// As token ids.
    Ids,
    /// As words, for servers that do not take ids.
    Words { tokens_per_word: f64 },
}

struct Client {
    server: Server,
    config: MeasureConfig,
    prompts: Prompts,
    rng: Rng,
}

/// Measures every probe of a plan. `progress` is called with (done, total, next probe).
///
/// # Errors
///
/// If the server does not answer. A probe that it rejects or that yields no figure is left out, with a note.
pub async fn measure(
    server: Server,
    config: MeasureConfig,
    plan: &Plan,
    mut progress: impl FnMut(usize, usize, &Probe),
) -> Result<Measured, ServerError> {
    let rng = Rng::new(config.seed);
    let mut client = Client { server, config, prompts: Prompts::Ids, rng };
    client.warm_up().await?;
    let mut rounds: Vec<Vec<(Work, f64)>> = vec![Vec::new(); plan.probes.len()];
    let mut failures: Vec<Vec<String>> = vec![Vec::new(); plan.probes.len()];
    let total = plan.probes.len() * plan.repeats as usize;
    let mut done = 0;
    for _ in 0..plan.repeats {
        for (index, Planned { probe, .. }) in plan.probes.iter().enumerate() {
            progress(done, total, probe);
            done += 1;
            // A probe that has failed twice and never succeeded is not tried again.
            if rounds[index].is_empty() && failures[index].len() >= FAILURES_MAX {
                continue;
            }
            let observed = match client.run(probe).await {
                Ok(timelines) => probe.observe(&timelines).map_err(|why| why.to_string()),
                Err(error @ ServerError::Broken { .. }) => return Err(error),
                Err(error) => Err(error.to_string()),
            };
            match observed {
                Ok(figure) => rounds[index].push(figure),
                Err(why) => failures[index].push(why),
            }
        }
    }
    let mut measured = Measured::default();
    for ((planned, rounds), failures) in plan.probes.iter().zip(rounds).zip(failures) {
        let (name, times) = (planned.probe.name(), failures.len());
        let left_out =
            if rounds.is_empty() { "left out".into() } else { format!("rounds without a figure {times}") };
        measured.points.extend(Point::new(*planned, rounds, client.config.pick));
        measured.notes.extend(failures.last().map(|why| format!("{name}: {left_out}, {why}")));
    }
    Ok(measured)
}

// === impl Client ===

impl Client {
    /// Finds out which form of prompts the server accepts, and warms it up.
    async fn warm_up(&mut self) -> Result<(), ServerError> {
        if let Err(refused) = self.run(&WARM_UP[0]).await {
            let ServerError::Status { status: 400 | 422, .. } = refused else { return Err(refused) };
            self.prompts = Prompts::Words { tokens_per_word: 1.0 };
            let sample = self.run(&Probe::Prefill { prompt_tokens: SAMPLE_WORDS }).await?;
            let tokens = sample.first().map_or(0, |line| line.prompt_tokens).max(1);
            self.prompts = Prompts::Words { tokens_per_word: f64::from(tokens) / f64::from(SAMPLE_WORDS) };
        }
        for probe in &WARM_UP {
            match self.run(probe).await {
                Ok(_) | Err(ServerError::Status { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends a probe's requests, all at once, and waits for them to end.
    async fn run(&mut self, probe: &Probe) -> Result<Vec<Timeline>, ServerError> {
        let (requests, prompt_tokens, output_tokens) = probe.requests();
        let mut ready = Vec::new();
        for _ in 0..requests {
            let prompt = self.prompt(prompt_tokens);
            let request = self.server.completion(&self.config.model, &prompt, output_tokens);
            ready.push((self.server.connect("/v1/completions").await?, request));
        }
        let clock = Instant::now();
        let mut under_way = JoinSet::new();
        for (connection, request) in ready {
            let server = self.server.clone();
            under_way.spawn(async move { server.complete(connection, request, clock).await });
        }
        let mut timelines = Vec::new();
        let all = async {
            while let Some(ended) = under_way.join_next().await {
                // Tasks are never aborted before this, so an error here is a panic of ours: let it surface.
                let mut line = ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
                if line.prompt_tokens == 0 {
                    line.prompt_tokens = prompt_tokens;
                }
                timelines.push(line);
            }
            Ok(())
        };
        match tokio::time::timeout(self.config.timeout, all).await {
            Ok(ended) => ended.map(|()| timelines),
            Err(_) => Err(ServerError::Late(self.config.timeout)),
        }
    }

    /// A prompt that has not been sent before, as JSON.
    fn prompt(&mut self, tokens: u32) -> String {
        match self.prompts {
            Prompts::Ids => {
                // The upper end of a vocabulary is where special and unused tokens are.
                let (first, end) = (ID_FIRST.min(self.config.vocab / 2), self.config.vocab / 10 * 9);
                let span = u64::from(end.saturating_sub(first).max(1));
                let ids: Vec<String> = (0..tokens)
                    .map(|_| (u64::from(first) + self.rng.next_u64() % span).to_string())
                    .collect();
                format!("[{}]", ids.join(","))
            }
            Prompts::Words { tokens_per_word } => {
                let words = (f64::from(tokens) / tokens_per_word).round().max(1.0) as u32;
                let text: Vec<String> = (0..words).map(|_| word(self.rng.next_u64())).collect();
                format!("\"{}\"", text.join(" "))
            }
        }
    }
}

/// Four letters.
fn word(draw: u64) -> String {
    (0..4).map(|place| char::from(b'a' + (draw >> (place * 8)) as u8 % 26)).collect()
}
