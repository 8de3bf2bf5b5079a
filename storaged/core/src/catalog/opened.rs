//! Which steps of a job were opened on this node.

use storaged_wire::peer::HighMark;

/// So many of them are remembered: who compares steps or exports them reads a few.
const REMEMBERED: usize = 4;

/// What a job's ranks here may have gone on from. They open a step before their run is opened or after, and others read older or newer ones
/// at any time.
#[derive(Debug, Clone, Default)]
pub(crate) struct OpenedSteps {
    /// Before the newest run that is known was heard of, last ones last.
    before_run: Vec<HighMark>,
    /// Since then.
    since: Vec<HighMark>,
}

impl OpenedSteps {
    pub fn opens(&mut self, step: HighMark) {
        self.since.retain(|it| *it != step);
        if self.since.len() >= REMEMBERED {
            self.since.remove(0);
        }
        self.since.push(step);
    }

    /// A newer run is known: it goes on from what was opened before, unless its ranks open another one yet.
    pub fn run_begins(&mut self) {
        if !self.since.is_empty() {
            self.before_run = std::mem::take(&mut self.since);
        }
    }

    /// A restart from it has failed.
    pub fn failed(&mut self, step: HighMark) {
        self.before_run.retain(|it| *it != step);
        self.since.retain(|it| *it != step);
    }

    /// Whether the newest run may have gone on from it.
    pub fn has(&self, step: HighMark) -> bool {
        self.any(|it| it == step)
    }

    /// Whether one of those that the newest run may have gone on from is such.
    pub fn any(&self, is_such: impl Fn(HighMark) -> bool) -> bool {
        let mut all = self.before_run.iter().chain(&self.since);
        all.any(|step| is_such(*step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::at;

    fn all(opened: &OpenedSteps) -> Vec<u64> {
        (0..20).filter(|step| opened.has(at(*step))).collect()
    }

    #[test]
    fn a_run_goes_on_from_one_of_those_that_were_opened_last_before_it_began() {
        let mut opened = OpenedSteps::default();
        assert!(!opened.any(|_| true));
        [7, 9, 5].iter().for_each(|step| opened.opens(at(*step)));
        opened.run_begins();
        [2, 3].iter().for_each(|step| opened.opens(at(*step)));
        assert_eq!(all(&opened), [2, 3, 5, 7, 9], "others may read at any time");
        opened.run_begins();
        opened.run_begins();
        assert_eq!(all(&opened), [2, 3]);
        opened.failed(at(3));
        assert_eq!(all(&opened), [2]);
    }

    #[test]
    fn one_that_reads_all_steps_is_not_remembered_with_all() {
        let mut opened = OpenedSteps::default();
        (0..20).for_each(|step| opened.opens(at(step)));
        opened.opens(at(17));
        opened.opens(at(1));
        assert_eq!(all(&opened), [1, 17, 18, 19]);
    }
}
