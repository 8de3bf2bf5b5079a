use super::CliError;
use clap::Args;
#[derive(Debug, Args)]
pub struct BenchArgs {}
pub fn bench(_: &BenchArgs) -> Result<(), CliError> {
    Ok(())
}
