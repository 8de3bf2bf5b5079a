//! Native part of the Python package: the SDK's calls with the interpreter lock released.
//!
//! It knows integers and bytes, nothing of torch. Order of reading: `save` (slots and copies), `load` (manifests and
//! shards), `control` (runs, waits, plans), `verdict` (on a restart), `board` (memory that outlives its writer), `turn` (one call at a time, within its limit), `fault` (which exception a
//! failure becomes). Every wait ends within its limit and less than a second, and within 0.2 s of Ctrl-C.

mod board;
mod control;
mod early;
mod fault;
mod load;
mod save;
mod turn;
mod verdict;

use pyo3::prelude::*;

/// The module `storaged._native`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("DEFAULT_SOCKET", storaged_sdk::DEFAULT_SOCKET)?;
    module.add("AWAY_AFTER", storaged_sdk::AWAY_AFTER.as_secs_f64())?;
    module.add_class::<board::Board>()?;
    module.add_class::<control::Client>()?;
    module.add_class::<save::Trainer>()?;
    module.add_class::<save::Slot>()?;
    module.add_class::<load::Manifest>()?;
    module.add_class::<load::Shard>()?;
    module.add_function(wrap_pyfunction!(control::token_of_environment, module)?)?;
    module.add_function(wrap_pyfunction!(save::layout, module)?)?;
    Ok(())
}
