//! Requests, replies, peers' messages, stream records, names and frames.

use bolero::check;
use storaged_wire::framing::{FRAME_PREFIX_BYTES, body_length, frame};
use storaged_wire::local::{Reply, Request};
use storaged_wire::peer::{PeerMessage, SessionKind, StreamRecord};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{
    CheckpointState, Namespace, NodeName, Owner, Refusal, WorldSize, decode, encode,
};

use crate::damage::{Damage, damaged};
use crate::{ITERATIONS, round_trip, samples};

fn every_record(bytes: &[u8]) {
    let _ = round_trip::<Request>(bytes);
    let _ = round_trip::<Reply>(bytes);
    let _ = round_trip::<PeerMessage>(bytes);
    let _ = round_trip::<StreamRecord>(bytes);
    let _ = round_trip::<RestorePlan>(bytes);
    let _ = round_trip::<Refusal>(bytes);
    let _ = round_trip::<CheckpointState>(bytes);
    let _ = round_trip::<Namespace>(bytes);
    let _ = round_trip::<Owner>(bytes);
    if let Ok(world_size) = round_trip::<WorldSize>(bytes) {
        assert!((1..=1 << 17).contains(&world_size.get()));
    }
}

/// One of the sound ones, in bytes.
fn pick<T: minicbor::Encode<()>>(all: &[T], which: u8) -> Vec<u8> {
    encode(&all[usize::from(which) % all.len()])
}

#[test]
fn every_sample_makes_the_round_trip() {
    let sound = samples::requests()
        .iter()
        .all(|one| round_trip(&encode(one)).ok().as_ref() == Some(one));
    assert!(sound, "requests");
    let sound = samples::replies()
        .iter()
        .all(|one| round_trip(&encode(one)).ok().as_ref() == Some(one));
    assert!(sound, "replies");
    let mut messages = samples::checkpoint_messages();
    messages.extend(samples::session_messages());
    let sound = messages
        .iter()
        .all(|one| round_trip(&encode(one)).ok().as_ref() == Some(one));
    assert!(sound, "peers' messages");
}

#[test]
fn any_bytes_are_a_record_or_an_error() {
    check!().with_iterations(ITERATIONS).for_each(every_record);
}

#[test]
fn damaged_requests_are_sound_or_errors() {
    let sound = samples::requests();
    check!()
        .with_iterations(4 * ITERATIONS)
        .with_type::<(u8, Vec<Damage>)>()
        .for_each(|(which, damages)| {
            let _ = round_trip::<Request>(&damaged(&pick(&sound, *which), damages));
        });
}

#[test]
fn damaged_replies_are_sound_or_errors() {
    let sound = samples::replies();
    check!()
        .with_iterations(4 * ITERATIONS)
        .with_type::<(u8, Vec<Damage>)>()
        .for_each(|(which, damages)| {
            let _ = round_trip::<Reply>(&damaged(&pick(&sound, *which), damages));
        });
}

#[test]
fn damaged_messages_of_peers_are_sound_or_errors() {
    let mut sound = samples::checkpoint_messages();
    sound.extend(samples::session_messages());
    check!()
        .with_iterations(4 * ITERATIONS)
        .with_type::<(u8, Vec<Damage>)>()
        .for_each(|(which, damages)| {
            let _ = round_trip::<PeerMessage>(&damaged(&pick(&sound, *which), damages));
        });
}

#[test]
fn damaged_stream_records_are_sound_or_errors() {
    let sound = encode(&samples::stream_record());
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<Vec<Damage>>()
        .for_each(|damages| every_record(&damaged(&sound, damages)));
}

#[test]
fn lengths_are_not_believed_before_their_bytes_are_there() {
    // Arrays, maps, byte strings and texts that claim 2^32 - 1 or 2^63 items, in the place of every byte.
    let mut messages = samples::checkpoint_messages();
    messages.extend(samples::session_messages());
    for sound in messages.iter().map(encode) {
        for (at, major) in (0..sound.len()).flat_map(|at| [2u8, 3, 4, 5].map(|major| (at, major))) {
            for claim in [
                &[0x1A, 0xFF, 0xFF, 0xFF, 0xFF][..],
                &[0x1B, 0x7F, 0xFF, 0, 0, 0, 0, 0, 0],
            ] {
                let mut bytes = sound[..at].to_vec();
                bytes.push(major << 5 | claim[0]);
                bytes.extend_from_slice(&claim[1..]);
                bytes.extend_from_slice(&sound[at..]);
                let _ = round_trip::<PeerMessage>(&bytes);
                every_record(&bytes);
            }
        }
    }
}

#[test]
fn lists_of_a_stripes_blocks_have_at_most_255_entries() {
    let repair = |count: usize| {
        let sound = samples::session_messages();
        let repairs = sound.into_iter().find_map(|message| match message {
            PeerMessage::Propose(mut session) => match &mut session.kind {
                SessionKind::Repair { wanted, .. } => {
                    *wanted = vec![(1, samples::node("b")); count];
                    Some(PeerMessage::Propose(session))
                }
                SessionKind::Encode { .. } => None,
            },
            _ => None,
        });
        encode(&repairs.expect("there is a repair"))
    };
    assert!(round_trip::<PeerMessage>(&repair(255)).is_ok());
    let error = round_trip::<PeerMessage>(&repair(256)).expect_err("one too many");
    assert!(error.to_string().contains("at most 255"), "{error}");
}

#[test]
fn deep_nesting_in_an_unknown_field_is_skipped_or_refused() {
    // [leader, session, edge, one field too many], as a later version may send it, but nested out of all measure.
    let sound = encode(&samples::stream_record());
    for opener in [0x81, 0x9F, 0xBF, 0xC1] {
        let mut bytes = sound.clone();
        assert_eq!(bytes[0], 0x83, "an array of three");
        bytes[0] = 0x84;
        bytes.resize(bytes.len() + 200_000, opener);
        bytes.push(0);
        let _ = decode::<StreamRecord>("stream record", &bytes);
    }
}

#[test]
fn frames_announce_their_length_and_long_ones_are_refused() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<([u8; FRAME_PREFIX_BYTES], u32, u8)>()
        .for_each(|(prefix, limit, which)| {
            let limit = *limit as usize;
            match body_length(*prefix, limit) {
                Ok(length) => assert!(length <= limit),
                Err(_) => assert!(u32::from_le_bytes(*prefix) as usize > limit),
            }
            let all = samples::requests();
            let request = &all[usize::from(*which) % all.len()];
            let bytes = frame(request);
            let (prefix, body) = bytes.split_first_chunk().expect("a prefix");
            assert_eq!(body_length(*prefix, limit).is_ok(), body.len() <= limit);
            assert_eq!(
                decode::<Request>("request", body).as_ref().ok(),
                Some(request)
            );
        });
}

#[test]
fn any_text_is_a_name_or_an_error() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(String, Vec<Damage>)>()
        .for_each(|(text, damages)| {
            let near = damaged(b"llama-70b.v2", damages);
            for text in [text, &String::from_utf8_lossy(&near).into_owned()] {
                if let Ok(name) = text.parse::<Namespace>() {
                    assert!((1..=63).contains(&name.as_str().len()) && !text.contains(['/', '\0']));
                    assert!(!text.starts_with('.'));
                }
                let _ = text.parse::<NodeName>();
                let _ = text.parse::<CheckpointState>();
            }
        });
}
