//! What clients do, on its way to the driver: in two queues, so that an operator is heard though a tenant's thousand connections ask
//! without end. All that one connection does goes one way, in order.

use storaged_core::Viewer;
use tokio::sync::mpsc;

use super::StageEvent;

/// Events of each kind that wait for the driver; senders wait when it is full.
const QUEUE: usize = 4096;

/// The sending ends.
#[derive(Debug, Clone)]
pub struct ToDriver {
    operators: mpsc::Sender<StageEvent>,
    tenants: mpsc::Sender<StageEvent>,
}

/// The receiving ends.
#[derive(Debug)]
pub struct FromStage {
    /// Heard first.
    pub operators: mpsc::Receiver<StageEvent>,
    /// Heard when nothing else waits that the driver must hear.
    pub tenants: mpsc::Receiver<StageEvent>,
}

/// Both queues.
pub fn queues() -> (ToDriver, FromStage) {
    let (to_operators, operators) = mpsc::channel(QUEUE);
    let (to_tenants, tenants) = mpsc::channel(QUEUE);
    let to_driver = ToDriver {
        operators: to_operators,
        tenants: to_tenants,
    };
    (to_driver, FromStage { operators, tenants })
}

impl ToDriver {
    /// The queue of a connection through the socket of this viewer.
    pub fn of(&self, viewer: &Viewer) -> &mpsc::Sender<StageEvent> {
        match viewer {
            Viewer::Operator => &self.operators,
            Viewer::Tenant(_) | Viewer::Public => &self.tenants,
        }
    }

    /// The queue of clients in the same process.
    pub fn of_tenants(&self) -> &mpsc::Sender<StageEvent> {
        &self.tenants
    }
}

impl FromStage {
    /// What comes next, an operator's first; none once nothing can come any more.
    pub async fn next(&mut self) -> Option<StageEvent> {
        tokio::select! {
            biased;
            Some(event) = self.operators.recv() => Some(event),
            Some(event) = self.tenants.recv() => Some(event),
            else => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use storaged_core::ConnId;

    use super::*;

    #[tokio::test]
    async fn an_operator_is_heard_before_those_who_came_first() {
        let (to_driver, mut from_stage) = queues();
        for conn in 0..3 {
            let gone = StageEvent::Gone { conn: ConnId(conn) };
            let queue = to_driver.of(&Viewer::Tenant(None));
            queue.try_send(gone).unwrap();
        }
        let (conn, viewer) = (ConnId(9), Viewer::Operator);
        let queue = to_driver.of(&viewer);
        let connected = StageEvent::Connected {
            conn,
            viewer: viewer.clone(),
        };
        queue.try_send(connected).unwrap();
        queue.try_send(StageEvent::Gone { conn }).unwrap();
        drop(to_driver);
        let mut heard = Vec::new();
        while let Some(event) = from_stage.next().await {
            heard.push(event);
        }
        assert!(matches!(heard[0], StageEvent::Connected { .. }));
        let gone = heard[1..].iter().map(|event| match event {
            StageEvent::Gone { conn } => conn.0,
            other => panic!("{other:?}"),
        });
        assert_eq!(gone.collect::<Vec<_>>(), [9, 0, 1, 2]);
    }
}
