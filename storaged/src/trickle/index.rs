//! The index of a namespace: per checkpoint one small object in `NAMESPACE/.storaged/steps/`, named so that the newest
//! comes first, and the marks that a person or a restore has put on it. One page of it answers what a restart asks,
//! however many objects the checkpoints have.

use std::fmt;

use storaged_core::DurableFault;
use storaged_wire::{Manifest, Namespace, RunId, Step};

use super::Trickle;
use super::store::{KeyPrefix, ObjectKey, PAGE_ENTRIES_MAX, Rest, StoreError};

/// A checkpoint's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StepKey {
    pub run: RunId,
    pub step: Step,
}

/// What an object of the index says of its checkpoint. The order is that of their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mark {
    /// Its manifest is about to be written, or is: every shard stands alone.
    Full,
    /// The same, and shards build on older checkpoints: the object's bytes name them.
    Increment,
    /// Somebody wants it kept.
    Pinned,
    /// A restore found it damaged: the object's bytes say what.
    Quarantined,
    /// Its removal has begun: what is left of it is no checkpoint.
    Removing,
}

const MARKS: [(Mark, &str); 5] = [
    (Mark::Full, "full"),
    (Mark::Increment, "increment"),
    (Mark::Pinned, "pinned"),
    (Mark::Quarantined, "quarantined"),
    (Mark::Removing, "removing"),
];

/// A checkpoint as the index has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Indexed {
    pub place: StepKey,
    pub marks: Vec<Mark>,
}

impl Indexed {
    pub fn has(&self, mark: Mark) -> bool {
        self.marks.contains(&mark)
    }

    /// Whether a manifest of it may be there.
    pub fn is_entry(&self) -> bool {
        (self.has(Mark::Full) || self.has(Mark::Increment)) && !self.has(Mark::Removing)
    }
}

impl StepKey {
    pub fn of(manifest: &Manifest) -> Self {
        Self {
            run: manifest.run,
            step: manifest.step,
        }
    }
}

impl fmt::Display for StepKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run {} step {}", self.run, self.step)
    }
}

impl Mark {
    fn suffix(self) -> &'static str {
        let known = MARKS.iter().find(|(mark, _)| *mark == self);
        known.map_or("", |(_, suffix)| suffix)
    }
}

fn folder(namespace: &Namespace) -> String {
    format!("{namespace}/.storaged/steps")
}

/// The key of a mark: the numbers count down, so that the order of names is from the newest to the oldest.
pub(super) fn mark_key(
    namespace: &Namespace,
    place: StepKey,
    mark: Mark,
) -> Result<ObjectKey, StoreError> {
    let (run, step) = (place.run, place.step.get());
    let numbers = [run.number(), run.identity(), step].map(|number| format!("{:016x}", !number));
    let name = format!("{}.{}", numbers.join("-"), mark.suffix());
    format!("{}/{name}", folder(namespace)).parse()
}

/// What a name in the index says; none for names that no daemon wrote.
pub(super) fn read_name(name: &str) -> Option<(StepKey, Mark)> {
    let (numbers, suffix) = name.split_once('.')?;
    let (mark, _) = MARKS.iter().find(|(_, known)| *known == suffix)?;
    let mut numbers = numbers.split('-').map(|text| {
        let exact = text.len() == 16 && !text.contains(|c: char| c.is_ascii_uppercase());
        let number = u64::from_str_radix(text, 16).ok()?;
        exact.then_some(!number)
    });
    let (number, identity, step) = (numbers.next()??, numbers.next()??, numbers.next()??);
    let place = StepKey {
        run: RunId::with_identity(number, identity),
        step: Step::new(step),
    };
    numbers.next().is_none().then_some((place, *mark))
}

/// Reads the index page by page, the newest first.
pub(super) struct IndexReader<'a> {
    trickle: &'a Trickle,
    under: KeyPrefix,
    after: Option<ObjectKey>,
    rest: Rest,
    /// The last checkpoint of a page: its marks may go on in the next.
    open: Option<Indexed>,
}

impl<'a> IndexReader<'a> {
    pub fn new(trickle: &'a Trickle, namespace: &Namespace) -> Result<Self, DurableFault> {
        Ok(Self {
            trickle,
            under: KeyPrefix::folder(folder(namespace).parse()?),
            after: None,
            rest: Rest::More,
            open: None,
        })
    }

    /// The next checkpoints; none after the last.
    pub async fn next(&mut self) -> Result<Option<Vec<Indexed>>, DurableFault> {
        if self.rest == Rest::None {
            return Ok(None);
        }
        let store = &self.trickle.store;
        let after = self.after.as_ref();
        let page = store
            .list_page(&self.under, after, PAGE_ENTRIES_MAX)
            .await?;
        self.rest = page.rest;
        let prefix = self.under.text();
        let mut found: Vec<Indexed> = self.open.take().into_iter().collect();
        for entry in &page.entries {
            let name = entry.key.as_str().strip_prefix(&prefix);
            let Some((place, mark)) = name.and_then(read_name) else {
                continue;
            };
            match found.last_mut().filter(|last| last.place == place) {
                Some(last) => last.marks.push(mark),
                None => found.push(Indexed {
                    place,
                    marks: vec![mark],
                }),
            }
        }
        self.after = page.entries.into_iter().next_back().map(|last| last.key);
        if self.rest == Rest::More {
            self.open = found.pop();
        }
        Ok(Some(found))
    }
}

impl Trickle {
    /// The whole index, the newest first.
    pub(super) async fn index(&self, namespace: &Namespace) -> Result<Vec<Indexed>, DurableFault> {
        let mut reader = IndexReader::new(self, namespace)?;
        let mut all = Vec::new();
        while let Some(page) = reader.next().await? {
            all.extend(page);
        }
        Ok(all)
    }

    /// Puts a mark on a checkpoint; one that is there already stays as it is.
    pub(super) async fn mark(
        &self,
        namespace: &Namespace,
        place: StepKey,
        mark: Mark,
        says: &str,
    ) -> Result<(), DurableFault> {
        let key = mark_key(namespace, place, mark)?;
        match self.store.put_new(&key, says.to_owned().into()).await {
            Err(StoreError::AlreadyExists { .. }) => Ok(()),
            outcome => Ok(outcome?),
        }
    }

    /// Takes a mark from a checkpoint.
    pub(super) async fn unmark(
        &self,
        namespace: &Namespace,
        place: StepKey,
        mark: Mark,
    ) -> Result<(), DurableFault> {
        let key = mark_key(namespace, place, mark)?;
        Ok(self.store.delete(&key).await?)
    }

    /// What a mark says; nothing if it is gone or no text.
    pub(super) async fn said(
        &self,
        namespace: &Namespace,
        place: StepKey,
        mark: Mark,
    ) -> Result<String, DurableFault> {
        let key = mark_key(namespace, place, mark)?;
        match self.store.get(&key, None).await {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(StoreError::NotFound { .. }) => Ok(String::new()),
            Err(error) => Err(error.into()),
        }
    }
}

/// The checkpoints that an increment's mark names, one per line.
pub(super) fn read_bases(says: &str) -> Vec<StepKey> {
    let base = |line: &str| {
        let (run, step) = line.split_once(' ')?;
        Some(StepKey {
            run: run.parse().ok()?,
            step: Step::new(step.parse().ok()?),
        })
    };
    says.lines().filter_map(base).collect()
}

pub(super) fn write_bases(bases: impl IntoIterator<Item = StepKey>) -> String {
    let line = |base: StepKey| format!("{} {}\n", base.run, base.step);
    bases.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: u64, identity: u64, step: u64, mark: Mark) -> String {
        let place = StepKey {
            run: RunId::with_identity(number, identity),
            step: Step::new(step),
        };
        let key = mark_key(&Namespace::new("job").unwrap(), place, mark).unwrap();
        key.as_str().to_owned()
    }

    #[test]
    fn names_are_pinned_and_read_back() {
        let full = name(7, 0xa6, 100, Mark::Full);
        assert_eq!(
            full,
            "job/.storaged/steps/fffffffffffffff8-ffffffffffffff59-ffffffffffffff9b.full"
        );
        for (mark, _) in MARKS {
            let key = name(7, 0xa6, 100, mark);
            let (place, read) = read_name(key.rsplit('/').next().unwrap()).unwrap();
            assert_eq!(read, mark);
            assert_eq!(place.to_string(), "run 7-00000000000000a6 step 100");
        }
        for bad in ["", "x.full", "ffffffffffffffff.full", "1-2-3.full"] {
            assert_eq!(read_name(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_newest_comes_first_and_marks_stay_together() {
        let names = [
            name(u64::MAX, 0, 0, Mark::Full),
            name(11, 0, 3, Mark::Full),
            name(2, 9, 1, Mark::Increment),
            name(2, 8, 10, Mark::Full),
            name(2, 8, 9, Mark::Full),
            name(2, 8, 9, Mark::Pinned),
            name(2, 8, 9, Mark::Quarantined),
            name(2, 8, 9, Mark::Removing),
            name(1, 0, 99, Mark::Full),
        ];
        assert!(names.is_sorted(), "{names:#?}");
    }

    #[test]
    fn bases_are_written_and_read() {
        let base = StepKey {
            run: RunId::with_identity(3, 1),
            step: Step::new(40),
        };
        let text = write_bases([base]);
        assert_eq!(text, "3-0000000000000001 40\n");
        assert_eq!(read_bases(&text), [base]);
    }
}
