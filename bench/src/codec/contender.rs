//! Who takes part: every engine of ours, ISA-L, two Rust crates, and memcpy of the data as the measure of the memory.
//! All are called as their users call them, with what can be kept between calls kept; each checks its own bytes.

mod check;
mod encode;
mod fold;

use anyhow::Result;
use storaged_codec::{Engine, engines};

use super::case::Case;

/// The name of memcpy.
pub const MEMCPY: &str = "memcpy";

/// The name of the crate `reed-solomon-erasure`, as it was built.
pub const RSE: &str = if cfg!(feature = "rse-simd") {
    "rse_simd"
} else {
    "rse_default"
};

/// All names, in the order of tables and plots; not every build and processor has every one.
pub const NAMES: [&str; 9] = [
    "gfni512",
    "gfni256",
    "avx2",
    "portable",
    "isal",
    "rse_simd",
    "rse_default",
    "rs_simd",
    MEMCPY,
];

/// One way to do the work of a case.
pub trait Contender {
    /// Its name in the figures.
    fn name(&self) -> &'static str;
    /// The blocks that it wants for output.
    fn outputs(&self) -> Outputs;
    /// The part of the work, as 1 / this, that it does in a round: less for the slow ones, whose rate shows on less.
    fn share(&self) -> usize {
        1
    }
    /// One step: the blocks in, the blocks out.
    ///
    /// # Errors
    /// What its library finds wrong.
    fn step(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()>;
    /// One step whose bytes are compared with what they must be.
    ///
    /// # Errors
    /// As for a step, and if the bytes are wrong.
    fn check(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()>;
}

/// Blocks for output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outputs {
    /// So many in each step, others every time if the data is.
    Written(usize),
    /// So many, in every step the same.
    Kept(usize),
}

/// Everybody who can do a case in this build and on this processor, or those of them that `only` names.
///
/// # Errors
/// What a library finds wrong with the case.
pub fn contenders(case: Case, block: usize, only: &[String]) -> Result<Vec<Box<dyn Contender>>> {
    let mut all = match case {
        Case::Encode { geometry, .. } => encode::contenders(geometry, block)?,
        Case::Fold { sums, .. } => fold::contenders(sums)?,
    };
    all.retain(|one| only.is_empty() || only.iter().any(|name| name == one.name()));
    Ok(all)
}

/// Our engines, without the one that is only there to be right.
fn engines_measured() -> Vec<&'static dyn Engine> {
    let mut engines = engines();
    engines.retain(|engine| engine.name() != "naive");
    engines
}

/// The part of the work that an engine of ours does in a round.
fn engine_share(engine: &dyn Engine) -> usize {
    match engine.name() {
        "portable" => SLOW,
        _ => 1,
    }
}

/// The share of who takes ten times as long as the fastest.
const SLOW: usize = 8;

#[cfg(test)]
mod tests {
    use super::{MEMCPY, NAMES, Outputs, RSE, contenders};
    use crate::codec::arena::Arena;
    use crate::codec::case::{Case, Level, Place};

    /// Every contender does what it should on one step, and is not pleased with wrong bytes.
    fn all_are_right(case: Case, block: usize) {
        let mut arena = Arena::new(64 * block);
        let mut found = contenders(case, block, &[]).expect("contenders");
        assert!(found.iter().any(|one| one.name() == MEMCPY));
        assert!(found.iter().any(|one| one.name() == RSE));
        for one in &mut found {
            assert!(NAMES.contains(&one.name()), "{} is unknown", one.name());
            let (Outputs::Written(count) | Outputs::Kept(count)) = one.outputs();
            let (data, out) = arena.parts();
            let data: Vec<&[u8]> = data.chunks(block).take(case.inputs()).collect();
            let mut out: Vec<&mut [u8]> = out.chunks_mut(block).take(count).collect();
            for _ in 0..2 {
                let checked = one.check(&data, &mut out);
                checked.unwrap_or_else(|error| panic!("{case}, {}: {error:#}", one.name()));
            }
        }
    }

    #[test]
    fn everybody_makes_the_right_bytes() {
        for case in Case::all() {
            all_are_right(case, 4096);
        }
        // Long enough for stores past the cache.
        let geometry = storaged_codec::Geometry::new(8, 2).expect("a geometry");
        let place = Place::Ram;
        all_are_right(Case::Encode { geometry, place }, 512 << 10);
    }

    #[test]
    fn only_those_named_take_part() {
        let only = [MEMCPY.to_owned(), "nobody".to_owned()];
        let (sums, level) = (2, Level::First);
        let found = contenders(Case::Fold { sums, level }, 4096, &only).expect("contenders");
        assert_eq!(found.len(), 1);
    }
}
