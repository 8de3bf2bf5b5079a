//! `make bench-delta`: what deltas save on real training state and what they cost, against zstd alone and zstd with the
//! previous state as dictionary. Reads the corpus that `bench/corpus/make_corpus.py` makes.

#![forbid(unsafe_code)]

mod corpus;
mod integrity;
mod links;
mod measure;
mod report;

use std::path::PathBuf;

use clap::Parser;

/// Measures delta records on a corpus of training state.
#[derive(Parser)]
struct Arguments {
    /// The folder that make_corpus.py wrote.
    #[arg(long, default_value = "target/corpus")]
    corpus: PathBuf,
    /// Where delta.json and delta.md go.
    #[arg(long, default_value = "docs/bench")]
    out: PathBuf,
    /// Rounds of each measurement; the fastest counts.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// The commit that is measured, for the record.
    #[arg(long, default_value = "unknown")]
    commit: String,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let corpus = corpus::read(&arguments.corpus)?;
    let mut rows = Vec::new();
    for case in &corpus.cases {
        let row = measure::case(&case.load(&arguments.corpus)?, arguments.rounds)?;
        println!("{}", report::line(&row));
        rows.push(row);
    }
    let mut losses = Vec::new();
    for case in &corpus.cases {
        losses.extend(links::losses(
            &case.load(&arguments.corpus)?,
            arguments.rounds,
        )?);
    }
    let integrity = integrity::measure(arguments.rounds);
    report::write(
        &arguments.out,
        &arguments.commit,
        &corpus,
        &rows,
        &losses,
        &integrity,
    )
}
