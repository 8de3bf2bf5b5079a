//! What a node answers on its sockets and pages before it has a place in the roster: a status that says what it waits for, whether it
//! may be restarted, that it ends if an operator drains it, and a refusal of all else. The sockets and pages are the ones that the daemon has later.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use storaged_core::{ConnId, Viewer, not_an_operator};
use storaged_wire::drain::{DrainPhase, DrainReport};
use storaged_wire::local::{Reply, Request};
use storaged_wire::{NodeName, Refusal, RefusalCode};

use crate::env::{OpsDoor, StageDoor};
use crate::http::{OpsState, RestartAsked};
use crate::membership::Waits;
use crate::stage::{Answer, StageEvent};

/// An answer is on its way to the socket for so long at most.
const ANSWERED_WITHIN: Duration = Duration::from_millis(200);

/// An operator has drained a node that has no place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drained {
    /// What may be lost with it, or stays as it is.
    pub left: Vec<String>,
}

/// A node that has no place yet.
#[derive(Debug)]
pub struct WaitingRoom {
    stage: StageDoor,
    ops: OpsDoor,
    /// Connections of the operator, which the daemon must know as such.
    viewers: BTreeMap<ConnId, Viewer>,
    drained: Option<Drained>,
    sign: WaitingSign,
}

/// What it says; whoever looks for the place writes it.
#[derive(Debug, Clone)]
pub struct WaitingSign {
    node: NodeName,
    pages: Arc<OpsState>,
    shown: Arc<Mutex<SignText>>,
}

#[derive(Debug)]
struct SignText {
    status: String,
    reason: String,
    /// What speaks against a restart.
    objections: Vec<String>,
}

impl WaitingRoom {
    /// Answers on these from now on.
    pub fn open(node: NodeName, stage: StageDoor, ops: OpsDoor) -> Self {
        let reason = "this node looks for its place in the roster".to_owned();
        let shown = SignText {
            status: status(&node, &json!({"as": "unknown"}), &reason),
            objections: vec![reason.clone()],
            reason,
        };
        let sign = WaitingSign {
            node,
            pages: ops.state.clone(),
            shown: Arc::new(Mutex::new(shown)),
        };
        Self {
            stage,
            ops,
            viewers: BTreeMap::new(),
            drained: None,
            sign,
        }
    }

    /// Where what it waits for is said.
    pub fn sign(&self) -> WaitingSign {
        self.sign.clone()
    }

    /// Answers until this comes to its end.
    ///
    /// # Errors
    /// [`Drained`] if the node is to end before.
    pub async fn answer_until<T>(&mut self, end: impl Future<Output = T>) -> Result<T, Drained> {
        tokio::pin!(end);
        loop {
            if let Some(drained) = self.drained.take() {
                // It takes no place meanwhile.
                tokio::time::sleep(ANSWERED_WITHIN).await;
                return Err(drained);
            }
            tokio::select! {
                done = &mut end => return Ok(done),
                Some(event) = self.stage.received.next() => self.answer(event),
                Some(asked) = self.ops.asked.recv() => self.answer_page(asked),
            }
        }
    }

    fn answer(&mut self, event: StageEvent) {
        match event {
            StageEvent::Connected { conn, viewer } => drop(self.viewers.insert(conn, viewer)),
            StageEvent::RequestComes { .. } => {}
            StageEvent::Gone { conn } => drop(self.viewers.remove(&conn)),
            StageEvent::Request {
                id,
                request,
                answer,
            } => {
                let is_operator = self.viewers.get(&id.conn) == Some(&Viewer::Operator);
                let reply = match &request {
                    Request::Drain(_) if is_operator => self.drain(),
                    Request::Drain(_) => Reply::Refused(not_an_operator()),
                    _ => self.sign.reply(&request),
                };
                // Whoever asked may have gone.
                let _ = answer.send(Answer { reply, slot: None });
            }
        }
    }

    /// It ends: it serves nobody. What speaks against a restart speaks against that too.
    fn drain(&mut self) -> Reply {
        let (left, reason) = {
            let shown = self.sign.shown();
            (shown.objections.clone(), shown.reason.clone())
        };
        tracing::info!(reason, "an operator drains this node, which has no place");
        self.drained = Some(Drained { left: left.clone() });
        Reply::Draining(DrainReport {
            phase: DrainPhase::Over,
            within_ms: 0,
            left,
            place: Some("none: it had none".into()),
            after: Some(Vec::new()),
        })
    }

    fn answer_page(&self, asked: RestartAsked) {
        // Whoever asked may have gone.
        let _ = asked.answer.send(self.sign.shown().objections.clone());
    }

    /// The daemon takes over: who is connected stays so.
    pub fn leave(self) -> (StageDoor, OpsDoor) {
        for (conn, viewer) in self.viewers {
            // Fewer connections are possible than events fit.
            let queue = self.stage.events.of(&viewer).clone();
            let _ = queue.try_send(StageEvent::Connected { conn, viewer });
        }
        (self.stage, self.ops)
    }
}

impl WaitingSign {
    /// What the node waits for now.
    pub fn say(&self, waits: &Waits) {
        let reason = waits.to_string();
        let status = status(&self.node, &described(waits), &reason);
        self.pages.set_status(status.clone(), vec![reason.clone()]);
        self.pages.metrics.observe_waiting(waits);
        *self.shown() = SignText {
            status,
            objections: match waits {
                // It holds nothing, and nobody counts on it.
                Waits::AsSpare { .. } | Waits::Cordoned { .. } | Waits::ForAdmission { .. } => {
                    Vec::new()
                }
                _ => vec![reason.clone()],
            },
            reason,
        };
    }

    fn shown(&self) -> MutexGuard<'_, SignText> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reply(&self, request: &Request) -> Reply {
        let shown = self.shown();
        match request {
            Request::Status => Reply::Status(shown.status.clone()),
            Request::RestartSafe { .. } => Reply::RestartSafe(shown.objections.clone()),
            _ => {
                let text = format!(
                    "node {} has no place in the cluster and holds no checkpoints: {}; ask a node that has one (`storaged node ls`)",
                    self.node, shown.reason
                );
                Reply::Refused(Refusal::new(RefusalCode::NoPlace, text))
            }
        }
    }
}

fn status(node: &NodeName, waiting: &Value, reason: &str) -> String {
    json!({"node": node.as_str(), "ready": false, "not_ready": [reason], "waiting": waiting})
        .to_string()
}

/// Of what `described` says, that of nodes that hold nothing and that nobody counts on: for weeks, if nothing is lost.
pub const OUT_OF_USE: [&str; 3] = ["spare", "cordoned", "dismissed"];

/// What it waits for, for programs.
fn described(waits: &Waits) -> Value {
    match waits {
        Waits::AsSpare { epoch } => json!({"as": "spare", "epoch": epoch}),
        Waits::Cordoned { .. } => json!({"as": "cordoned"}),
        Waits::ForAdmission { .. } => json!({"as": "dismissed"}),
        Waits::ForOthers(_) => json!({"as": "unplaceable"}),
        Waits::Twin(_) => json!({"as": "twin"}),
        Waits::ForNodes { there, wanted } | Waits::ToGrow { there, wanted } => {
            json!({"as": "new-node", "there": there, "wanted": wanted})
        }
        Waits::ForRegistry(_) => json!({"as": "unknown"}),
    }
}

#[cfg(test)]
mod tests {
    use crate::membership::Roster;
    use crate::stage::{SocketFaults, ToDriver, queues};
    use storaged_core::RequestId;
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    fn room() -> (WaitingRoom, ToDriver, mpsc::Sender<RestartAsked>) {
        let (events, received) = queues();
        let (to_driver, asked) = mpsc::channel(16);
        let ops = OpsDoor {
            state: Arc::default(),
            asked,
        };
        let stage = StageDoor {
            events: events.clone(),
            received,
            faults: SocketFaults::default(),
        };
        let node = NodeName::new("n3").unwrap();
        (WaitingRoom::open(node, stage, ops), events, to_driver)
    }

    async fn asked(events: &ToDriver, request: Request) -> Reply {
        let (answer, answered) = oneshot::channel();
        let id = RequestId {
            conn: ConnId(7),
            index: 0,
        };
        let event = StageEvent::Request {
            id,
            request,
            answer,
        };
        events.of_tenants().send(event).await.unwrap();
        answered.await.unwrap().reply
    }

    #[tokio::test]
    async fn a_spare_says_that_it_is_one_and_refuses_the_rest() {
        let (mut room, events, pages) = room();
        room.sign().say(&Waits::AsSpare { epoch: 5 });
        let client = async {
            let Reply::Status(status) = asked(&events, Request::Status).await else {
                panic!("a status");
            };
            let status: Value = serde_json::from_str(&status).unwrap();
            assert_eq!(status["waiting"], json!({"as": "spare", "epoch": 5}));
            assert_eq!(status["ready"], false);
            let list = asked(&events, Request::List { namespace: None }).await;
            let Reply::Refused(refusal) = list else {
                panic!("{list:?}");
            };
            assert_eq!(refusal.code, RefusalCode::NoPlace);
            assert!(refusal.message.contains("spare"), "{}", refusal.message);
            let safe = asked(&events, Request::RestartSafe { bears: None }).await;
            assert_eq!(safe, Reply::RestartSafe(Vec::new()));
            let (answer, answered) = oneshot::channel();
            pages
                .send(RestartAsked {
                    bears: None,
                    answer,
                })
                .await
                .unwrap();
            assert_eq!(answered.await.unwrap(), Vec::<String>::new());
        };
        room.answer_until(client).await.unwrap();
    }

    #[test]
    fn who_is_out_of_use_is_in_nobodys_way() {
        let (room, _events, _pages) = room();
        let node = NodeName::new("n9").unwrap();
        let (there, wanted) = (1, 2);
        for waits in [
            Waits::AsSpare { epoch: 5 },
            Waits::Cordoned { node: node.clone() },
            Waits::ForAdmission { node },
            Waits::ForNodes { there, wanted },
            Waits::ToGrow { there, wanted },
        ] {
            room.sign().say(&waits);
            let is_out_of_use = OUT_OF_USE.iter().any(|it| described(&waits)["as"] == *it);
            let objects = !room.sign().shown().objections.is_empty();
            assert_ne!(is_out_of_use, objects, "{waits}");
        }
    }

    /// Their sum over all nodes is what an operator asks before a node is lost.
    #[test]
    fn who_takes_the_next_place_counts_as_a_spare_and_nobody_else_does() {
        let (room, _events, _pages) = room();
        let node = NodeName::new("n9").unwrap();
        let text = || room.sign().pages.metrics.text();
        let spare = "\nstoraged_membership_spare";
        assert!(text().contains(&format!("{spare} 0\n")));
        let (there, wanted) = (1, 2);
        for (waits, counts) in [
            (Waits::AsSpare { epoch: 5 }, 1),
            (Waits::Cordoned { node: node.clone() }, 0),
            (Waits::AsSpare { epoch: 6 }, 1),
            (Waits::ForNodes { there, wanted }, 0),
            (Waits::ForAdmission { node }, 0),
            (Waits::AsSpare { epoch: 7 }, 1),
        ] {
            room.sign().say(&waits);
            assert!(text().contains(&format!("{spare} {counts}\n")), "{waits}");
        }
        let roster = Roster::empty("cluster".into(), 3);
        room.sign().pages.metrics.observe_roster(&roster);
        assert!(text().contains(&format!("{spare} 0\n")), "it has a place");
    }

    /// An operator that was connected before has its rights after.
    #[tokio::test]
    async fn who_is_connected_as_operator_stays_one() {
        let (mut room, events, _pages) = room();
        for conn in [ConnId(1), ConnId(2)] {
            let viewer = Viewer::Operator;
            let connected = StageEvent::Connected { conn, viewer };
            events.of(&Viewer::Operator).send(connected).await.unwrap();
        }
        let gone = StageEvent::Gone { conn: ConnId(1) };
        events.of(&Viewer::Operator).send(gone).await.unwrap();
        let waited = tokio::time::sleep(Duration::from_millis(200));
        room.answer_until(waited).await.unwrap();
        let (mut stage, _) = room.leave();
        let replayed = stage.received.next().await;
        assert!(
            matches!(
                replayed,
                Some(StageEvent::Connected {
                    conn: ConnId(2),
                    viewer: Viewer::Operator
                })
            ),
            "{replayed:?}"
        );
        assert!(stage.received.operators.try_recv().is_err());
    }
}
