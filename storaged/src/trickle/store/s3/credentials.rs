//! Credentials from a file that may be replaced while the daemon runs: lines `NAME=VALUE` with the names that the
//! environment would have, as systemd's EnvironmentFile has them. The file is looked at before every request and read
//! when it is another one, so that what rotates it need tell nobody. One that cannot be used ends a start; while the daemon runs the last ones
//! are used on, as those of a role are: servers take them till they end.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;
use std::{fs, io};

use aws_credential_types::Credentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{self, ProvideCredentials, future};
use thiserror::Error;

use super::config::S3Config;
use crate::trickle::store::StoreError;
use crate::trickle::store::remote::read_credentials;

/// Credentials of a file.
#[derive(Debug)]
pub(super) struct FileCredentials {
    path: PathBuf,
    names: [String; 3],
    read: Mutex<LastRead>,
}

/// What was read last.
#[derive(Debug, Default)]
struct LastRead {
    good: Option<(FileState, Credentials)>,
    /// Why the file at its place now cannot be used, as it was told.
    told: Option<String>,
}

/// What tells a file from another one at its place.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileState {
    modified: SystemTime,
    length: u64,
}

/// Credentials that a file does not give.
#[derive(Debug, Error)]
enum FileError {
    #[error(transparent)]
    Read(#[from] io::Error),
    #[error(transparent)]
    Unusable(#[from] StoreError),
    #[error("no {name}")]
    Missing { name: String },
}

impl FileCredentials {
    /// Reads the file once, so that a mistake is told at start.
    pub fn open(path: PathBuf, config: &S3Config) -> Result<Self, StoreError> {
        let names = [
            config.access_key_env.clone(),
            config.secret_key_env.clone(),
            config.session_token_env.clone(),
        ];
        let credentials = Self {
            path,
            names,
            read: Mutex::default(),
        };
        let read = credentials.current();
        match read {
            Ok(_) => Ok(credentials),
            Err(FileError::Unusable(error)) => Err(error),
            Err(error) => Err(StoreError::Invalid {
                what: "S3 credentials".into(),
                expected: format!(
                    "{} and {} in {}",
                    credentials.names[0],
                    credentials.names[1],
                    credentials.path.display()
                ),
                got: error.to_string(),
            }),
        }
    }

    /// Those of the file, or the last ones that it had.
    fn current(&self) -> Result<Credentials, FileError> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = match self.of_file(&mut read) {
            Ok(credentials) => {
                read.told = None;
                return Ok(credentials);
            }
            Err(fault) => fault,
        };
        let Some((_, last)) = &read.good else {
            return Err(fault);
        };
        let last = last.clone();
        let reason = crate::driver::chain(&fault);
        if read.told.as_ref() != Some(&reason) {
            let path = self.path.display();
            tracing::warn!(%path, reason, "no new S3 credentials: the last ones are used on");
            read.told = Some(reason);
        }
        Ok(last)
    }

    fn of_file(&self, read: &mut LastRead) -> Result<Credentials, FileError> {
        let state = self.state()?;
        if let Some((_, known)) = read.good.as_ref().filter(|(of, _)| *of == state) {
            return Ok(known.clone());
        }
        let text = read_credentials(&self.path)?;
        let text = String::from_utf8_lossy(&text);
        let missing = |name: &str| FileError::Missing { name: name.into() };
        let value = |name: &str| value_of(&text, name).ok_or_else(|| missing(name));
        let [access, secret, token] = &self.names;
        let fresh = Credentials::new(
            value(access)?,
            value(secret)?,
            value_of(&text, token),
            None,
            "storaged",
        );
        if read.good.is_some() {
            tracing::info!(path = %self.path.display(), "took the S3 credentials anew");
        }
        read.good = Some((state, fresh.clone()));
        Ok(fresh)
    }

    fn state(&self) -> Result<FileState, FileError> {
        let metadata = fs::metadata(&self.path)?;
        Ok(FileState {
            modified: metadata.modified()?,
            length: metadata.len(),
        })
    }
}

impl ProvideCredentials for FileCredentials {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let read: provider::Result = self.current().map_err(CredentialsError::provider_error);
        future::ProvideCredentials::ready(read)
    }
}

fn value_of(text: &str, name: &str) -> Option<String> {
    let mut lines = text.lines().filter_map(|line| line.trim().split_once('='));
    let (_, value) = lines.find(|(key, _)| key.trim() == name)?;
    let value = value.trim().trim_matches(['"', '\'']);
    (!value.is_empty()).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_that_is_replaced_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("environment");
        let config: S3Config = toml::from_str("bucket = 'ckpt'").unwrap();
        let error = FileCredentials::open(path.clone(), &config).unwrap_err();
        assert!(error.to_string().contains("AWS_ACCESS_KEY_ID"), "{error}");
        let write = |key: &str| {
            let text = format!("# S3\nAWS_ACCESS_KEY_ID={key}\nAWS_SECRET_ACCESS_KEY=\"s=1\"\n");
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        };
        write("old");
        let credentials = FileCredentials::open(path.clone(), &config).unwrap();
        let current = || credentials.current().unwrap();
        assert_eq!(
            (current().access_key_id(), current().secret_access_key()),
            ("old", "s=1")
        );
        write("another");
        assert_eq!(current().access_key_id(), "another");
    }

    #[test]
    fn a_file_that_others_can_read_is_refused_at_the_start_and_not_taken_later() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("environment");
        let config: S3Config = toml::from_str("bucket = 'ckpt'").unwrap();
        let write = |key: &str, mode| {
            let text = format!("AWS_ACCESS_KEY_ID={key}\nAWS_SECRET_ACCESS_KEY=s\n");
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        };
        let open = || FileCredentials::open(path.clone(), &config);
        for exposed in [0o644, 0o604, 0o602] {
            write("old", exposed);
            let refused = open().unwrap_err().to_string();
            let mode = format!("{exposed:04o}");
            assert!(refused.contains(&mode), "{refused}");
            assert!(refused.contains("environment"), "{refused}");
        }
        // 0440: a Secret of Kubernetes that its pod's group may read, and what systemd's LoadCredential= looks like.
        for allowed in [0o600, 0o400, 0o640, 0o440] {
            fs::remove_file(&path).unwrap();
            write("old", allowed);
            open().unwrap();
        }
        let credentials = open().unwrap();
        fs::remove_file(&path).unwrap();
        write("another", 0o644);
        let current = || credentials.current().unwrap().access_key_id().to_owned();
        assert_eq!(current(), "old");
        let told = || credentials.read.lock().unwrap().told.clone();
        assert!(told().is_some_and(|it| it.contains("0644")), "{:?}", told());
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!((current().as_str(), told()), ("another", None));
    }

    /// Whatever rotates it may write it in two steps, or be killed between them.
    #[test]
    fn the_last_credentials_are_used_on_while_the_file_has_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("environment");
        let config: S3Config = toml::from_str("bucket = 'ckpt'").unwrap();
        let write = |text: &str| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        };
        write("AWS_ACCESS_KEY_ID=old\nAWS_SECRET_ACCESS_KEY=s\n");
        let credentials = FileCredentials::open(path.clone(), &config).unwrap();
        let current = || credentials.current().unwrap().access_key_id().to_owned();
        fs::remove_file(&path).unwrap();
        assert_eq!(current(), "old");
        write("AWS_ACCESS_KEY_ID=another\n");
        assert_eq!(current(), "old");
        write("AWS_ACCESS_KEY_ID=another\nAWS_SECRET_ACCESS_KEY=t\n");
        assert_eq!(current(), "another");
    }
}
