//! What fuzzing of the holder begins with: what keepers and operators do, and everything that is said.

use storaged::keep::message::{
    FromKeeper, HeldCount, HoldAnswer, HoldOrder, HolderName, HolderReport, KeeperIdentity,
    ToHolder,
};

use super::said::{STEPS, Step};
use crate::Inputs;

/// A step of a seed: over which connection, and two bytes that say more.
type SeedStep = (Step, [u8; 3]);

fn seed(steps: &[SeedStep], own: &str) -> Vec<u8> {
    let mut bytes = vec![steps.len() as u8];
    for (step, more) in steps {
        let what = STEPS.iter().position(|it| it == step).unwrap_or_default();
        bytes.push(what as u8);
        bytes.extend(more);
    }
    bytes.extend(own.bytes());
    bytes
}

/// What keepers and operators do.
const STORIES: [(&str, &[SeedStep]); 8] = [
    (
        "memory-is-handed-on",
        &[
            (Step::Attach, [0, 1, 7]),
            (Step::List, [0, 0, 0]),
            (Step::Daemon, [0, 9, 0]),
            (Step::Store, [0, 1, 0]),
            (Step::Store, [0, 2, 1]),
            (Step::Store, [0, 1, 2]),
            (Step::Remove, [0, 2, 0]),
            (Step::Count, [0, 0, 0]),
            (Step::List, [0, 0, 0]),
        ],
    ),
    (
        "a-table-is-said-anew",
        &[
            (Step::Attach, [0, 1, 7]),
            (Step::Store, [0, 1, 0]),
            (Step::Store, [0, 2, 1]),
            (Step::Store, [0, 3, 2]),
            (Step::Count, [0, 0, 0]),
            (Step::Anew, [0, 0, 0]),
            (Step::Store, [0, 1, 0]),
            (Step::Store, [0, 2, 2]),
            (Step::List, [0, 0, 0]),
            (Step::Count, [0, 0, 0]),
        ],
    ),
    (
        "one-that-breaks-off-is-forgotten",
        &[
            (Step::Attach, [0, 1, 7]),
            (Step::Store, [0, 1, 0]),
            (Step::Anew, [0, 0, 0]),
            (Step::Store, [0, 2, 1]),
            (Step::HangUp, [0, 0, 0]),
            (Step::Attach, [1, 2, 8]),
            (Step::Count, [1, 0, 0]),
        ],
    ),
    (
        "there-is-no-room",
        &[
            (Step::Attach, [0, 1, 7]),
            (Step::Store, [0, 0, 0]),
            (Step::Store, [0, 1, 0]),
            (Step::Store, [0, 2, 0]),
            (Step::Store, [0, 3, 0]),
            (Step::StoreLongName, [0, 64, 0]),
            (Step::StoreLongName, [0, 1, 0]),
            (Step::Store, [0, 6, 0]),
            (Step::Store, [0, 3, 1]),
            (Step::Count, [0, 0, 0]),
            (Step::StoreLongName, [0, 65, 0]),
            (Step::StoreLongName, [0, 0, 0]),
            (Step::Odd, [0, 0, 0]),
            (Step::Count, [0, 0, 0]),
            (Step::Count, [0, 0, 0]),
        ],
    ),
    (
        "a-second-keeper-and-a-stranger",
        &[
            (Step::Attach, [0, 1, 7]),
            (Step::Store, [0, 1, 0]),
            (Step::Attach, [1, 2, 8]),
            (Step::Remove, [2, 1, 0]),
            (Step::Anew, [3, 0, 0]),
            (Step::Odd, [3, 0, 0]),
            (Step::Who, [1, 0, 0]),
            (Step::Attach, [2, 1, 7]),
            (Step::Remove, [0, 1, 0]),
            (Step::Count, [2, 0, 0]),
        ],
    ),
    (
        "a-daemon-outlives-its-keeper",
        &[
            (Step::Attach, [0, 1, 7]),
            (Step::Daemon, [0, 9, 0]),
            (Step::Store, [0, 1, 0]),
            (Step::HangUp, [0, 0, 0]),
            (Step::Attach, [1, 2, 8]),
            (Step::Release, [1, 0, 0]),
            (Step::Who, [1, 0, 0]),
            (Step::DaemonEnds, [0, 0, 0]),
            (Step::Attach, [1, 2, 8]),
            (Step::Count, [1, 0, 0]),
        ],
    ),
    (
        "all-is-let-go-of-between-two-daemons",
        &[
            (Step::Attach, [0, 1, 7]),
            (Step::Release, [1, 0, 0]),
            (Step::Daemon, [0, 9, 0]),
            (Step::Store, [0, 1, 0]),
            (Step::Release, [1, 0, 0]),
            (Step::DaemonEnds, [0, 0, 0]),
            (Step::Anew, [0, 0, 0]),
            (Step::Store, [0, 2, 0]),
            (Step::Release, [1, 0, 0]),
            (Step::Count, [0, 0, 0]),
            (Step::Release, [0, 0, 0]),
        ],
    ),
    (
        "all-is-let-go-of-for-nobody",
        &[
            (Step::Attach, [0, 1, 7]),
            (Step::Store, [0, 1, 0]),
            (Step::HangUp, [0, 0, 0]),
            (Step::Release, [1, 0, 0]),
            (Step::Attach, [1, 2, 8]),
            (Step::List, [1, 0, 0]),
        ],
    ),
];

/// Everything that is said, and some of what nobody says.
fn texts() -> Vec<String> {
    let name = || HolderName::new("slot-1").expect("a name");
    let keeper = KeeperIdentity {
        process: 8,
        mark: u64::MAX,
    };
    let orders = [
        HoldOrder::Attach(keeper),
        HoldOrder::Daemon(9),
        HoldOrder::Anew,
        HoldOrder::Count,
        HoldOrder::Release,
        HoldOrder::Who,
    ];
    let counts = HeldCount { held: 12, freed: 3 };
    let answers = [
        HoldAnswer::Busy(7),
        HoldAnswer::Holds(counts),
        HoldAnswer::Lacks(1),
        HoldAnswer::Released(2),
        HoldAnswer::Stranger(65_534),
    ];
    let changes = [
        ToHolder::Store(name()),
        ToHolder::Remove(name()),
        ToHolder::List,
        ToHolder::Watch,
    ];
    let given = [
        FromKeeper::Held(name()),
        FromKeeper::End(3),
        FromKeeper::Holder(HolderReport::Absent),
        FromKeeper::Holder(HolderReport::HasAll),
        FromKeeper::Holder(HolderReport::Lacks { since: 7 }),
    ];
    let odd = ["READY=1", "FDSTORE=1\nFDNAME=a:b", "HOLDDAEMON=+9", ""];
    let mut texts = orders.map(HoldOrder::encode).to_vec();
    texts.extend(answers.map(HoldAnswer::encode));
    texts.extend(changes.iter().map(ToHolder::encode));
    texts.extend(given.iter().map(FromKeeper::encode));
    texts.extend(odd.map(String::from));
    texts
}

/// Stories, and each text by a keeper and by a stranger.
pub fn holder_seeds() -> Inputs {
    let said = [
        (Step::Attach, [0, 1, 7]),
        (Step::Say, [0, 0, u8::MAX]),
        (Step::SayWithFile, [0, 0, u8::MAX]),
        (Step::Say, [1, 0, u8::MAX]),
        (Step::SayWithFile, [1, 0, u8::MAX]),
        (Step::Count, [0, 0, 0]),
    ];
    let stories = STORIES.iter();
    let stories = stories.map(|(name, steps)| ((*name).to_owned(), seed(steps, "")));
    let texts = texts().into_iter().enumerate();
    let texts = texts.map(|(at, text)| (format!("text-{at}"), seed(&said, &text)));
    stories.chain(texts).collect()
}
