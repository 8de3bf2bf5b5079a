//! Engines: the arithmetic on blocks, behind one seam. The best one that the processor can run is chosen when it is
//! first asked for; each can be asked for by name. All give the same bytes, which the tests hold against `naive`.

mod blocks;
mod naive;
mod portable;
#[cfg(test)]
mod tests;

// The kernels' loads, stores and calls into code for special processors are the only unsafe code of this crate.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[allow(unsafe_code)]
#[macro_use]
mod kernels;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod gfni256;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod gfni512;
#[cfg(target_arch = "aarch64")]
#[allow(unsafe_code)]
mod neon;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod x86;

use std::sync::OnceLock;

use thiserror::Error;

use crate::matrix::CodingMatrix;
use naive::Naive;
use portable::Portable;

/// The environment variable that names the engine to use.
pub const ENGINE_VARIABLE: &str = "STORAGED_ENGINE";

/// Every engine's name, on any processor, the fastest first.
const NAMES: [&str; 6] = ["gfni512", "gfni256", "avx2", "neon", "portable", "naive"];

/// Arithmetic on blocks of bytes. All slices of one call have the same length; where they have not, each output
/// gets what the shorter of it and the input allow.
pub trait Engine: Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;
    /// `out[i] ^= coefficients[i] * data`.
    fn fold(&self, out: &mut [&mut [u8]], coefficients: &[u8], data: &[u8]);
    /// `out[i] = input[i] ^ coefficients[i] * data`: a hop's partial sums on their way through, without a copy first.
    /// What is in `out` before does not count, save beyond the end of `input[i]` or `data`, where it stays.
    fn fold_from(&self, out: &mut [&mut [u8]], input: &[&[u8]], coefficients: &[u8], data: &[u8]) {
        for ((block, from), c) in out.iter_mut().zip(input).zip(coefficients) {
            let length = block.len().min(from.len()).min(data.len());
            block[..length].copy_from_slice(&from[..length]);
            self.fold(&mut [&mut block[..length]], &[*c], &data[..length]);
        }
    }
    /// `out ^= data`.
    fn xor(&self, out: &mut [u8], data: &[u8]);
    /// `out[j] = sum over i of rows[j][i] * data[i]`: parity from data, or lost blocks from survivors with the rows
    /// of [`CodingMatrix::repair_coefficients`]. What is in `out` before does not count; without a row it stays.
    fn combine(&self, rows: &[&[u8]], data: &[&[u8]], out: &mut [&mut [u8]]) {
        let count = rows.len().min(out.len());
        let (rows, out) = (&rows[..count], &mut out[..count]);
        out.iter_mut().for_each(|block| block.fill(0));
        for (i, block) in data.iter().enumerate() {
            let column: Vec<u8> = rows.iter().map(|row| blocks::entry(row, i)).collect();
            self.fold(out, &column, block);
        }
    }
    /// `parity[j] = sum over i of c[j][i] * data[i]`.
    fn encode(&self, matrix: &CodingMatrix, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        let count = parity.len().min(matrix.geometry().m());
        let rows: Vec<&[u8]> = (0..count).map(|j| matrix.parity_row(j)).collect();
        self.combine(&rows, data, parity);
    }
}

/// A name that gives no engine.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum EngineError {
    /// No engine has this name.
    #[error("expected an engine named {known}, got {0:?}", known = NAMES.join(", "))]
    Unknown(String),
    /// The engine is for other processors.
    #[error("this processor cannot run the engine {name:?}: use one of {others}", others = can.join(", "))]
    Unsupported {
        name: String,
        can: Vec<&'static str>,
    },
}

/// The engine that `STORAGED_ENGINE` names if it is set and fits this processor, else the fastest.
pub fn engine() -> &'static dyn Engine {
    static CHOSEN: OnceLock<&'static dyn Engine> = OnceLock::new();
    *CHOSEN.get_or_init(|| engine_from_env().unwrap_or_else(|_| fastest()))
}

/// What [`engine`] chooses, but with a value of `STORAGED_ENGINE` that cannot hold as an error. For programs to call
/// at start, so that a setting is never ignored silently.
///
/// # Errors
/// [`EngineError`] if the variable names no engine, or one that this processor cannot run.
pub fn engine_from_env() -> Result<&'static dyn Engine, EngineError> {
    match std::env::var_os(ENGINE_VARIABLE) {
        Some(name) => engine_named(&name.to_string_lossy()),
        None => Ok(fastest()),
    }
}

/// The engine of this name.
///
/// # Errors
/// [`EngineError`] if there is none, or this processor cannot run it.
pub fn engine_named(name: &str) -> Result<&'static dyn Engine, EngineError> {
    let named = engines().into_iter().find(|engine| engine.name() == name);
    named.ok_or_else(|| {
        if NAMES.contains(&name) {
            EngineError::Unsupported {
                name: name.into(),
                can: engines().iter().map(|engine| engine.name()).collect(),
            }
        } else {
            EngineError::Unknown(name.into())
        }
    })
}

/// All engines that this processor can run, the fastest first.
pub fn engines() -> Vec<&'static dyn Engine> {
    let mut engines = special();
    engines.push(&Portable);
    engines.push(&Naive);
    engines
}

fn fastest() -> &'static dyn Engine {
    special().first().copied().unwrap_or(&Portable)
}

/// The engines for what only some processors have, the fastest first.
#[cfg(target_arch = "x86_64")]
fn special() -> Vec<&'static dyn Engine> {
    let gfni512 = gfni512::Gfni512::detect().map(|engine| engine as &dyn Engine);
    let gfni256 = gfni256::Gfni256::detect().map(|engine| engine as &dyn Engine);
    let avx2 = avx2::Avx2::detect().map(|engine| engine as &dyn Engine);
    [gfni512, gfni256, avx2].into_iter().flatten().collect()
}

/// The engines for what only some processors have.
#[cfg(target_arch = "aarch64")]
fn special() -> Vec<&'static dyn Engine> {
    let neon = neon::Neon::detect().map(|engine| engine as &dyn Engine);
    neon.into_iter().collect()
}

/// The engines for what only some processors have: none are written for this kind of processor.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn special() -> Vec<&'static dyn Engine> {
    Vec::new()
}
