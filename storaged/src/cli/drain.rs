//! `storaged drain`: ends this node's daemon in order, before the machine goes.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::drain::{DrainOrder, DrainPhase, DrainReport, PlaceAfter, StepAfterDrain};
use storaged_sdk::{Client, ClientError, Patience};

use super::{CliError, SocketArgs, print};
use crate::config::Span;

/// Between two questions.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// A daemon that dies meanwhile is back within this time where somebody starts it again, and knows nothing of the drain.
const BACK_WITHIN: Duration = Duration::from_secs(5);
/// What an answer may take at most. A daemon that goes on answers in milliseconds.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
/// A daemon that has not answered so long after its time was over is not waited for.
const OVERDUE_AFTER: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
#[command(
    after_help = "What only this node has or can finish comes first: uploads, the coding of the newest steps, and blocks that the others have not\nput back yet. It needs no trainers. Then its place goes to the next spare, and daemon and keeper end. It says what each job's\nnewest step bears until the others have decoded what this node had. Exit codes: 0 nothing is lost with this node's memory,\n75 the time was over before (what is left is printed), 1 the daemon did not say.\n`storaged node admit NODE` lets the node have a place again."
)]
pub struct DrainArgs {
    /// Time that there is, as 25s or 2m: finished or not, the daemon ends then, or a few seconds later where the registry is slow
    #[arg(long, default_value = "25s")]
    deadline: Span,
    /// The node comes back soon: no spare takes its place now, and whoever keeps the memory of its daemon (`storaged hold`, systemd) keeps it.
    /// Without this that is let go of, where nothing is left and every job's newest step bears another loss without it or is durable
    #[arg(long)]
    keep_place: bool,
    /// Node losses that each job's newest step must bear before it goes, at most m: 2 leave one that is borne afterwards, as for maintenance
    /// with time for it (--deadline). A copy in the durable tier does not make up for them. By default that step must be left
    /// without this node, in RAM or in the durable tier
    #[arg(long, value_name = "N")]
    bears: Option<u32>,
    #[command(flatten)]
    socket: SocketArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `storaged drain`.
pub fn drain(args: &DrainArgs) -> Result<(), CliError> {
    let place = if args.keep_place {
        PlaceAfter::Kept
    } else {
        PlaceAfter::GivenUp
    };
    let within_ms = u32::try_from(args.deadline.as_ms()).unwrap_or(u32::MAX);
    let until = Instant::now() + Duration::from_millis(within_ms.into());
    let socket = args.socket.path();
    let mut client = Client::connect_anonymous(&socket)?;
    let mut order = DrainOrder {
        within_ms,
        place,
        bears: args.bears,
    };
    let report = loop {
        match follow(&mut client, order, until) {
            Err(ClientError::Broken { .. }) if order.within_ms > 0 => client = back(&socket)?,
            Err(ClientError::TimedOut { limit_ms, .. }) => {
                let waited = Duration::from_millis(limit_ms);
                return Err(CliError::DrainUnanswered(waited));
            }
            ended => break ended?,
        }
        let left = until.saturating_duration_since(Instant::now());
        order.within_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
    };
    tell(args, report)
}

/// Asks again and again until it is over.
fn follow(
    client: &mut Client,
    order: DrainOrder,
    until: Instant,
) -> Result<DrainReport, ClientError> {
    let mut said = Vec::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        client.be_patient(Patience::of(answer_within(left)));
        let report = client.drain(order)?;
        if report.phase == DrainPhase::Over {
            return Ok(report);
        }
        if report.left != said {
            say(&report);
            said.clone_from(&report.left);
        }
        std::thread::sleep(ASK_EVERY);
    }
}

/// How long an answer may take with so much time left for the drain.
fn answer_within(left: Duration) -> Duration {
    ANSWER_WITHIN.min(left.saturating_add(OVERDUE_AFTER))
}

/// The next daemon, after one that has ended without a word.
fn back(socket: &Path) -> Result<Client, ClientError> {
    eprintln!("the daemon has ended: draining the one that comes next");
    let until = Instant::now() + BACK_WITHIN;
    loop {
        match Client::connect_anonymous(socket) {
            Err(_) if Instant::now() < until => std::thread::sleep(ASK_EVERY),
            connected => return connected,
        }
    }
}

/// Progress is for people.
fn say(report: &DrainReport) {
    let seconds = report.within_ms.div_ceil(1_000);
    for one in &report.left {
        eprintln!("within {seconds} s: {one}");
    }
}

fn tell(args: &DrainArgs, report: DrainReport) -> Result<(), CliError> {
    let DrainReport {
        left, place, after, ..
    } = report;
    if args.json {
        let after = after.map(|steps| steps.iter().map(described).collect::<Vec<_>>());
        print(&json!({"left": left, "place": place, "after": after}).to_string());
    } else {
        if let Some(place) = &place {
            print(&format!("the place of this node: {place}"));
        }
        for step in after.iter().flatten() {
            print(&in_words(step));
        }
    }
    if !left.is_empty() {
        return Err(CliError::DrainedUnfinished(left.join("; ")));
    }
    if !args.json {
        print("drained: nothing is lost with this node's memory");
    }
    Ok(())
}

/// For programs.
fn described(step: &StepAfterDrain) -> Value {
    json!({
        "namespace": step.key.namespace.as_str(),
        "run": step.key.run.to_string(),
        "step": step.key.step.get(),
        "bears": step.bears.losses,
        "of": step.bears.of,
        "durable": step.state == CheckpointState::Durable,
    })
}

fn in_words(step: &StepAfterDrain) -> String {
    let (key, bears) = (&step.key, step.bears);
    let tier = match step.state {
        CheckpointState::Durable => ", and is in the durable tier",
        _ => "",
    };
    format!(
        "{}: step {} of run {} bears {} of {} losses until others have what this node had{tier}",
        key.namespace, key.step, key.run, bears.losses, bears.of
    )
}

#[cfg(test)]
mod tests {
    use storaged_sdk::wire::local::Bears;
    use storaged_sdk::wire::peer::CheckpointKey;
    use storaged_sdk::wire::{Namespace, RunId, Step};

    use super::*;

    /// As one that was stopped with SIGSTOP: whoever drains has so much time and no more.
    #[test]
    fn a_daemon_that_does_not_answer_costs_little_more_than_the_time_that_there_is() {
        let seconds = Duration::from_secs;
        let short = answer_within(seconds(3));
        assert_eq!(short, seconds(8));
        assert_eq!(answer_within(Duration::ZERO), seconds(5));
        assert_eq!(answer_within(Duration::MAX), seconds(15));
        let said = CliError::DrainUnanswered(short).to_string();
        assert!(said.contains("within 8s"), "{said}");
    }

    #[test]
    fn what_a_step_bears_is_said_in_words_and_to_programs() {
        let step = StepAfterDrain {
            key: CheckpointKey {
                namespace: Namespace::new("llm").expect("a name"),
                run: RunId::new(3),
                step: Step::new(9),
            },
            bears: Bears { losses: 1, of: 2 },
            state: CheckpointState::Durable,
        };
        assert_eq!(
            in_words(&step),
            "llm: step 9 of run 3 bears 1 of 2 losses until others have what this node had, and is in the durable tier"
        );
        let expected = json!({"namespace": "llm", "run": "3", "step": 9, "bears": 1, "of": 2, "durable": true});
        assert_eq!(described(&step), expected);
    }
}
