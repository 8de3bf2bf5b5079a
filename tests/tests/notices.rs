//! Notices of clouds that a machine goes, as `deploy/preemption/notice.sh` asks for them: of a metadata service that says what they document.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use anyhow::{Result, ensure};
use serde_json::json;

/// Of a metadata service.
#[derive(Clone)]
struct Answer {
    /// The request's first line, but for HTTP.
    asked: &'static str,
    /// Without it the request is refused.
    header: &'static str,
    said: String,
}

impl Answer {
    fn new(asked: &'static str, header: &'static str, said: impl Into<String>) -> Self {
        let said = said.into();
        Self {
            asked,
            header,
            said,
        }
    }
}

/// Serves them to the end of this process; its address.
fn metadata_service(answers: Vec<Answer>) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = format!("http://{}", listener.local_addr()?);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            drop(answer(stream, &answers));
        }
    });
    Ok(address)
}

fn answer(mut stream: TcpStream, answers: &[Answer]) -> Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut head = String::new();
    while reader.read_line(&mut head)? > 2 {}
    let head = head.replace(": ", ":");
    let mut all = answers.iter();
    let found =
        all.find(|it| head.starts_with(&format!("{} HTTP", it.asked)) && head.contains(it.header));
    let (status, body) = found.map_or((404, ""), |it| (200, it.said.as_str()));
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status} It\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    Ok(())
}

fn is_announced(cloud: &str, answers: Vec<Answer>) -> Result<bool> {
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/preemption/notice.sh"
    );
    let asked = Command::new(script)
        .arg(cloud)
        .env("NOTICE_METADATA", metadata_service(answers)?)
        .output()?;
    ensure!(asked.status.code() != Some(2), "{asked:?}");
    Ok(asked.status.success())
}

#[test]
fn clouds_announce_that_a_spot_machine_goes() -> Result<()> {
    let action = "GET /latest/meta-data/spot/instance-action";
    let plain = Answer::new(action, "", "terminate");
    let token = Answer::new(
        "PUT /latest/api/token",
        "X-aws-ec2-metadata-token-ttl-seconds:60",
        "word",
    );
    let guarded = Answer::new(action, "X-aws-ec2-metadata-token:word", "terminate");
    ensure!(is_announced("aws", vec![plain])?);
    ensure!(is_announced("aws", vec![token.clone(), guarded])?);
    ensure!(!is_announced("aws", vec![token])?);
    let preempted = "GET /computeMetadata/v1/instance/preempted";
    for (said, goes) in [("TRUE", true), ("FALSE", false)] {
        let answer = Answer::new(preempted, "Metadata-Flavor:Google", said);
        ensure!(is_announced("gcp", vec![answer])? == goes, "{said}");
    }
    Ok(())
}

/// A scale set's machines are told of one another.
#[test]
fn azure_announces_events_of_which_those_count_that_end_this_machine() -> Result<()> {
    let name = Answer::new(
        "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text",
        "Metadata:true",
        "worker_3",
    );
    let event = |kind: &str, of: &[&str]| {
        json!({
            "EventId": "602d9444-d2cd-49c7-8624-8643e7171297", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": of,
            "EventStatus": "Scheduled", "NotBefore": "Mon, 28 Nov 2026 18:29:47 GMT", "EventSource": "Platform",
        })
    };
    for (events, goes) in [
        (vec![], false),
        (vec![event("Preempt", &["worker_30"])], false),
        (
            vec![
                event("Freeze", &["worker_3"]),
                event("Preempt", &["worker_1"]),
            ],
            false,
        ),
        (
            vec![
                event("Freeze", &["worker_1"]),
                event("Terminate", &["worker_1", "worker_3"]),
            ],
            true,
        ),
        (vec![event("Preempt", &["worker_3"])], true),
        // Told days before, and listed still when the machine is up again.
        (
            vec![
                event("Redeploy", &["worker_3"]),
                event("Reboot", &["worker_3"]),
            ],
            false,
        ),
    ] {
        let listed = json!({"DocumentIncarnation": 1, "Events": events});
        for said in [listed.to_string(), format!("{listed:#}")] {
            let answer = Answer::new(
                "GET /metadata/scheduledevents?api-version=2020-07-01",
                "Metadata:true",
                &said,
            );
            let answers = vec![name.clone(), answer];
            ensure!(is_announced("azure", answers)? == goes, "{said}");
        }
    }
    ensure!(!is_announced("azure", vec![name])?);
    Ok(())
}

/// It would wait for ever, and the unit would look well.
#[test]
fn a_notice_that_cannot_be_asked_for_is_said() -> Result<()> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/preemption");
    let notice = format!("{folder}/notice.sh");
    for (command, code) in [
        (vec![notice.as_str(), "gpc"], 2),
        (vec!["/nowhere/notice.sh", "gcp"], 127),
    ] {
        let ended = Command::new(format!("{folder}/drain-on-notice.sh"))
            .arg("20s")
            .args(&command)
            .output()?;
        let said = String::from_utf8_lossy(&ended.stderr);
        ensure!(ended.status.code() == Some(code), "{ended:?}");
        ensure!(said.contains(command[0]), "{said}");
    }
    Ok(())
}
