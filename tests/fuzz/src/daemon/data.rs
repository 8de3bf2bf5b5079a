//! Data streams of peers, as the executor of a coding session reads them. Among honest nodes a session's streams are written down;
//! an input says what is done to those that come to one member. Whatever that is, a frame is what the plan says or the stream is
//! refused at it, what is taken is all that goes on, nothing wrong is kept, and no neighbour is blamed that sent what it should.

use std::ops::Range;
use std::sync::OnceLock;

use storaged_codec::engine;
use storaged_core::StripeTurn;
use storaged_plan::Target;
use storaged_wire::peer::{SessionFault, StreamRecord};
use storaged_wire::{NodeName, SessionId, decode, encode};

use super::sessions::{
    CHUNK, DataSession, HeldStripe, Ran, SentStream, StrayStream, node, sessions,
};
use crate::Inputs;

const HEADER_BYTES: usize = 16;
/// Place of the flag in a header: all else of it is as the plan says.
const FLAG: usize = 12;
/// Of an input's edits, so many are made.
const EDITS_MAX: u8 = 12;
/// Bytes of an edit: which stream, what, at which frame, how far behind its beginning, with what.
const EDIT_BYTES: usize = 6;

/// A member to which streams come.
#[derive(Clone, Copy)]
struct Hearer {
    session: &'static DataSession,
    member: usize,
}

fn hearers() -> &'static [Hearer] {
    static HEARERS: OnceLock<Vec<Hearer>> = OnceLock::new();
    let members = |session: &'static DataSession| {
        let members = 0..session.works.len();
        let all = members.map(move |member| Hearer { session, member });
        all.filter(|hearer| !hearer.session.incoming(hearer.member).is_empty())
    };
    HEARERS.get_or_init(|| sessions().iter().flat_map(members).collect())
}

/// A frame as an honest node sends it.
#[derive(Debug, Clone)]
struct HonestFrame {
    at: usize,
    header: [u8; HEADER_BYTES],
    sums: Option<Vec<u8>>,
}

impl HonestFrame {
    fn stripe(&self) -> u64 {
        let (stripe, _) = self.header.split_first_chunk().expect("a header");
        u64::from_le_bytes(*stripe)
    }

    /// Bytes of a sum.
    fn bytes(&self) -> usize {
        let bytes = self.header[8..FLAG].first_chunk().expect("a header");
        u32::from_le_bytes(*bytes) as usize
    }

    fn width(&self) -> usize {
        usize::from(self.header[13])
    }

    /// Bytes that follow a header that is not clean.
    fn payload(&self) -> usize {
        self.bytes() * self.width()
    }
}

fn frames_of(stream: &SentStream) -> Vec<HonestFrame> {
    let bytes = stream.tape.bytes();
    let (mut frames, mut at) = (Vec::new(), 0);
    while let Some(header) = bytes[at..].first_chunk().copied() {
        let sums = None;
        let mut frame = HonestFrame { at, header, sums };
        at += HEADER_BYTES;
        if header[FLAG] == 1 {
            frame.sums = Some(bytes[at..at + frame.payload()].to_vec());
            at += frame.payload();
        }
        frames.push(frame);
    }
    frames
}

/// What may be made of a stream.
struct Heard {
    /// The sums of each frame that is whole and as it must be; none if they are zeros.
    sums: Vec<Option<Vec<u8>>>,
    /// Where it must be refused; its length if it need not be.
    refused_at: usize,
    is_whole: bool,
}

fn heard(said: &[u8], honest: &[HonestFrame]) -> Heard {
    let mut heard = Heard {
        sums: Vec::new(),
        refused_at: said.len(),
        is_whole: false,
    };
    let mut at = 0;
    for frame in honest {
        let Some(header) = said[at..].first_chunk::<HEADER_BYTES>() else {
            return heard;
        };
        at += HEADER_BYTES;
        let mut as_planned = *header;
        as_planned[FLAG] = frame.header[FLAG];
        if as_planned != frame.header || header[FLAG] > 1 {
            heard.refused_at = at;
            return heard;
        }
        if header[FLAG] == 0 {
            heard.sums.push(None);
            continue;
        }
        let Some(sums) = said.get(at..at + frame.payload()) else {
            return heard;
        };
        at += frame.payload();
        heard.sums.push(Some(sums.to_vec()));
    }
    heard.refused_at = at;
    heard.is_whole = at == said.len();
    heard
}

/// What came in place of an honest stream.
struct Came {
    from: NodeName,
    said: Vec<u8>,
    honest: Vec<HonestFrame>,
    heard: Heard,
}

impl Came {
    fn is_honest(&self) -> bool {
        let sums = self.honest.iter().zip(&self.heard.sums);
        self.heard.is_whole && sums.clone().all(|(frame, sums)| frame.sums == *sums)
    }
}

/// The target: which member, how many edits, these, and then bytes that edits may put in.
pub fn data(bytes: &[u8]) {
    let [which, count, rest @ ..] = bytes else {
        return;
    };
    let hearers = hearers();
    let hearer = hearers[usize::from(*which) % hearers.len()];
    let count = usize::from(count % (EDITS_MAX + 1)).min(rest.len() / EDIT_BYTES);
    let (edits, own) = rest.split_at(count * EDIT_BYTES);
    let streams = hearer.session.incoming(hearer.member);
    let honest: Vec<Vec<HonestFrame>> = streams.iter().map(|it| frames_of(it)).collect();
    let mut said: Vec<Vec<u8>> = streams.iter().map(|it| it.tape.bytes()).collect();
    let mut strays = Vec::new();
    for edit in edits.as_chunks::<EDIT_BYTES>().0 {
        let own = &own[usize::from(edit[5]).min(own.len())..];
        if edit[1] % 11 == 10 {
            strays.extend(stray(edit[0], own));
        } else {
            make(&mut said, &honest, *edit, own);
        }
    }
    let ran = hearer.session.run(hearer.member, &said, &strays);
    let came = streams.iter().zip(honest).zip(said);
    let came: Vec<Came> = came
        .map(|((stream, honest), said)| Came {
            from: stream.from.clone(),
            heard: heard(&said, &honest),
            honest,
            said,
        })
        .collect();
    let read: usize = ran.strays.iter().map(|tape| tape.read()).sum();
    assert_eq!(read, 0, "a stray stream is read");
    check_reading(&came, &ran);
    check_outcome(hearer, &came, &ran);
    check_kept(&ran);
    check_sent(hearer, &came, &ran);
}

/// A stream of any node, to which its first record is in the input. Where that is a stream of the session, the one that is edited comes
/// after it.
fn stray(from: u8, own: &[u8]) -> Option<StrayStream> {
    let record = decode::<StreamRecord>("stream record", own).ok()?;
    let from = node(usize::from(from % 8));
    Some(StrayStream { from, record })
}

/// One thing that a hostile neighbour, or one of another release, does.
fn make(said: &mut [Vec<u8>], honest: &[Vec<HonestFrame>], edit: [u8; EDIT_BYTES], own: &[u8]) {
    let [which, what, frame, behind, byte, _] = edit;
    let which = usize::from(which) % said.len();
    let other = said[usize::from(byte) % said.len()].clone();
    let (stream, frames) = (&mut said[which], &honest[which]);
    let frame = &frames[usize::from(frame) % frames.len()];
    let begins = frame.at.min(stream.len());
    let at = (begins + usize::from(behind)).min(stream.len());
    let put = |range: Range<usize>, stream: &mut Vec<u8>, bytes: &[u8]| {
        let end = range.end.min(stream.len());
        stream.splice(range.start.min(end)..end, bytes.iter().copied());
    };
    let payload = begins + HEADER_BYTES..begins + HEADER_BYTES + frame.payload();
    match what % 11 {
        0 => at_most_one(stream, at, |it| *it ^= byte.max(1)),
        1 => stream.truncate(at),
        2 => stream.extend_from_slice(own),
        3 => *stream = own.to_vec(),
        4 => put(at..at + own.len(), stream, own),
        5 => put(at..at, stream, own),
        6 => put(begins..payload.end, stream, &[]),
        7 => *stream = other,
        // Frames that are as they must be, and say something else.
        8 => {
            put(payload, stream, &[]);
            at_most_one(stream, begins + FLAG, |it| *it = 0);
        }
        _ => {
            let bytes = own.iter().copied().chain([byte]).cycle();
            let bytes: Vec<u8> = bytes.take(frame.payload()).collect();
            let is_dirty = stream.get(begins + FLAG) == Some(&1);
            let end = if is_dirty { payload.end } else { payload.start };
            put(payload.start..end, stream, &bytes);
            at_most_one(stream, begins + FLAG, |it| *it = 1);
        }
    }
}

/// Changes the byte there, if the stream is so long.
fn at_most_one(stream: &mut [u8], at: usize, change: impl FnOnce(&mut u8)) {
    if let Some(byte) = stream.get_mut(at) {
        change(byte);
    }
}

/// Of a stream that is refused nothing more is read, and no more memory is filled at once than a chunk has.
fn check_reading(came: &[Came], ran: &Ran) {
    for (came, tape) in came.iter().zip(&ran.tapes) {
        let (read, refused) = (tape.read(), came.heard.refused_at);
        assert!(read <= refused, "read {read}, refused at {refused}");
        assert!(tape.asked_most() <= CHUNK as usize, "asked for too much");
    }
}

fn check_outcome(hearer: Hearer, came: &[Came], ran: &Ran) {
    let all_whole = came.iter().all(|came| came.heard.is_whole);
    let stripes = hearer.session.works[hearer.member].stripes.clone();
    let fault = match &ran.end.outcome {
        Ok(_) => {
            assert!(all_whole, "a stream that breaks the plan is taken");
            let mut read = came.iter().zip(&ran.tapes);
            assert!(read.all(|(came, tape)| tape.read() == came.said.len()));
            assert!(ran.held.is_empty() || ran.end.kept == stripes);
            return;
        }
        Err(fault) => fault,
    };
    assert!(!came.iter().all(Came::is_honest), "refused: {fault:?}");
    match fault {
        SessionFault::Neighbour { .. } => assert!(!all_whole, "refused: {fault:?}"),
        SessionFault::WrongResult(_)
        | SessionFault::WrongBytes { .. }
        | SessionFault::Unproven { .. } => {}
        other => panic!("streams of others make a fault of this node's own: {other:?}"),
    }
    let blamed = fault.blamed();
    let wronged = came
        .iter()
        .find(|it| Some(&it.from) == blamed && it.is_honest());
    assert!(
        wronged.is_none(),
        "an honest neighbour is blamed: {fault:?}"
    );
    assert!(blamed.is_none() || came.iter().any(|it| Some(&it.from) == blamed));
}

/// What is kept is what honest nodes make.
fn check_kept(ran: &Ran) {
    assert!(
        !ran.held.contains(&HeldStripe::Wrong),
        "wrong bytes are kept"
    );
    for stripe in ran.end.kept.iter().cloned().flatten() {
        let held = ran.held.get(stripe as usize);
        assert_eq!(held, Some(&HeldStripe::Right), "stripe {stripe}");
    }
}

/// What goes on are whole frames, in which is what came, by the plan.
fn check_sent(hearer: Hearer, came: &[Came], ran: &Ran) {
    let Hearer { session, member } = hearer;
    let work = &session.works[member];
    for honest in session.outgoing(member) {
        let sent = ran.sent.iter().find(|sent| sent.to == honest.to);
        let sent = sent.map_or_else(Vec::new, |sent| sent.tape.bytes());
        let frames = frames_of(honest);
        let Heard {
            sums,
            refused_at,
            is_whole,
        } = heard(&sent, &frames);
        assert_eq!(refused_at, sent.len(), "what is sent is no frame");
        assert!(is_whole || ran.end.outcome.is_err(), "too little is sent");
        for (frame, sums) in frames.iter().zip(&sums) {
            let stripe = frame.stripe();
            let turn = work.turns().find(|turn| turn.stripe == stripe);
            let turn = turn.expect("a stripe of the session");
            let expected = expected(hearer, came, turn, &honest.to, frame);
            let sums = sums.clone().unwrap_or_else(|| vec![0; frame.payload()]);
            assert!(sums == expected, "stripe {stripe}");
        }
    }
}

/// What an honest member sends, and onto it by the plan what differs in what came: all of it is linear.
fn expected(
    hearer: Hearer,
    came: &[Came],
    turn: StripeTurn,
    to: &NodeName,
    frame: &HonestFrame,
) -> Vec<u8> {
    let work = &hearer.session.works[hearer.member];
    let plan = &work.plan.classes()[turn.class];
    let hop = plan.hop(hearer.member).expect("it has a part");
    let mut operands = Vec::new();
    for edge in &hop.inputs {
        let from = &work.members[plan.edges[*edge].from];
        let came = came.iter().find(|came| came.from == *from);
        operands.extend(differences(came.expect("it is a neighbour"), turn.stripe));
    }
    let is_to = |target: Target| match target {
        Target::Edge(edge) => work.members[plan.edges[edge].to] == *to,
        Target::Keep(_) => false,
    };
    let output = hop.outputs.iter().find(|output| is_to(output.target));
    let rows = &output.expect("it sends to there").rows;
    let mut sums = frame
        .sums
        .clone()
        .unwrap_or_else(|| vec![0; frame.payload()]);
    for (sum, row) in sums.chunks_mut(frame.bytes()).zip(rows) {
        for (operand, coefficient) in operands.iter().zip(row) {
            engine().fold(&mut [&mut *sum], &[*coefficient], operand);
        }
    }
    sums
}

/// The XOR of the sums of a stripe that came and of those of an honest node.
fn differences(came: &Came, stripe: u64) -> Vec<Vec<u8>> {
    let at = came
        .honest
        .iter()
        .position(|frame| frame.stripe() == stripe);
    let at = at.expect("a frame of the stripe");
    let frame = &came.honest[at];
    let zeros = || vec![0; frame.payload()];
    let mut sums = frame.sums.clone().unwrap_or_else(zeros);
    // Nothing goes on of a stripe that did not come.
    let said = came
        .heard
        .sums
        .get(at)
        .expect("sums went on that did not come");
    engine().xor(&mut sums, said.as_ref().unwrap_or(&zeros()));
    sums.chunks(frame.bytes()).map(<[u8]>::to_vec).collect()
}

/// Every member as honest nodes feed it, its streams as they are where they are short, and every edit of every member.
pub fn data_seeds() -> Inputs {
    let mut seeds = Inputs::new();
    for (which, hearer) in (0u8..).zip(hearers().iter().copied()) {
        let name = &hearer.session.name;
        let name: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
        let member = hearer.member;
        let mut add = |what: String, edits: &[[u8; EDIT_BYTES]], own: &[u8]| {
            let bytes = [&[which, edits.len() as u8], edits.as_flattened(), own].concat();
            seeds.push((format!("{which}-{name}-{member}-{what}"), bytes));
        };
        add("honest".into(), &[], &[]);
        let streams = hearer.session.incoming(member);
        for (at, stream) in (0u8..).zip(&streams) {
            let bytes = stream.tape.bytes();
            if bytes.len() <= 1024 {
                add(format!("whole-{at}"), &[[at, 3, 0, 0, 0, 0]], &bytes);
            }
            let frame = 2 * (at % 2);
            let header = &bytes[..HEADER_BYTES];
            for what in 0..10 {
                let behind = [20, 8, 0, 0, 0][usize::from(what) % 5];
                let edit = [at, what, frame, behind, at.wrapping_add(1), 0];
                add(format!("edit-{at}-{what}"), &[edit], header);
            }
        }
        let mut record = streams[0].record.clone();
        add(
            "stray-other".into(),
            &[[7, 10, 0, 0, 0, 0]],
            &encode(&record),
        );
        record.session = SessionId::new(2);
        add(
            "stray-later".into(),
            &[[1, 10, 0, 0, 0, 0]],
            &encode(&record),
        );
    }
    seeds
}
