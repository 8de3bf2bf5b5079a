//! Every loss of up to m nodes of one group, each with real processes: all shards come back right, on the nodes that are left.

use anyhow::{Context, Result};
use storaged_tests::system::{System, shards};

use crate::Figures;
use crate::nodes::{save, until};

/// Data and coding nodes of a cluster of one group.
#[derive(Debug, Clone, Copy)]
struct Nodes {
    k: usize,
    m: usize,
}

const GEOMETRIES: [Nodes; 3] = [
    Nodes { k: 4, m: 2 },
    Nodes { k: 6, m: 2 },
    Nodes { k: 8, m: 3 },
];

/// All sets of one to `most` of so many nodes.
fn subsets(nodes: usize, most: usize) -> Vec<Vec<usize>> {
    let all = 1_u32..1 << nodes;
    let few = all.filter(|set| set.count_ones() as usize <= most);
    let members = |set: u32| (0..nodes).filter(move |node| set >> node & 1 == 1);
    few.map(|set| members(set).collect()).collect()
}

/// One loss, and the cluster as it was before.
fn lose(system: &mut System, lost: &[usize], nodes: Nodes, step: u64) -> Result<()> {
    let Nodes { k, m } = nodes;
    for node in lost {
        system.cluster.kill(*node)?;
    }
    let left: Vec<usize> = (0..k + m).filter(|node| !lost.contains(node)).collect();
    let world = u32::try_from(k)?;
    let restored = system.restore(&left, step, &shards(world, step));
    for node in lost {
        system.cluster.start(*node)?;
    }
    system.cluster.wait_for_links()?;
    until("protection", || system.bears(left[0], m))?;
    restored.map(drop)
}

pub fn measure(figures: &mut Figures) -> Result<()> {
    let (mut tried, mut failed) = (0, 0);
    for nodes in GEOMETRIES {
        let Nodes { k, m } = nodes;
        let mut system = System::start(k + m, Some((k, m)), "")?;
        let (run, mut trainers) = system.trainers(u32::try_from(k)?)?;
        save(&system, run, &mut trainers, 7, 0..k + m)?;
        drop(trainers);
        until("protection", || system.bears(0, m))?;
        for lost in subsets(k + m, m) {
            tried += 1;
            if let Err(error) = lose(&mut system, &lost, nodes, 7).context("a loss") {
                println!("({k}, {m}) without {lost:?}: {error:#}");
                failed += 1;
            }
        }
        println!("({k}, {m}): {tried} losses so far, {failed} of them failed");
        figures.insert("loss_subsets", f64::from(tried));
        figures.insert("loss_subsets_failed", f64::from(failed));
    }
    Ok(())
}
