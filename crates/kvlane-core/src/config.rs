//! Sections of the configuration. Each key is one field: doc comment, default and bounds.
//!
//! [`section!`](crate::section) makes the struct from its fields, and implements [`Setting`] for it: the keys, from
//! which documents, flags and the schema are made, and the check of their bounds.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use crate::bounded::Bounded;

/// The shortest time that a configured duration may have, where zero means nothing.
pub const LEAST_TIME: Duration = Duration::from_millis(1);
/// The longest time that a configured duration may have.
pub const MOST_TIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// The bounds of most durations.
pub const TIME: RangeInclusive<Duration> = LEAST_TIME..=MOST_TIME;
/// The bounds of durations where zero means none.
pub const TIME_OR_ZERO: RangeInclusive<Duration> = Duration::ZERO..=MOST_TIME;

/// What is wrong with a configuration, where, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct ConfigError {
    /// The field, as `section.key`.
    pub field: String,
    /// What is wrong and what would be right.
    pub problem: String,
}

/// A key of a section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Its name within the section.
    pub name: &'static str,
    /// Its doc comment, one paragraph per line.
    pub doc: String,
    /// How its value is written.
    pub kind: Kind,
    /// The smallest and the largest value, both inclusive; of a list, its length.
    pub bounds: Option<(String, String)>,
    /// The keys of its value, or of each entry of its value.
    pub keys: Vec<Key>,
}

/// How a value is written in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// True or false.
    Flag,
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// A string.
    Text,
    /// A list.
    List,
    /// A map with names that the user chooses.
    Map,
    /// A map with the keys of a section.
    Section,
    /// One of several of these.
    Any,
}

/// The type of a key.
pub trait Setting {
    /// How its values are written.
    const KIND: Kind;

    /// The bounds of every value of this type.
    fn bounds() -> Option<(String, String)> {
        None
    }

    /// The keys of a section, or of the entries of a list or map.
    fn keys() -> Vec<Key> {
        Vec::new()
    }

    /// Checks the bounds of all keys in it; `place` is its own key.
    ///
    /// # Errors
    /// The first key that is out of bounds.
    fn check(&self, _place: &str) -> Result<(), ConfigError> {
        Ok(())
    }
}

/// The type of a key that has bounds of its own: a whole number, a duration, or the length of a list.
pub trait Measured {
    /// What is compared with the bounds.
    type Measure: PartialOrd;

    /// Its measure; none if it is not set.
    fn measure(&self) -> Option<Self::Measure>;

    /// A measure as text.
    fn show(measure: &Self::Measure) -> String;
}

/// Declares a section of the configuration.
///
/// A field is written `name: Type = default, in bounds;`. If the fields have no defaults, an entry of a list or map
/// is declared, whose fields have serde's `default` or are required. Bounds are optional.
#[macro_export]
macro_rules! section {
    (
        $(#[$($outer:tt)*])*
        $vis:vis struct $name:ident {
            $($(#[$($attr:tt)*])* $own:vis $field:ident: $type:ty = $default:expr $(, in $bounds:expr)?;)*
        }
    ) => {
        $(#[$($outer)*])*
        #[derive(Clone, Debug, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        $vis struct $name { $($(#[$($attr)*])* $own $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        $crate::section!(@setting $name $({ $([$($attr)*])* $field: $type $(, $bounds)? })*);
    };
    (
        $(#[$($outer:tt)*])*
        $vis:vis struct $name:ident {
            $($(#[$($attr:tt)*])* $own:vis $field:ident: $type:ty $(, in $bounds:expr)?;)*
        }
    ) => {
        $(#[$($outer)*])*
        #[derive(Clone, Debug, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        $vis struct $name { $($(#[$($attr)*])* $own $field: $type,)* }

        $crate::section!(@setting $name $({ $([$($attr)*])* $field: $type $(, $bounds)? })*);
    };
    (@setting $name:ident $({ $([$($attr:tt)*])* $field:ident: $type:ty $(, $bounds:expr)? })*) => {
        impl $crate::config::Setting for $name {
            const KIND: $crate::config::Kind = $crate::config::Kind::Section;

            fn keys() -> Vec<$crate::config::Key> {
                vec![$({
                    let key = $crate::config::Key::of::<$type>(
                        stringify!($field),
                        concat!($($crate::section!(@doc $($attr)*)),*),
                    );
                    $(let key = key.within::<$type>($bounds);)?
                    key
                },)*]
            }

            fn check(&self, place: &str) -> Result<(), $crate::config::ConfigError> {
                $({
                    let place = $crate::config::below(place, stringify!($field));
                    $($crate::config::within(&place, &self.$field, $bounds)?;)?
                    $crate::config::Setting::check(&self.$field, &place)?;
                })*
                Ok(())
            }
        }
    };
    (@doc doc = $line:literal) => { concat!($line, "\n") };
    (@doc $($other:tt)*) => { "" };
}

/// Types of keys without keys or bounds of their own, by how they are written: `setting!(Text: String, Duration)`.
#[macro_export]
macro_rules! setting {
    ($kind:ident: $($type:ty),+) => {
        $(impl $crate::config::Setting for $type {
            const KIND: $crate::config::Kind = $crate::config::Kind::$kind;
        })+
    };
}

/// An error for `field`.
///
/// # Errors
/// Always: shorthand for `Err(ConfigError { .. })`.
pub fn wrong<T>(field: &str, problem: String) -> Result<T, ConfigError> {
    Err(ConfigError { field: field.into(), problem })
}

/// Checks the bounds of a value. Fractions have a type that checks itself: [`Bounded`].
///
/// # Errors
/// The field and its range.
pub fn within<T: Measured>(
    field: &str,
    value: &T,
    bounds: RangeInclusive<T::Measure>,
) -> Result<(), ConfigError> {
    match value.measure() {
        Some(measure) if !bounds.contains(&measure) => {
            let [value, least, most] = [&measure, bounds.start(), bounds.end()].map(T::show);
            wrong(field, format!("{value} is out of range: must be {least} to {most}"))
        }
        _ => Ok(()),
    }
}

/// The key `name` in the section `place`; the whole configuration is the section without a name.
pub fn below(place: &str, name: &str) -> String {
    if place.is_empty() { name.to_owned() } else { format!("{place}.{name}") }
}

// === impl Key ===

impl Key {
    /// The key `name`, whose type is `T`.
    pub fn of<T: Setting>(name: &'static str, doc: &str) -> Self {
        let paragraphs = doc.split("\n\n").map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
        let doc = paragraphs.collect::<Vec<_>>().join("\n");
        Self { name, doc, kind: T::KIND, bounds: T::bounds(), keys: T::keys() }
    }

    /// The same key with bounds of its own.
    pub fn within<T: Measured>(self, bounds: RangeInclusive<T::Measure>) -> Self {
        Self { bounds: Some((T::show(bounds.start()), T::show(bounds.end()))), ..self }
    }
}

// === impl Setting, impl Measured ===

setting!(Flag: bool);
setting!(Integer: u16, u32, u64, usize, i8);
setting!(Text: String, PathBuf, IpAddr, Duration);

/// Numbers are their own measure.
macro_rules! measured {
    ($($type:ty)*) => {
        $(impl Measured for $type {
            type Measure = Self;

            fn measure(&self) -> Option<Self> {
                Some(*self)
            }

            fn show(measure: &Self) -> String {
                measure.to_string()
            }
        })*
    };
}

measured!(u16 u32 u64 usize i8);

impl Measured for Duration {
    type Measure = Self;

    fn measure(&self) -> Option<Self> {
        Some(*self)
    }

    fn show(measure: &Self) -> String {
        match measure.as_secs() {
            0 if measure.is_zero() => "0s".to_owned(),
            3600 => "an hour".to_owned(),
            secs if secs == MOST_TIME.as_secs() => "a year".to_owned(),
            _ => format!("{measure:?}"),
        }
    }
}

impl<T: Measured> Measured for Option<T> {
    type Measure = T::Measure;

    fn measure(&self) -> Option<T::Measure> {
        self.as_ref()?.measure()
    }

    fn show(measure: &T::Measure) -> String {
        T::show(measure)
    }
}

/// The length is compared.
macro_rules! measured_by_length {
    ($($type:ty),*) => {
        $(impl<T> Measured for $type {
            type Measure = usize;

            fn measure(&self) -> Option<usize> {
                Some(self.len())
            }

            fn show(measure: &usize) -> String {
                measure.to_string()
            }
        })*
    };
}

measured_by_length!(Vec<T>, BTreeMap<String, T>);

impl<const LEAST: u64, const MOST: u64> Setting for Bounded<LEAST, MOST> {
    const KIND: Kind = Kind::Number;

    fn bounds() -> Option<(String, String)> {
        Some((LEAST.to_string(), MOST.to_string()))
    }
}

impl<T: Setting> Setting for Option<T> {
    const KIND: Kind = T::KIND;

    fn bounds() -> Option<(String, String)> {
        T::bounds()
    }

    fn keys() -> Vec<Key> {
        T::keys()
    }

    fn check(&self, place: &str) -> Result<(), ConfigError> {
        self.as_ref().map_or(Ok(()), |value| value.check(place))
    }
}

impl<T: Setting> Setting for Vec<T> {
    const KIND: Kind = Kind::List;

    fn keys() -> Vec<Key> {
        T::keys()
    }

    fn check(&self, place: &str) -> Result<(), ConfigError> {
        self.iter().enumerate().try_for_each(|(n, value)| value.check(&format!("{place}[{n}]")))
    }
}

impl<T: Setting> Setting for BTreeMap<String, T> {
    const KIND: Kind = Kind::Map;

    fn keys() -> Vec<Key> {
        T::keys()
    }

    fn check(&self, place: &str) -> Result<(), ConfigError> {
        self.iter().try_for_each(|(name, value)| value.check(&below(place, name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    section! {
        /// A section.
        struct Oven {
            /// Loaves per batch,
            /// in one layer.
            ///
            /// More do not fit.
            loaves: u32 = 4, in 1..=8;
            /// Time in the oven; none: until they are done.
            time: Option<Duration> = None, in TIME;
            /// Share of rye.
            rye: Bounded<0, 1> = Bounded::of(0.5);
            /// The shelves, by name.
            shelves: BTreeMap<String, Shelf> = BTreeMap::new(), in 0..=2;
        }
    }

    section! {
        /// An entry.
        struct Shelf {
            /// Its height.
            height: u16, in 1..=10;
        }
    }

    #[test]
    fn a_key_has_its_doc_comment_and_its_bounds() {
        let keys = Oven::keys();
        let told: Vec<_> = keys.iter().map(|key| (key.name, key.kind, key.bounds.clone())).collect();
        let bounds = |least: &str, most: &str| Some((least.to_owned(), most.to_owned()));
        assert_eq!(
            told,
            [
                ("loaves", Kind::Integer, bounds("1", "8")),
                ("time", Kind::Text, bounds("1ms", "a year")),
                ("rye", Kind::Number, bounds("0", "1")),
                ("shelves", Kind::Map, bounds("0", "2")),
            ]
        );
        assert_eq!(keys[0].doc, "Loaves per batch, in one layer.\nMore do not fit.");
        assert_eq!((keys[3].keys[0].name, &*keys[3].keys[0].doc), ("height", "Its height."));
    }

    #[test]
    fn a_value_out_of_bounds_is_named_wherever_it_is() {
        let shelves =
            |names: &[&str], height| names.iter().map(|&name| (name.into(), Shelf { height })).collect();
        let check = |oven: Oven, expect: &str| {
            assert_eq!(oven.check("oven").expect_err(expect).to_string(), expect);
        };
        assert_eq!(Oven::default().check("oven"), Ok(()));
        check(Oven { loaves: 9, ..Oven::default() }, "oven.loaves: 9 is out of range: must be 1 to 8");
        check(
            Oven { time: Some(Duration::ZERO), ..Oven::default() },
            "oven.time: 0s is out of range: must be 1ms to a year",
        );
        check(
            Oven { shelves: shelves(&["top"], 0), ..Oven::default() },
            "oven.shelves.top.height: 0 is out of range: must be 1 to 10",
        );
        check(
            Oven { shelves: shelves(&["a", "b", "c"], 1), ..Oven::default() },
            "oven.shelves: 3 is out of range: must be 0 to 2",
        );
    }
}
