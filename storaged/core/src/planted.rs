//! Planted bugs: a checker that catches nothing proves nothing. `planted!("name")` is a constant `false` unless the crate
//! is built with `--cfg storaged_mutants`; then the environment's `STORAGED_MUTANT` names the one bug that is there.
//! `make sim-mutants` builds once, runs the simulation with each, and wants every one caught.

#![expect(unexpected_cfgs, reason = "the cfg is of this file alone")]

/// Whether this bug is there.
macro_rules! planted {
    ($name:literal) => {
        $crate::planted::is_there($name)
    };
}

/// Whether the bug of this name was chosen.
#[cfg(storaged_mutants)]
pub(crate) fn is_there(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| std::env::var("STORAGED_MUTANT").ok());
    chosen.as_deref() == Some(name)
}

/// No bug is there.
#[cfg(not(storaged_mutants))]
pub(crate) const fn is_there(_name: &str) -> bool {
    false
}
