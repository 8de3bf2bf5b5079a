//! Clients of the nodes: connections, requests and their answers.

use storaged_core::{ConnId, Input, RequestId, Viewer};
use storaged_wire::local::{Reply, Request, Role};
use storaged_wire::{Namespace, Refusal, TenantName};

use super::requests::{hello, hello_by};
use super::scene::Scene;
use super::world::World;

/// An answer is there by then, whatever limit its request has.
const ANSWERED_MS: u64 = 120_000;

impl<S: Scene> World<S> {
    /// Numbers a request.
    pub fn request_on(&mut self, conn: ConnId) -> RequestId {
        self.asked += 1;
        let index = self.asked;
        RequestId { conn, index }
    }

    /// Numbers a connection.
    pub fn fresh_conn(&mut self) -> ConnId {
        self.asked += 1;
        ConnId(self.asked)
    }

    /// Asks a node; the answer comes to `answer`.
    pub fn send(&mut self, node: usize, conn: ConnId, request: Request) -> RequestId {
        let id = self.request_on(conn);
        self.tell(node, Input::Request { id, request });
        id
    }

    /// What was answered.
    pub fn answer(&self, id: RequestId) -> Option<&Reply> {
        self.replies.get(&id)
    }

    /// Waits for answers.
    pub fn run_until_answered(&mut self, ids: &[RequestId]) {
        self.run_until(ANSWERED_MS, "an answer", |world| {
            ids.iter().all(|id| world.answer(*id).is_some())
        });
    }

    /// Asks a node and waits for its answer.
    pub fn ask(&mut self, node: usize, conn: ConnId, request: Request) -> Reply {
        let id = self.send(node, conn, request);
        self.run_until_answered(&[id]);
        self.replies.remove(&id).expect("it was answered")
    }

    /// A connection to a node's daemon.
    pub fn try_connect(
        &mut self,
        node: usize,
        namespace: Namespace,
        role: Role,
    ) -> Result<ConnId, Refusal> {
        let conn = self.fresh_conn();
        if let Some(tenant) = namespace.tenant() {
            // It comes through the tenant's socket.
            let viewer = Viewer::Tenant(Some(TenantName::new(tenant).unwrap()));
            self.tell(node, Input::Connected { conn, viewer });
        }
        match self.ask(node, conn, hello(namespace, role)) {
            Reply::Welcome { .. } => Ok(conn),
            Reply::Refused(refusal) => Err(refusal),
            other => panic!("expected a welcome, got {other:?}"),
        }
    }

    /// Somebody says hello by a token and asks for a run; who is refused at once hears so.
    pub fn begins_a_run(
        &mut self,
        timeout_ms: u32,
        node: usize,
        job: &Namespace,
        token: &[u8],
    ) -> Result<RequestId, Refusal> {
        let conn = self.fresh_conn();
        match self.ask(node, conn, hello_by(job.clone(), token, Role::Reader)) {
            Reply::Welcome { .. } => Ok(self.send(node, conn, Request::OpenRun { timeout_ms })),
            Reply::Refused(refusal) => {
                self.disconnect(node, conn);
                Err(refusal)
            }
            other => panic!("expected a welcome, got {other:?}"),
        }
    }

    /// What somebody hears who wants to open a run by a token, and waits for it for so long.
    pub fn asks_for_run_within(
        &mut self,
        timeout_ms: u32,
        node: usize,
        job: &Namespace,
        token: &[u8],
    ) -> Reply {
        let id = match self.begins_a_run(timeout_ms, node, job, token) {
            Ok(id) => id,
            Err(refusal) => return Reply::Refused(refusal),
        };
        self.run_until_answered(&[id]);
        self.disconnect(node, id.conn);
        self.replies.remove(&id).expect("it was answered")
    }

    /// A connection ends.
    pub fn disconnect(&mut self, node: usize, conn: ConnId) {
        self.tell(node, Input::Disconnected { conn });
    }
}
