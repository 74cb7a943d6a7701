//! Results of a calibration, as text, page, JSON and timing file.

use std::fmt::Write as _;

use kvlane_core::timing::{Residual, TimingFile};
use serde::Serialize;

use super::fit::{Estimate, Fit, Parameter, Standing};
use super::server::Facts;
use super::{Limits, Point, Work};
use crate::report::{Axis, Chart, Mark, Page, Part, Section, Series, Table, number, percent};

/// The figures, schema `kvlane.calibrate/1`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Always [`Report::SCHEMA`].
    pub schema: &'static str,
    /// The server's URL.
    pub url: String,
    /// The model's name there.
    pub served_model: String,
    /// The engine, if it is known.
    pub engine: Option<String>,
    /// Its sizes, as far as they are known.
    pub limits: Limits,
    /// Maximum tokens of a step that the model uses.
    pub chunk_tokens: u32,
    /// Seed of the prompts.
    pub seed: u64,
    /// Root mean square error over the fitted measurements, as a share.
    pub rms: f64,
    /// The largest error on a prompt that was not fitted, as a share; `None` without any.
    pub held_out_error_max: Option<f64>,
    /// The constants.
    pub constants: Vec<Estimate>,
    /// The measurements beside the model.
    pub points: Vec<Row>,
    /// Measurements left out, and assumptions, as text.
    pub notes: Vec<String>,
    /// The timing file.
    pub timing: TimingFile,
}

/// A measurement with the model's value.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The measurement.
    #[serde(flatten)]
    pub point: Point,
    /// Duration by the fitted model, in seconds.
    pub modelled_s: f64,
    /// Modelled over measured, minus one.
    pub error: f64,
}

// === impl Report ===

impl Report {
    /// Name and version of the format.
    pub const SCHEMA: &str = "kvlane.calibrate/1";

    /// Combines settings, measurements and fit.
    pub fn new(
        url: &str,
        facts: &Facts,
        seed: u64,
        points: &[Point],
        fit: Fit,
        mut notes: Vec<String>,
    ) -> Self {
        let limits = facts.limits.clone();
        let chunk_tokens = limits.chunk_tokens();
        let row = |point: &Point| {
            let modelled_s = point.work.secs(&fit.timing, chunk_tokens);
            Row { point: point.clone(), modelled_s, error: modelled_s / point.secs - 1.0 }
        };
        let points: Vec<Row> = points.iter().map(row).collect();
        let held_out = points.iter().filter(|row| row.point.planned.held_out).map(|row| row.error.abs());
        let held_out_error_max = held_out.reduce(f64::max);
        if limits.max_num_batched_tokens.is_none() {
            notes.push(format!(
                "the server does not say how many tokens a step has at most; {chunk_tokens} are assumed \
                 (--max-num-batched-tokens)"
            ));
        }
        let mut timing = TimingFile::new(fit.timing);
        timing.kv_capacity_tokens = limits.kv_capacity_tokens;
        timing.block_tokens = limits.block_tokens;
        timing.max_num_seqs = limits.max_num_seqs;
        timing.max_num_batched_tokens = Some(chunk_tokens);
        timing.residuals = points.iter().map(Row::residual).collect();
        timing.source = format!("kvlane calibrate {url}, model {}, seed {seed}", facts.model);
        Self {
            schema: Self::SCHEMA,
            url: url.into(),
            served_model: facts.model.clone(),
            engine: facts.engine.map(|engine| engine.name.to_owned()),
            limits,
            chunk_tokens,
            seed,
            rms: fit.rms,
            held_out_error_max,
            constants: fit.estimates,
            points,
            notes,
            timing,
        }
    }

    /// For a terminal.
    pub fn to_text(&self) -> String {
        let (constants, points) = (self.constants_table().to_text(), self.points_table().to_text());
        let mut text = format!("{}\n\n{constants}\n{points}\n{}\n", self.subject(), self.verdict());
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        text
    }

    /// For a browser.
    pub fn to_page(&self) -> Page {
        let text = |text: String| Part::Text(text);
        let mut found = vec![Part::Table(self.constants_table())];
        found.extend(self.notes.iter().map(|note| text(format!("Note: {note}."))));
        let charts = vec![Part::Chart(self.prefill_chart()), Part::Chart(self.decode_chart())];
        let section = |heading: &str, parts| Section { heading: heading.into(), parts };
        Page {
            title: format!("Calibration of {}", self.timing.timing.name()),
            verdict: Some(self.verdict()),
            intro: self.subject(),
            sections: vec![
                section("Constants", found),
                section("Measured and modelled", charts),
                section("All measurements", vec![Part::Table(self.points_table())]),
            ],
            ..Page::default()
        }
    }

    fn subject(&self) -> String {
        let told = |what: &str, value: Option<u64>| match value {
            Some(value) => format!("{what} {value}"),
            None => format!("{what} unknown"),
        };
        let Limits { max_model_len, kv_capacity_tokens, block_tokens, max_num_seqs, .. } = self.limits;
        let sizes = [
            told("context", max_model_len.map(u64::from)),
            told("KV cache tokens", kv_capacity_tokens),
            told("block", block_tokens.map(u64::from)),
            told("sequences", max_num_seqs.map(u64::from)),
            format!("tokens of a step {}", self.chunk_tokens),
        ];
        let engine = self.engine.as_deref().unwrap_or("an unknown engine");
        format!(
            "{} at {} ({engine}), timed as {}: {}.",
            self.served_model,
            self.url,
            self.timing.timing.name(),
            sizes.join(", ")
        )
    }

    fn verdict(&self) -> String {
        let fitted =
            format!("The error of the model is {} (rms) over the fitted measurements.", percent(self.rms));
        match self.held_out_error_max {
            Some(error) => {
                format!("{fitted} It predicts prompts that were not fitted within {}.", percent(error))
            }
            None => fitted,
        }
    }

    fn constants_table(&self) -> Table {
        let row = |estimate: &Estimate| {
            let error = match estimate.standing {
                Standing::Prior => "-".into(),
                _ => percent(estimate.relative_error),
            };
            let standing = match estimate.standing {
                Standing::Fitted => "fitted",
                Standing::Loose => "loosely determined",
                Standing::Prior => "not determined: as before",
            };
            let value = |value| constant(estimate.parameter, value);
            vec![
                estimate.parameter.name().into(),
                value(estimate.value),
                error,
                value(estimate.prior),
                self.rate(estimate),
                standing.into(),
            ]
        };
        Table {
            columns: ["constant", "value", "std. error", "before", "that is", ""].map(String::from).to_vec(),
            rows: self.constants.iter().map(row).collect(),
        }
    }

    /// A share of a peak, in operations or bytes per second of one GPU.
    fn rate(&self, estimate: &Estimate) -> String {
        let hardware = &self.timing.timing.hardware;
        match estimate.parameter {
            Parameter::Compute | Parameter::Attention => {
                format!("{} TFLOP/s", number(estimate.value * hardware.peak_flops / 1e12))
            }
            Parameter::Weights | Parameter::Kv => {
                format!("{} GB/s", number(estimate.value * hardware.memory_bytes_per_s / 1e9))
            }
            _ => String::new(),
        }
    }

    fn points_table(&self) -> Table {
        let row = |row: &Row| {
            let samples = &row.point.samples_s;
            let (least, most) = (samples.first().copied(), samples.last().copied());
            vec![
                row.point.work.name(),
                millis(row.point.secs),
                format!("{} - {}", millis(least.unwrap_or(f64::NAN)), millis(most.unwrap_or(f64::NAN))),
                millis(row.modelled_s),
                format!("{:+.1} %", row.error * 100.0),
                if row.point.planned.held_out { "not fitted".into() } else { String::new() },
            ]
        };
        Table {
            columns: ["", "measured ms", "rounds", "modelled ms", "off", ""].map(String::from).to_vec(),
            rows: self.points.iter().map(row).collect(),
        }
    }

    fn prefill_chart(&self) -> Chart {
        let tokens = |row: &&Row| match row.point.work {
            Work::Prefill { prompt_tokens } => Some(f64::from(prompt_tokens)),
            Work::Decode { .. } => None,
        };
        self.chart("Time to first token of a cold prompt", "prompt tokens", "TTFT (s)", &[("", &tokens)])
    }

    fn decode_chart(&self) -> Chart {
        let seqs = |row: &&Row, long: bool| match row.point.work {
            Work::Decode { seqs, context_tokens } => {
                let is_long = context_tokens / u64::from(seqs.max(1)) > LONG_CONTEXT_TOKENS;
                (is_long == long).then_some(f64::from(seqs))
            }
            Work::Prefill { .. } => None,
        };
        let (short, long) = (|row: &&Row| seqs(row, false), |row: &&Row| seqs(row, true));
        let sets: [(&str, &Place<'_>); 2] = [("short contexts, ", &short), ("long contexts, ", &long)];
        self.chart("Step with all decoding", "sequences", "step (s)", &sets)
    }

    /// Measured dots and a modelled line for each set of rows; `pick` gives a row's position.
    fn chart(&self, title: &str, x: &str, y: &str, sets: &[(&str, &Place<'_>)]) -> Chart {
        let mut series = Vec::new();
        for (name, pick) in sets {
            let mut rows: Vec<(f64, &Row)> =
                self.points.iter().filter_map(|row| Some((pick(&row)?, row))).collect();
            rows.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            let mut add = |what: &str, mark, of: &dyn Fn(&Row) -> Option<f64>| {
                let points: Vec<(f64, f64)> =
                    rows.iter().filter_map(|(x, row)| Some((*x, of(row)?))).collect();
                if !points.is_empty() {
                    series.push(Series { name: format!("{name}{what}"), points, band: Vec::new(), mark });
                }
            };
            let measured =
                |row: &Row, held_out| (row.point.planned.held_out == held_out).then_some(row.point.secs);
            add("modelled", Mark::Line, &|row| Some(row.modelled_s));
            add("measured", Mark::Dots, &|row| measured(row, false));
            add("measured, not fitted", Mark::Dots, &|row| measured(row, true));
        }
        let axis = |label: &str| Axis::log(label);
        Chart { title: title.into(), x: axis(x), y: axis(y), series }
    }
}

/// Contexts beyond this count as long in a chart.
const LONG_CONTEXT_TOKENS: u64 = 1024;

/// Position of a row in a chart, if it is in it.
type Place<'a> = dyn Fn(&&Row) -> Option<f64> + 'a;

// === impl Row ===

impl Row {
    fn residual(&self) -> Residual {
        let note = if self.point.planned.held_out { ", not fitted" } else { "" };
        Residual {
            what: format!("{}{note}", self.point.work.name()),
            measured_s: self.point.secs,
            modelled_s: self.modelled_s,
        }
    }
}

fn millis(secs: f64) -> String {
    if secs < 0.1 { format!("{:.2}", secs * 1e3) } else { format!("{:.0}", secs * 1e3) }
}

/// A constant's value in its usual unit.
fn constant(parameter: Parameter, value: f64) -> String {
    match parameter {
        Parameter::StepSecs | Parameter::RequestSecs => format!("{:.3} ms", value * 1e3),
        Parameter::SequenceSecs => format!("{:.2} us", value * 1e6),
        _ => number(value),
    }
}
