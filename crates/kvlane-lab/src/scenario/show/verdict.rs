//! The verdict of a simulation: the best policy against the next best, paired by request at the same load and under the
//! same seed.

use super::load_of;
use crate::scenario::Row;
use crate::statistics::draws::RandomStreams;
use crate::statistics::paired::{Matched, Paired};
use crate::statistics::verdict::{Contrast, at_loads, ranked};

/// The sentence; `None` with fewer than two policies, or if nothing was answered.
pub fn verdict(rows: &[Row]) -> Option<String> {
    let mut arms: Vec<&str> = Vec::new();
    for row in rows {
        if !arms.contains(&&*row.arm) {
            arms.push(&row.arm);
        }
    }
    let loads = loads(rows);
    let mean_s = |arm: &str, load| at(rows, arm, load)?.simulated.get("ttft_mean_s").copied();
    let ranked = ranked(&arms, &loads, mean_s);
    let [best, next, ..] = ranked[..] else { return None };
    let found: Vec<(f64, Contrast)> =
        loads.iter().filter_map(|&load| Some((load, compared(rows, next, best, load)?))).collect();
    let among = match ranked.len() {
        2 => None,
        count => Some(format!("the next best of {count} policies")),
    };
    at_loads(best, next, among.as_deref(), &found)
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
fn compared(rows: &[Row], before: &str, after: &str, load: f64) -> Option<Contrast> {
    let (before, after) = (at(rows, before, load)?, at(rows, after, load)?);
    let seeds = before.first_tokens.iter().zip(&after.first_tokens);
    let matched: Vec<Matched> = seeds.map(|(before, after)| Matched::by_id(before, after)).collect();
    Some(Contrast::from(&Paired::of(&matched, RandomStreams::of(1, 0))?))
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
        assert!(said.contains(" do not differ beyond noise at the same load: "), "{said}");
    }

    #[test]
    fn requests_that_only_the_other_answered_are_named() {
        let (mut all, half) = (times(300, 1.0), times(150, 0.5));
        all[0] += 1e-3;
        let said = verdict(&[row("a", 1.0, &half), row("b", 1.0, &all)]).expect("a verdict");
        assert!(said.ends_with("; a did not answer 150 requests that b answered."), "{said}");
    }

    #[test]
    fn one_policy_has_no_verdict() {
        assert_eq!(verdict(&[row("a", 1.0, &times(10, 1.0))]), None);
        assert_eq!(verdict(&[]), None);
        assert_eq!(verdict(&[Row::default(), row("a", 1.0, &times(10, 1.0))]), None);
    }
}
