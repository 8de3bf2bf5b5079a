//! Names and numbers of a request: parsed once, at the border.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use storaged_wire::{Namespace, Rank, Step, WorldSize};

use super::fault::ApiFault;

/// Stands before a letter that was a capital one; no name of this interface has it.
const CAPITAL: char = '.';
/// Before a name that begins with what a namespace may not begin with.
const FIRST: &str = "0..";
/// Behind a name, for the namespace that holds its record.
const RECORD: &str = "..hp";

/// A namespace of the interface, and the two of the daemon that it stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HyperName {
    pub text: String,
    /// Where its checkpoints are.
    pub shards: Namespace,
    /// Where its record is: how many ranks it has, and which run saves.
    pub record: Namespace,
}

impl HyperName {
    pub fn parse(text: &str) -> Result<Self, ApiFault> {
        let expected = "a namespace of letters, digits, '-' and '_' that leaves room within 63 bytes, where a capital letter \
             counts twice";
        let malformed = || ApiFault::Malformed {
            expected,
            got: text.chars().take(80).collect(),
        };
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if text.is_empty() || !text.chars().all(allowed) {
            return Err(malformed());
        }
        let name = |ending: &str| Namespace::new(escaped(text) + ending).map_err(|_| malformed());
        Ok(Self {
            text: text.to_owned(),
            shards: name("")?,
            record: name(RECORD)?,
        })
    }

    /// The name that a record's namespace belongs to, if it is one.
    pub fn of_record(namespace: &Namespace) -> Option<Self> {
        let escaped = namespace.as_str().strip_suffix(RECORD)?;
        let mut text = String::new();
        let mut rest = escaped.strip_prefix(FIRST).unwrap_or(escaped).chars();
        while let Some(c) = rest.next() {
            match c {
                CAPITAL => text.extend(rest.next()?.to_uppercase()),
                c => text.push(c),
            }
        }
        Self::parse(&text)
            .ok()
            .filter(|name| name.record == *namespace)
    }
}

/// Another name for every name: what begins and goes on as a namespace may stays as it is.
fn escaped(text: &str) -> String {
    let begins = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let mut name = if text.starts_with(begins) {
        String::new()
    } else {
        FIRST.into()
    };
    for c in text.chars() {
        if c.is_ascii_uppercase() {
            name.push(CAPITAL);
        }
        name.push(c.to_ascii_lowercase());
    }
    name
}

pub fn rank(text: &str) -> Result<Rank, ApiFault> {
    let number = text.parse().map(Rank::new);
    number.map_err(|_| malformed("a rank, a number from 0", text))
}

pub fn step(text: &str) -> Result<Step, ApiFault> {
    let number = text.parse().map(Step::new);
    number.map_err(|_| malformed("a step, a number from 0", text))
}

fn malformed(expected: &'static str, got: &str) -> ApiFault {
    ApiFault::Malformed {
        expected,
        got: got.chars().take(80).collect(),
    }
}

/// A number of a query, if it is there.
fn number(query: Option<&str>, key: &str, expected: &'static str) -> Result<Option<u32>, ApiFault> {
    let parts = query.unwrap_or_default().split('&');
    let mut values = parts.filter_map(|part| part.split_once('='));
    match values.find(|(known, _)| *known == key) {
        None => Ok(None),
        Some((_, text)) => match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(malformed(expected, text)),
        },
    }
}

/// What a namespace is created with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Creation {
    pub num_ranks: WorldSize,
    pub steps_retained: u32,
}

impl Creation {
    pub fn parse(query: Option<&str>) -> Result<Self, ApiFault> {
        let expected =
            "num_ranks=1 to 131072 in the query: the ranks of the job and one for metadata";
        let ranks = number(query, "num_ranks", expected)?.unwrap_or(0);
        let num_ranks =
            WorldSize::new(ranks).map_err(|_| malformed(expected, &ranks.to_string()))?;
        let expected = "steps_retained=1 or more in the query";
        let steps_retained = number(query, "steps_retained", expected)?.unwrap_or(3);
        if steps_retained == 0 {
            return Err(malformed(expected, "0"));
        }
        Ok(Self {
            num_ranks,
            steps_retained,
        })
    }
}

/// How many steps a listing may have.
pub fn limit(query: Option<&str>) -> Result<usize, ApiFault> {
    let expected = "limit=N in the query";
    let limit = number(query, "limit", expected)?.unwrap_or(5);
    usize::try_from(limit).map_err(|_| malformed(expected, "a number too large"))
}

/// The checksum that a request says its body has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksum(pub u128);

#[derive(Deserialize)]
struct ShardMeta {
    checksum: String,
    #[serde(default = "xxh3_128")]
    algorithm: String,
}

/// The one algorithm that clients use.
const ALGORITHM: &str = "xxh3_128";

fn xxh3_128() -> String {
    ALGORITHM.into()
}

impl Checksum {
    /// From the header `Shard-Meta`.
    pub fn parse(header: &[u8]) -> Result<Self, ApiFault> {
        let said = || String::from_utf8_lossy(header).chars().take(80).collect();
        let malformed = || ApiFault::Malformed {
            expected: "Shard-Meta as {\"checksum\": base64 of 16 bytes, \"algorithm\": \"xxh3_128\"}",
            got: said(),
        };
        let meta: ShardMeta = serde_json::from_slice(header).map_err(|_| malformed())?;
        if meta.algorithm != ALGORITHM {
            return Err(malformed());
        }
        let bytes = STANDARD.decode(meta.checksum).map_err(|_| malformed())?;
        let bytes = bytes.try_into().map_err(|_| malformed())?;
        Ok(Self(u128::from_be_bytes(bytes)))
    }

    /// As text.
    pub fn base64(self) -> String {
        STANDARD.encode(self.0.to_be_bytes())
    }

    /// As the header `Shard-Meta`.
    pub fn header(self) -> String {
        format!(
            "{{\"checksum\": \"{}\", \"algorithm\": \"{ALGORITHM}\"}}",
            self.base64()
        )
    }
}

/// Bytes of a body that a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    All,
    Part { first: u64, last: u64 },
}

impl Wanted {
    /// From the header `Range`. What is not one range of bytes is all, as RFC 9110 allows.
    pub fn parse(header: Option<&str>, length: u64) -> Result<Self, ApiFault> {
        let Some(header) = header else {
            return Ok(Self::All);
        };
        let one = header
            .strip_prefix("bytes=")
            .filter(|range| !range.contains(','));
        let Some((first, last)) = one.and_then(|range| range.trim().split_once('-')) else {
            return Ok(Self::All);
        };
        let outside = || ApiFault::Range {
            length,
            got: header.chars().take(80).collect(),
        };
        let number = |text: &str| text.parse::<u64>().map_err(|_| outside());
        let (first, last) = match (first, last) {
            ("", last) => (length.saturating_sub(number(last)?), u64::MAX),
            (first, "") => (number(first)?, u64::MAX),
            (first, last) => (number(first)?, number(last)?),
        };
        if first <= last && first < length {
            Ok(Self::Part {
                first,
                last: last.min(length - 1),
            })
        } else {
            Err(outside())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_a_namespace_of_its_own_and_is_found_again() {
        let names = [
            "job", "Job", "j-O-b_", "-a", "_", "A", "0", "0A", "HP", "hp", "aHP",
        ];
        let mut seen = std::collections::BTreeSet::new();
        for text in names {
            let name = HyperName::parse(text).unwrap();
            assert!(seen.insert(name.shards.to_string()), "{text}");
            assert!(seen.insert(name.record.to_string()), "{text}");
            assert_eq!(HyperName::of_record(&name.record), Some(name.clone()));
            assert_eq!(HyperName::of_record(&name.shards), None);
        }
        assert_eq!(
            HyperName::parse("job-1_a").unwrap().shards.as_str(),
            "job-1_a"
        );
        for text in ["", "a.b", "a/b", "ä", &"a".repeat(60), "a b"] {
            assert!(HyperName::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_checksum_comes_and_goes_as_the_client_writes_it() {
        let header = "{\"checksum\": \"maoG0wFHmNhgAcMkRo1Jfw==\", \"algorithm\": \"xxh3_128\"}";
        let checksum = Checksum::parse(header.as_bytes()).unwrap();
        assert_eq!(checksum.header(), header);
        for wrong in [
            "",
            "[]",
            "{\"checksum\": \"AA==\"}",
            "{\"checksum\": \"AAAAAAAAAAAAAAAAAAAAAA==\", \"algorithm\": \"md5\"}",
        ] {
            assert!(Checksum::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ranges_are_within_the_body() {
        let part = |first, last| Wanted::Part { first, last };
        for (header, wanted) in [
            ("bytes=0-0", part(0, 0)),
            ("bytes=5-", part(5, 9)),
            ("bytes=-3", part(7, 9)),
            ("bytes=-30", part(0, 9)),
            ("bytes=2-99", part(2, 9)),
            ("bytes=1-2,4-5", Wanted::All),
            ("lines=1-2", Wanted::All),
        ] {
            assert_eq!(Wanted::parse(Some(header), 10).unwrap(), wanted, "{header}");
        }
        for header in ["bytes=10-", "bytes=5-4", "bytes=a-b", "bytes=-0"] {
            assert!(Wanted::parse(Some(header), 10).is_err(), "{header}");
        }
        assert_eq!(Wanted::parse(None, 0).unwrap(), Wanted::All);
    }

    #[test]
    fn a_creation_says_how_many_ranks() {
        let made = Creation::parse(Some("num_ranks=5&steps_retained=2")).unwrap();
        assert_eq!((made.num_ranks.get(), made.steps_retained), (5, 2));
        for query in [
            None,
            Some("num_ranks=0"),
            Some("num_ranks=x"),
            Some("num_ranks=2&steps_retained=0"),
        ] {
            assert!(Creation::parse(query).is_err(), "{query:?}");
        }
    }
}
