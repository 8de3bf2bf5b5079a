//! What nodes decide, in small clusters whose nodes, links and clocks a test has in its hand.
//!
//! One program, since each one builds the world around the decisions (`testkit/`) anew. A module is a subject; a test is
//! `cargo test -p storaged-core --test testsuite pins::`.

mod cluster;
#[path = "../testkit/mod.rs"]
mod testkit;

mod boards;
mod cordons;
mod descriptions;
mod drains;
mod drills;
mod early_hellos;
mod early_openings;
mod enclosures;
mod epochs;
mod failed_restarts;
mod forgotten_jobs;
mod giving_way;
mod handle;
mod healing;
mod kept_steps;
mod left_behind;
mod leftovers;
mod liars;
mod lifetimes;
mod manifest_keys;
mod openings;
mod orders;
mod orphans;
mod pins;
mod plans;
mod publishing;
mod recovery;
mod removed;
mod restart_safe;
mod rotation;
mod runs;
mod scrub;
mod slots;
mod tenants;
mod tier;
mod tight_room;
mod verdict;
