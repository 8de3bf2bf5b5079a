use clap::Args;
use super::CliError;
#[derive(Debug, Args)]
pub struct BenchArgs {}
pub fn bench(_: &BenchArgs) -> Result<(), CliError> { Ok(()) }
