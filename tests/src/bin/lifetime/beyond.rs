//! Losses of one node more than a group bears, spread over all of them.

use anyhow::Result;
use storaged_tests::beyond::{DoomedGroup, Tier};
use storaged_tests::system::losses;

use crate::Figures;
use crate::losses::{Count, GEOMETRIES, Nodes};

/// So many are tried of each geometry at most: those of (4, 2) are so many.
const SAMPLE: usize = 20;

/// Losses of m+1 nodes.
fn sample(nodes: Nodes) -> Vec<Vec<usize>> {
    let mut all = losses(nodes.all(), nodes.m + 1);
    all.retain(|lost| lost.len() > nodes.m);
    let every = all.len().div_ceil(SAMPLE).max(1);
    all.into_iter().step_by(every).collect()
}

pub fn measure(figures: &mut Figures) -> Result<()> {
    let mut all = Count::default();
    for nodes in GEOMETRIES {
        for tier in [Tier::None, Tier::Directory] {
            let mut group = DoomedGroup::start(nodes.k, nodes.m, tier)?;
            for lost in sample(nodes) {
                all.note(&format!("{tier:?}"), group.lose(&lost));
            }
            println!("{nodes:?} {tier:?} one node too many: {all:?} so far");
            figures.insert("loss_beyond_m", f64::from(all.tried));
            figures.insert("loss_beyond_m_failed", f64::from(all.failed));
        }
    }
    Ok(())
}
