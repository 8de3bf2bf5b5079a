//! `storaged rotate`.

use std::path::PathBuf;

use clap::Args;
use storaged_sdk::read_token;
use storaged_sdk::wire::Namespace;

use super::token::TokenArgs;
use super::{CliError, NamespaceArgs, SocketArgs};

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  storaged token new\n  storaged rotate llama-70b --token-file old --new-token-file new\nFrom then on the new token alone opens the job: on all nodes that are up, on others as soon as they are back. Trainers that are connected go on with their saves, and restart with the new one. Keep the new token: nobody can go back to the old one."
)]
pub struct RotateArgs {
    /// Namespace of the job
    #[arg(env = "STORAGED_NAMESPACE")]
    namespace: Namespace,
    #[command(flatten)]
    token: TokenArgs,
    /// File with the token that is to open the job from now on
    #[arg(long, value_name = "FILE")]
    new_token_file: PathBuf,
    /// Longest wait for the daemon's welcome, in seconds
    #[arg(long, default_value_t = 15)]
    timeout: u32,
    #[command(flatten)]
    socket: SocketArgs,
}

pub fn rotate(args: &RotateArgs) -> Result<(), CliError> {
    let new = read_token(&args.new_token_file)?;
    let old = args.token.read()?;
    let of = NamespaceArgs {
        namespace: args.namespace.clone(),
        token: args.token.clone(),
        step: None,
        timeout: args.timeout,
    };
    let mut client = of.connect(&args.socket)?;
    Ok(client.rotate(&old, &new)?)
}
