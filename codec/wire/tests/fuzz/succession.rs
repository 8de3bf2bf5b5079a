//! Messages about tokens that are changed.

use storaged_wire::local::{Reply, Request};
use storaged_wire::peer::PeerMessage;
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

pub fn messages() -> Vec<PeerMessage> {
    let Rotation { succession, keys } = rotation();
    vec![
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
