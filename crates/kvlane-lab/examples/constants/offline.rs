//! Published offline benchmarks, to which nothing is fitted, and the model's values for them.

use std::fmt::Write as _;

use kvlane_lab::measured::Measured;
use kvlane_lab::measured::offline::{Figure, Offline, OfflineColumn, OfflineRow, OfflineTable};

/// The tables of offline benchmarks, as Markdown.
pub(crate) fn offline_tables() -> String {
    let measured = Measured::table();
    let (mut summaries, mut rows, mut sources) = (String::new(), String::new(), String::new());
    for table in &Offline::tables().tables {
        _ = writeln!(sources, "- `{}`: {}. Source: {}.", table.name, table.about, table.source);
        for column in &table.columns {
            let modelled: Vec<f64> =
                column.rows.iter().map(|&row| table.modelled(&measured, column, row)).collect();
            let errors: Vec<f64> = modelled
                .iter()
                .zip(&column.rows)
                .map(|(modelled, OfflineRow(.., published))| 100.0 * (modelled / published - 1.0))
                .collect();
            let half = |held_out: bool| {
                let rows = (0..errors.len()).filter(|&row| OfflineColumn::is_held_out(row) == held_out);
                summary(&rows.map(|row| errors[row]).collect::<Vec<f64>>(), 0)
            };
            let (name, engine, count) = (&table.name, &column.engine, errors.len());
            _ = writeln!(summaries, "| `{name}` | `{engine}` | {count} | {} | {} |", half(false), half(true));
            let cells: Vec<String> =
                (0..errors.len()).map(|row| cell(table, column, row, modelled[row])).collect();
            _ = writeln!(rows, "| `{engine}` | {} | {} |", figure(table.figure), cells.join("; "));
        }
    }
    format!(
        "| Table | Engine | Rows | Rows that are not held out | Held-out rows |\n|---|---|---|---|---|\n{summaries}\n\
         | Engine | Figure | Tokens of prompt + answer, of a batch after its sequences: published → modelled |\n|---|---|---|\n{rows}\n{sources}"
    )
}

/// Mean error, and in brackets the mean of absolute errors and the largest, with so many decimals.
pub(crate) fn summary(errors: &[f64], decimals: usize) -> String {
    let count = errors.len() as f64;
    let mean = errors.iter().sum::<f64>() / count;
    let absolute = errors.iter().map(|error| error.abs()).sum::<f64>() / count;
    let largest = errors.iter().copied().fold(0.0_f64, |a, b| if b.abs() > a.abs() { b } else { a });
    format!("{mean:+.decimals$} % ({absolute:.decimals$}; {largest:+.decimals$})").replace('-', "−")
}

fn figure(figure: Figure) -> &'static str {
    match figure {
        Figure::OutTokS => "output tokens/s",
        Figure::Secs => "seconds of a batch",
    }
}

/// One row; those held out are in italics.
fn cell(table: &OfflineTable, column: &OfflineColumn, row: usize, modelled: f64) -> String {
    let OfflineRow(input, output, requests, published) = column.rows[row];
    let (input, output) = (thousands(f64::from(input)), thousands(f64::from(output)));
    let error = format!("{:+.0} %", 100.0 * (modelled / published - 1.0)).replace('-', "−");
    let figures = match table.figure {
        Figure::OutTokS => {
            format!("{input} + {output}: {} → {} ({error})", thousands(published), thousands(modelled))
        }
        Figure::Secs => format!("{requests} × {input} + {output}: {published:.1} → {modelled:.1} ({error})"),
    };
    if OfflineColumn::is_held_out(row) { format!("*{figures}*") } else { figures }
}

/// `12,345`.
fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
