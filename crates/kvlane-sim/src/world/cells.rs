//! Cells: parts of a fleet, each with endpoints and gateways of its own, behind a front tier that chooses the cell of each request.
//!
//! A cell tells the front tier its load and, less often, a [`Sketch`] of the prompts that its gateways know. The front tier is any
//! [`Policy`], whose rows are the cells: a row has the mean load of the cell's endpoints and, as its overlap, what the
//! sketch finds of the prompt. To both the front tier adds what it has sent to the cell since.
//!
//! Endpoints and gateways are in the cells in turns. The routers of a cell know the endpoints of the others as unhealthy ones, so that
//! all have the same ids.

use std::collections::VecDeque;

use foldhash::fast::FixedState;
use hashbrown::HashSet;
use kvlane_core::block::BlockHash;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::index::{marks, sketch, sketch::Sketch};
use kvlane_core::load::{InFlight, Load};
use kvlane_core::policy::{Candidate, PickContext, Policy, PolicyConfig, Reason};
use kvlane_core::rates::Rates;
use kvlane_core::request::SchedulingRequest;
use kvlane_core::rng::Rng;
use kvlane_core::router::Router;
use kvlane_core::time::Nanos;

use super::{Event, World};

/// Cells, and what the front tier knows of them.
#[derive(Clone, Debug, PartialEq)]
pub struct CellsConfig {
    /// How many; at least 1.
    pub count: u16,
    /// The policy of the front tier.
    pub policy: PolicyConfig,
    /// Time between two loads that a cell tells.
    pub loads_every: Nanos,
    /// The sketches that a cell tells; `None` if it tells none.
    pub sketches: Option<Sketches>,
    /// Time from telling until the front tier knows.
    pub delay: Nanos,
}

/// The sketches that cells tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sketches {
    /// Time between two of a cell.
    pub every: Nanos,
    /// Their size.
    pub size: sketch::Config,
}

/// What the front tier was told and has looked up so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    /// Sketches.
    pub sketches: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Marks in them.
    pub marks: u64,
    /// Lookups of a prompt in the sketch of a cell.
    pub lookups: u64,
    /// Those that found more than the marks of which the sketch was made.
    pub false_hits: u64,
    /// Tokens by which they did.
    pub false_tokens: u64,
}

/// Requests that are kept for each cell, to be added to its news: the oldest ones are left out.
const SENT_MAX: usize = 1 << 16;
/// Marks for which a sketch has room at least: the front tier adds those of what it sends, also to the sketch of an empty cell.
const MARKS_MIN: usize = 1 << 15;

/// The front tier.
pub(super) struct Front {
    config: CellsConfig,
    policy: Box<dyn Policy>,
    rng: Rng,
    /// Time from the front tier to a router.
    distance: Nanos,
    block_tokens: u32,
    cells: Vec<Cell>,
    lookups: Lookups,
}

/// A cell, as the front tier knows it.
#[derive(Default)]
struct Cell {
    load: CellLoad,
    known: Option<Known>,
    /// Requests that may not be in its news, the oldest first.
    sent: VecDeque<Sent>,
}

struct Sent {
    at: Nanos,
    load: InFlight,
    marks: Vec<BlockHash>,
}

/// News of a cell.
#[derive(Debug)]
pub(super) enum CellNews {
    Load(CellLoad),
    Known(Known),
}

/// What a cell tells.
#[derive(Clone, Copy, Debug)]
pub(super) enum Telling {
    Load,
    Sketch,
}

/// The load of a cell.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CellLoad {
    at: Nanos,
    /// Of all endpoints that may get requests.
    in_flight: InFlight,
    endpoints: u32,
    /// The mean over the endpoints.
    rates: Rates,
    usual_output_tokens: f64,
}

/// The prompts that a cell knows.
#[derive(Debug)]
pub(super) struct Known {
    at: Nanos,
    sketch: Sketch,
    /// The marks in the sketch, which the front tier does not know: false hits are counted by them.
    marks: HashSet<BlockHash, FixedState>,
}

// === impl CellLoad ===

impl CellLoad {
    /// That of a cell with these gateways.
    fn of(routers: &[&Router], at: Nanos) -> Self {
        let mut cell = Self { at, ..Self::default() };
        let mut rates = Vec::new();
        for router in routers {
            router.read(|scheduler| {
                let endpoints = || scheduler.pool().eligible();
                cell.in_flight = endpoints().fold(cell.in_flight, |sum, of| sum.plus(&of.in_flight()));
                cell.usual_output_tokens += scheduler.usual_output_tokens() / routers.len() as f64;
                rates = endpoints().map(|endpoint| scheduler.rates(endpoint)).collect();
            });
        }
        cell.endpoints = rates.len() as u32;
        if !rates.is_empty() {
            let mean = |rate: fn(&Rates) -> f64| rates.iter().map(rate).sum::<f64>() / rates.len() as f64;
            cell.rates = Rates {
                prefill_token_s: mean(|rates| rates.prefill_token_s),
                prefill_pair_s: mean(|rates| rates.prefill_pair_s),
                load_token_s: mean(|rates| rates.load_token_s),
                step_s: mean(|rates| rates.step_s),
                sequence_s: mean(|rates| rates.sequence_s),
                context_token_s: mean(|rates| rates.context_token_s),
                request_s: mean(|rates| rates.request_s),
                wait_steps: mean(|rates| rates.wait_steps),
            };
        }
        cell
    }
}

// === impl Known ===

impl Known {
    /// What these gateways of a cell know.
    fn of(routers: &[&Router], at: Nanos, size: sketch::Config) -> Self {
        let prompts = routers.iter().flat_map(|router| router.tell_marks());
        let marks: HashSet<BlockHash, FixedState> = prompts.flat_map(|prompt| prompt.marks).collect();
        let mut sketch = Sketch::new(size, marks.len().max(MARKS_MIN));
        marks.iter().for_each(|mark| sketch.insert(*mark));
        Self { at, sketch, marks }
    }

    fn add(&mut self, marks: &[BlockHash]) {
        for mark in marks {
            self.sketch.insert(*mark);
            self.marks.insert(*mark);
        }
    }

    /// Leading blocks of a prompt by the marks themselves.
    fn blocks(&self, chain: &[BlockHash], block_tokens: u32) -> u32 {
        let known = marks::of(chain, block_tokens).take_while(|(_, mark)| self.marks.contains(mark));
        known.last().map_or(0, |(blocks, _)| blocks as u32)
    }
}

// === impl Cell ===

impl Cell {
    /// The mean load of its endpoints, with what was sent to it since it told.
    fn load(&self, distance: Nanos) -> InFlight {
        let since = self.sent.iter().rev().take_while(|sent| sent.at + distance > self.load.at);
        since.fold(self.load.in_flight, |sum, sent| sum.plus(&sent.load)).mean(self.load.endpoints)
    }
}

// === impl Front ===

impl Front {
    pub(super) fn new(config: CellsConfig, seed: u64, distance: Nanos, block_tokens: u32) -> Self {
        Self {
            policy: config.policy.build(),
            rng: Rng::new(seed.wrapping_add(1)),
            distance,
            block_tokens,
            cells: (0..config.count.max(1)).map(|_| Cell::default()).collect(),
            lookups: Lookups::default(),
            config,
        }
    }

    /// News of a cell have come.
    fn hear(&mut self, cell: usize, news: CellNews) {
        let cell = &mut self.cells[cell];
        match news {
            CellNews::Load(load) => cell.load = load,
            CellNews::Known(mut known) => {
                self.lookups.sketches += 1;
                self.lookups.bytes += known.sketch.bytes() as u64;
                self.lookups.marks += known.marks.len() as u64;
                let told = cell.sent.partition_point(|sent| sent.at + self.distance <= known.at);
                cell.sent.drain(..told);
                cell.sent.iter().for_each(|sent| known.add(&sent.marks));
                cell.known = Some(known);
            }
        }
    }

    /// The cell of a request.
    fn choose(&mut self, now: Nanos, request: &SchedulingRequest, chain: &[BlockHash]) -> usize {
        let has_endpoints = self.cells.iter().any(|cell| cell.load.endpoints > 0);
        let mut rows = Vec::with_capacity(self.cells.len());
        for (n, cell) in self.cells.iter().enumerate() {
            if has_endpoints && cell.load.endpoints == 0 {
                continue;
            }
            let mut overlap_tokens = 0;
            if let Some(known) = &cell.known {
                let found = known.sketch.blocks(chain, self.block_tokens);
                let more = found - known.blocks(chain, self.block_tokens);
                overlap_tokens = found * self.block_tokens;
                self.lookups.lookups += 1;
                self.lookups.false_hits += u64::from(more > 0);
                self.lookups.false_tokens += u64::from(more * self.block_tokens);
            }
            let load = Load { in_flight: cell.load(self.distance), reported: None };
            let endpoint = EndpointId::new(n as u16, 0);
            rows.push(Candidate {
                rates: cell.load.rates,
                ..Candidate::approximate(endpoint, overlap_tokens, load)
            });
        }
        let usual =
            rows.iter().map(|row| self.cells[row.endpoint.slot()].load.usual_output_tokens).sum::<f64>();
        let usual_output_tokens = usual / rows.len() as f64;
        let mut cx = PickContext {
            request,
            now,
            output_tokens: usual_output_tokens as u32,
            usual_output_tokens,
            peers: None,
            adapter: None,
            rng: &mut self.rng,
            reason: Reason::default(),
            work: [None; 2],
            costs: None,
            pairs: None,
        };
        let row = &rows[self.policy.pick(&mut cx, &rows)];
        let load = InFlight {
            requests: 1,
            prefilling: 1,
            moving: 0,
            prefill_tokens: row.uncached_tokens(request).into(),
            prefill_pairs: row.uncached_pairs(request),
            lower_tokens: row.lower_tokens.into(),
            context_tokens: request.prompt_tokens.into(),
        };
        let picked = row.endpoint.slot();
        self.send(picked, now, load, chain);
        picked
    }

    /// A request goes to a cell.
    fn send(&mut self, cell: usize, at: Nanos, load: InFlight, chain: &[BlockHash]) {
        let cell = &mut self.cells[cell];
        let mut sent = Sent { at, load, marks: Vec::new() };
        match &mut cell.known {
            Some(known) => {
                sent.marks = marks::of(chain, self.block_tokens).map(|(_, mark)| mark).collect();
                known.add(&sent.marks);
            }
            // Without sketches, only what the next load may not have is of use.
            None => {
                let told = cell.sent.partition_point(|sent| sent.at + self.distance <= cell.load.at);
                cell.sent.drain(..told);
            }
        }
        if cell.sent.len() == SENT_MAX {
            cell.sent.pop_front();
        }
        cell.sent.push_back(sent);
    }
}

// === impl World ===

impl World {
    /// The front tier asks all cells for their news, and they begin to tell.
    pub(super) fn begin_cells(&mut self) {
        let count = self.front.as_ref().map_or(0, |front| front.cells.len());
        for cell in 0..count {
            for what in [Telling::Load, Telling::Sketch] {
                let Some((news, every)) = self.news_of(cell, what) else { continue };
                if let Some(front) = &mut self.front {
                    front.hear(cell, news);
                }
                // They do not tell at the same moment.
                let at = Nanos(every.0 * (cell as u64 + 1) / count as u64);
                self.clock.schedule(at, Event::CellTells { cell: cell as u16, what });
            }
        }
    }

    /// A cell tells the front tier, and will again.
    pub(super) fn cell_tells(&mut self, cell: u16, what: Telling) {
        let now = self.now();
        let Some((news, every)) = self.news_of(cell.into(), what) else { return };
        let delay = self.front.as_ref().map_or(Nanos::ZERO, |front| front.config.delay);
        self.clock.schedule(now + delay, Event::CellHeard { cell, news: Box::new(news) });
        self.clock.schedule(now + every, Event::CellTells { cell, what });
    }

    /// The front tier hears a cell.
    pub(super) fn cell_heard(&mut self, cell: u16, news: CellNews) {
        if let Some(front) = &mut self.front {
            front.hear(cell.into(), news);
        }
    }

    /// What a cell has to tell, and the time until it tells it again.
    fn news_of(&self, cell: usize, what: Telling) -> Option<(CellNews, Nanos)> {
        let (now, config) = (self.now(), &self.front.as_ref()?.config);
        let routers = self.gateways.tellers(cell);
        match what {
            Telling::Load => Some((CellNews::Load(CellLoad::of(&routers, now)), config.loads_every)),
            Telling::Sketch => {
                let Sketches { every, size } = config.sketches?;
                if !self.gateways.has_exchange() {
                    // Marks that are not told are kept up to a limit, and later ones are lost.
                    routers.iter().for_each(|router| _ = router.tell(false));
                }
                Some((CellNews::Known(Known::of(&routers, now, size)), every))
            }
        }
    }

    /// The cell of a request; 0 without cells.
    pub(super) fn cell_for(&mut self, request: &SchedulingRequest, chain: &[BlockHash]) -> usize {
        let now = self.now();
        self.front.as_mut().map_or(0, |front| front.choose(now, request, chain))
    }

    /// What the front tier was told and has looked up so far.
    pub fn lookups(&self) -> Lookups {
        self.front.as_ref().map_or_else(Lookups::default, |front| front.lookups)
    }
}
