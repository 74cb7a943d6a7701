//! JSON as read by Python's `json.loads`: keys keep their order, and of a repeated key the last value is used at the
//! position of the first. Text without escapes is borrowed from the body.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;

use minijinja::Value;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

/// From here on a float may represent an integer that Python would keep exactly.
const FLOAT_EXACT: f64 = 18_446_744_073_709_551_616.0;

/// Largest number of keys for which duplicates are found without a map.
const KEYS_COMPARED_MAX: usize = 12;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Float(f64),
    Str(Cow<'a, str>),
    List(Vec<Json<'a>>),
    Map(Map<'a>),
}

/// An object's entries in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Map<'a>(pub(crate) Vec<(Cow<'a, str>, Json<'a>)>);

/// Parses one document.
pub(crate) fn parse(text: &str) -> Result<Json<'_>, serde_json::Error> {
    let mut from = serde_json::Deserializer::from_str(text);
    let json = Seed.deserialize(&mut from)?;
    from.end()?;
    Ok(json)
}

// === impl Json ===

impl<'a> Json<'a> {
    pub(crate) fn text(text: impl Into<Cow<'a, str>>) -> Json<'a> {
        Json::Str(text.into())
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match self {
            Json::Str(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn as_bool(&self) -> Option<bool> {
        match self {
            Json::Bool(yes) => Some(*yes),
            _ => None,
        }
    }

    pub(crate) fn as_u32(&self) -> Option<u32> {
        match self {
            Json::Int(n) => u32::try_from(*n).ok(),
            Json::Uint(n) => u32::try_from(*n).ok(),
            _ => None,
        }
    }

    pub(crate) fn is_null(&self) -> bool {
        matches!(self, Json::Null)
    }

    /// Whether Python treats the value as true.
    pub(crate) fn is_truthy(&self) -> bool {
        match self {
            Json::Null => false,
            Json::Bool(yes) => *yes,
            Json::Int(n) => *n != 0,
            Json::Uint(n) => *n != 0,
            Json::Float(x) => *x != 0.0,
            Json::Str(text) => !text.is_empty(),
            Json::List(items) => !items.is_empty(),
            Json::Map(map) => !map.0.is_empty(),
        }
    }

    pub(crate) fn into_value(self) -> Value {
        match self {
            Json::Null => Value::from(()),
            Json::Bool(yes) => Value::from(yes),
            Json::Int(n) => Value::from(n),
            Json::Uint(n) => Value::from(n),
            Json::Float(x) => Value::from(x),
            Json::Str(Cow::Borrowed(text)) => Value::from(text),
            Json::Str(Cow::Owned(text)) => Value::from(text),
            Json::List(items) => Value::from(items.into_iter().map(Json::into_value).collect::<Vec<_>>()),
            Json::Map(map) => map.into_value(),
        }
    }

    /// Converts to owned text.
    pub(crate) fn into_owned(self) -> Json<'static> {
        match self {
            Json::Null => Json::Null,
            Json::Bool(yes) => Json::Bool(yes),
            Json::Int(n) => Json::Int(n),
            Json::Uint(n) => Json::Uint(n),
            Json::Float(x) => Json::Float(x),
            Json::Str(text) => Json::Str(Cow::Owned(text.into_owned())),
            Json::List(items) => Json::List(items.into_iter().map(Json::into_owned).collect()),
            Json::Map(map) => Json::Map(Map(map
                .0
                .into_iter()
                .map(|(key, value)| (Cow::Owned(key.into_owned()), value.into_owned()))
                .collect())),
        }
    }
}

// === impl Map ===

impl<'a> Map<'a> {
    pub(crate) fn get(&self, key: &str) -> Option<&Json<'a>> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    pub(crate) fn get_mut(&mut self, key: &str) -> Option<&mut Json<'a>> {
        self.0.iter_mut().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The value at `key`, unless it is absent or null.
    pub(crate) fn some(&self, key: &str) -> Option<&Json<'a>> {
        self.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn str(&self, key: &str) -> Option<&str> {
        self.get(key).and_then(Json::as_str)
    }

    /// Takes the value and leaves null in its place.
    pub(crate) fn take(&mut self, key: &str) -> Option<Json<'a>> {
        self.get_mut(key).map(|value| std::mem::replace(value, Json::Null)).filter(|value| !value.is_null())
    }

    /// Sets the value, in place if the key exists, otherwise at the end.
    pub(crate) fn set(&mut self, key: &'static str, value: Json<'a>) {
        match self.get_mut(key) {
            Some(slot) => *slot = value,
            None => self.0.push((Cow::Borrowed(key), value)),
        }
    }

    pub(crate) fn into_value(self) -> Value {
        Value::from_pairs(
            self.0.into_iter().map(|(key, value)| (Value::from(key.as_ref()), value.into_value())),
        )
    }

    /// Of a repeated key the last value is used at the position of the first.
    fn settle(mut entries: Vec<(Cow<'a, str>, Json<'a>)>) -> Map<'a> {
        let repeated = if entries.len() <= KEYS_COMPARED_MAX {
            entries.iter().enumerate().any(|(i, (key, _))| entries[..i].iter().any(|(other, _)| other == key))
        } else {
            let mut seen: HashSet<&str> = HashSet::with_capacity(entries.len());
            entries.iter().any(|(key, _)| !seen.insert(key))
        };
        if repeated {
            let mut places: HashMap<String, usize> = HashMap::with_capacity(entries.len());
            let mut settled: Vec<(Cow<'a, str>, Json<'a>)> = Vec::with_capacity(entries.len());
            for (key, value) in entries {
                match places.get(key.as_ref()) {
                    Some(&place) => settled[place].1 = value,
                    None => {
                        places.insert(key.to_string(), settled.len());
                        settled.push((key, value));
                    }
                }
            }
            entries = settled;
        }
        Map(entries)
    }
}

// === impl Seed ===

struct Seed;

impl<'de> DeserializeSeed<'de> for Seed {
    type Value = Json<'de>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Json<'de>, D::Error> {
        from.deserialize_any(Seed)
    }
}

impl<'de> Visitor<'de> for Seed {
    type Value = Json<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json<'de>, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, yes: bool) -> Result<Json<'de>, E> {
        Ok(Json::Bool(yes))
    }

    fn visit_i64<E>(self, n: i64) -> Result<Json<'de>, E> {
        Ok(Json::Int(n))
    }

    fn visit_u64<E>(self, n: u64) -> Result<Json<'de>, E> {
        Ok(i64::try_from(n).map_or(Json::Uint(n), Json::Int))
    }

    fn visit_f64<E: serde::de::Error>(self, x: f64) -> Result<Json<'de>, E> {
        if x.abs() >= FLOAT_EXACT {
            return Err(E::custom("integer too large to be kept exactly"));
        }
        Ok(Json::Float(x))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json<'de>, E> {
        Ok(Json::Str(Cow::Owned(text.to_owned())))
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Json<'de>, E> {
        Ok(Json::Str(Cow::Borrowed(text)))
    }

    fn visit_string<E>(self, text: String) -> Result<Json<'de>, E> {
        Ok(Json::Str(Cow::Owned(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Json<'de>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = from.next_element_seed(Seed)? {
            items.push(item);
        }
        Ok(Json::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Json<'de>, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = from.next_key_seed(Seed)? {
            let Json::Str(key) = key else {
                return Err(A::Error::custom("a key that is not a string"));
            };
            entries.push((key, from.next_value_seed(Seed)?));
        }
        Ok(Json::Map(Map::settle(entries)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_order_and_of_a_repeated_one_the_last_value_counts() {
        let Json::Map(map) = parse(r#"{"b": 1, "a": 2, "b": 3}"#).expect("JSON") else { panic!("an object") };
        assert_eq!(map.0, [("b".into(), Json::Int(3)), ("a".into(), Json::Int(2))]);

        let many: Vec<String> = (0..40).map(|i| format!("\"k{}\": {i}", i % 20)).collect();
        let text = format!("{{{}}}", many.join(","));
        let Json::Map(map) = parse(&text).expect("JSON") else { panic!("an object") };
        assert_eq!(map.0.len(), 20);
        assert_eq!(map.get("k0"), Some(&Json::Int(20)));
    }

    #[test]
    fn text_without_escapes_is_borrowed() {
        assert!(matches!(parse("\"plain\"").expect("JSON"), Json::Str(Cow::Borrowed("plain"))));
        assert!(matches!(parse("\"a\\nb\"").expect("JSON"), Json::Str(Cow::Owned(_))));
    }

    #[test]
    fn integers_beyond_sixty_four_bits_are_refused_rather_than_rounded() {
        assert_eq!(parse("18446744073709551615").expect("JSON"), Json::Uint(u64::MAX));
        assert!(parse("18446744073709551616").is_err());
        assert!(parse("[1] 2").is_err());
    }
}
