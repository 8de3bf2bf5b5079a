//! Host lists as Slurm and others write them: `n[001-128].cluster`, `n[1-3,7],login1`. A number keeps the digits that the first one has.

use thiserror::Error;

/// The largest cluster, and what a mistyped range may cost.
const HOSTS_MAX: usize = 20_000;
/// A host's name has no more letters, and no list of so few hosts needs more brackets or longer numbers.
const HOST_BYTES_MAX: usize = 253;
const BRACKETS_MAX: usize = 8;
const DIGITS_MAX: usize = 20;

/// A text that is no host list.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected at most {HOSTS_MAX} hosts such as n[001-128] or n1,n2, got {0:?}")]
pub struct HostListError(String);

/// Whether it names several by brackets or commas.
pub(super) fn is_list(text: &str) -> bool {
    text.contains(['[', ','])
}

/// The hosts, in the order in which they are named.
pub(super) fn expand(text: &str) -> Result<Vec<String>, HostListError> {
    let mut hosts = Vec::new();
    for part in outside_brackets(text) {
        let is_short = part.matches('[').count() <= BRACKETS_MAX;
        let found = Some(part).filter(|_| is_short).and_then(expand_one);
        let found = found.filter(|it| hosts.len() + it.len() <= HOSTS_MAX);
        hosts.extend(found.ok_or_else(|| HostListError(text.into()))?);
    }
    Ok(hosts)
}

/// The parts between commas that are in no brackets.
fn outside_brackets(text: &str) -> Vec<&str> {
    let mut is_inside = false;
    let parts = text.split(|letter| {
        is_inside = letter == '[' || is_inside && letter != ']';
        letter == ',' && !is_inside
    });
    parts.collect()
}

fn expand_one(text: &str) -> Option<Vec<String>> {
    let Some((before, rest)) = text.split_once('[') else {
        let is_good = (1..=HOST_BYTES_MAX).contains(&text.len()) && !text.contains(']');
        return is_good.then(|| vec![text.to_owned()]);
    };
    let (ranges, after) = rest.split_once(']')?;
    if before.len() > HOST_BYTES_MAX {
        return None;
    }
    let tails = if after.is_empty() {
        vec![String::new()]
    } else {
        expand_one(after)?
    };
    let mut hosts = Vec::new();
    for range in ranges.split(',') {
        for number in numbers(range)? {
            if hosts.len() + tails.len() > HOSTS_MAX {
                return None;
            }
            hosts.extend(tails.iter().map(|tail| format!("{before}{number}{tail}")));
        }
    }
    Some(hosts)
}

fn numbers(range: &str) -> Option<impl Iterator<Item = String>> {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let number = |digits: &str| {
        let is_one = (1..=DIGITS_MAX).contains(&digits.len())
            && digits.bytes().all(|it| it.is_ascii_digit());
        is_one.then(|| digits.parse::<u64>().ok()).flatten()
    };
    let (from, to, width) = (number(first)?, number(last)?, first.len());
    (from <= to).then(|| (from..=to).map(move |it| format!("{it:0width$}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_written_out_with_their_digits() {
        for (list, hosts) in [
            ("n1", "n1"),
            ("n[001-003]", "n001 n002 n003"),
            ("n[8-11].c", "n8.c n9.c n10.c n11.c"),
            ("n[1,07-08],m2", "n1 n07 n08 m2"),
            ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
            ("n[1-2]:9300", "n1:9300 n2:9300"),
        ] {
            assert_eq!(expand(list).unwrap().join(" "), hosts, "{list}");
        }
        assert_eq!(expand("n[00001-20000]").unwrap().len(), HOSTS_MAX);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for wrong in [
            "",
            "n[",
            "n]",
            "n[]",
            "n[1-]",
            "n[3-1]",
            "n[a-b]",
            "n[1]]",
            "n1,,n2",
            "n[1-2",
            "n[-1]",
            "n[+1]",
            "n[0-20000]",
            "n[1-999]x[1-999]",
            "n[1-99999999999999999999]",
            "n[1-18446744073709551615]",
        ] {
            let error = expand(wrong).unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong:?}")), "{error}");
        }
        // What could take a day, or all memory.
        let many = "[1]".repeat(200_000);
        let zeros = "0".repeat(70_000);
        for wrong in [
            format!("n{many}"),
            format!("n{}[1-20000]", "[1]".repeat(2_000)),
            format!("n[{zeros}1-2]"),
            "n".repeat(300),
        ] {
            assert!(expand(&wrong).is_err());
        }
    }
}
