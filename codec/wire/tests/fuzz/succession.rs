//! Messages about tokens that are changed.

use storaged_wire::local::{Reply, Request};
use storaged_wire::peer::{DropOrder, OrderKey, PeerMessage};
use storaged_wire::provenance::KeyTold;
use storaged_wire::succession::{RecordSource, Rotated, SEAL_BYTES, TokenStanding};
use storaged_wire::{Owner, Rotation};

use super::samples;

const OLD: &[u8] = b"a token that was used";
const NEW: &[u8] = b"a token that is used now";

fn standing() -> TokenStanding {
    TokenStanding {
        namespace: samples::namespace(),
        succession: None,
        durable: Some(samples::mark()),
    }
}

fn rotation() -> Rotation {
    Rotation::new(&standing(), OLD, NEW, [9; SEAL_BYTES]).expect("a new token")
}

pub fn requests() -> Vec<Request> {
    vec![Request::Succession, Request::Rotate(Box::new(rotation()))]
}

pub fn replies() -> Vec<Reply> {
    let succession = Some(rotation().succession);
    vec![Reply::Succession(TokenStanding {
        succession,
        ..standing()
    })]
}

fn drop_order() -> DropOrder {
    let plain = DropOrder {
        query: 7,
        namespace: samples::namespace(),
        owner: Owner::of_token(OLD),
        force: false,
        proof: None,
    };
    let key = OrderKey::of_token(&plain.namespace, OLD);
    let proof = Some(key.prove(&plain, samples::node("n1")));
    DropOrder { proof, ..plain }
}

pub fn messages() -> Vec<PeerMessage> {
    let Rotation { succession, keys } = rotation();
    let order = drop_order();
    vec![
        PeerMessage::Drop(DropOrder {
            proof: None,
            ..order.clone()
        }),
        PeerMessage::Drop(order.clone()),
        PeerMessage::CheckOrder {
            query: 7,
            order: Box::new(order),
        },
        PeerMessage::OrderChecked {
            query: 7,
            is_proven: true,
        },
        PeerMessage::KeyTold(KeyTold {
            namespace: samples::namespace(),
            owner: Owner::of_token(OLD),
            key: keys.newest,
            retired: Some(keys.retired.clone()),
        }),
        PeerMessage::Rotated(Box::new(Rotated {
            succession,
            keys: Some(keys),
            source: Some(RecordSource::Told),
        })),
    ]
}
