//! Amazon's own chain of credentials, each in a process whose environment asks for it, against a stand-in of the service that gives them.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, post, put};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::net::TcpListener;
use tokio::process::Command;

use super::super::s3::S3;
use super::super::{Store, StoreError};
use super::s3::{BUCKET, Served, Tags, serve_with};
use super::{key, pattern};

const CHILD: &str = "trickle::store::tests::s3_chain::in_a_process_of_its_own";
const ENDPOINT: &str = "STORAGED_TEST_CHAIN_ENDPOINT";
const TOKEN: &str = "who-i-am";
/// A file that comes after the first request.
const LATER: &str = "STORAGED_TEST_CHAIN_LATER";

/// Which keys are given in turn, how long they are good for, and how often they were asked for.
#[derive(Debug)]
struct Given {
    keys: &'static [&'static str],
    good_for: Duration,
    asked: AtomicUsize,
    /// From so many answers on it fails.
    answers_max: usize,
    /// What came with requests for them.
    shown: Mutex<BTreeSet<String>>,
}

impl Given {
    fn new(keys: &'static [&'static str], good_for: Duration) -> Arc<Self> {
        Self::failing_after(usize::MAX, keys, good_for)
    }

    fn failing_after(
        answers_max: usize,
        keys: &'static [&'static str],
        good_for: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            answers_max,
            keys,
            good_for,
            asked: AtomicUsize::new(0),
            shown: Mutex::default(),
        })
    }

    /// The next key, its secret, and when it ends.
    fn next(&self) -> [String; 3] {
        let turn = self.asked.fetch_add(1, Ordering::Relaxed);
        let key = self.keys[turn % self.keys.len()];
        let until = OffsetDateTime::from(SystemTime::now() + self.good_for);
        let until = until
            .replace_nanosecond(0)
            .unwrap()
            .format(&Rfc3339)
            .unwrap();
        [key.into(), key.replace("key", "secret"), until]
    }

    fn json(&self) -> String {
        let [key, secret, until] = self.next();
        format!(
            r#"{{"Code":"Success","Type":"AWS-HMAC","LastUpdated":"2026-01-01T00:00:00Z","AccessKeyId":"{key}","SecretAccessKey":"{secret}","Token":"t","Expiration":"{until}"}}"#
        )
    }
}

async fn container(State(given): State<Arc<Given>>, headers: HeaderMap) -> String {
    let shown = headers.get("authorization").map(|it| it.to_str().unwrap());
    given.shown.lock().unwrap().extend(shown.map(str::to_owned));
    given.json()
}

async fn role(State(given): State<Arc<Given>>, body: String) -> String {
    given.shown.lock().unwrap().insert(body);
    let [key, secret, until] = given.next();
    format!(
        r#"<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey><SessionToken>t</SessionToken><Expiration>{until}</Expiration>
</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"#
    )
}

/// The services of a container, of roles and of an instance, at one address.
async fn providers(given: Arc<Given>) -> String {
    let instance = "/latest/meta-data/iam/security-credentials/";
    let broken = || async { StatusCode::INTERNAL_SERVER_ERROR };
    let router = Router::new()
        .route("/credentials", get(container))
        .route("/", post(role))
        .route("/broken", get(broken))
        .route(
            "/latest/api/token",
            put(async || ([("x-aws-ec2-metadata-token-ttl-seconds", "600")], "token")),
        )
        .route(instance, get(async || "trainer"))
        .route(
            &format!("{instance}trainer"),
            get(async |State(given): State<Arc<Given>>| {
                let answers = given.asked.load(Ordering::Relaxed) < given.answers_max;
                let failed = StatusCode::INTERNAL_SERVER_ERROR;
                answers.then(|| given.json()).ok_or(failed)
            }),
        )
        .with_state(given);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    format!("http://{address}")
}

/// Puts three objects in a process with this environment and nothing else; what it says.
async fn put_with(root: &Path, environment: &[(&str, &str)]) -> (String, BTreeSet<String>) {
    let Served {
        endpoint, wishes, ..
    } = serve_with(root, Tags::OfParts).await;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", CHILD, "--nocapture"]).env_clear();
    command.env(ENDPOINT, endpoint).env("HOME", root);
    command.envs(environment.iter().copied()).kill_on_drop(true);
    let output = command.output().await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let signers = wishes.lock().unwrap().signers.clone();
    (said.into_owned(), signers)
}

/// What the tests below start.
#[tokio::test]
async fn in_a_process_of_its_own() {
    let Ok(endpoint) = std::env::var(ENDPOINT) else {
        return;
    };
    let text = format!("bucket = {BUCKET:?}\nendpoint = {endpoint:?}");
    let store = S3::open(&toml::from_str(&text).unwrap()).unwrap();
    for object in ["a", "b", "c"] {
        if let (true, Ok(later)) = (object == "b", std::env::var(LATER)) {
            let credentials = "[train]\naws_access_key_id = key\naws_secret_access_key = secret\n";
            std::fs::write(later, credentials).unwrap();
        }
        match store.put_new(&key(object), pattern(10, 1)).await {
            Ok(()) => println!("put {object}"),
            Err(error @ StoreError::Denied { .. }) => println!("denied: {error}"),
            Err(error @ StoreError::Unavailable { .. }) => println!("unavailable: {error}"),
            Err(error) => panic!("{error}"),
        }
    }
}

const HOUR: Duration = Duration::from_secs(3_600);

#[tokio::test]
async fn each_provider_of_the_chain_gives_credentials() {
    let files = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = files.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let token = write("token", TOKEN);
    let shared = write(
        "shared",
        "[train]\naws_access_key_id = key\naws_secret_access_key = secret\n",
    );
    let says = r#"{"Version": 1, "AccessKeyId": "key", "SecretAccessKey": "secret"}"#;
    let program = write("says", says);
    let config = write(
        "config",
        &format!("[default]\ncredential_process = /bin/cat {program}\n"),
    );
    let given = Given::new(&["key"], HOUR);
    let service = providers(Arc::clone(&given)).await;
    let of_container = format!("{service}/credentials");
    let cases: [(&str, &[(&str, &str)]); 5] = [
        (
            "profile",
            &[
                ("AWS_PROFILE", "train"),
                ("AWS_SHARED_CREDENTIALS_FILE", &shared),
            ],
        ),
        (
            "program",
            &[("AWS_CONFIG_FILE", &config), ("PATH", "/usr/bin:/bin")],
        ),
        (
            "EKS Pod Identity",
            &[
                ("AWS_CONTAINER_CREDENTIALS_FULL_URI", &of_container),
                ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &token),
            ],
        ),
        (
            "IRSA",
            &[
                ("AWS_WEB_IDENTITY_TOKEN_FILE", &token),
                ("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer"),
                ("AWS_ENDPOINT_URL_STS", &service),
            ],
        ),
        (
            "instance",
            &[("AWS_EC2_METADATA_SERVICE_ENDPOINT", &service)],
        ),
    ];
    for (provider, environment) in cases {
        let root = tempfile::tempdir().unwrap();
        let (said, signers) = put_with(root.path(), environment).await;
        assert_eq!(said.matches("put ").count(), 3, "{provider}: {said}");
        assert_eq!(signers, BTreeSet::from(["key".to_owned()]), "{provider}");
    }
    // Of what is good for an hour one is enough: once for each of the three services.
    assert_eq!(given.asked.load(Ordering::Relaxed), 3);
    let shown = given.shown.lock().unwrap();
    assert!(shown.contains(TOKEN), "{shown:?}");
    assert!(
        shown
            .iter()
            .any(|it| it.contains(&format!("WebIdentityToken={TOKEN}"))),
        "{shown:?}"
    );
}

#[tokio::test]
async fn credentials_that_end_are_asked_for_again() {
    let given = Given::new(&["key", "key2"], Duration::from_secs(5));
    let of_container = providers(given).await + "/credentials";
    let environment = [("AWS_CONTAINER_CREDENTIALS_FULL_URI", &*of_container)];
    let root = tempfile::tempdir().unwrap();
    let (said, signers) = put_with(root.path(), &environment).await;
    assert_eq!(said.matches("put ").count(), 3, "{said}");
    assert_eq!(signers, ["key", "key2"].map(str::to_owned).into());
}

/// The service of an instance fails while what it gave last is still good.
#[tokio::test]
async fn credentials_are_used_on_while_nobody_gives_new_ones() {
    let given = Given::failing_after(1, &["key"], Duration::from_secs(5));
    let service = providers(given).await;
    let root = tempfile::tempdir().unwrap();
    let environment = [("AWS_EC2_METADATA_SERVICE_ENDPOINT", &*service)];
    let (said, signers) = put_with(root.path(), &environment).await;
    assert_eq!(said.matches("put ").count(), 3, "{said}");
    assert_eq!(signers, BTreeSet::from(["key".to_owned()]));
}

#[tokio::test]
async fn a_profile_that_comes_later_is_taken() {
    let root = tempfile::tempdir().unwrap();
    let later = tempfile::tempdir().unwrap();
    let file = later.path().join("credentials").display().to_string();
    let environment = [
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_PROFILE", "train"),
        ("AWS_SHARED_CREDENTIALS_FILE", &*file),
        (LATER, &*file),
    ];
    let (said, signers) = put_with(root.path(), &environment).await;
    assert_eq!(said.matches("put ").count(), 2, "{said}");
    assert_eq!(signers, BTreeSet::from(["key".to_owned()]));
}

#[tokio::test]
async fn without_any_it_is_denied_and_a_service_that_fails_is_tried_again() {
    let root = tempfile::tempdir().unwrap();
    let nothing = [("AWS_EC2_METADATA_DISABLED", "true")];
    let (said, _) = put_with(root.path(), &nothing).await;
    assert_eq!(said.matches("denied: access denied").count(), 3, "{said}");
    assert!(said.contains("no S3 credentials"), "{said}");
    let root = tempfile::tempdir().unwrap();
    let broken = providers(Given::new(&["key"], HOUR)).await + "/broken";
    let environment = [("AWS_CONTAINER_CREDENTIALS_FULL_URI", &*broken)];
    let (said, _) = put_with(root.path(), &environment).await;
    assert_eq!(said.matches("unavailable: ").count(), 3, "{said}");
}
