//! A job's token: what only the job knows, and what its namespace belongs to.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use storaged_wire::local::{TOKEN_BYTES_MAX, TOKEN_BYTES_MIN, is_token_length};
use thiserror::Error;

/// The environment variable that names a file with the job's token.
pub const TOKEN_FILE_VARIABLE: &str = "STORAGED_TOKEN_FILE";
/// The environment variable that holds the token itself, where there is no file.
pub const TOKEN_VARIABLE: &str = "STORAGED_TOKEN";

/// What users may do who are neither the file's nor of its group.
const MODE_OTHERS: u32 = 0o007;

/// Why there is no token to be had.
#[derive(Debug, Error)]
pub enum TokenError {
    /// The file cannot be read.
    #[error("the secret in {path} cannot be read")]
    Unreadable {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// It is something else.
    #[error("expected a file with a secret, got {path}, which is no regular file")]
    NotAFile { path: PathBuf },
    /// Anybody may read it, and be the job.
    #[error(
        "expected a file that other users cannot use, got {path} with mode {mode:04o}: chmod 600 it, and make a new one if others may have read it"
    )]
    Mode { path: PathBuf, mode: u32 },
    /// It holds no token, or one that can be guessed.
    #[error(
        "expected a job token of {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} bytes, as `storaged token FILE` makes, got {bytes}"
    )]
    Length { bytes: usize },
}

/// Looks whether a token is long enough; none at all is, for those who are told apart by their tenant alone.
///
/// # Errors
/// [`TokenError::Length`].
pub fn check_token(token: &[u8]) -> Result<(), TokenError> {
    let bytes = token.len();
    if is_token_length(bytes) {
        return Ok(());
    }
    Err(TokenError::Length { bytes })
}

/// Reads a file that other users cannot read, at most so many bytes of it.
///
/// # Errors
/// [`TokenError`] if there is none, or if other users could read it too.
pub fn read_secret(path: &Path, bytes_max: u64) -> Result<Vec<u8>, TokenError> {
    let unreadable = |source| TokenError::Unreadable {
        path: path.into(),
        source,
    };
    // Opening something else, such as a FIFO, must not wait for whoever is at its other end.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.map_err(|error| unreadable(error.into()))?);
    check_file(&file, path)?;
    let mut text = Vec::new();
    let read = file.take(bytes_max).read_to_end(&mut text);
    read.map_err(unreadable)?;
    Ok(text)
}

/// Reads a job's token from a file. White space around it, such as a line feed, is not part of it.
///
/// # Errors
/// [`TokenError`] if there is none, or if other users could read it too.
pub fn read_token(path: &Path) -> Result<Vec<u8>, TokenError> {
    let text = read_secret(path, 2 * TOKEN_BYTES_MAX as u64)?;
    let token = text.trim_ascii();
    check_token(token)?;
    // A file is named for what is in it.
    if token.is_empty() {
        return Err(TokenError::Length { bytes: 0 });
    }
    Ok(token.to_vec())
}

/// Looks at the opened file, so that nobody can put another one in its place in between.
fn check_file(file: &File, path: &Path) -> Result<(), TokenError> {
    let found = file.metadata().map_err(|source| TokenError::Unreadable {
        path: path.into(),
        source,
    })?;
    if !found.is_file() {
        return Err(TokenError::NotAFile { path: path.into() });
    }
    let mode = found.permissions().mode() & 0o7777;
    if mode & MODE_OTHERS != 0 {
        return Err(TokenError::Mode {
            path: path.into(),
            mode,
        });
    }
    Ok(())
}

/// The job's token as the process's environment has it: in the file that [`TOKEN_FILE_VARIABLE`] names, or else in [`TOKEN_VARIABLE`]. Empty
/// without either.
///
/// # Errors
/// [`TokenError`] if a file is named that holds none.
pub fn token_of_environment() -> Result<Vec<u8>, TokenError> {
    let named = std::env::var_os(TOKEN_FILE_VARIABLE).filter(|path| !path.is_empty());
    if let Some(path) = named {
        return read_token(Path::new(&path));
    }
    let token = std::env::var_os(TOKEN_VARIABLE).unwrap_or_default();
    Ok(token.into_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn written(text: &str, mode: u32) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        (folder, path)
    }

    #[test]
    fn a_token_is_read_without_the_white_space_around_it() {
        let (_folder, path) = written(&format!("{TOKEN}\n"), 0o600);
        assert_eq!(read_token(&path).unwrap(), TOKEN.as_bytes());
        // A secret of Kubernetes that its pod's group may read.
        let (_folder, path) = written(TOKEN, 0o440);
        assert_eq!(read_token(&path).unwrap(), TOKEN.as_bytes());
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        for mode in [0o644, 0o604, 0o602] {
            let (_folder, path) = written(TOKEN, mode);
            let refused = read_token(&path).unwrap_err();
            assert!(matches!(refused, TokenError::Mode { .. }), "{refused}");
        }
    }

    #[test]
    fn a_file_without_a_token_is_refused() {
        let long = "x".repeat(TOKEN_BYTES_MAX + 1);
        for text in ["", "  \n", "too short", &long] {
            let (_folder, path) = written(text, 0o600);
            let refused = read_token(&path).unwrap_err();
            assert!(matches!(refused, TokenError::Length { .. }), "{refused}");
        }
        let (folder, path) = written(TOKEN, 0o600);
        let refused = read_token(folder.path()).unwrap_err();
        assert!(matches!(refused, TokenError::NotAFile { .. }), "{refused}");
        std::fs::remove_file(&path).unwrap();
        let refused = read_token(&path).unwrap_err();
        assert!(
            matches!(refused, TokenError::Unreadable { .. }),
            "{refused}"
        );
    }
}
