//! Python functions that templates rely on: `json.dumps`, float formatting, `str.strip`, `strftime`.

use std::fmt::Write as _;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use crate::prompt::UnixTime;

/// Deepest nesting of a value that is written.
const DEPTH_MAX: usize = 200;

/// The arguments of `json.dumps` that affect the output.
pub(crate) struct Dumps {
    pub(crate) ensure_ascii: bool,
    pub(crate) indent: Option<String>,
    pub(crate) item_separator: String,
    pub(crate) key_separator: String,
    pub(crate) sort_keys: bool,
}

// === impl Dumps ===

impl Default for Dumps {
    fn default() -> Dumps {
        Dumps {
            ensure_ascii: false,
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            sort_keys: false,
        }
    }
}

impl Dumps {
    /// Appends `value` in the format of `json.dumps`.
    pub(crate) fn write(&self, value: &Value, out: &mut String) -> Result<(), Error> {
        self.value(value, 0, out)
    }

    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, "nested too deeply for JSON"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => number(value, out),
            ValueKind::String => self.text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut count = 0;
                for item in value.try_iter()? {
                    self.item(&mut count, '[', depth, out);
                    self.value(&item, depth + 1, out)?;
                }
                self.end(count, '[', ']', depth, out);
            }
            ValueKind::Map => {
                let mut count = 0;
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                for key in keys {
                    self.item(&mut count, '{', depth, out);
                    match key.kind() {
                        ValueKind::String => self.text(key.as_str().unwrap_or_default(), out),
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                            out.push('"');
                            self.value(&key, depth + 1, out)?;
                            out.push('"');
                        }
                        kind => return Err(not_json(kind)),
                    }
                    out.push_str(&self.key_separator);
                    self.value(&value.get_item(&key)?, depth + 1, out)?;
                }
                self.end(count, '{', '}', depth, out);
            }
            kind => return Err(not_json(kind)),
        }
        Ok(())
    }

    fn item(&self, count: &mut usize, open: char, depth: usize, out: &mut String) {
        if *count == 0 {
            out.push(open);
        } else {
            out.push_str(&self.item_separator);
        }
        *count += 1;
        self.line(depth + 1, out);
    }

    fn end(&self, count: usize, open: char, close: char, depth: usize, out: &mut String) {
        if count == 0 {
            out.push(open);
        } else {
            self.line(depth, out);
        }
        out.push(close);
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn text(&self, text: &str, out: &mut String) {
        out.push('"');
        let mut plain = 0;
        for (at, c) in text.char_indices() {
            let escape = match c {
                '"' => "\\\"",
                '\\' => "\\\\",
                '\n' => "\\n",
                '\r' => "\\r",
                '\t' => "\\t",
                '\u{8}' => "\\b",
                '\u{c}' => "\\f",
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => "",
                _ => continue,
            };
            out.push_str(&text[plain..at]);
            plain = at + c.len_utf8();
            if escape.is_empty() {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            } else {
                out.push_str(escape);
            }
        }
        out.push_str(&text[plain..]);
        out.push('"');
    }
}

fn not_json(kind: ValueKind) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value of kind {kind} cannot be written as JSON"))
}

fn number(value: &Value, out: &mut String) {
    if value.is_integer() {
        let _ = write!(out, "{value}");
        return;
    }
    match f64::try_from(value.clone()) {
        Ok(x) => float(x, out),
        Err(_) => {
            let _ = write!(out, "{value}");
        }
    }
}

/// Appends `x` in the format of Python's `repr`: the shortest digits that read back exactly, with an exponent below
/// 1e-4 and from 1e16 on (`float_repr_style` "short", CPython `Python/pystrtod.c`).
pub(crate) fn float(x: f64, out: &mut String) {
    if x.is_nan() {
        return out.push_str("NaN");
    }
    if x.is_infinite() {
        return out.push_str(if x > 0.0 { "Infinity" } else { "-Infinity" });
    }
    if x.is_sign_negative() {
        out.push('-');
    }
    let shortest = format!("{:e}", x.abs());
    let (digits, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let digits: String = digits.chars().filter(|c| *c != '.').collect();
    if (-4..16).contains(&exponent) {
        if exponent < 0 {
            out.push_str("0.");
            out.extend(std::iter::repeat_n('0', (-exponent - 1) as usize));
            out.push_str(&digits);
        } else {
            let whole = exponent as usize + 1;
            if digits.len() <= whole {
                out.push_str(&digits);
                out.extend(std::iter::repeat_n('0', whole - digits.len()));
                out.push_str(".0");
            } else {
                out.push_str(&digits[..whole]);
                out.push('.');
                out.push_str(&digits[whole..]);
            }
        }
    } else {
        out.push_str(&digits[..1]);
        if digits.len() > 1 {
            out.push('.');
            out.push_str(&digits[1..]);
        }
        let sign = if exponent < 0 { '-' } else { '+' };
        let _ = write!(out, "e{sign}{:02}", exponent.abs());
    }
}

/// Appends `value` in the format of Python's `str`.
pub(crate) fn display(value: &Value, out: &mut String) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.push_str(text),
        None if value.is_undefined() => {}
        None => repr(value, 0, out)?,
    }
    Ok(())
}

/// Appends `value` in the format of Python's `repr`.
fn repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "nested too deeply to be printed"));
    }
    let separator = |at: usize, out: &mut String| out.push_str(if at > 0 { ", " } else { "" });
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::String => quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Number => number(value, out),
        ValueKind::Seq => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            for (at, item) in value.try_iter()?.enumerate() {
                separator(at, out);
                repr(&item, depth + 1, out)?;
            }
            if tuple && value.len() == Some(1) {
                out.push(',');
            }
            out.push(if tuple { ')' } else { ']' });
        }
        ValueKind::Map if value.as_object().is_some_and(|object| object.enumerator_len().is_some()) => {
            out.push('{');
            for (at, key) in value.try_iter()?.enumerate() {
                separator(at, out);
                repr(&key, depth + 1, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

/// Appends a quoted text: in single quotes, unless it contains single quotes and no double quotes.
fn quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        let hidden = c.is_control() || c == '\u{ad}' || (c != ' ' && c.is_whitespace());
        let _ = match c {
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            c if c == quote || c == '\\' => write!(out, "\\{c}"),
            c if hidden && u32::from(c) < 0x100 => write!(out, "\\x{:02x}", u32::from(c)),
            c if hidden => write!(out, "\\u{:04x}", u32::from(c)),
            c => write!(out, "{c}"),
        };
    }
    out.push(quote);
}

/// Whether Python's `str.strip` treats `c` as white space. Unlike Unicode, this includes the four separators.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `datetime.strftime` in UTC and English. `None` for an unsupported directive.
pub(crate) fn strftime(format: &str, now: UnixTime) -> Option<String> {
    const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let days = now.0.div_euclid(86_400);
    let second = now.0.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    if !(0..=9999).contains(&year) {
        return None;
    }
    let week_day = (days + 4).rem_euclid(7);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let mut out = String::with_capacity(format.len() + 16);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next()?;
        let plain = directive == '-';
        if plain {
            directive = chars.next()?;
        }
        let mut padded = |n: i64, width: usize| {
            let _ = if plain { write!(out, "{n}") } else { write!(out, "{n:0width$}") };
        };
        match directive {
            'Y' => padded(year, 4),
            'm' => padded(month, 2),
            'd' => padded(day, 2),
            'H' => padded(hour, 2),
            'I' => padded((hour + 11) % 12 + 1, 2),
            'M' => padded(minute, 2),
            'S' => padded(second, 2),
            'y' => padded(year % 100, 2),
            'j' => padded(days - from_civil(year, 1, 1) + 1, 3),
            'e' => {
                let _ = write!(out, "{day:2}");
            }
            'F' => {
                let _ = write!(out, "{year:04}-{month:02}-{day:02}");
            }
            'T' => {
                let _ = write!(out, "{hour:02}:{minute:02}:{second:02}");
            }
            'R' => {
                let _ = write!(out, "{hour:02}:{minute:02}");
            }
            'A' => out.push_str(DAYS[week_day as usize]),
            'a' => out.push_str(&DAYS[week_day as usize][..3]),
            'B' => out.push_str(MONTHS[month as usize - 1]),
            'b' | 'h' => out.push_str(&MONTHS[month as usize - 1][..3]),
            'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            's' => {
                let _ = write!(out, "{}", now.0);
            }
            'z' | 'Z' => {}
            '%' => out.push('%'),
            _ => return None,
        }
    }
    Some(out)
}

/// Year, month and day of a day counted from 1970-01-01 in the Gregorian calendar. Years start in March, so that the
/// leap day is the last day of a year. 146,097 days are 400 years.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

/// The inverse of [`civil`].
fn from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let of_year = (153 * (if month > 2 { month - 3 } else { month + 9 }) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_python_prints_them() {
        let printed = |x| {
            let mut out = String::new();
            float(x, &mut out);
            out
        };
        for (x, expect) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e16, "1.5e+16"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-123.456, "-123.456"),
            (1e-300, "1e-300"),
            (123456789012345680.0, "1.2345678901234568e+17"),
        ] {
            assert_eq!(printed(x), expect);
        }
    }

    #[test]
    fn dates_print_as_strftime_prints_them() {
        let at = |seconds, format| strftime(format, UnixTime(seconds));
        assert_eq!(at(1_795_190_250, "%d %b %Y"), Some("20 Nov 2026".into()));
        assert_eq!(
            at(1_795_190_250, "%A, %-d %B %Y %H:%M:%S %j %p %y%%"),
            Some("Friday, 20 November 2026 15:57:30 324 PM 26%".into())
        );
        assert_eq!(at(0, "%Y-%m-%d %a"), Some("1970-01-01 Thu".into()));
        assert_eq!(at(951_782_400, "%F %T"), Some("2000-02-29 00:00:00".into()));
        assert_eq!(at(-1, "%Y-%m-%d"), Some("1969-12-31".into()));
        assert_eq!(at(0, "%Q"), None);
    }

    #[test]
    fn a_day_and_its_date_are_each_others_inverse() {
        for days in (-200_000..200_000).step_by(97) {
            let (year, month, day) = civil(days);
            assert_eq!(from_civil(year, month, day), days);
        }
    }
}
