//! `storaged pin`, `unpin` and `rm`: checkpoints that stay, and checkpoints that go from the durable tier, through the daemon and with the
//! job's token.

use clap::Args;
use serde_json::Value;
use storaged_sdk::wire::local::{CheckpointInfo, Keep, PinnedOnes, Removal, Role};
use storaged_sdk::wire::{Namespace, RefusalCode, RunId, Step};
use storaged_sdk::{Client, ClientError, ConnectOptions, WithTrainers};

use super::token::TokenArgs;
use super::{CliError, SocketArgs, connect, parse_step, print};

/// Whose checkpoints.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// Namespace of the job
    #[arg(env = "STORAGED_NAMESPACE")]
    namespace: Namespace,
    #[command(flatten)]
    token: TokenArgs,
    #[command(flatten)]
    socket: SocketArgs,
    /// Longest wait, in seconds
    #[arg(long, default_value_t = 600)]
    timeout: u32,
}

#[derive(Debug, Args)]
#[command(
    after_help = "A pinned checkpoint stays in the RAM of all nodes that have parts of it, whatever is saved later, and in the durable tier whatever\n[trickle] keep_last says. Refused if two more steps of its size would not fit beside it on some node (memory.budget). One that has left RAM\nis pinned in the durable tier alone; one that becomes durable later is pinned there when it is pinned again. `storaged ls` shows pins."
)]
pub struct PinArgs {
    #[command(flatten)]
    job: JobArgs,
    /// Its step
    #[arg(value_parser = parse_step)]
    step: Step,
    /// Its run; the newest that has the step without it
    #[arg(long)]
    run: Option<RunId>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  storaged rm llama-70b --step 1200\n  storaged rm llama-70b --run 3-00f3a9c1d2e4b5a6\n  storaged rm llama-70b --all\nRemoves from the durable tier only, the manifest first. Of the newest run of a job that trains only with --live, pinned ones only\nwith --pinned. Exits with 1 if there was nothing to remove."
)]
pub struct RmArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    what: RmWhat,
    /// Of this run, with --step; all of it without
    #[arg(long)]
    run: Option<RunId>,
    /// Also of the newest run of a job whose trainers are connected
    #[arg(long)]
    live: bool,
    /// Also pinned ones
    #[arg(long)]
    pinned: bool,
}

#[derive(Debug, Args)]
#[group(multiple = false)]
struct RmWhat {
    /// One checkpoint
    #[arg(long, value_parser = parse_step)]
    step: Option<Step>,
    /// Every checkpoint of the namespace
    #[arg(long)]
    all: bool,
}

impl JobArgs {
    fn connect(&self) -> Result<Client, CliError> {
        let options = ConnectOptions {
            socket: self.socket.path(),
            namespace: self.namespace.clone(),
            token: self.token.read()?,
            role: Role::Reader,
        };
        connect(&options, self.timeout)
    }

    fn timeout_ms(&self) -> u32 {
        self.timeout.saturating_mul(1000)
    }
}

pub fn pin(args: &PinArgs, keep: Keep) -> Result<(), CliError> {
    let mut client = args.job.connect()?;
    client.keep(args.run, args.step, keep, args.job.timeout_ms())?;
    let what = match keep {
        Keep::Pin => pinned_where(&mut client, args)?,
        Keep::Unpin => "no longer pinned",
    };
    print(&format!(
        "{} step {}: {what}",
        args.job.namespace, args.step
    ));
    Ok(())
}

/// Where a step stays from now on.
fn pinned_where(client: &mut Client, args: &PinArgs) -> Result<&'static str, CliError> {
    // A job of which nothing is in RAM is not listed.
    let listed = match client.list(Some(args.job.namespace.clone())) {
        Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::UnknownNamespace => {
            Vec::new()
        }
        listed => listed?,
    };
    let is_it = |one: &CheckpointInfo| {
        let of_run = args.run.is_none_or(|run| run == one.run);
        one.step == args.step && of_run && one.pinned == Some(true)
    };
    let tier = Tier::of(&client.status()?)?;
    Ok(tier.says_where(listed.iter().find(|one| is_it(one))))
}

/// Whether the asked node has a durable tier: one that has none pins nothing there, whatever it knows of what other nodes have copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tier {
    Configured,
    Absent,
}

impl Tier {
    /// By the daemon's status.
    fn of(status: &str) -> Result<Self, CliError> {
        let status: Value = serde_json::from_str(status)
            .map_err(|error| CliError::Unexpected(error.to_string()))?;
        Ok(match &status["durable"] {
            Value::Null => Self::Absent,
            _ => Self::Configured,
        })
    }

    /// Where a step stays that has just been pinned, as it is listed now.
    fn says_where(self, listed: Option<&CheckpointInfo>) -> &'static str {
        match (self, listed) {
            (Self::Configured, Some(one)) if one.durable => "pinned in RAM and in the durable tier",
            (Self::Configured, Some(_)) => "pinned in RAM",
            (Self::Configured, None) => "pinned in the durable tier alone: it is not in RAM",
            (Self::Absent, Some(_)) => {
                "pinned in RAM (this node has no durable tier to pin it in as well)"
            }
            (Self::Absent, None) => {
                "was pinned in RAM, and is not any more: it was unpinned or dropped meanwhile"
            }
        }
    }
}

pub fn rm(args: &RmArgs) -> Result<(), CliError> {
    let removal = match (args.what.step, args.run) {
        (Some(step), run) => Removal::Step { run, step },
        (None, Some(run)) if !args.what.all => Removal::Run { run },
        (None, None) if args.what.all => Removal::All,
        _ => {
            return Err(CliError::Usage(
                "expected one of --step, --run and --all (--run also beside --step)".into(),
            ));
        }
    };
    let mut client = args.job.connect()?;
    let trainers = if args.live {
        WithTrainers::Too
    } else {
        WithTrainers::Refused
    };
    let pinned = if args.pinned {
        PinnedOnes::Too
    } else {
        PinnedOnes::Spared
    };
    let timeout_ms = args.job.timeout_ms();
    let (checkpoints, objects) = client.remove(removal, trainers, pinned, timeout_ms)?;
    print(&format!(
        "removed {checkpoints} checkpoints ({objects} objects) of {} from the durable tier",
        args.job.namespace
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use storaged_sdk::wire::{CheckpointState, WorldSize};

    use super::*;

    fn pinned(state: CheckpointState) -> CheckpointInfo {
        CheckpointInfo {
            namespace: Namespace::new("job").expect("a namespace"),
            run: RunId::new(1),
            step: Step::new(7),
            state,
            durable: state == CheckpointState::Durable,
            world_size: WorldSize::new(1).expect("a world size"),
            length: 1,
            manifest: None,
            bears: None,
            kept_for: None,
            pinned: Some(true),
        }
    }

    /// A daemon that was started again without `[durable]` may remember that a step has become durable.
    #[test]
    fn a_node_without_a_durable_tier_is_not_said_to_have_pinned_anything_there() {
        let without = Tier::of(r#"{"durable":null}"#).expect("a status");
        for state in [CheckpointState::Protected, CheckpointState::Durable] {
            let said = without.says_where(Some(&pinned(state)));
            assert!(said.starts_with("pinned in RAM ("), "{said}");
            assert!(said.contains("has no durable tier"), "{said}");
        }
        let gone = without.says_where(None);
        assert!(!gone.contains("tier"), "{gone}");
    }

    #[test]
    fn where_a_step_is_pinned_is_said_by_what_the_tier_has_of_it() {
        let with = Tier::of(r#"{"durable":{"state":"ready"}}"#).expect("a status");
        let protected = pinned(CheckpointState::Protected);
        let durable = pinned(CheckpointState::Durable);
        for (listed, expected) in [
            (Some(&protected), "pinned in RAM"),
            (Some(&durable), "pinned in RAM and in the durable tier"),
            (None, "pinned in the durable tier alone: it is not in RAM"),
        ] {
            assert_eq!(with.says_where(listed), expected);
        }
    }
}
