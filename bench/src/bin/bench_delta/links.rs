//! The cost model put to the test: for links from slow to faster than any, when the last byte is through, against raw
//! chunks on the same link. Encoding is timed for real; the link is computed, so that any rate can be had.

use storaged_codec::delta::{Basis, CostModel, DeltaWriter, LinkRate, Processor};

use crate::corpus::States;
use crate::measure::{CHUNK, around};

/// Bytes per second.
const RATES: [f64; 7] = [25e6, 100e6, 400e6, 1e9, 2e9, 4e9, 8e9];

/// One case on one link.
#[derive(serde::Serialize)]
pub struct Loss {
    pub case: String,
    pub link_gbps: f64,
    /// Time until the last byte is through, of the time that raw chunks take.
    pub time_of_raw: f64,
    /// Bytes sent, of raw.
    pub ratio: f64,
    /// What the model expected the chunks to take on the processor, of what they took.
    pub expected_of_got_seconds: f64,
    /// What it expected them to have, of what they had.
    pub expected_of_got_bytes: f64,
}

pub fn losses(states: &States, rounds: u32) -> anyhow::Result<Vec<Loss>> {
    let mut losses = Vec::new();
    for rate in RATES {
        let mut of_rounds = Vec::new();
        for _ in 0..rounds.max(1) {
            of_rounds.push(one(states, rate)?);
        }
        of_rounds.sort_by(|a, b| a.time_of_raw.total_cmp(&b.time_of_raw));
        losses.push(of_rounds.swap_remove(of_rounds.len() / 2));
    }
    Ok(losses)
}

fn one(states: &States, rate: f64) -> anyhow::Result<Loss> {
    let mut clock = processor_seconds;
    let basis = Basis {
        start: 0,
        bytes: &states.t,
    };
    let mut writer =
        DeltaWriter::new(CostModel::new(LinkRate::new(rate)?, Processor::WHOLE), None)?;
    let mut out = Vec::with_capacity(2 * CHUNK as usize);
    // When the processor and the link are through with what they have; and the copy of each record into the buffer
    // that is sent belongs to raw chunks as well, so it does not count for them.
    let (mut processor, mut link, mut sent) = (0.0, 0.0f64, 0);
    let mut copied = 0.0;
    for (index, block) in states.t1.chunks(CHUNK as usize).enumerate() {
        let at = index as u64 * u64::from(CHUNK);
        let near = around(basis, at, block.len(), CHUNK);
        out.clear();
        let start = processor_seconds();
        let choice = writer.write(at, block, Some(near), &mut clock, &mut out)?;
        let took = processor_seconds() - start;
        if choice.encoding == storaged_codec::delta::Encoding::Raw {
            copied += choice.got.seconds;
            processor += took - choice.got.seconds;
        } else {
            processor += took;
        }
        link = link.max(processor) + out.len() as f64 / rate;
        sent += out.len();
    }
    let raw = states.t1.len() as f64 / rate;
    let tallies = writer.tallies().values();
    let (mut expected, mut got) = ((0.0, 0.0), (-copied, 0.0));
    for tally in tallies {
        expected = (
            expected.0 + tally.expected.seconds,
            expected.1 + tally.expected.bytes,
        );
        got = (got.0 + tally.got.seconds, got.1 + tally.got.bytes);
    }
    Ok(Loss {
        case: states.name.clone(),
        link_gbps: rate / 1e9,
        time_of_raw: link / raw,
        ratio: sent as f64 / states.t1.len() as f64,
        expected_of_got_seconds: if got.0 > 0.0 { expected.0 / got.0 } else { 1.0 },
        expected_of_got_bytes: expected.1 / got.1,
    })
}

/// Time that this thread had on a processor: on a shared machine, what others take is not the encoder's.
fn processor_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
