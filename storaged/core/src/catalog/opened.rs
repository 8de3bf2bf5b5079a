//! Which steps of a job were opened on this node.

use storaged_wire::peer::HighMark;

/// What a job's ranks here may have gone on from. They open a step before their run is opened, and others read older or newer ones
/// at any time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OpenedSteps {
    /// Last, before the newest run that is known was heard of.
    before_run: Option<HighMark>,
    /// Last, since then.
    since: Option<HighMark>,
}

impl OpenedSteps {
    pub fn opens(&mut self, step: HighMark) {
        self.since = Some(step);
    }

    /// A newer run is known: it goes on from what was opened last, unless its ranks open another one yet.
    pub fn run_begins(&mut self) {
        self.before_run = self.since.take().or(self.before_run);
    }

    /// A restart from it has failed.
    pub fn failed(&mut self, step: HighMark) {
        for opened in [&mut self.before_run, &mut self.since] {
            opened.take_if(|it| *it == step);
        }
    }

    /// Whether the newest run may have gone on from it.
    pub fn has(&self, step: HighMark) -> bool {
        [self.before_run, self.since].contains(&Some(step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::at;

    #[test]
    fn a_run_goes_on_from_what_was_opened_last_before_it_began() {
        let mut opened = OpenedSteps::default();
        opened.opens(at(9));
        opened.opens(at(5));
        opened.run_begins();
        opened.opens(at(2));
        opened.opens(at(3));
        let all: Vec<u64> = (0..10).filter(|step| opened.has(at(*step))).collect();
        assert_eq!(all, [3, 5], "others may read at any time");
        opened.run_begins();
        opened.run_begins();
        assert!(opened.has(at(3)) && !opened.has(at(5)));
        opened.failed(at(3));
        assert!(!opened.has(at(3)));
    }
}
