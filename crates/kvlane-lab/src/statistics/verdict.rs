//! The verdict of a comparison in a sentence: how much sooner one run gives the first token than another.
//!
//! Runs that sent the same requests are compared request by request ([`super::paired`]). Of runs with different
//! requests the means are compared, by a bootstrap over independent samples. The sentence also says what limits it: a
//! difference within noise, different loads, requests that only one of the runs answered.

use kvlane_trace::record::Record;

use super::ci::Figure;
use super::draws::{Drawn, Estimate, RandomStreams};
use super::paired::{Matched, Paired, same_requests};

/// Change in percent below which it is given with a decimal.
const DECIMAL_BELOW: f64 = 9.5;
/// Difference of two loads, as a share, above which they are called different.
const LOADS_DIFFER: f64 = 0.05;

/// Time to first token of one run against that of another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contrast {
    /// The run's mean over the other's: below 1 is sooner.
    pub ratio: Estimate,
    /// Requests that the other run answered and this one did not.
    pub lost: u64,
    /// Whether both sent the same requests, which were then compared one by one.
    pub paired: bool,
    /// Conversations that began per second in the run and in the other, if they differ.
    pub rates: Option<(f64, f64)>,
}

/// Compares one run with another at each load. `among` describes the other among several, as in `the next best of 4
/// policies`. `None` without a load.
pub fn at_loads(run: &str, other: &str, among: Option<&str>, found: &[(f64, Contrast)]) -> Option<String> {
    let beside = among.map_or_else(String::new, |among| format!(", {among},"));
    match found {
        [] => None,
        [(_, one)] => Some(one.sentence(run, other, &beside)),
        several => {
            let item = |(load, contrast): &(f64, Contrast)| {
                (contrast.marked(), format!("at {load}"), contrast.remarks(run, other))
            };
            let opening = format!(
                "{run} against {other}{}, at the same loads: first token",
                beside.trim_end_matches(',')
            );
            Some(listed(&opening, several.iter().map(item)))
        }
    }
}

/// Compares several runs with the first. `None` without a comparison.
pub fn with_first(first: &str, others: &[(&str, Contrast)]) -> Option<String> {
    match others {
        [] => None,
        [(run, contrast)] => Some(contrast.sentence(run, first, "")),
        several => {
            let item = |(run, contrast): &(&str, Contrast)| {
                (contrast.marked(), format!("in {run}"), contrast.remarks("it", first))
            };
            let opening = format!("Each compared with {first}: first token");
            Some(listed(&opening, several.iter().map(item)))
        }
    }
}

/// The names that have a value at every load, by the geometric mean of their values, the least first.
pub fn ranked<'a>(
    names: &[&'a str],
    loads: &[f64],
    value: impl Fn(&str, f64) -> Option<f64>,
) -> Vec<&'a str> {
    let whole = |name: &str| loads.iter().map(|load| Some(value(name, *load)?.ln())).sum::<Option<f64>>();
    let mut ranked: Vec<(&str, f64)> = names.iter().filter_map(|name| Some((*name, whole(name)?))).collect();
    ranked.sort_by(|a, b| a.1.total_cmp(&b.1));
    ranked.into_iter().map(|(name, _)| name).collect()
}

/// Changes in one sentence, each with its label, and then what limits them.
fn listed(opening: &str, items: impl Iterator<Item = (String, String, Vec<String>)>) -> String {
    let (mut changes, mut limits) = (Vec::new(), String::new());
    for (change, label, remarks) in items {
        if !remarks.is_empty() {
            limits.push_str(&format!("; {label} {}", remarks.join(", and ")));
        }
        changes.push(format!("{change} {label}"));
    }
    format!("{opening} {}{limits}.", changes.join(", "))
}

// === impl Contrast ===

impl From<&Paired> for Contrast {
    /// A comparison request by request of runs at the same load.
    fn from(paired: &Paired) -> Self {
        Self { ratio: paired.mean_ratio, lost: paired.lost, paired: true, rates: None }
    }
}

impl Contrast {
    /// Compares the records of a run with those of another. `None` if one of them has no answer.
    pub fn of(other: &[Record], run: &[Record]) -> Option<Self> {
        let rates = begun_per_s(run).zip(begun_per_s(other));
        let rates = rates.filter(|(run, other)| (run / other - 1.0).abs() > LOADS_DIFFER);
        if same_requests(other, run) {
            let matched = Matched::of(other, run, Record::ttft_s);
            let paired = Paired::of(&[matched], RandomStreams::of(1, 0))?;
            return Some(Self { rates, ..Self::from(&paired) });
        }
        let means = |records: &[Record], which| {
            let answered = records.iter().filter(|record| record.is_ok());
            let samples = answered.filter_map(Record::ttft_s).collect();
            Drawn::of(&[samples], Figure::Mean, RandomStreams::of(1, which))
        };
        let (other, run) = (means(other, 0)?, means(run, 1)?);
        let ratio = Drawn::follow(&[&run, &other], |means| (means[1] > 0.0).then(|| means[0] / means[1]))?;
        Some(Self { ratio: ratio.estimate(), lost: 0, paired: false, rates })
    }

    /// Whether the interval excludes that there is no difference.
    fn is_sure(&self) -> bool {
        self.ratio.interval.is_some_and(|interval| interval.low > 1.0 || interval.high < 1.0)
    }

    /// The change with its interval of 95 %, as in `23 % sooner (19 to 27)`.
    fn change(&self) -> String {
        let (word, sign) = if self.ratio.value <= 1.0 { ("sooner", 1.0) } else { ("later", -1.0) };
        let percent = |ratio: f64| sign * 100.0 * (1.0 - ratio);
        let size = percent(self.ratio.value);
        let decimals = usize::from(size < DECIMAL_BELOW);
        let Some(interval) = self.ratio.interval else { return format!("{size:.decimals$} % {word}") };
        let mut ends = [percent(interval.low), percent(interval.high)];
        ends.sort_unstable_by(f64::total_cmp);
        let [low, high] = ends.map(|end| unsigned_zero(format!("{end:.decimals$}")));
        format!("{size:.decimals$} % {word} ({low} to {high})")
    }

    /// The change, marked if it is within noise.
    fn marked(&self) -> String {
        let change = self.change();
        match change.strip_suffix(')') {
            _ if self.is_sure() => change,
            Some(open) => format!("{open}, within noise)"),
            None => format!("{change} (too few requests for an interval)"),
        }
    }

    fn sentence(&self, run: &str, other: &str, beside: &str) -> String {
        let load = match self.rates {
            None => " at the same load",
            Some(_) if beside.is_empty() => ", but not at the same load",
            Some(_) => " but not at the same load",
        };
        let remarks = self.remarks(run, other);
        let limits = match remarks.is_empty() {
            true => String::new(),
            false => format!("; {}", remarks.join(", and ")),
        };
        match self.is_sure() {
            true => {
                format!("{run} gives the first token {} than {other}{beside}{load}{limits}.", self.change())
            }
            false => format!(
                "{run} and {other}{beside} do not differ beyond noise{load}: first token {} with {run}{limits}.",
                self.marked()
            ),
        }
    }

    /// What limits the comparison.
    fn remarks(&self, run: &str, other: &str) -> Vec<String> {
        let lost = match self.lost {
            0 => None,
            1 => Some(format!("{run} did not answer 1 request that {other} answered")),
            lost => Some(format!("{run} did not answer {lost} requests that {other} answered")),
        };
        let rates = self.rates.map(|(own, others)| {
            format!("{run} had {own:.3} new conversations per second, {other} {others:.3}")
        });
        let apart = (!self.paired)
            .then(|| "the requests differ, so the means are compared as independent samples".to_owned());
        [rates, apart, lost].into_iter().flatten().collect()
    }
}

/// `-0` and `-0.0` without their sign.
fn unsigned_zero(number: String) -> String {
    match number.strip_prefix('-') {
        Some(size) if size.chars().all(|digit| matches!(digit, '0' | '.')) => size.to_owned(),
        _ => number,
    }
}

/// Conversations that began per second. Their later turns are due when the server has answered, so these do not
/// count. `None` for fewer than two conversations.
fn begun_per_s(records: &[Record]) -> Option<f64> {
    let times = records.iter().filter(|record| record.after.is_none()).map(|record| record.scheduled_s);
    let (mut count, mut first, mut last) = (0, f64::INFINITY, f64::NEG_INFINITY);
    for time in times {
        (count, first, last) = (count + 1, time.min(first), time.max(last));
    }
    (last > first).then(|| f64::from(count - 1) / (last - first))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests at one per `gap_s`, with the times to first token.
    fn run(gap_s: f64, ttfts: impl IntoIterator<Item = f64>) -> Vec<Record> {
        let record = |(id, ttft_s): (usize, f64)| {
            let at = id as f64 * gap_s;
            Record {
                id: id as u64,
                session: Some(id as u32),
                scheduled_s: at,
                first_token_s: Some(at + ttft_s),
                end_s: at + ttft_s,
                prompt_tokens: 1000 + 700 * (id as u32 % 5),
                status: 200,
                ..Record::default()
            }
        };
        ttfts.into_iter().enumerate().map(record).collect()
    }

    fn times(count: usize, factor: f64) -> Vec<f64> {
        (0..count).map(|n| factor * (1.0 + (n * 7919 % 100) as f64)).collect()
    }

    fn said(other: &[Record], run: &[Record]) -> String {
        let contrast = Contrast::of(other, run).expect("answers");
        with_first("before", &[("after", contrast)]).expect("a verdict")
    }

    #[test]
    fn a_difference_has_its_size_its_interval_and_the_load() {
        assert_eq!(
            said(&run(1.0, times(400, 1.0)), &run(1.0, times(400, 0.77))),
            "after gives the first token 23 % sooner (23 to 23) than before at the same load."
        );
        assert_eq!(
            said(&run(1.0, times(400, 1.0)), &run(1.0, times(400, 1.025))),
            "after gives the first token 2.5 % later (2.5 to 2.5) than before at the same load."
        );
    }

    #[test]
    fn what_chance_can_explain_is_within_noise() {
        let shuffled = times(300, 1.0).into_iter().rev();
        let said = said(&run(1.0, times(300, 1.0)), &run(1.0, shuffled));
        assert!(said.starts_with("after and before do not differ beyond noise at the same load: "), "{said}");
        assert!(said.contains(", within noise)"), "{said}");
        let one = Contrast::of(&run(1.0, [1.0]), &run(1.0, [0.5])).expect("an answer");
        assert_eq!(one.marked(), "50 % sooner (too few requests for an interval)");
    }

    #[test]
    fn different_loads_and_different_requests_are_named() {
        let faster = said(&run(1.0, times(400, 1.0)), &run(0.5, times(400, 2.0)));
        assert_eq!(
            faster,
            "after gives the first token 100 % later (100 to 100) than before, but not at the same load; after had 2.000 \
             new conversations per second, before 1.000."
        );
        let mut others = run(1.0, times(400, 0.5));
        others.iter_mut().for_each(|record| record.prompt_tokens = 9000);
        let said = said(&run(1.0, times(400, 1.0)), &others);
        assert!(said.contains("50 % sooner") && !said.contains("(50 to 50)"), "{said}");
        assert!(said.ends_with("; the requests differ, so the means are compared as independent samples."));
    }

    #[test]
    fn several_runs_are_each_compared_with_the_first() {
        let first = run(1.0, times(300, 1.0));
        let mut fewer = run(1.0, times(300, 0.5));
        fewer[7].status = 503;
        let noise = run(1.0, times(300, 1.0).into_iter().rev());
        let others = [("b", &fewer), ("c", &noise)]
            .map(|(name, records)| (name, Contrast::of(&first, records).expect("answers")));
        let said = with_first("a", &others).expect("a verdict");
        assert!(
            said.starts_with("Each compared with a: first token 50 % sooner (50 to 50) in b, "),
            "{said}"
        );
        assert!(said.contains("within noise) in c"), "{said}");
        assert!(said.ends_with("; in b it did not answer 1 request that a answered."), "{said}");
        assert_eq!(with_first("a", &[]), None);
    }

    #[test]
    fn names_are_ranked_over_the_loads_that_all_of_them_have() {
        let value = |name: &str, load: f64| match name {
            "a" => Some(3.0),
            "b" => Some(1.0 + 7.0 * (load - 1.0)),
            _ => (load < 2.0).then_some(1.0),
        };
        assert_eq!(ranked(&["a", "b", "c"], &[1.0, 2.0], value), ["b", "a"]);
    }
}
