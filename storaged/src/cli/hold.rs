//! `storaged hold`: the process that has the descriptors of a node's memory for longer than any pod of its daemon.

use std::path::PathBuf;

use clap::Args;

use super::{CliError, print};
use crate::keep::{HOLDER_SOCKET, HOLDER_VARIABLE, holder};
use crate::log::{self, LogFormat};

#[derive(Debug, Args)]
#[command(
    after_help = "A daemon's keeper (`storaged run --holder PATH`) connects to it as the same user or as root, one at a time. The memory is free once this\nprocess ends, or with --release; SIGTERM or SIGINT ends it. It needs no configuration and no network.\nExample:\n  storaged hold --socket /run/storaged-memory/hold.sock"
)]
pub struct HoldArgs {
    /// Where it listens
    #[arg(long, env = HOLDER_VARIABLE, default_value = HOLDER_SOCKET)]
    socket: PathBuf,
    /// Have the holder that listens there let go of everything, instead; refused while a daemon runs. A keeper that waits
    /// to start its daemon again, as where that cannot read what is held, lets go of it too
    #[arg(long)]
    release: bool,
    /// How log lines look
    #[arg(long, value_enum, default_value = "text")]
    log_format: LogFormat,
}

/// Runs `storaged hold`.
pub fn hold(args: &HoldArgs) -> Result<(), CliError> {
    if args.release {
        let released = holder::release(&args.socket)?;
        print(&format!("let go of {released} descriptors"));
        return Ok(());
    }
    log::start(args.log_format);
    Ok(holder::hold(&args.socket)?)
}
