//! Changes of a job's token in the durable tier: `NAMESPACE/.storaged/successions/NUMBER`, each made by create-if-absent. Who lacks the
//! token that is changed makes none that counts, so that forged ones are only passed over.

use storaged_core::{ClaimFault, DurableFault, FoundSuccessions, SuccessionFault, Trust};
use storaged_wire::peer::HighMark;
use storaged_wire::succession::SUCCESSIONS_MAX;
use storaged_wire::{
    ConsentKey, ManifestKey, Namespace, Provenance, Rotation, Succession, decode, encode,
};

use super::index::{IndexReader, StepKey};
use super::provenance::PROVENANCE_OBJECT;
use super::store::{KeyPrefix, ObjectKey, StoreError};
use super::{Trickle, in_order, object_at};

impl Trickle {
    /// The changes of a job's token, and the newest checkpoint that the trust's keys have authenticated.
    ///
    /// # Errors
    /// Why the tier could not be asked.
    pub async fn find_successions(
        &self,
        namespace: &Namespace,
        trust: Option<&Trust>,
    ) -> Result<FoundSuccessions, DurableFault> {
        let records = self.successions(namespace).await?;
        let newest = match trust {
            Some(trust) => self.list(namespace, None, trust).await?.authentic,
            None => None,
        };
        Ok(FoundSuccessions { records, newest })
    }

    /// Objects that are no records are passed over: who may write there could put them in everybody's way.
    async fn successions(&self, namespace: &Namespace) -> Result<Vec<Succession>, DurableFault> {
        let under = KeyPrefix::folder(folder(namespace).parse()?);
        let entries = self.store.list(&under).await?;
        let mut found = Vec::new();
        let readable = entries.iter().rev();
        let readable = readable.filter(|one| one.length <= Succession::BYTES_MAX as u64);
        // Whatever has another name somebody else has put there: it is not read, however much it is.
        let numbered = readable.filter_map(|one| Some((one, number_of(&one.key)?)));
        for (entry, number) in numbered {
            let is_its =
                |record: &Succession| record.namespace == *namespace && record.number == number;
            match self.succession_at(&entry.key).await {
                Ok(Some(record)) if is_its(&record) => found.push(record),
                Ok(_) => {
                    tracing::warn!(key = %entry.key, "no change of a job's token, and passed over");
                }
                Err(fault) => return Err(fault),
            }
        }
        Ok(found)
    }

    async fn succession_at(&self, key: &ObjectKey) -> Result<Option<Succession>, DurableFault> {
        match self.store.get(key, None).await {
            Ok(bytes) => Ok(decode("succession", &bytes).ok()),
            Err(StoreError::NotFound { .. } | StoreError::NotPlain { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a token was not changed for another one by who holds it.
    pub(super) async fn check_current(
        &self,
        namespace: &Namespace,
        consent: &ConsentKey,
    ) -> Result<(), DurableFault> {
        let records = self.successions(namespace).await?;
        check_none(namespace, &records, |it| it.retires(consent))
    }

    /// The same of a key by which a node publishes.
    pub(super) async fn check_key(
        &self,
        namespace: &Namespace,
        key: &ManifestKey,
    ) -> Result<(), DurableFault> {
        let records = self.successions(namespace).await?;
        check_none(namespace, &records, |it| it.retires_key(key))
    }

    /// Writes a change of a job's token, and gives the record that is there then. What became durable while it was made is authenticated
    /// under the new key.
    ///
    /// # Errors
    /// Why the token stays what it is.
    pub async fn succeed(
        &self,
        rotation: &Rotation,
        retired: &ManifestKey,
    ) -> Result<Succession, SuccessionFault> {
        let Rotation { succession, keys } = rotation;
        let namespace = &succession.namespace;
        let known = self.check_job(namespace, succession.owner).await;
        known.map_err(|fault| match fault {
            ClaimFault::WrongOwner => SuccessionFault::WrongOwner,
            ClaimFault::Durable(fault) => SuccessionFault::Durable(fault),
        })?;
        let there = self.put_succession(succession).await;
        let there = there.map_err(SuccessionFault::Durable)?;
        if !there.retires_key(retired) {
            let text = format!(
                "change {} of the token of {namespace} is in the durable tier, and not by who holds the token: remove it there",
                there.number
            );
            return Err(SuccessionFault::Durable(DurableFault::Conflict(text)));
        }
        if !there.is_under(&keys.newest) {
            return Err(SuccessionFault::Another(Box::new(there)));
        }
        let up_to = keys.retired.last().and_then(|one| one.up_to);
        let signed = self.sign_again(rotation, retired, up_to).await;
        signed.map_err(SuccessionFault::Durable)?;
        Ok(there)
    }

    /// The record of this number that is there: this one, or one that came first.
    async fn put_succession(&self, succession: &Succession) -> Result<Succession, DurableFault> {
        let namespace = &succession.namespace;
        let name = in_order(succession.number.into());
        let key: ObjectKey = format!("{}/{name}", folder(namespace)).parse()?;
        match self.store.put_new(&key, encode(succession).into()).await {
            Ok(()) => Ok(succession.clone()),
            Err(StoreError::AlreadyExists { .. }) => {
                let there = self.succession_at(&key).await?;
                there.ok_or_else(|| {
                    DurableFault::Conflict(format!(
                        "{key}: expected no object or the change of a token, got something else: remove it"
                    ))
                })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Checkpoints that became durable after the record was begun are not to be refused.
    async fn sign_again(
        &self,
        rotation: &Rotation,
        retired: &ManifestKey,
        up_to: Option<HighMark>,
    ) -> Result<(), DurableFault> {
        let namespace = &rotation.succession.namespace;
        let is_newer = |place: &StepKey| {
            let place = HighMark {
                run: place.run,
                step: place.step,
            };
            up_to.is_none_or(|up_to| place > up_to)
        };
        let mut reader = IndexReader::new(self, namespace)?;
        while let Some(page) = reader.next().await? {
            let newer: Vec<StepKey> = page
                .iter()
                .filter(|one| one.is_entry() && is_newer(&one.place))
                .map(|one| one.place)
                .collect();
            if newer.is_empty() && !page.is_empty() {
                return Ok(());
            }
            for place in newer {
                let at = object_at(namespace, place.run, place.step, PROVENANCE_OBJECT)?;
                let Some(bytes) = self.read_provenance(&at).await? else {
                    continue;
                };
                if let Ok(record) = Provenance::from_object(&bytes, retired) {
                    let object = record.to_object(&rotation.keys.newest);
                    self.put_mine(&at, object.into()).await?;
                }
            }
        }
        Ok(())
    }
}

fn check_none(
    namespace: &Namespace,
    records: &[Succession],
    retires: impl Fn(&Succession) -> bool,
) -> Result<(), DurableFault> {
    if !records.iter().any(retires) {
        return Ok(());
    }
    Err(DurableFault::TokenChanged(format!(
        "the token of {namespace} was changed for another one, as the durable tier knows: use the new one"
    )))
}

fn number_of(key: &ObjectKey) -> Option<u32> {
    let (_, name) = key.as_str().rsplit_once('/')?;
    let number: u32 = name.parse().ok()?;
    let is_one = (1..=SUCCESSIONS_MAX).contains(&number) && in_order(number.into()) == name;
    is_one.then_some(number)
}

fn folder(namespace: &Namespace) -> String {
    format!("{namespace}/.storaged/successions")
}
