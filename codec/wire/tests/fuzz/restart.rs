//! Sound records of what launchers and operators ask and are told of restarts and of a node's end.

use storaged_wire::drain::{DrainOrder, DrainPhase, DrainReport, PlaceAfter, StepAfterDrain};
use storaged_wire::failed::{FailedRestart, FailureReport, NamespaceFailures};
use storaged_wire::local::{Bears, Reply, Request, Rung};
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::pins::{NamespacePins, Pin, PinAnswer, PinDoubt};
use storaged_wire::verdict::{
    ExpectedTime, HeldBasis, RateSource, Reason, ReasonCode, RestartVerdict, Returning, Stretch,
    Verdict, WaitingGain,
};
use storaged_wire::{CheckpointState, Owner, Rank, RunId, Step};

use super::samples::{chunk, mark, namespace, node, plan, some_digest};

pub fn requests() -> Vec<Request> {
    let timeout_ms = 1000;
    let step = Step::new(160);
    vec![
        Request::Verdict { timeout_ms },
        Request::PlanDrill {
            step: Some(Step::new(5)),
            timeout_ms,
        },
        Request::RestartFailed(FailureReport {
            run: Some(RunId::new(2)),
            step,
            timeout_ms,
        }),
        Request::LiftQuarantine { step },
        Request::FollowShard {
            manifest: some_digest(),
            rank: Rank::new(1),
            timeout_ms,
        },
        Request::Drain(DrainOrder {
            within_ms: 25_000,
            place: PlaceAfter::GivenUp,
            bears: Some(2),
        }),
    ]
}

pub fn replies() -> Vec<Reply> {
    vec![
        Reply::Verdict(verdict()),
        Reply::RestartsFailed(vec![failed()]),
        Reply::ShardComing {
            length: 9,
            chunk: chunk(),
            leaves: vec![some_digest(); 3].into(),
            rung: Rung::Decoded,
        },
        Reply::ShardCame(Rung::PeerRam),
        Reply::StillComing,
        Reply::Draining(DrainReport {
            phase: DrainPhase::GivingUpPlace,
            within_ms: 1,
            left: vec!["job: step 5 of run 1 is not coded".into()],
            place: Some("given up in epoch 7".into()),
            after: Some(vec![StepAfterDrain {
                key: CheckpointKey {
                    namespace: namespace(),
                    run: RunId::new(2),
                    step: Step::new(5),
                },
                bears: Bears { losses: 1, of: 2 },
                state: CheckpointState::Protected,
            }]),
        }),
    ]
}

pub fn messages() -> Vec<PeerMessage> {
    let pin = Pin {
        run: RunId::new(3),
        step: Step::new(5),
        pinned: true,
        changes: 2,
        doubt: Some(PinDoubt::Undecided),
    };
    let of = NamespacePins {
        namespace: namespace(),
        owner: Owner::of_token(b"t"),
        pins: vec![pin],
    };
    let full = PinAnswer::NoRoom("of n3".into());
    vec![
        PeerMessage::FailedRestarts(vec![NamespaceFailures {
            namespace: namespace(),
            owner: Owner::of_token(b"t"),
            failed: vec![failed()],
        }]),
        PeerMessage::Pins(Some(7), of),
        PeerMessage::PinNoted(7, PinAnswer::Noted),
        PeerMessage::PinNoted(7, full),
    ]
}

fn failed() -> FailedRestart {
    FailedRestart {
        run: RunId::new(3),
        step: Step::new(160),
        times: 2,
        wait_ms: Some(1_200_000),
        changes: 5,
    }
}

fn verdict() -> RestartVerdict {
    RestartVerdict {
        namespace: namespace(),
        verdict: Verdict::RestartFromDurable,
        reasons: vec![Reason {
            code: ReasonCode::NodesSilent,
            text: "n3 has not answered".into(),
        }],
        plan: Some(plan()),
        expected: vec![ExpectedTime {
            stretch: Stretch::Durable,
            ms: 12,
            rate: RateSource::Measured,
        }],
        newest_seen: Some(mark()),
        passed_over: plan().passed_over,
        waiting: vec![WaitingGain {
            at: mark(),
            verdict: Verdict::Recover,
            returning: vec![Returning {
                any: 1,
                of: vec![node("a"), node("b")],
                basis: HeldBasis::Coded,
            }],
        }],
    }
}
