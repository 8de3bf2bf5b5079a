//! Tokens that open a job, that are changed, or are somebody else's.

use storaged_core::ConnId;
use storaged_wire::local::{Reply, Request, Role};
use storaged_wire::succession::{SEAL_BYTES, TokenStanding};
use storaged_wire::{Namespace, RefusalCode, Rotation};

use super::Cluster;
use crate::testkit::{TOKEN, hello_by};

pub const OTHER: &[u8] = crate::testkit::OTHER;
pub const NEW: &[u8] = b"the token that comes next";
const SEAL: [u8; SEAL_BYTES] = [3; SEAL_BYTES];

pub fn code(reply: &Reply) -> Option<RefusalCode> {
    match reply {
        Reply::Refused(refusal) => Some(refusal.code),
        _ => None,
    }
}

pub fn is_opened(reply: &Reply) -> bool {
    matches!(reply, Reply::RunOpened { .. })
}

impl Cluster {
    /// A reader that is let in.
    pub fn comes_by(&mut self, node: usize, job: &Namespace, token: &[u8]) -> ConnId {
        let conn = self.fresh_conn();
        let reply = self.ask(node, conn, hello_by(job.clone(), token, Role::Reader));
        assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
        conn
    }

    /// What somebody hears who wants to open a run by a token.
    pub fn asks_for_run(&mut self, node: usize, job: &Namespace, token: &[u8]) -> Reply {
        self.asks_for_run_within(10_000, node, job, token)
    }

    /// Changes the token of a job for the new one, at a node.
    pub fn rotate(&mut self, node: usize, job: &Namespace) {
        let conn = self.comes_by(node, job, TOKEN);
        let standing: TokenStanding = match self.ask(node, conn, Request::Succession) {
            Reply::Succession(standing) => standing,
            other => panic!("{other:?}"),
        };
        let rotation = Rotation::new(&standing, TOKEN, NEW, SEAL).expect("a new token");
        let reply = self.ask(node, conn, Request::Rotate(Box::new(rotation)));
        assert!(matches!(reply, Reply::Done), "{reply:?}");
        self.run_for(100);
    }
}
