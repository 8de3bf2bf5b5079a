//! Benches of storaged that go through its public parts. `storaged bench` measures the whole path; what needs other
//! people's libraries beside ours belongs here.

#![forbid(unsafe_code)]
