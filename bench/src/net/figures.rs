//! Figures by key, in the order they were measured.

use std::fmt::Write;

use serde_json::{Map, Value};

/// Numbers by name. A name that was measured again keeps its last number.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Figures(Vec<(String, f64)>);

impl Figures {
    /// Notes a figure, and shows it.
    pub fn put(&mut self, key: impl Into<String>, value: f64) {
        let key = key.into();
        eprintln!("  {key} {}", shown(value));
        self.0.retain(|(known, _)| *known != key);
        self.0.push((key, value));
    }

    /// The number of this name.
    pub fn get(&self, key: &str) -> Option<f64> {
        let found = self.0.iter().find(|(known, _)| known == key);
        found.map(|(_, value)| *value)
    }

    /// All, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(key, value)| (key.as_str(), *value))
    }

    /// One flat JSON object, with what else is to be said.
    pub fn to_json(&self, said: &[(&str, String)]) -> Value {
        let said = said
            .iter()
            .map(|(key, value)| ((*key).into(), value.as_str().into()));
        // Four digits say all that repeats.
        let number = |value: f64| shown(value).parse::<f64>().unwrap_or(value).into();
        let numbers = self.iter().map(|(key, value)| (key.into(), number(value)));
        Value::Object(said.chain(numbers).collect::<Map<_, _>>())
    }
}

/// A number with about four digits.
pub fn shown(value: f64) -> String {
    let mut text = String::new();
    let digits = match value.abs() {
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        size if size >= 1.0 => 3,
        _ => 4,
    };
    // Writing to a string does not fail.
    let _ = write!(text, "{value:.digits$}");
    text
}

#[cfg(test)]
mod tests {
    use super::{Figures, shown};

    #[test]
    fn figures_keep_their_order_and_their_last_number() {
        let mut figures = Figures::default();
        figures.put("b", 1.0);
        figures.put("a", 2.0);
        figures.put("b", 0.123_456);
        assert_eq!(figures.get("b"), Some(0.123_456));
        let json = figures.to_json(&[("date", "today".into())]).to_string();
        assert_eq!(json, r#"{"a":2.0,"b":0.1235,"date":"today"}"#);
    }

    #[test]
    fn numbers_are_shown_with_four_digits() {
        assert_eq!(shown(0.020_94), "0.0209");
        assert_eq!(shown(12.345), "12.35");
        assert_eq!(shown(12_345.6), "12346");
    }
}
