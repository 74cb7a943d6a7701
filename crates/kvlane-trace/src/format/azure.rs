//! The Azure LLM inference traces of 2023 and 2024: comma-separated values.
//!
//! ```csv
//! TIMESTAMP,ContextTokens,GeneratedTokens
//! 2023-11-16 18:15:46.6805900,374,44
//! ```
//!
//! Times have up to nine decimals; those of 2024 also have a time zone. There are no ids and no sessions: every prompt
//! is unshared. Origin: Azure/AzurePublicDataset, `data/AzureLLMInferenceTrace_*.csv`.

use std::io::BufRead;

use super::csv::Columns;
use super::lines::{Fault, Lines, text_tokens};
use super::{Draft, Options, TraceError};
use crate::trace::TraceRequest;

const TIMESTAMP: &str = "TIMESTAMP";
const CONTEXT_TOKENS: &str = "ContextTokens";
const GENERATED_TOKENS: &str = "GeneratedTokens";

/// Nothing is shared, so this is only what statistics count in.
const BLOCK_TOKENS: u32 = 16;

pub(super) fn begins(head: &str) -> bool {
    head.lines().next().is_some_and(|line| line.contains(CONTEXT_TOKENS) && line.contains(TIMESTAMP))
}

pub(super) fn read<R: BufRead>(lines: &mut Lines<R>, options: &Options) -> Result<Draft, TraceError> {
    let columns = Columns::read(lines, &[TIMESTAMP, CONTEXT_TOKENS, GENERATED_TOKENS])?;
    let place = |name| columns.place(name).unwrap_or_default();
    let (timestamp, context, generated) = (place(TIMESTAMP), place(CONTEXT_TOKENS), place(GENERATED_TOKENS));
    let mut draft = Draft::new(options, BLOCK_TOKENS);
    let mut first: Option<(i64, String)> = None;
    lines.each(|_, bytes| {
        let values = columns.split(bytes)?;
        let nanos = unix_nanos(values[timestamp]).ok_or_else(|| {
            let why = format!("{:?} is not a time like 2023-11-16 18:15:46.6805900", values[timestamp]);
            Fault::Field(TIMESTAMP, why)
        })?;
        let input_tokens = text_tokens(CONTEXT_TOKENS, values[context], 1)?;
        let output_tokens = text_tokens(GENERATED_TOKENS, values[generated], 0)?;
        let (start, _) = first.get_or_insert_with(|| (nanos, values[timestamp].to_owned()));
        let request = TraceRequest {
            arrival_s: (nanos - *start) as f64 / 1e9,
            input_tokens,
            output_tokens,
            session: draft.builder.len() as u32,
            ..TraceRequest::default()
        };
        draft.push(request, &[])?;
        Ok(())
    })?;
    if let Some((_, text)) = first {
        draft.builder.note(format!("times count from the first request, at {text}"));
    }
    Ok(draft)
}

/// Nanoseconds since 1970 of a time like `2024-05-10 00:00:00.009930+00:00`; UTC where it names no zone.
fn unix_nanos(text: &str) -> Option<i64> {
    let (date, clock) = text.split_once([' ', 'T'])?;
    let [year, month, day] = numbers(date, '-')?;
    let (clock, zone_minutes) = match clock.find(['+', '-']) {
        Some(at) => {
            let [hours, minutes] = numbers(&clock[at + 1..], ':')?;
            let minutes = hours * 60 + minutes;
            (&clock[..at], if clock[at..].starts_with('+') { minutes } else { -minutes })
        }
        None => (clock.trim_end_matches('Z'), 0),
    };
    let (clock, decimals) = clock.split_once('.').unwrap_or((clock, "0"));
    let [hour, minute, second] = numbers(clock, ':')?;
    let digits = decimals.bytes().all(|digit| digit.is_ascii_digit()) && (1..=9).contains(&decimals.len());
    let sane = (1970..2200).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second < 61;
    if !digits || !sane {
        return None;
    }
    let nanos = decimals.parse::<i64>().ok()? * 10i64.pow(9 - decimals.len() as u32);
    let minutes = (days(year, month, day) * 24 + hour) * 60 + minute - zone_minutes;
    Some((minutes * 60 + second) * 1_000_000_000 + nanos)
}

/// `N` short numbers with `separator` between them.
fn numbers<const N: usize>(text: &str, separator: char) -> Option<[i64; N]> {
    let mut parts = text.split(separator);
    let mut out = [0; N];
    for number in &mut out {
        let part = parts.next().filter(|part| (1..=4).contains(&part.len()))?;
        *number = part.bytes().all(|digit| digit.is_ascii_digit()).then(|| part.parse().ok())??;
    }
    parts.next().is_none().then_some(out)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar. The year begins in March, so that the leap day is its
/// last, and from there month `m` begins on day `(153 m + 2) / 5`.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let month = (month + 9) % 12;
    let leap_days = year / 4 - year / 100 + year / 400;
    year * 365 + leap_days + (153 * month + 2) / 5 + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_nanoseconds_since_1970() {
        for (text, nanos) in [
            ("1970-01-01 00:00:00", 0),
            ("1970-03-01 00:00:01.5", 59 * 86_400_000_000_000 + 1_500_000_000),
            ("2000-02-29 00:00:00Z", 951_782_400_000_000_000),
            ("2023-11-16 18:15:46.6805900", 1_700_158_546_680_590_000),
            ("2024-05-10T02:30:00.000000001+02:30", 1_715_299_200_000_000_001),
            ("2024-05-09 23:00:00-01:00", 1_715_299_200_000_000_000),
        ] {
            assert_eq!(unix_nanos(text), Some(nanos), "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_none() {
        for text in [
            "",
            "2023-11-16",
            "2023-11-16 18:15",
            "2023-11-16 24:00:00",
            "2023-00-16 18:15:46",
            "2023-11-16 18:15:46.",
            "2023-11-16 18:15:46.1234567890",
            "2023-11-16 18:15:46.-1",
            "+2023-11-16 18:15:46",
            "2023-11-16-1 18:15:46",
            "2023-11-16 18:15:46+",
            "99999-11-16 18:15:46",
        ] {
            assert_eq!(unix_nanos(text), None, "{text}");
        }
    }
}
