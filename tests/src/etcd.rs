//! etcd as a process of a test's own, on loopback or in a network namespace.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::system::{free_ports, wait};

/// An answer of a process on loopback takes no longer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Makes the command that runs a program where etcd is to be.
type CommandOf = dyn Fn(&Path) -> Command + Send + Sync;

/// One member, which keeps what it has when it is killed and started again.
pub struct Etcd {
    folder: TempDir,
    address: IpAddr,
    port: u16,
    command_of: Box<CommandOf>,
    /// A folder with an authority and a certificate for `localhost`, if it speaks TLS.
    certificates: Option<PathBuf>,
    /// Options beside those that each has.
    options: Vec<String>,
    /// Its name and all members, where it is not alone.
    membership: Option<(String, String)>,
    child: Option<Child>,
}

/// Where `make test` has put it, or the machine has it.
fn executable() -> PathBuf {
    let ours = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../target/tools/usr/bin/etcd"
    ));
    if ours.exists() {
        ours.into()
    } else {
        "etcd".into()
    }
}

impl Etcd {
    /// An empty one.
    ///
    /// # Errors
    /// If there is no etcd, or it does not answer.
    pub fn start() -> Result<Self> {
        Self::of(None, &[])
    }

    /// An empty one with options of its own.
    ///
    /// # Errors
    /// If there is no etcd, or it does not answer.
    pub fn start_with(options: &[String]) -> Result<Self> {
        Self::of(None, options)
    }

    /// An empty one of so many members, each of which is killed and started by itself.
    ///
    /// # Errors
    /// If there is no etcd, or its members do not agree.
    pub fn start_members(count: usize) -> Result<Vec<Self>> {
        let prepared = (0..count)
            .map(|_| Self::prepare(Ipv4Addr::LOCALHOST.into(), |it: &Path| Command::new(it)));
        let mut members = prepared.collect::<Result<Vec<_>>>()?;
        let named = (members.iter().enumerate())
            .map(|(at, it)| format!("m{at}=http://{}:{}", it.address, it.port + 1));
        let all = named.collect::<Vec<_>>().join(",");
        for (at, member) in members.iter_mut().enumerate() {
            member.membership = Some((format!("m{at}"), all.clone()));
            // None answers before most of them are there.
            member.spawn()?;
        }
        members.iter().try_for_each(Self::wait_for_it)?;
        Ok(members)
    }

    /// One that takes nobody without a certificate of the authority in this folder (`ca.pem`), where `localhost` has one too.
    ///
    /// # Errors
    /// If there is no etcd, or it does not listen.
    pub fn start_with_tls(certificates: &Path) -> Result<Self> {
        Self::of(Some(certificates.into()), &[])
    }

    fn of(certificates: Option<PathBuf>, options: &[String]) -> Result<Self> {
        let mut etcd = Self::prepare(Ipv4Addr::LOCALHOST.into(), |it: &Path| Command::new(it))?;
        etcd.certificates = certificates;
        etcd.options = options.to_vec();
        etcd.start_again()?;
        Ok(etcd)
    }

    /// One that is to run where these commands run, at this address. It does not run yet.
    ///
    /// # Errors
    /// If it has no folder to write to.
    pub fn prepare(
        address: IpAddr,
        command_of: impl Fn(&Path) -> Command + Send + Sync + 'static,
    ) -> Result<Self> {
        Ok(Self {
            folder: tempfile::tempdir()?,
            address,
            port: free_ports(),
            command_of: Box::new(command_of),
            certificates: None,
            options: Vec::new(),
            membership: None,
            child: None,
        })
    }

    /// With what it had.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn start_again(&mut self) -> Result<()> {
        self.spawn()?;
        self.wait_for_it()
    }

    /// The same where this process may not reach it.
    ///
    /// # Errors
    /// If it does not start.
    pub fn spawn(&mut self) -> Result<()> {
        let (here, peers) = (
            self.endpoint().replace("localhost", "127.0.0.1"),
            format!("http://{}:{}", self.address, self.port + 1),
        );
        let alone = ("default".to_owned(), format!("default={peers}"));
        let (name, members) = self.membership.as_ref().unwrap_or(&alone);
        let log = std::fs::File::create(self.folder.path().join("log"))?;
        let mut command = (self.command_of)(&executable());
        command
            .arg("--data-dir")
            .arg(self.folder.path().join("data"));
        for (option, value) in [
            ("--listen-client-urls", &here),
            ("--advertise-client-urls", &here),
            ("--listen-peer-urls", &peers),
            ("--initial-advertise-peer-urls", &peers),
            ("--initial-cluster", members),
            ("--name", name),
        ] {
            command.arg(option).arg(value);
        }
        if let Some(folder) = &self.certificates {
            command.arg("--client-cert-auth");
            for (option, file) in [
                ("--trusted-ca-file", "ca.pem"),
                ("--cert-file", "localhost.pem"),
                ("--key-file", "localhost.key"),
            ] {
                command.arg(option).arg(folder.join(file));
            }
        }
        command.args(&self.options);
        // Tests are run on aarch64 too.
        command.env("ETCD_UNSUPPORTED_ARCH", "arm64");
        let child = command.stdout(Stdio::null()).stderr(log).spawn();
        self.child =
            Some(child.context("starting etcd: `make test` fetches it (tests/fresh/etcd.sh)")?);
        Ok(())
    }

    /// Waits until it answers.
    ///
    /// # Errors
    /// If it does not.
    pub fn wait_for_it(&self) -> Result<()> {
        // A refusal is an answer too: it may have users.
        wait("etcd", || match self.certificates {
            None => self.said("kv/range", r#"{"key":"AA=="}"#, None).map(drop),
            Some(_) => {
                TcpStream::connect((self.address, self.port))?;
                Ok(())
            }
        })
    }

    /// As by a power cut.
    ///
    /// # Errors
    /// If it cannot be killed.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Its process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Where it answers.
    pub fn endpoint(&self) -> String {
        match self.certificates {
            None => format!("http://{}:{}", self.address, self.port),
            Some(_) => format!("https://localhost:{}", self.port),
        }
    }

    /// What it answers to a request of its v3 API.
    ///
    /// # Errors
    /// If it does not answer, or with an error.
    pub fn post(&self, path: &str, body: &str) -> Result<Value> {
        self.post_as(None, path, body)
    }

    /// The same with a user's token.
    ///
    /// # Errors
    /// If it does not answer, or with an error.
    pub fn post_as(&self, token: Option<&str>, path: &str, body: &str) -> Result<Value> {
        let answer = self.said(path, body, token)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("an answer")?;
        ensure!(head.contains(" 200 "), "{answer}");
        Ok(serde_json::from_str(body)?)
    }

    fn said(&self, path: &str, body: &str, token: Option<&str>) -> Result<String> {
        let mut stream = TcpStream::connect((self.address, self.port))?;
        stream.set_read_timeout(Some(ANSWER_WITHIN))?;
        let length = body.len();
        let token = token.map_or_else(String::new, |it| format!("authorization: {it}\r\n"));
        write!(
            stream,
            "POST /v3/{path} HTTP/1.0\r\n{token}content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.starts_with("HTTP/"), "{answer}");
        Ok(answer)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
