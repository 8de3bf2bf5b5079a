//! Policy of the verb *encode*: coding plans and who does what in them.

mod plan;
mod work;

pub use plan::{CodingPlan, Coefficients, Edge, Hop, HopOutput, RaggedRows, Target};
pub use work::{Keep, ParityId, SessionWork, SlotShard, Source, stripe_bytes};
