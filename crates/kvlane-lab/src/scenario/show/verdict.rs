//! The verdict of a simulation in a sentence: how much sooner the best policy gives the first token than the next best.
//!
//! Requests are paired: each is compared with itself under the other policy, at the same load and under the same seed
//! (see [`crate::statistics::paired`]).

use super::load_of;
use crate::scenario::Row;
use crate::statistics::draws::{Estimate, RandomStreams};
use crate::statistics::paired::{Matched, Paired};

/// The sentence; `None` with fewer than two policies, or if nothing was answered.
pub fn verdict(rows: &[Row]) -> Option<String> {
    let mut arms: Vec<&str> = Vec::new();
    for row in rows {
        if !arms.contains(&&*row.arm) {
            arms.push(&row.arm);
        }
    }
    let loads = loads(rows);
    // Over the loads at which all have answers.
    let mean = |arm: &str| -> Option<f64> {
        let of_load = |load: &f64| Some(at(rows, arm, *load)?.simulated.get("ttft_mean_s")?.ln());
        loads.iter().map(of_load).sum()
    };
    let mut ranked: Vec<(&str, f64)> = arms.iter().filter_map(|arm| Some((*arm, mean(arm)?))).collect();
    ranked.sort_by(|a, b| a.1.total_cmp(&b.1));
    let [(best, _), (next, _), ..] = ranked[..] else { return None };
    let found: Vec<(f64, Paired)> =
        loads.iter().filter_map(|&load| Some((load, compared(rows, next, best, load)?))).collect();
    let (_, first) = found.first()?;
    let among = match ranked.len() {
        2 => String::new(),
        count => format!(", the next best of {count} policies"),
    };
    if let [_] = found[..] {
        let lost = lost(first, best, next);
        return Some(match change(&first.mean_ratio) {
            (true, change) => {
                format!("{best} gives the first token {change} than {next}{among}, at the same load{lost}.")
            }
            (false, change) => {
                format!(
                    "{best} and {next}{among}, do not differ at the same load: first token {change}{lost}."
                )
            }
        });
    }
    let each: Vec<String> =
        found.iter().map(|(load, paired)| format!("{} at {load}", change(&paired.mean_ratio).1)).collect();
    let losses: Vec<String> = found
        .iter()
        .map(|(load, paired)| (load, lost(paired, best, next)))
        .filter(|(_, lost)| !lost.is_empty())
        .map(|(load, lost)| format!("; at {load}{}", lost.trim_start_matches(',')))
        .collect();
    Some(format!(
        "{best} against {next}{among}, at the same loads: first token {}{}.",
        each.join(", "),
        losses.concat()
    ))
}

/// The loads, in order.
fn loads(rows: &[Row]) -> Vec<f64> {
    let mut loads: Vec<f64> = rows.iter().filter_map(|row| load_of(row.cell)).map(|(_, load)| load).collect();
    loads.sort_unstable_by(f64::total_cmp);
    loads.dedup();
    loads
}

fn at<'a>(rows: &'a [Row], arm: &str, load: f64) -> Option<&'a Row> {
    rows.iter().find(|row| row.arm == arm && load_of(row.cell).is_some_and(|(_, value)| value == load))
}

/// Time to first token of `after` compared with `before`, request by request.
fn compared(rows: &[Row], before: &str, after: &str, load: f64) -> Option<Paired> {
    let (before, after) = (at(rows, before, load)?, at(rows, after, load)?);
    let seeds = before.first_tokens.iter().zip(&after.first_tokens);
    let matched: Vec<Matched> = seeds.map(|(before, after)| Matched::by_id(before, after)).collect();
    Paired::of(&matched, RandomStreams::of(1, 0))
}

/// A ratio as a change with its interval of 95 %, and whether there is one for sure.
fn change(ratio: &Estimate) -> (bool, String) {
    let sooner = |ratio: f64| 100.0 * (1.0 - ratio);
    let word = if ratio.value <= 1.0 { "sooner" } else { "later" };
    let size = sooner(ratio.value).abs();
    let Some(interval) = ratio.interval else { return (true, format!("{size:.0} % {word}")) };
    let sign = if ratio.value <= 1.0 { 1.0 } else { -1.0 };
    let mut ends = [sign * sooner(interval.low), sign * sooner(interval.high)];
    ends.sort_unstable_by(f64::total_cmp);
    // Adding zero makes a positive one of a negative one.
    let [low, high] = ends.map(|end| end.round() + 0.0);
    (ends[0] > 0.0, format!("{size:.0} % {word} ({low:.0} to {high:.0})"))
}

/// What the better policy did not answer, which the other did.
fn lost(paired: &Paired, best: &str, next: &str) -> String {
    match paired.lost {
        0 => String::new(),
        lost => format!(", but {best} did not answer {lost} requests that {next} did"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Cell;

    /// A policy at a load: the time to first token of each request.
    fn row(arm: &str, load: f64, ttfts: &[f64]) -> Row {
        let mean = ttfts.iter().sum::<f64>() / ttfts.len() as f64;
        Row {
            arm: arm.into(),
            cell: Cell::Load(load),
            simulated: [("ttft_mean_s".to_owned(), mean)].into(),
            first_tokens: vec![
                ttfts.iter().enumerate().map(|(id, ttft)| (id as u32, *ttft as f32)).collect(),
            ],
            ..Row::default()
        }
    }

    fn times(count: usize, factor: f64) -> Vec<f64> {
        (0..count).map(|n| factor * (1.0 + (n * 7919 % 100) as f64)).collect()
    }

    #[test]
    fn the_best_is_compared_with_the_next_best_at_each_load() {
        let rows = [
            row("round_robin", 1.0, &times(500, 2.0)),
            row("fleet_cost", 1.0, &times(500, 0.77)),
            row("least_load", 1.0, &times(500, 1.0)),
        ];
        let said = verdict(&rows).expect("a verdict");
        assert_eq!(
            said,
            "fleet_cost gives the first token 23 % sooner (23 to 23) than least_load, the next best of 3 policies, at the same load."
        );
        let mut more = rows.to_vec();
        more.extend([row("fleet_cost", 2.0, &times(500, 1.2)), row("least_load", 2.0, &times(500, 1.0))]);
        more.push(row("round_robin", 2.0, &times(500, 9.0)));
        assert_eq!(
            verdict(&more).expect("a verdict"),
            "fleet_cost against least_load, the next best of 3 policies, at the same loads: first token 23 % sooner (23 to 23) at 1, \
             20 % later (20 to 20) at 2."
        );
    }

    #[test]
    fn what_chance_can_explain_is_no_difference() {
        let noise: Vec<f64> = times(300, 1.0).into_iter().rev().collect();
        let said = verdict(&[row("a", 1.0, &times(300, 1.0)), row("b", 1.0, &noise)]).expect("a verdict");
        assert!(said.contains("do not differ"), "{said}");
    }

    #[test]
    fn requests_that_only_the_other_answered_are_named() {
        let (mut all, half) = (times(300, 1.0), times(150, 0.5));
        all[0] += 1e-3;
        let said = verdict(&[row("a", 1.0, &half), row("b", 1.0, &all)]).expect("a verdict");
        assert!(said.ends_with("but a did not answer 150 requests that b did."), "{said}");
    }

    #[test]
    fn one_policy_has_no_verdict() {
        assert_eq!(verdict(&[row("a", 1.0, &times(10, 1.0))]), None);
        assert_eq!(verdict(&[]), None);
        assert_eq!(verdict(&[Row::default(), row("a", 1.0, &times(10, 1.0))]), None);
    }
}
