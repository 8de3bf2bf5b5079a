//! All that comes to pass in a world, as one digest.

use super::World;

impl World {
    /// Runs to the end and gives a digest of everything that happened.
    pub fn run_traced(&mut self) -> String {
        self.trace = Some(blake3::Hasher::new());
        self.run();
        let trace = self.trace.take();
        trace
            .map(|trace| trace.finalize().to_hex().to_string())
            .unwrap_or_default()
    }

    /// Runs to the end; with `STORAGED_SIM_TRACES` it says what of this world came to pass, as one digest: a change that is
    /// meant to move code only leaves that of every seed as it was.
    pub fn run_named(&mut self, name: &str) {
        match std::env::var_os("STORAGED_SIM_TRACES") {
            Some(_) => println!("trace {name} {}", self.run_traced()),
            None => self.run(),
        }
    }
}
