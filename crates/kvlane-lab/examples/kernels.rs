//! Prints published measurements of kernels, prompts, decode steps and memory with the timing model's values.

use std::io::{Result, Write as _};

use kvlane_lab::measured::{Measured, MeasuredRow, MeasuredSet};

const HEADINGS: [&str; 6] = ["engine", "sequences", "tokens", "published", "modelled", "error"];

fn main() -> Result<()> {
    let mut out = std::io::stdout().lock();
    let measured = Measured::table();
    for set in &measured.sets {
        let rows = set.rows.iter().map(|row| cells(set, row, measured.modelled(set, row)));
        let rows: Vec<[String; 6]> = std::iter::once(HEADINGS.map(str::to_owned)).chain(rows).collect();
        // A prefill has no sequences, and memory has neither.
        let shown: Vec<usize> = (0..HEADINGS.len())
            .filter(|&column| rows[1..].iter().any(|row| !row[column].is_empty()))
            .collect();
        writeln!(out, "{}\n{}", set.about, set.source)?;
        if set.request_ms > 0.0 {
            writeln!(out, "modelled with {} ms of the server around the engine", set.request_ms)?;
        }
        for row in &rows {
            for &column in &shown {
                let width = rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
                match column {
                    0 => write!(out, "  {:<width$}", row[column])?,
                    _ => write!(out, "  {:>width$}", row[column])?,
                }
            }
            writeln!(out)?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn cells(set: &MeasuredSet, row: &MeasuredRow, modelled: f64) -> [String; 6] {
    let digits = if set.rows.iter().all(|row| row.measured >= 1000.0) { 0 } else { 2 };
    let number = |value: f64| format!("{value:.digits$}");
    let count = |count: u32| if count > 0 { count.to_string() } else { String::new() };
    let error = format!("{:+.1} %", (modelled / row.measured - 1.0) * 100.0);
    [row.engine.clone(), count(row.seqs), count(row.tokens), number(row.measured), number(modelled), error]
}
