//! The corpus: successive states of small models that were trained on this machine.

use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;

/// The version of `corpus.json` that this reads.
const VERSION: u32 = 1;

#[derive(Deserialize)]
pub struct Corpus {
    version: u32,
    pub torch: String,
    pub seed: u64,
    pub cases: Vec<Case>,
}

#[derive(Deserialize)]
pub struct Case {
    pub name: String,
    pub element_size: u8,
    files: Files,
}

#[derive(Deserialize)]
struct Files {
    t: String,
    t1: String,
    t10: String,
}

/// A case with its bytes.
pub struct States {
    pub name: String,
    pub element: u8,
    pub t: Vec<u8>,
    pub t1: Vec<u8>,
    pub t10: Vec<u8>,
}

pub fn read(folder: &Path) -> anyhow::Result<Corpus> {
    let path = folder.join("corpus.json");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("{}: make it with `make corpus`", path.display()))?;
    let corpus: Corpus = serde_json::from_str(&text)?;
    ensure!(
        corpus.version == VERSION,
        "expected a corpus of version {VERSION}, got {}: make it again with `make corpus`",
        corpus.version
    );
    Ok(corpus)
}

impl Case {
    pub fn load(&self, folder: &Path) -> anyhow::Result<States> {
        let file = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).with_context(|| path.display().to_string())
        };
        Ok(States {
            name: self.name.clone(),
            element: self.element_size,
            t: file(&self.files.t)?,
            t1: file(&self.files.t1)?,
            t10: file(&self.files.t10)?,
        })
    }
}
