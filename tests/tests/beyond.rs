//! One node more is lost than a group of (4, 2) bears, with real processes: data nodes alone, and one with both of those that code for them.
//! `make lifetime` tries all such losses, and those of other geometries.

use anyhow::Result;
use storaged_tests::beyond::{DoomedGroup, Tier};

const LOST: [[usize; 3]; 2] = [[0, 1, 3], [2, 4, 5]];

fn each_is_lost(tier: Tier) -> Result<()> {
    let mut group = DoomedGroup::start(4, 2, tier)?;
    LOST.iter().try_for_each(|lost| group.lose(lost))
}

#[test]
fn what_is_lost_is_said_by_type_where_there_is_no_durable_tier() -> Result<()> {
    each_is_lost(Tier::None)
}

#[test]
fn what_is_lost_is_said_by_type_and_the_durable_tier_has_the_step_before() -> Result<()> {
    each_is_lost(Tier::Directory)
}
