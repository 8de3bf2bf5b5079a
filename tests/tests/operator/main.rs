//! What an operator does in an ordinary month, with real processes: other settings, reloads, certificates, doors.

mod certificates;
mod chunk;
mod disagree;
mod door;
mod leads;
mod lists;
mod modes;
mod node;
mod quiet;
mod reload;
mod rolling;
