//! Finding unfinished uploads and their parts again.

use std::collections::BTreeMap;

use aws_sdk_s3::types::ChecksumType;
use md5::{Digest, Md5};

use super::failure::{Context, answer_lacks};
use super::{PartDigest, PartNumber, PartState, S3, S3_LIMITS, objects};
use crate::trickle::store::remote::check_listed;
use crate::trickle::store::{ObjectKey, PartBytes, StoreError, Upload, UploadId};

/// Whether an entity tag is the one that S3 gives an object of these parts: the MD5 of the parts' own, and how many there are. Servers whose
/// tags are something else (some encrypt) say nothing by it.
pub(super) fn is_of_parts(tag: Option<&str>, upload: &Upload) -> bool {
    let mut all = Md5::new();
    for part in upload.done().values() {
        let (PartDigest::ETag(tag) | PartDigest::Crc64 { tag, .. }) = &part.digest else {
            return false;
        };
        match hex::decode(tag.trim_matches('"')) {
            Ok(bytes) if bytes.len() == 16 => all.update(&bytes),
            _ => return false,
        }
    }
    let expected = format!("{}-{}", hex::encode(all.finalize()), upload.done().len());
    tag.is_some_and(|tag| tag.trim_matches('"').eq_ignore_ascii_case(&expected))
}

/// The size of an upload's parts, which the server does not say: all but the last have it. One part alone that is shorter than asked for may
/// be the last.
pub(super) fn size_of(parts: &BTreeMap<PartNumber, PartState>, asked: PartBytes) -> PartBytes {
    let longest = parts.values().map(|part| part.length).max().unwrap_or(0);
    let full = parts.values().filter(|part| part.length == longest).count();
    if longest > asked.get() || full > 1 {
        PartBytes::new(longest, &S3_LIMITS).unwrap_or(asked)
    } else {
        asked
    }
}

impl S3 {
    /// The unfinished uploads of one key, oldest first.
    pub(super) async fn upload_ids(&self, key: &ObjectKey) -> Result<Vec<UploadId>, StoreError> {
        let name = self.name(key);
        let uploads = self.list_uploads(&name).await?;
        Ok(uploads
            .into_iter()
            .filter(|(found, _)| *found == name)
            .map(|(_, id)| id)
            .collect())
    }

    pub(super) async fn create_upload(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
    ) -> Result<Upload, StoreError> {
        let context = self.context("begin upload of", key);
        let request = self.client.create_multipart_upload();
        let request = request.bucket(&self.bucket).key(self.name(key));
        let objects = &self.objects;
        let algorithm = objects.algorithm();
        // S3 has no other kind of this checksum.
        let whole = algorithm.as_ref().map(|_| ChecksumType::FullObject);
        let request = request
            .set_storage_class(objects.storage_class.clone())
            .set_server_side_encryption(objects.encryption.clone())
            .set_ssekms_key_id(objects.kms_key.clone())
            .set_tagging(objects.tagging.clone())
            .set_checksum_algorithm(algorithm)
            .set_checksum_type(whole);
        let sent = request.send().await;
        let answer = sent.map_err(|error| context.error(error))?;
        let id = answer
            .upload_id
            .ok_or_else(|| answer_lacks(&context, "an upload id"))?;
        Ok(Upload::new(key.clone(), UploadId(id), part_bytes))
    }

    /// Names and ids of the unfinished uploads whose name starts with `prefix`, oldest first.
    pub(super) async fn list_uploads(
        &self,
        prefix: &str,
    ) -> Result<Vec<(String, UploadId)>, StoreError> {
        let what = format!("list uploads s3://{}/{prefix}", self.bucket);
        let context = Context {
            what,
            key: None,
            upload: None,
        };
        let mut found = Vec::new();
        let mut markers = (None, None);
        loop {
            let request = self
                .client
                .list_multipart_uploads()
                .bucket(&self.bucket)
                .prefix(prefix);
            let request = request
                .set_key_marker(markers.0)
                .set_upload_id_marker(markers.1);
            let page = request.send().await.map_err(|error| context.error(error))?;
            for upload in page.uploads() {
                if let (Some(name), Some(id)) = (upload.key(), upload.upload_id()) {
                    let begun = upload
                        .initiated()
                        .map(|time| (time.secs(), time.subsec_nanos()));
                    found.push((begun, name.to_owned(), UploadId(id.to_owned())));
                }
            }
            check_listed(&context.what, found.len())?;
            let more = page.is_truncated() == Some(true) && page.next_key_marker.is_some();
            if !more {
                found.sort();
                return Ok(found.into_iter().map(|(_, name, id)| (name, id)).collect());
            }
            markers = (page.next_key_marker, page.next_upload_id_marker);
        }
    }

    /// The parts that the server has.
    pub(super) async fn parts_of(
        &self,
        upload: &Upload,
    ) -> Result<BTreeMap<PartNumber, PartState>, StoreError> {
        let context = self.upload_context("list parts of", upload);
        let (mut parts, mut marker) = (BTreeMap::new(), None);
        loop {
            let request = self.client.list_parts().bucket(&self.bucket);
            let request = request
                .key(self.name(upload.key()))
                .upload_id(upload.id().to_string());
            let sent = request.set_part_number_marker(marker).send().await;
            let page = sent.map_err(|error| context.error(error))?;
            for part in page.parts() {
                let number = part
                    .part_number()
                    .and_then(|number| u32::try_from(number - 1).ok());
                let length = part.size().and_then(|size| u64::try_from(size).ok());
                let (Some(number), Some(length), Some(tag)) = (number, length, part.e_tag()) else {
                    continue;
                };
                let tag = tag.to_owned();
                let digest = match objects::crc64_said(part.checksum_crc64_nvme()) {
                    Some(sum) => PartDigest::Crc64 { sum, tag },
                    None => PartDigest::ETag(tag),
                };
                parts.insert(PartNumber(number), PartState { length, digest });
            }
            check_listed(&context.what, parts.len())?;
            let more = page.is_truncated() == Some(true) && page.next_part_number_marker.is_some();
            if !more {
                return Ok(parts);
            }
            marker = page.next_part_number_marker;
        }
    }
}
