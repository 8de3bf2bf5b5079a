//! What an operator does in an ordinary month, with real processes: other settings, reloads, certificates, doors.

mod chunk;
mod node;
