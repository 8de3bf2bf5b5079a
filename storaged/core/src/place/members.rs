//! Another list of nodes while the daemon runs. What is committed keeps the groups of its manifest; new checkpoints get
//! the new ones, and home nodes are chosen anew.

use storaged_plan::{Member, groups};

use crate::context::Context;

impl Context {
    /// Takes the new list, unless it cannot be grouped: whoever read it has checked that already.
    pub(crate) fn set_members(&mut self, members: Vec<Member>) {
        let groups = match self
            .setup
            .geometry
            .map(|geometry| groups(&members, geometry))
        {
            None => Vec::new(),
            Some(Ok(groups)) => groups,
            Some(Err(_)) => return,
        };
        if !members.iter().any(|member| member.name == *self.me()) {
            return;
        }
        self.setup.members = members;
        self.groups = groups;
        self.announce_all();
    }
}
