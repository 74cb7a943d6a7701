//! Least-squares fit of the timing model's constants to measurements.
//!
//! Levenberg-Marquardt on the logarithms of the constants, so that none turns negative and all have one scale, with
//! logarithms of measured over modelled as residuals: a relative error weighs the same for a millisecond and for a
//! minute. Outliers get almost no weight (Cauchy's weights). Derivatives are numeric: the model is cheap to evaluate.
//!
//! Not every set of measurements determines every constant: short contexts do not determine the bandwidth of keys and
//! values. A constant for which the prior fits as well keeps the prior, and is marked.

use kvlane_core::timing::TimingModel;
use serde::Serialize;

use super::{Point, Work};

/// Steps of the method before it stops, converged or not.
const STEPS_MAX: usize = 300;

/// Rounds of reweighting outliers.
const WEIGHINGS: usize = 10;

/// A residual of this multiple of the usual one gets half the weight: the constant with which Cauchy's weights lose 5
/// % efficiency for normal errors.
const CAUCHY: f64 = 2.385;

/// Minimum error of a measurement, as a share.
const NOISE_MIN: f64 = 0.001;

/// Half the distance between a measurement's rounds counts as its error, up to this share: beyond it the rounds
/// reflect other load on the machine.
const SPREAD_MAX: f64 = 0.05;

/// Relative standard error from which a constant is badly determined.
const LOOSE_ERROR: f64 = 0.25;

/// Increase of the cost with a constant pinned, in squares of the noise, up to which the pin holds: two standard
/// deviations.
const PIN_COST_MAX: f64 = 4.0;

/// Step of a numeric derivative, in logarithms.
const DERIVATIVE_STEP: f64 = 1e-5;

/// One of the model's constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Parameter {
    /// Share of peak arithmetic that matrices reach.
    Compute,
    /// Share of memory bandwidth at which weights are read.
    Weights,
    /// Share of memory bandwidth at which keys and values are read.
    Kv,
    /// Share of peak arithmetic that prompt attention reaches.
    Attention,
    /// Host seconds of a step.
    StepSecs,
    /// Host seconds of a step for each decoding sequence.
    SequenceSecs,
    /// Seconds of a request outside of steps.
    RequestSecs,
}

/// How well the measurements determine a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// Determined.
    Fitted,
    /// The prior is ruled out, but the value is uncertain.
    Loose,
    /// Not determined: the prior is kept.
    Prior,
}

/// One constant after the fit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The constant.
    pub parameter: Parameter,
    /// Its value in the fitted model.
    pub value: f64,
    /// Its value before.
    pub prior: f64,
    /// Standard error as a share of the value; where the prior is kept, that of the fitted value.
    pub relative_error: f64,
    /// How well it is determined.
    pub standing: Standing,
}

/// The result of a fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The prior with its constants replaced.
    pub timing: TimingModel,
    /// One for each constant.
    pub estimates: Vec<Estimate>,
    /// Root mean square of the residuals of what was fitted, as a share.
    pub rms: f64,
}

/// Errors of a fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// Too few measurements.
    #[error(
        "{0} usable measurements are too few to fit: at least three prompts or decode batches are needed"
    )]
    TooFew(usize),
    /// A measurement that is not a duration.
    #[error("`{0}` has no positive duration: invalid measurement")]
    NoDuration(String),
}

// === impl Parameter ===

impl Parameter {
    /// All, in the order of reports.
    pub const ALL: [Self; 7] = [
        Self::Compute,
        Self::Weights,
        Self::Kv,
        Self::Attention,
        Self::StepSecs,
        Self::SequenceSecs,
        Self::RequestSecs,
    ];

    /// Its name in a timing file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "efficiency.compute",
            Self::Weights => "efficiency.weights",
            Self::Kv => "efficiency.kv",
            Self::Attention => "efficiency.attention",
            Self::StepSecs => "host.step_secs",
            Self::SequenceSecs => "host.sequence_secs",
            Self::RequestSecs => "host.request_secs",
        }
    }

    /// Its value in a model.
    pub fn get(self, timing: &TimingModel) -> f64 {
        let (share, host) = (&timing.hardware.efficiency, &timing.host);
        match self {
            Self::Compute => share.compute,
            Self::Weights => share.weights,
            Self::Kv => share.kv,
            Self::Attention => share.attention,
            Self::StepSecs => host.step_secs,
            Self::SequenceSecs => host.sequence_secs,
            Self::RequestSecs => host.request_secs,
        }
    }

    fn set(self, timing: &mut TimingModel, value: f64) {
        let (share, host) = (&mut timing.hardware.efficiency, &mut timing.host);
        *match self {
            Self::Compute => &mut share.compute,
            Self::Weights => &mut share.weights,
            Self::Kv => &mut share.kv,
            Self::Attention => &mut share.attention,
            Self::StepSecs => &mut host.step_secs,
            Self::SequenceSecs => &mut host.sequence_secs,
            Self::RequestSecs => &mut host.request_secs,
        } = value;
    }

    /// Whether it is a share of a peak, so that a larger value is less time.
    fn is_share(self) -> bool {
        matches!(self, Self::Compute | Self::Weights | Self::Kv | Self::Attention)
    }

    /// Range of the search. A share of a peak that is only nominal can have any value: only the product matters.
    fn range(self) -> (f64, f64) {
        match self {
            Self::Compute | Self::Weights | Self::Kv | Self::Attention => (1e-9, 1e5),
            Self::StepSecs | Self::RequestSecs => (1e-7, 100.0),
            Self::SequenceSecs => (1e-9, 10.0),
        }
    }

    /// Start of the search if the prior is zero, which has no logarithm.
    fn typical(self) -> f64 {
        match self {
            Self::SequenceSecs => 1e-5,
            _ => 1e-3,
        }
    }
}

/// Fits the constants of `prior` to the points that are not held out. A step of the engine has at most `chunk_tokens`.
///
/// # Errors
///
/// If there is nothing to fit.
pub fn fit(prior: &TimingModel, chunk_tokens: u32, points: &[Point]) -> Result<Fit, FitError> {
    let fitted: Vec<&Point> = points.iter().filter(|point| !point.planned.held_out).collect();
    if fitted.len() < 3 {
        return Err(FitError::TooFew(fitted.len()));
    }
    if let Some(point) = fitted.iter().find(|point| !(point.secs.is_finite() && point.secs > 0.0)) {
        return Err(FitError::NoDuration(point.work.name()));
    }
    let mut problem = Problem { points: &fitted, chunk_tokens, weights: vec![1.0; fitted.len()] };
    let mut free: Vec<Parameter> = Parameter::ALL.to_vec();
    // Two starting points: the prior for a known machine, and an estimate for one whose peaks are only nominal.
    let mut model = [prior.clone(), problem.guess(prior)]
        .map(|start| problem.descend(start, &free))
        .into_iter()
        .min_by(|a, b| problem.cost(a).total_cmp(&problem.cost(b)))
        .unwrap_or_else(|| prior.clone());
    for _ in 0..WEIGHINGS {
        problem.weigh(&model, free.len());
        model = problem.descend(model, &free);
    }
    let mut noise = problem.noise(&model, free.len());
    let mut loose: Vec<Parameter> = Vec::new();
    let mut pinned: Vec<(Parameter, f64)> = Vec::new();
    loop {
        let errors = problem.errors(&model, &free, noise);
        let worst = free
            .iter()
            .zip(&errors)
            .filter(|(parameter, error)| **error > LOOSE_ERROR && !loose.contains(parameter))
            .max_by(|(_, a), (_, b)| a.total_cmp(b));
        let Some((&parameter, &error)) = worst else { break };
        let others: Vec<Parameter> = free.iter().copied().filter(|other| *other != parameter).collect();
        let mut start = model.clone();
        parameter.set(&mut start, parameter.get(prior));
        let without = problem.descend(start, &others);
        if problem.cost(&without) - problem.cost(&model) <= PIN_COST_MAX * noise * noise {
            pinned.push((parameter, error));
            (free, model) = (others, without);
            noise = problem.noise(&model, free.len());
        } else {
            loose.push(parameter);
        }
    }
    let errors = problem.errors(&model, &free, noise);
    let estimate = |parameter: Parameter| {
        let at = free.iter().position(|other| *other == parameter);
        let dropped = pinned.iter().find(|(other, _)| *other == parameter);
        let standing = match at {
            None => Standing::Prior,
            Some(_) if loose.contains(&parameter) => Standing::Loose,
            Some(_) => Standing::Fitted,
        };
        let relative_error = at.map(|at| errors[at]).or(dropped.map(|(_, error)| *error)).unwrap_or(f64::MAX);
        Estimate {
            parameter,
            value: parameter.get(&model),
            prior: parameter.get(prior),
            relative_error,
            standing,
        }
    };
    let estimates = Parameter::ALL.map(estimate).to_vec();
    let squares: f64 = problem.residuals(&model).iter().map(|residual| residual * residual).sum();
    let rms = (squares / fitted.len() as f64).sqrt();
    Ok(Fit { timing: model, estimates, rms })
}

/// The measurements to fit.
struct Problem<'a> {
    points: &'a [&'a Point],
    chunk_tokens: u32,
    /// One for each point.
    weights: Vec<f64>,
}

// === impl Problem ===

impl Problem<'_> {
    /// Logarithms of modelled over measured.
    fn residuals(&self, timing: &TimingModel) -> Vec<f64> {
        let residual = |point: &&Point| (point.work.secs(timing, self.chunk_tokens) / point.secs).ln();
        self.points.iter().map(residual).collect()
    }

    /// Weighted sum of squares.
    fn cost(&self, timing: &TimingModel) -> f64 {
        self.residuals(timing)
            .iter()
            .zip(&self.weights)
            .map(|(residual, weight)| weight * residual * residual)
            .sum()
    }

    /// Weighs each point by its error (the spread of its rounds and the usual error of the model), and reduces the
    /// weight of outliers.
    fn weigh(&mut self, timing: &TimingModel, parameters: usize) {
        let residuals = self.residuals(timing);
        let mut sizes: Vec<f64> = residuals.iter().map(|residual| residual.abs()).collect();
        // 1.4826 times the median is the standard deviation for normal errors; a fit makes residuals look smaller.
        let spare = sizes.len().saturating_sub(parameters).max(1);
        let shrunk = (sizes.len() as f64 / spare as f64).sqrt();
        let usual = (1.4826 * shrunk * super::median(&mut sizes)).max(NOISE_MIN);
        let weight = |(point, residual): (&&Point, f64)| {
            let variance = usual.powi(2) + point.spread().min(SPREAD_MAX).powi(2);
            1.0 / (variance + (residual / CAUCHY).powi(2))
        };
        self.weights = self.points.iter().zip(residuals).map(weight).collect();
    }

    /// Residual of a point in units of its error; at least one.
    fn noise(&self, timing: &TimingModel, parameters: usize) -> f64 {
        let spare = self.points.len().saturating_sub(parameters).max(1);
        (self.cost(timing) / spare as f64).sqrt().max(1.0)
    }

    /// A starting point for an unknown machine: each constant as if it alone explained half of the measurement that
    /// shows it best.
    fn guess(&self, prior: &TimingModel) -> TimingModel {
        let mut nothing = prior.clone();
        for parameter in Parameter::ALL {
            let (low, high) = parameter.range();
            parameter.set(&mut nothing, if parameter.is_share() { high } else { low });
        }
        let alone = |parameter: Parameter, work: &Work| {
            let mut timing = nothing.clone();
            parameter.set(&mut timing, 1.0);
            work.secs(&timing, self.chunk_tokens)
        };
        let mut guess = prior.clone();
        for parameter in Parameter::ALL {
            let shows = |point: &&&Point| alone(parameter, &point.work) / point.secs;
            let Some(best) = self.points.iter().max_by(|a, b| shows(a).total_cmp(&shows(b))) else {
                continue;
            };
            let (low, high) = parameter.range();
            let of_half = 2.0 * shows(&best);
            let value = if parameter.is_share() { of_half } else { 0.1 / of_half };
            parameter.set(&mut guess, value.clamp(low, high));
        }
        guess
    }

    /// The nearest minimum of the cost over the `free` constants.
    fn descend(&self, mut timing: TimingModel, free: &[Parameter]) -> TimingModel {
        for parameter in free {
            let (low, high) = parameter.range();
            let value = parameter.get(&timing);
            parameter
                .set(&mut timing, if value > 0.0 { value.clamp(low, high) } else { parameter.typical() });
        }
        let (mut cost, mut damping) = (self.cost(&timing), 1e-3);
        for _ in 0..STEPS_MAX {
            let (jacobian, residuals) = (self.jacobian(&timing, free), self.residuals(&timing));
            let mut normal = self.normal(&jacobian);
            let gradient: Vec<f64> = (0..free.len())
                .map(|column| {
                    let rows = jacobian.iter().zip(&residuals).zip(&self.weights);
                    rows.map(|((row, residual), weight)| weight * row[column] * residual).sum()
                })
                .collect();
            for (index, row) in normal.iter_mut().enumerate() {
                row[index] += damping * row[index].max(1e-6);
            }
            let moved = solve(normal, &gradient).map(|step| {
                let mut moved = timing.clone();
                for (parameter, step) in free.iter().zip(step) {
                    let (low, high) = parameter.range();
                    // A step of at most a factor of e: the model is far from linear in its constants.
                    let value = parameter.get(&timing) * (-step).clamp(-1.0, 1.0).exp();
                    parameter.set(&mut moved, value.clamp(low, high));
                }
                moved
            });
            let better = moved.map(|moved| (self.cost(&moved), moved)).filter(|(new, _)| *new < cost);
            match better {
                Some((new, moved)) => {
                    let gain = cost - new;
                    (timing, cost) = (moved, new);
                    damping = (damping / 5.0).max(1e-12);
                    if gain <= 1e-14 * (1.0 + cost) {
                        break;
                    }
                }
                None if damping > 1e9 => break,
                None => damping *= 4.0,
            }
        }
        timing
    }

    /// Derivative of each residual by the logarithm of each free constant.
    fn jacobian(&self, timing: &TimingModel, free: &[Parameter]) -> Vec<Vec<f64>> {
        let moved = |parameter: &Parameter, factor: f64| {
            let mut moved = timing.clone();
            parameter.set(&mut moved, parameter.get(timing) * factor);
            self.residuals(&moved)
        };
        let (up, down) = (DERIVATIVE_STEP.exp(), (-DERIVATIVE_STEP).exp());
        let columns: Vec<(Vec<f64>, Vec<f64>)> =
            free.iter().map(|p| (moved(p, up), moved(p, down))).collect();
        let row = |at: usize| {
            columns.iter().map(|(up, down)| (up[at] - down[at]) / (2.0 * DERIVATIVE_STEP)).collect()
        };
        (0..self.points.len()).map(row).collect()
    }

    /// The weighted product of a Jacobian with itself.
    fn normal(&self, jacobian: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let size = jacobian.first().map_or(0, Vec::len);
        let mut normal = vec![vec![0.0; size]; size];
        for (row, weight) in jacobian.iter().zip(&self.weights) {
            for (a, line) in normal.iter_mut().enumerate() {
                for (b, sum) in line.iter_mut().enumerate() {
                    *sum += weight * row[a] * row[b];
                }
            }
        }
        normal
    }

    /// Standard error of each free constant as a share of it, very large if the points do not determine it.
    fn errors(&self, timing: &TimingModel, free: &[Parameter], noise: f64) -> Vec<f64> {
        let mut normal = self.normal(&self.jacobian(timing, free));
        for (index, row) in normal.iter_mut().enumerate() {
            // Keeps undetermined constants finite.
            row[index] += 1e-12;
        }
        let variance = |at: usize| {
            let unit: Vec<f64> = (0..free.len()).map(|other| f64::from(u8::from(other == at))).collect();
            solve(normal.clone(), &unit).map_or(f64::MAX, |column| column[at])
        };
        (0..free.len()).map(|at| noise * variance(at).max(0.0).sqrt()).collect()
    }
}

/// Solves a symmetric positive definite system by Cholesky's method; `None` if it is not positive definite.
fn solve(mut matrix: Vec<Vec<f64>>, right: &[f64]) -> Option<Vec<f64>> {
    let size = right.len();
    for column in 0..size {
        for row in column..size {
            let product: f64 = (0..column).map(|k| matrix[row][k] * matrix[column][k]).sum();
            let rest = matrix[row][column] - product;
            matrix[row][column] = match row == column {
                true if rest > 0.0 => rest.sqrt(),
                true => return None,
                false => rest / matrix[column][column],
            };
        }
    }
    let mut solution = right.to_vec();
    for row in 0..size {
        let product: f64 = (0..row).map(|k| matrix[row][k] * solution[k]).sum();
        solution[row] = (solution[row] - product) / matrix[row][row];
    }
    for row in (0..size).rev() {
        let product: f64 = (row + 1..size).map(|k| matrix[k][row] * solution[k]).sum();
        solution[row] = (solution[row] - product) / matrix[row][row];
    }
    Some(solution)
}
