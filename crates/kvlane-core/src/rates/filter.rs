//! A Kalman filter of logarithms of factors, whose observations are of sums of terms.
//!
//! Linearised again at its own result (iterated extended filter; Bell and Cathey, IEEE Transactions on Automatic
//! Control 38 (1993), p. 294), because the logarithm of a sum bends.
//!
//! - *Noise* is measured: half of the residuals are to be within its quartiles.
//! - An *outlier* counts as one at [`CLAMP`] standard deviations (Huber, Annals of Mathematical Statistics 35 (1964),
//!   p. 73), and makes the state as much surer as it counts.
//! - *Change*: each observation leaves what it observes a little less sure, and residuals of one sign, one after the
//!   other, much less. Noise is what is left around them.

use serde::{Deserialize, Serialize};

/// Standard deviations at which an outlier counts.
const CLAMP: f64 = 2.0;

/// Those at which a time counts that may have more in it than work.
const CLAMP_WAITING: f64 = 1.0;

/// Bounds of the noise of a kind of observation, the factor by which a residual corrects it, and the quartile of a normal
/// distribution.
const NOISE_RANGE: (f64, f64) = (0.02, 1.0);
const NOISE_STRIDE: f64 = 1.05;
const QUARTILE: f64 = 0.6745;

/// Variance of a logarithm that an observation of nothing else adds, and where many parts are observed together, of which each
/// follows its own changes.
const CHANGE: f64 = 1e-5;
const CHANGE_TOGETHER: f64 = 1e-7;
/// The same per square of the standard deviations by which the latest residuals are on one side, beyond [`ONE_SIDED`].
const SHIFT_CHANGE: f64 = 0.02;
const ONE_SIDED: f64 = 0.75;
/// The same per square of what an observation has moved it by: where a state moves far, the sum bends.
const MOVED: f64 = 0.5;
/// Weight of the latest residual among them.
const LATEST: f64 = 0.125;

/// Standard deviations before any observation that a logarithm is never farther from zero than.
const FAR: f64 = 4.0;

/// Corrections after which a state counts as settled, and the change of a logarithm below which it does.
const ITERATIONS_MAX: usize = 4;
const SETTLED: f64 = 0.05;

/// The first states are levels of what is observed, the others ratios within it.
const LEVELS: usize = 2;

/// Kinds of observations: they differ in noise.
pub(super) const KINDS: usize = 3;

/// The state: estimates and their covariance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "Vec<f64>", try_from = "Vec<f64>")]
pub(super) struct Filter<const N: usize> {
    logs: [f64; N],
    covariance: [[f64; N]; N],
    /// Of each kind of observation: its noise, and a moving average of its residuals in standard deviations.
    noise: [f64; KINDS],
    shift: [f64; KINDS],
}

/// An observation.
#[derive(Clone, Copy)]
pub(super) struct Observed {
    pub(super) kind: usize,
    /// Its logarithm, and the variance of that beside the noise of its kind.
    pub(super) log: f64,
    pub(super) more: f64,
    /// Whether there may be more in it than what is expected, such as waiting for something.
    pub(super) may_wait: bool,
    /// Whether it is of one of many parts that are observed together. Those of one part come one after the other.
    pub(super) is_of_many: bool,
    /// What the part is known to add to its logarithm by itself. Only the levels follow that as well.
    pub(super) own: f64,
}

/// What an observation is expected to be in a state: its logarithm, and the derivatives of that by the state.
pub(super) struct Expected<const N: usize> {
    pub(super) log: f64,
    pub(super) shares: [f64; N],
}

// === impl Filter ===

impl<const N: usize> Filter<N> {
    /// All logarithms are zero, which is as sure as this covariance.
    pub(super) fn new(covariance: [[f64; N]; N], noise: [f64; KINDS]) -> Self {
        Self { logs: [0.0; N], covariance, noise, shift: [0.0; KINDS] }
    }

    pub(super) fn logs(&self) -> &[f64; N] {
        &self.logs
    }

    /// Variance of one logarithm.
    pub(super) fn variance_of(&self, at: usize) -> f64 {
        self.covariance[at][at]
    }

    /// This was observed. The state is never less sure than `unsure`.
    pub(super) fn observe(
        &mut self,
        observed: &Observed,
        unsure: &Self,
        expected: impl Fn(&[f64; N]) -> Expected<N>,
    ) {
        let &Observed { kind, log, more, may_wait, is_of_many, own } = observed;
        let late = if may_wait { CLAMP_WAITING } else { CLAMP };
        let prior = self.logs;
        let mut first = None;
        let (mut seen, mut gain, mut variance, mut trust) = (expected(&prior), [0.0; N], 1.0, 1.0);
        for _ in 0..ITERATIONS_MAX {
            gain = product(&self.covariance, &seen.shares);
            variance = dot(&seen.shares, &gain) + self.noise[kind] * self.noise[kind] + more;
            // Linearised where the state is now, and measured from where it was.
            let moved = dot(&seen.shares, &std::array::from_fn(|at| self.logs[at] - prior[at]));
            let deviations = (log - seen.log + moved) / variance.sqrt();
            first.get_or_insert(deviations);
            let clamp = if deviations > 0.0 { late } else { CLAMP };
            trust = (clamp / deviations.abs()).min(1.0);
            let far = trust * deviations / variance.sqrt();
            let far_own = trust * own / variance;
            let last = self.logs;
            self.logs = std::array::from_fn(|at| {
                let most = FAR * unsure.covariance[at][at].sqrt();
                let far = if at < LEVELS { far } else { far - far_own };
                (prior[at] + far * gain[at]).clamp(-most, most)
            });
            if last.iter().zip(&self.logs).all(|(last, log)| (last - log).abs() < SETTLED) {
                break;
            }
            seen = expected(&self.logs);
        }
        let deviations = first.unwrap_or_default();
        let (noise, shift) = (&mut self.noise[kind], &mut self.shift[kind]);
        let stride = if (deviations - *shift).abs() > QUARTILE { NOISE_STRIDE } else { 1.0 / NOISE_STRIDE };
        *noise = (*noise * stride).clamp(NOISE_RANGE.0, NOISE_RANGE.1);
        *shift += LATEST * (deviations.clamp(-CLAMP, late) - *shift);
        let beyond = (shift.abs() - ONE_SIDED).max(0.0);
        let change = if is_of_many { CHANGE_TOGETHER } else { CHANGE + SHIFT_CHANGE * beyond * beyond };
        for row in 0..N {
            for column in 0..N {
                self.covariance[row][column] -= trust * gain[row] * gain[column] / variance;
            }
            let moved = self.logs[row] - prior[row];
            let more = change * seen.shares[row] * seen.shares[row] + MOVED * moved * moved;
            let room = (unsure.covariance[row][row] - self.covariance[row][row]).max(0.0);
            self.covariance[row][row] += more.min(room);
        }
    }

    /// A filter of these logarithms alone, whose deviations from their present values have the variance `more` beside.
    pub(super) fn part<const M: usize>(&self, which: [usize; M], more: f64) -> Filter<M> {
        let mut covariance = which.map(|row| which.map(|column| self.covariance[row][column]));
        (0..M).for_each(|at| covariance[at][at] += more);
        Filter { logs: which.map(|at| self.logs[at]), ..Filter::new(covariance, self.noise) }
    }
}

impl<const N: usize> From<Filter<N>> for Vec<f64> {
    fn from(filter: Filter<N>) -> Self {
        let covariance = filter.covariance.into_iter().flatten();
        filter.logs.into_iter().chain(covariance).chain(filter.noise).chain(filter.shift).collect()
    }
}

impl<const N: usize> TryFrom<Vec<f64>> for Filter<N> {
    type Error = String;

    fn try_from(numbers: Vec<f64>) -> Result<Self, String> {
        match numbers.len() == numbers_of(N) {
            true => Self::read(numbers, &Self::new([[0.0; N]; N], [0.0; KINDS])),
            false => Err(format!("a filter of {N} factors has {} numbers", numbers_of(N))),
        }
    }
}

impl<const N: usize> Filter<N> {
    /// A filter of at most `N` factors from its numbers. Further factors are as in `unsure`: nothing is known of them.
    pub(super) fn read(numbers: Vec<f64>, unsure: &Self) -> Result<Self, String> {
        let factors = (1..=N).find(|&factors| numbers.len() == numbers_of(factors));
        let Some(n) = factors.filter(|_| numbers.iter().all(|number| number.is_finite())) else {
            return Err(format!("a filter of {N} factors has {} numbers", numbers_of(N)));
        };
        let mut filter = *unsure;
        filter.logs[..n].copy_from_slice(&numbers[..n]);
        for (row, covariance) in filter.covariance[..n].iter_mut().zip(numbers[n..].chunks_exact(n)) {
            row[..n].copy_from_slice(covariance);
        }
        let kinds = &numbers[n + n * n..];
        filter.noise.copy_from_slice(&kinds[..KINDS]);
        filter.shift.copy_from_slice(&kinds[KINDS..]);
        Ok(filter)
    }
}

/// How many numbers a filter of so many factors has.
fn numbers_of(factors: usize) -> usize {
    factors + factors * factors + 2 * KINDS
}

fn dot<const N: usize>(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn product<const N: usize>(matrix: &[[f64; N]; N], by: &[f64; N]) -> [f64; N] {
    std::array::from_fn(|row| dot(&matrix[row], by))
}
