//! All that nodes hear and do in a world, as one digest.

use super::scene::Scene;
use super::world::World;

impl<S: Scene> World<S> {
    /// Runs to a time and gives a digest of every input of a node and of all that it led to.
    pub fn run_traced(&mut self, end: u64) -> String {
        self.trace = Some(blake3::Hasher::new());
        self.run_to(end);
        let trace = self.trace.take();
        trace
            .map(|trace| trace.finalize().to_hex().to_string())
            .unwrap_or_default()
    }

    /// Runs to a time; with `STORAGED_SIM_TRACES` it says what of this world came to pass, as one digest: a change that is
    /// meant to move code only leaves that of every seed as it was.
    pub fn run_named(&mut self, name: &str, end: u64) {
        match std::env::var_os("STORAGED_SIM_TRACES") {
            Some(_) => println!("trace {name} {}", self.run_traced(end)),
            None => self.run_to(end),
        }
    }
}
