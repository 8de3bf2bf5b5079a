//! `storaged restart-safe`: what a rolling restart asks before each node, and waits for.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use storaged_sdk::Client;

use super::{CliError, SocketArgs, print};

/// Between two looks; what is missing takes seconds to come back.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The daemon answers from its tables.
const ANSWER_MS: u32 = 5_000;

#[derive(Debug, Args)]
pub struct RestartSafeArgs {
    #[command(flatten)]
    pub socket: SocketArgs,
    /// Wait until it is safe, or until the timeout
    #[arg(long)]
    pub wait: bool,
    /// Longest wait, in seconds
    #[arg(long, default_value_t = 600)]
    pub timeout: u64,
    /// Node losses that the newest checkpoint of every namespace must bear before; by default 2, or m where m is 1.
    /// 0: a copy in the durable tier is enough
    #[arg(long)]
    pub bears: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub fn restart_safe(args: &RestartSafeArgs) -> Result<(), CliError> {
    let until = Instant::now() + Duration::from_secs(args.timeout);
    loop {
        let objections = look(args, until.saturating_duration_since(Instant::now()))?;
        if objections.is_empty() || !args.wait || Instant::now() >= until {
            return tell(args, objections);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn look(args: &RestartSafeArgs, left: Duration) -> Result<Vec<String>, CliError> {
    let mut client = Client::connect_anonymous(&args.socket.path())?;
    let left_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
    Ok(client.restart_objections(args.bears, left_ms.min(ANSWER_MS))?)
}

fn tell(args: &RestartSafeArgs, objections: Vec<String>) -> Result<(), CliError> {
    let safe = objections.is_empty();
    if args.json {
        print(&json!({"safe": safe, "objections": objections}).to_string());
    } else if safe {
        print("safe to restart");
    }
    if safe {
        Ok(())
    } else {
        Err(CliError::NotSafe(objections.join("; ")))
    }
}
