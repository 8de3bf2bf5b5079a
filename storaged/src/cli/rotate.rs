//! `storaged rotate`.

use std::path::PathBuf;

use clap::Args;
use storaged_sdk::wire::{Namespace, RefusalCode};
use storaged_sdk::{Client, ClientError, RotateError, read_token};

use super::token::TokenArgs;
use super::{CliError, NamespaceArgs, SocketArgs};

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  storaged token new\n  storaged rotate llama-70b --token-file old --new-token-file new\nFrom then on the new token alone opens the job: on all nodes that are up, on others as soon as they are back. Trainers that are connected go on with their saves, and restart with the new one. Keep the new token, also when the command fails: it may have been changed all the same, and nobody can go back to the old one. Running it again with the same two files goes on with it."
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
    let changed =
        connect(args, args.token.clone()).and_then(|mut client| Ok(client.rotate(&old, &new)?));
    let Err(error) = changed else {
        return Ok(());
    };
    // An earlier command may have done it, of which nobody heard the end.
    if is_wrong_token(&error)
        && let Ok(mut client) = connect(args, TokenArgs::in_file(args.new_token_file.clone()))
        && client.is_rotated(&old, &new)?
    {
        return Ok(());
    }
    Err(error)
}

fn connect(args: &RotateArgs, token: TokenArgs) -> Result<Client, CliError> {
    let of = NamespaceArgs {
        namespace: args.namespace.clone(),
        token,
        step: None,
        timeout: args.timeout,
    };
    of.connect(&args.socket)
}

fn is_wrong_token(error: &CliError) -> bool {
    let (CliError::Client(error) | CliError::Rotate(RotateError::Client(error))) = error else {
        return false;
    };
    matches!(error, ClientError::Refused(refusal) if refusal.code == RefusalCode::WrongToken)
}
