//! An API server of Kubernetes for tests, as far as a daemon asks one: ConfigMaps, one node and its pod, on loopback. No real one can be had
//! here. It is the strict kind: what is immutable stays, versions are compared, a namespace must be there, and names are listed in the
//! order in which they were created, as those of servers over SQL (kine) were.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

/// The namespace that is there.
pub const NAMESPACE: &str = "storaged";
/// Kubernetes takes no more in a ConfigMap.
const CONFIG_MAP_BYTES_MAX: usize = 1 << 20;

/// What befalls a request.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// It is not done: this HTTP status, and so many seconds to wait.
    Status(u16, Option<u64>),
    /// It is not done, because of something of this kind that is in the way; with the server's word for that.
    InTheWay(&'static str, &'static str),
    /// It is done, and the connection ends before the answer.
    AnswerLost,
    /// It is not done, and the connection ends.
    Cut,
    /// A proxy answers this status with a page.
    Page(u16),
}

#[derive(Default)]
struct Shelf {
    version: u64,
    /// By namespace and name.
    config_maps: BTreeMap<String, Value>,
    others: BTreeMap<String, Value>,
    namespaces: BTreeSet<String>,
    token: Option<String>,
    forbidden: BTreeSet<&'static str>,
    /// For the next requests of a method, one each.
    faults: BTreeMap<&'static str, VecDeque<Fault>>,
    is_away: bool,
    asked: BTreeMap<String, usize>,
}

/// The server.
pub struct ApiServer {
    address: SocketAddr,
    scheme: &'static str,
    shelf: Arc<Mutex<Shelf>>,
}

struct Asked {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Answer {
    status: u16,
    body: Value,
}

fn locked(shelf: &Mutex<Shelf>) -> MutexGuard<'_, Shelf> {
    shelf.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Answer {
    fn failure(status: u16, reason: &str, kind: &str, message: &str) -> Self {
        let body = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": status,
            "reason": reason, "message": message, "details": {"kind": kind},
        });
        Self { status, body }
    }

    const fn with(status: u16, body: Value) -> Self {
        Self { status, body }
    }
}

impl ApiServer {
    /// Without certificates, as `kubectl proxy`.
    ///
    /// # Errors
    /// If it cannot listen.
    pub fn start() -> Result<Self> {
        Self::serve("http", |stream| Ok(Box::new(stream)))
    }

    /// With the certificate for `localhost` in this folder (`registries::write_certificates`), for those who have the token.
    ///
    /// # Errors
    /// If it cannot listen, or the certificate cannot be used.
    pub fn start_with_tls(certificates: &Path, token: &str) -> Result<Self> {
        let file = |name: &str| certificates.join(name);
        let chain = CertificateDer::pem_file_iter(file("localhost.pem"))?;
        let chain = chain.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_file(file("localhost.key"))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        let config = Arc::new(config);
        let server = Self::serve("https", move |stream| {
            let connection = ServerConnection::new(config.clone())?;
            Ok(Box::new(StreamOwned::new(connection, stream)))
        })?;
        server.set_token(token);
        Ok(server)
    }

    fn serve(
        scheme: &'static str,
        open: impl Fn(TcpStream) -> Result<Box<dyn Stream>> + Send + Sync + 'static,
    ) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shelf = Arc::new(Mutex::new(Shelf {
            namespaces: [NAMESPACE.to_owned()].into(),
            ..Shelf::default()
        }));
        let (served, open) = (shelf.clone(), Arc::new(open));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (shelf, open) = (served.clone(), open.clone());
                std::thread::spawn(move || open(stream).and_then(|it| talk(it, &shelf)));
            }
        });
        Ok(Self {
            address,
            scheme,
            shelf,
        })
    }

    /// Where it answers.
    pub fn server(&self) -> String {
        let host = if self.scheme == "https" {
            "localhost"
        } else {
            "127.0.0.1"
        };
        format!("{}://{host}:{}", self.scheme, self.address.port())
    }

    /// Takes this token alone from now on.
    pub fn set_token(&self, token: &str) {
        locked(&self.shelf).token = Some(token.into());
    }

    /// What the next requests of a method meet, one after the other.
    pub fn fault(&self, method: &'static str, faults: impl IntoIterator<Item = Fault>) {
        let mut shelf = locked(&self.shelf);
        shelf.faults.entry(method).or_default().extend(faults);
    }

    /// The account has no rule for a method.
    pub fn forbid(&self, method: &'static str) {
        locked(&self.shelf).forbidden.insert(method);
    }

    /// It answers nobody.
    pub fn leave(&self) {
        locked(&self.shelf).is_away = true;
    }

    /// It answers again.
    pub fn come_back(&self) {
        locked(&self.shelf).is_away = false;
    }

    /// Somebody deletes a namespace.
    pub fn delete_namespace(&self, name: &str) {
        locked(&self.shelf).namespaces.remove(name);
    }

    /// Somebody deletes a ConfigMap.
    pub fn delete(&self, name: &str) {
        let name = format!("{NAMESPACE}/{name}");
        locked(&self.shelf).config_maps.remove(&name);
    }

    /// Puts an object of another kind there, by its path.
    pub fn put(&self, path: &str, object: Value) {
        locked(&self.shelf).others.insert(path.into(), object);
    }

    /// The names of its ConfigMaps.
    pub fn names(&self) -> Vec<String> {
        let shelf = locked(&self.shelf);
        let names = shelf.config_maps.keys();
        names
            .filter_map(|it| it.split_once('/'))
            .map(|(_, name)| name.into())
            .collect()
    }

    /// How often a method was used, or `LIST`.
    pub fn asked(&self, method: &str) -> usize {
        let shelf = locked(&self.shelf);
        shelf.asked.get(method).copied().unwrap_or_default()
    }
}

/// A connection, in clear or not.
trait Stream: Read + Write {}

impl<T: Read + Write> Stream for T {}

/// Answers until the other side ends it.
fn talk(stream: Box<dyn Stream>, shelf: &Mutex<Shelf>) -> Result<()> {
    let mut reader = BufReader::new(stream);
    while let Some(asked) = read(&mut reader)? {
        let fault = {
            let mut shelf = locked(shelf);
            if shelf.is_away {
                return Ok(());
            }
            let faults = shelf.faults.get_mut(asked.method.as_str());
            faults.and_then(VecDeque::pop_front)
        };
        let (mut extra, mut kind) = (String::new(), "application/json");
        let (status, body) = match fault {
            Some(Fault::Cut) => return Ok(()),
            Some(Fault::Page(status)) => {
                kind = "text/html";
                (status, "<html>not here</html>".into())
            }
            Some(Fault::Status(status, wait)) => {
                extra = wait.map_or_else(String::new, |it| format!("retry-after: {it}\r\n"));
                let failure = Answer::failure(status, "TooManyRequests", "", "try again later");
                (status, failure.body.to_string())
            }
            Some(Fault::InTheWay(kind, reason)) => {
                let message = format!(
                    "Operation cannot be fulfilled on {kind} \"one\": the object has been modified"
                );
                let failure = Answer::failure(409, reason, kind, &message);
                (failure.status, failure.body.to_string())
            }
            Some(Fault::AnswerLost) => {
                locked(shelf).answer(&asked)?;
                return Ok(());
            }
            None => {
                let answer = locked(shelf).answer(&asked)?;
                (answer.status, answer.body.to_string())
            }
        };
        let head = format!("content-type: {kind}\r\ncontent-length: {}", body.len());
        write!(
            reader.get_mut(),
            "HTTP/1.1 {status} It\r\n{extra}{head}\r\n\r\n{body}"
        )?;
        reader.get_mut().flush()?;
    }
    Ok(())
}

fn read(reader: &mut BufReader<Box<dyn Stream>>) -> Result<Option<Asked>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(ToOwned::to_owned);
    let method = words.next().context("a method")?;
    let path = words.next().context("a path")?;
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let length = headers.get("content-length").map_or(Ok(0), |it| it.parse());
    let mut body = vec![0; length?];
    reader.read_exact(&mut body)?;
    Ok(Some(Asked {
        method,
        path,
        headers,
        body,
    }))
}

impl Shelf {
    fn answer(&mut self, asked: &Asked) -> Result<Answer> {
        *self.asked.entry(asked.method.clone()).or_default() += 1;
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        if bearer.is_some_and(|it| asked.headers.get("authorization") != Some(&it)) {
            return Ok(Answer::failure(401, "Unauthorized", "", "Unauthorized"));
        }
        if self.forbidden.contains(asked.method.as_str()) {
            let message = "User \"system:serviceaccount:storaged:storaged\" cannot do that";
            return Ok(Answer::failure(403, "Forbidden", "configmaps", message));
        }
        let (path, query) = asked.path.split_once('?').unwrap_or((&asked.path, ""));
        if let Some(object) = self.others.get(path) {
            return Ok(Answer::with(200, object.clone()));
        }
        let Some(below) = path.strip_prefix("/api/v1/namespaces/") else {
            let kind = path.rsplit('/').nth(1).unwrap_or_default();
            return Ok(Answer::failure(404, "NotFound", kind, "not found"));
        };
        let (namespace, rest) = below.split_once('/').context("a resource")?;
        let is_there = self.namespaces.contains(namespace);
        match (asked.method.as_str(), rest.split_once('/')) {
            ("GET", None) => self.list(namespace, asked, query),
            ("GET", Some(("configmaps", name))) => Ok(self.get(namespace, name)),
            ("POST", None) if !is_there => {
                let message = format!("namespaces \"{namespace}\" not found");
                Ok(Answer::failure(404, "NotFound", "namespaces", &message))
            }
            ("POST", None) => self.create(namespace, serde_json::from_slice(&asked.body)?),
            ("PUT", Some(("configmaps", name))) => {
                self.replace(namespace, name, serde_json::from_slice(&asked.body)?)
            }
            (_, resource) => {
                let kind = resource.map_or("", |(kind, _)| kind);
                Ok(Answer::failure(404, "NotFound", kind, "not found"))
            }
        }
    }

    fn get(&self, namespace: &str, name: &str) -> Answer {
        match self.config_maps.get(&format!("{namespace}/{name}")) {
            Some(found) => Answer::with(200, found.clone()),
            None => absent(name),
        }
    }

    fn create(&mut self, namespace: &str, mut object: Value) -> Result<Answer> {
        let name = name_of(&object)?;
        let key = format!("{namespace}/{name}");
        if self.config_maps.contains_key(&key) {
            let message = format!("configmaps \"{name}\" already exists");
            return Ok(Answer::failure(
                409,
                "AlreadyExists",
                "configmaps",
                &message,
            ));
        }
        // base64 is four letters for three bytes.
        let content = [&object["data"], &object["binaryData"]];
        let texts = content.into_iter().filter_map(Value::as_object).flatten();
        let bytes: usize = texts
            .map(|(_, text)| text.as_str().map_or(0, str::len) * 3 / 4)
            .sum();
        if bytes > CONFIG_MAP_BYTES_MAX {
            let message = "Too long: must have at most 1048576 bytes";
            return Ok(Answer::failure(422, "Invalid", "configmaps", message));
        }
        self.version += 1;
        object["metadata"]["uid"] = format!("{:020}", self.version).into();
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.config_maps.insert(key, object.clone());
        Ok(Answer::with(201, object))
    }

    fn replace(&mut self, namespace: &str, name: &str, mut object: Value) -> Result<Answer> {
        let Some(there) = self.config_maps.get_mut(&format!("{namespace}/{name}")) else {
            return Ok(absent(name));
        };
        if there["immutable"] == true {
            let message = "field is immutable when `immutable` is set";
            return Ok(Answer::failure(422, "Invalid", "configmaps", message));
        }
        let asked = &object["metadata"]["resourceVersion"];
        if asked.is_string() && *asked != there["metadata"]["resourceVersion"] {
            let message = "the object has been modified; please apply your changes to the latest version and try again";
            return Ok(Answer::failure(409, "Conflict", "configmaps", message));
        }
        self.version += 1;
        object["metadata"]["uid"] = there["metadata"]["uid"].clone();
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        there.clone_from(&object);
        Ok(Answer::with(200, object))
    }

    fn list(&mut self, namespace: &str, asked: &Asked, query: &str) -> Result<Answer> {
        *self.asked.entry("LIST".into()).or_default() += 1;
        let selector = query.strip_prefix("labelSelector=").context("a selector")?;
        let (label, value) = selector.split_once("%3D").context("a selector")?;
        let mut found: Vec<Value> = self.config_maps.values().cloned().collect();
        found.retain(|it| {
            it["metadata"]["labels"][label] == value && it["metadata"]["namespace"] == namespace
        });
        found.sort_by_key(|it| it["metadata"]["uid"].as_str().map(ToOwned::to_owned));
        let accept = asked.headers.get("accept").context("what it takes")?;
        let (mut kind, mut version) = ("ConfigMapList", "v1");
        if accept.contains("as=PartialObjectMetadataList") {
            (kind, version) = ("PartialObjectMetadataList", "meta.k8s.io/v1");
            found.iter_mut().for_each(|it| {
                *it = json!({"metadata": it["metadata"]});
            });
        }
        // As the real one says it of nothing.
        let items = (!found.is_empty()).then_some(found);
        let metadata = json!({"resourceVersion": self.version.to_string()});
        let body =
            json!({"kind": kind, "apiVersion": version, "metadata": metadata, "items": items});
        Ok(Answer::with(200, body))
    }
}

fn absent(name: &str) -> Answer {
    let message = format!("configmaps \"{name}\" not found");
    Answer::failure(404, "NotFound", "configmaps", &message)
}

fn name_of(object: &Value) -> Result<String> {
    let name = object["metadata"]["name"].as_str().context("a name")?;
    Ok(name.to_owned())
}
