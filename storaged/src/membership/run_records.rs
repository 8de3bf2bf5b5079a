//! Runs in the registry: one record per number of a namespace, beside the rosters. Whoever creates a number's record has that number; a number
//! below one that is there is given to nobody. An answer that was lost costs nothing: a record that is there already says whose it is.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use storaged_core::Registration;
use storaged_wire::{Namespace, RunId};

use super::registry::{NumberedRecord, NumberedRecords, Proposal, Registry, RegistryError};
use super::roster::Roster;

/// Layout of the record.
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct RunRecord {
    version: u32,
    namespace: String,
    run: String,
}

impl Registry {
    /// Gives a run its number, unless that or a higher one is taken. `known` is the roster that this node goes by.
    ///
    /// # Errors
    /// [`RegistryError`] if the registry does not answer, has gone back to before the known roster, or has a record there that is no run: the
    /// number may have been taken for this run all the same, which the next call tells.
    pub async fn register_run(
        &self,
        known: &Roster,
        namespace: &Namespace,
        run: RunId,
    ) -> Result<Registration, RegistryError> {
        // One that was put back from an older copy may have forgotten runs too.
        self.confirm(known).await?;
        let records = self.records.runs_of(namespace);
        if let Some(newest) = newest(&*records, namespace).await?
            && newest.number() >= run.number()
        {
            return Ok(judged(newest, run));
        }
        let record = RunRecord {
            version: VERSION,
            namespace: namespace.to_string(),
            run: run.to_string(),
        };
        let record = Bytes::from(serde_json::to_vec(&record).unwrap_or_default());
        let created = records.create(run.number(), record).await?;
        // Read anew in any case: a request that was held up on its way creates a number that others have gone past since.
        let newest = newest(&*records, namespace).await?;
        match (created, newest) {
            (Proposal::Taken | Proposal::Outrun, Some(it)) if it.number() >= run.number() => {
                Ok(judged(it, run))
            }
            _ => Err(RegistryError::RunLost {
                namespace: namespace.clone(),
                run,
            }),
        }
    }
}

/// What the newest run of a namespace says of one that has its number or a lower one.
fn judged(newest: RunId, run: RunId) -> Registration {
    if newest == run {
        return Registration::Registered;
    }
    Registration::Taken {
        highest: newest.number(),
    }
}

async fn newest(
    records: &dyn NumberedRecords,
    namespace: &Namespace,
) -> Result<Option<RunId>, RegistryError> {
    let found = records.newest().await?;
    match found {
        Some(found) => Ok(Some(parsed(&found, namespace)?)),
        None => {
            records.check_place().await?;
            Ok(None)
        }
    }
}

fn parsed(found: &NumberedRecord, namespace: &Namespace) -> Result<RunId, RegistryError> {
    let wrong = |expected: &str, got: String| RegistryError::Run {
        name: found.name.clone(),
        namespace: namespace.clone(),
        expected: expected.into(),
        got,
    };
    let record: RunRecord = serde_json::from_slice(&found.bytes)
        .map_err(|error| wrong("a record of a run", error.to_string()))?;
    if record.version != VERSION {
        let got = format!("{}: upgrade this release", record.version);
        return Err(wrong("layout 1", got));
    }
    if record.namespace != namespace.as_str() {
        return Err(wrong("one of that namespace", record.namespace));
    }
    let run: RunId = (record.run.parse())
        .map_err(|error: storaged_wire::RunIdError| wrong("a run", error.to_string()))?;
    if found
        .name
        .ends_with(&super::registry::name_of_number(run.number()))
    {
        return Ok(run);
    }
    Err(wrong("the run of its number", run.to_string()))
}
