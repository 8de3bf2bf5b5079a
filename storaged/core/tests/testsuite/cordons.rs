//! Nodes that an operator expects to lose: what is coded from then on goes to others, and what they have is kept as before.

use crate::cluster::Cluster;
use crate::testkit::{members, name};
use storaged_core::{EpochMembers, Input, Viewer};
use storaged_plan::Cordon;
use storaged_wire::local::DurableWish;

/// Four data nodes; n4 and n5 code for them, and n6 is there too.
const NODES: usize = 7;

fn all_hear_of(cluster: &mut Cluster, epoch: u64, cordoned: &[usize]) {
    let mut members = members(NODES);
    for member in &mut members {
        if cordoned.iter().any(|node| name(*node) == member.name) {
            member.cordon = Cordon::Cordoned;
        }
    }
    for node in 0..NODES {
        let members = members.clone();
        let passed = Vec::new();
        let heard = Input::Members {
            newest: EpochMembers { epoch, members },
            passed,
        };
        cluster.tell(node, heard);
        cluster.run_for(150);
    }
}

/// Who holds parity of a step.
fn coded_by(cluster: &mut Cluster, step: u64) -> Vec<usize> {
    let mut holds = |node: &usize| {
        let status = cluster.ram(*node).node.status_json(&Viewer::Operator);
        let of_step = status
            .split("{\"namespace\"")
            .find(|one| one.contains(&format!(r#""step":{step},"#)) && one.contains("parity_here"));
        of_step.is_some_and(|one| !one.contains(r#""parity_here":0"#))
    };
    (0..NODES).filter(|node| holds(node)).collect()
}

#[test]
fn new_parity_goes_past_a_cordoned_node_and_what_it_has_stays_and_is_repaired() {
    let mut cluster = Cluster::start_of(NODES, 4, 2, 20);
    cluster.save_on_all(4, DurableWish::Never);
    assert_eq!(coded_by(&mut cluster, 1), [4, 5]);
    all_hear_of(&mut cluster, 2, &[5]);
    cluster.run_for(5_000);
    assert_eq!(
        coded_by(&mut cluster, 1),
        [4, 5],
        "old parity moves nowhere"
    );
    // What a cordoned node has lost is still put back there: nobody else is to hold it.
    cluster.kill(5);
    cluster.start_after(0, 5);
    cluster.run_for(200);
    all_hear_of(&mut cluster, 2, &[5]);
    let is_healed = |cluster: &Cluster| cluster.healed_at(&[5], 0).is_some();
    cluster.run_until(60_000, "its parity", is_healed);
    assert_eq!(coded_by(&mut cluster, 1), [4, 5]);
    cluster.save_on_all(4, DurableWish::Never);
    assert_eq!(coded_by(&mut cluster, 2), [4, 6]);
    all_hear_of(&mut cluster, 3, &[]);
    cluster.save_on_all(4, DurableWish::Never);
    assert_eq!(coded_by(&mut cluster, 3), [4, 5], "and back again");
}

#[test]
fn where_the_others_do_not_suffice_cordoned_nodes_code() {
    let mut cluster = Cluster::start_of(NODES, 4, 2, 20);
    all_hear_of(&mut cluster, 2, &[4, 5, 6]);
    cluster.save_on_all(4, DurableWish::Never);
    assert_eq!(coded_by(&mut cluster, 1), [4, 5]);
}
