//! What a node answers on its sockets and pages before it has a place in the roster: a status that says what it waits for, whether it
//! may be restarted, and a refusal of all else. The sockets and pages are the ones that the daemon has later.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use storaged_core::ConnId;
use storaged_wire::local::{Reply, Request};
use storaged_wire::{NodeName, Refusal, RefusalCode};

use crate::env::{OpsDoor, StageDoor};
use crate::http::{OpsState, RestartAsked};
use crate::membership::Waits;
use crate::stage::{Answer, StageEvent};

/// A node that has no place yet.
#[derive(Debug)]
pub struct WaitingRoom {
    stage: StageDoor,
    ops: OpsDoor,
    /// Connections of the operator, which the daemon must know as such.
    operators: BTreeSet<ConnId>,
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
            operators: BTreeSet::new(),
            sign,
        }
    }

    /// Where what it waits for is said.
    pub fn sign(&self) -> WaitingSign {
        self.sign.clone()
    }

    /// Answers until this comes to its end.
    pub async fn answer_until<T>(&mut self, end: impl Future<Output = T>) -> T {
        tokio::pin!(end);
        loop {
            tokio::select! {
                done = &mut end => return done,
                Some(event) = self.stage.received.recv() => self.answer(event),
                Some(asked) = self.ops.asked.recv() => self.answer_page(asked),
            }
        }
    }

    fn answer(&mut self, event: StageEvent) {
        match event {
            StageEvent::Operator { conn } => drop(self.operators.insert(conn)),
            StageEvent::Gone { conn } => drop(self.operators.remove(&conn)),
            StageEvent::Request {
                request, answer, ..
            } => {
                let reply = self.sign.reply(&request);
                // Whoever asked may have gone.
                let _ = answer.send(Answer { reply, slot: None });
            }
        }
    }

    fn answer_page(&self, asked: RestartAsked) {
        // Whoever asked may have gone.
        let _ = asked.answer.send(self.sign.shown().objections.clone());
    }

    /// The daemon takes over: who is connected stays so.
    pub fn leave(self) -> (StageDoor, OpsDoor) {
        for conn in self.operators {
            // Fewer connections are possible than events fit.
            let _ = self.stage.events.try_send(StageEvent::Operator { conn });
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
        *self.shown() = SignText {
            status,
            objections: match waits {
                // It holds nothing, and nobody counts on it.
                Waits::AsSpare { .. } | Waits::ForAdmission { .. } => Vec::new(),
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

/// What it waits for, for programs.
fn described(waits: &Waits) -> Value {
    match waits {
        Waits::AsSpare { epoch } => json!({"as": "spare", "epoch": epoch}),
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
    use std::time::Duration;

    use storaged_core::RequestId;
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    fn room() -> (
        WaitingRoom,
        mpsc::Sender<StageEvent>,
        mpsc::Sender<RestartAsked>,
    ) {
        let (events, received) = mpsc::channel(16);
        let (to_driver, asked) = mpsc::channel(16);
        let ops = OpsDoor {
            state: Arc::default(),
            asked,
        };
        let stage = StageDoor {
            events: events.clone(),
            received,
        };
        let node = NodeName::new("n3").unwrap();
        (WaitingRoom::open(node, stage, ops), events, to_driver)
    }

    async fn asked(events: &mpsc::Sender<StageEvent>, request: Request) -> Reply {
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
        events.send(event).await.unwrap();
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
        room.answer_until(client).await;
    }

    /// An operator that was connected before has its rights after.
    #[tokio::test]
    async fn who_is_connected_as_operator_stays_one() {
        let (mut room, events, _pages) = room();
        for conn in [ConnId(1), ConnId(2)] {
            events.send(StageEvent::Operator { conn }).await.unwrap();
        }
        let gone = StageEvent::Gone { conn: ConnId(1) };
        events.send(gone).await.unwrap();
        let waited = tokio::time::sleep(Duration::from_millis(200));
        room.answer_until(waited).await;
        let (mut stage, _) = room.leave();
        let replayed = stage.received.recv().await;
        assert!(
            matches!(replayed, Some(StageEvent::Operator { conn: ConnId(2) })),
            "{replayed:?}"
        );
        assert!(stage.received.try_recv().is_err());
    }
}
