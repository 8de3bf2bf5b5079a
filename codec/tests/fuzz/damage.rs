//! Damage to sound bytes: what a fuzzer starts from to get behind the first checks.

/// One change: where, what, and with which byte. Every number is a change.
pub type Damage = (u16, u8, u8);

/// The bytes after the first few changes: more would leave nothing sound.
pub fn damaged(sound: &[u8], damages: &[Damage]) -> Vec<u8> {
    let mut bytes = sound.to_vec();
    for (place, what, byte) in damages.iter().take(4) {
        // The low half of the places lies within the first bytes, which say most.
        let reach = if place & 1 == 0 { 48 } else { usize::MAX };
        let at = usize::from(place >> 1) % bytes.len().clamp(1, reach);
        change(&mut bytes, at, what % 7, *byte);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, at: usize, what: u8, byte: u8) {
    let end = bytes.len().min(at + 1 + usize::from(byte % 8));
    let at = at.min(end);
    match what {
        0 => bytes[at..end].iter_mut().take(1).for_each(|x| *x = byte),
        1 => bytes[at..end]
            .iter_mut()
            .take(1)
            .for_each(|x| *x ^= 1 << (byte % 8)),
        2 => bytes[at..end].fill(0xFF),
        3 => bytes[at..end].fill(0),
        4 => bytes.insert(at, byte),
        5 => drop(bytes.drain(at..end)),
        _ => bytes.truncate(at),
    }
}
