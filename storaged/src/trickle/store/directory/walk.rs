//! Listings of a directory that read no more than they give.

use rustix::fs::FileType;

use super::Inner;
use super::beneath::FolderEntry;
use crate::trickle::store::{
    KeyPrefix, LIST_ENTRIES_MAX, ListPage, ObjectEntry, ObjectKey, PAGE_ENTRIES_MAX, Rest,
    StoreError,
};

/// A name in a folder, in the order of keys: a folder counts with its slash.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    text: String,
    length: Option<u64>,
}

impl Inner {
    /// The first objects behind `after`, folder by folder, each read only when its turn comes.
    pub(super) fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        let limit = limit.min(PAGE_ENTRIES_MAX);
        let after = after.map_or("", ObjectKey::as_str);
        let mut page = ListPage::default();
        let mut waiting = self.behind(&under.text(), after)?;
        while let Some(name) = waiting.pop() {
            if let Some(length) = name.length {
                if page.entries.len() == limit {
                    page.rest = Rest::More;
                    break;
                }
                let key = name.text.parse()?;
                page.entries.push(ObjectEntry { key, length });
            } else {
                waiting.extend(self.behind(&name.text, after)?);
            }
        }
        Ok(page)
    }

    /// What a folder holds that may be or hold something behind `after`, the first one last.
    fn behind(&self, folder: &str, after: &str) -> Result<Vec<Name>, StoreError> {
        let mut names = self.names(folder)?;
        names.retain(|name| match name.length {
            Some(_) => name.text.as_str() > after,
            None => name.text.as_str() > after || after.starts_with(&name.text),
        });
        names.sort_by(|a, b| b.cmp(a));
        Ok(names)
    }

    /// Objects and folders in a folder; a folder's text ends in a slash.
    fn names(&self, folder: &str) -> Result<Vec<Name>, StoreError> {
        let listed = self.entries(folder.trim_end_matches('/'))?;
        Ok(listed
            .into_iter()
            .filter_map(|entry| name_of(folder, &entry))
            .collect())
    }

    /// The folders in a folder. One that has become empty may still be named.
    pub(super) fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        let prefix = under.text();
        let names = self.names(&prefix)?;
        let folders = names.into_iter().filter(|name| name.length.is_none());
        let mut folders: Vec<String> = folders
            .map(|name| name.text[prefix.len()..].trim_end_matches('/').to_owned())
            .collect();
        if folders.len() > LIST_ENTRIES_MAX {
            return Err(StoreError::Invalid {
                what: format!("folders of {prefix}"),
                expected: format!("at most {LIST_ENTRIES_MAX}"),
                got: folders.len().to_string(),
            });
        }
        folders.sort();
        Ok(folders)
    }
}

/// A directory entry as a name of the store; none if it is no key's, or no file or folder.
fn name_of(folder: &str, entry: &FolderEntry) -> Option<Name> {
    let text = format!("{folder}{}", entry.name);
    text.parse::<ObjectKey>().ok()?;
    match entry.kind {
        FileType::Directory => Some(Name {
            text: text + "/",
            length: None,
        }),
        FileType::RegularFile => Some(Name {
            text,
            length: Some(entry.length),
        }),
        _ => None,
    }
}
