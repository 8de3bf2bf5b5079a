//! S3 as durable tier: any server that does multipart uploads and `If-None-Match: *`.
//!
//! The client neither retries nor limits time by itself, [`super::Retrying`] does both. Requests
//! carry the SHA-256 of their body in the signature, so a server refuses bytes that changed on
//! their way; parts do not where TLS and a CRC that the server compares see to that.

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use aws_sdk_s3::Client;
use aws_sdk_s3::operation::complete_multipart_upload::CompleteMultipartUploadOutput;
use aws_sdk_s3::operation::upload_part::UploadPartOutput;
use aws_sdk_s3::operation::upload_part::builders::UploadPartFluentBuilder;
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;
use storaged_core::Leftovers;

use super::remote::{BucketFolder, check_listed, check_own, in_time};
use super::upload::crc64;
use super::{
    CALL_BYTES_MAX, KeyPrefix, ListPage, ObjectEntry, ObjectKey, PAGE_ENTRIES_MAX, PartBytes,
    PartDigest, PartNumber, PartState, Rest, Store, StoreError, StoreLimits, StoredForm, Upload,
    check_asked, check_range, check_small,
};

mod chain;
mod client;
mod config;
mod credentials;
mod failure;
mod objects;
mod uploads;

#[cfg(test)]
pub(super) use config::PartChecksum;
pub use config::S3Config;
use failure::{Context, answer_lacks};
use objects::{ObjectSettings, PartSigning, Signatures};

/// Those of its protocol, which Google's has too.
pub(in crate::trickle) const S3_LIMITS: StoreLimits = StoreLimits {
    part_bytes_min: 5 << 20,
    part_bytes_max: CALL_BYTES_MAX,
    parts_max: 10_000,
    form: StoredForm::Plain,
};

/// A bucket, or the part of it below a prefix.
#[derive(Debug, Clone)]
pub struct S3 {
    client: Client,
    bucket: String,
    folder: BucketFolder,
    objects: ObjectSettings,
    signatures: Arc<Signatures>,
}

impl S3 {
    fn part_request(&self, upload: &Upload, part: PartNumber) -> UploadPartFluentBuilder {
        let request = self.client.upload_part().bucket(&self.bucket);
        request
            .key(self.name(upload.key()))
            .upload_id(upload.id().to_string())
            .part_number(number_in_s3(part))
    }

    /// Sends a part. A bucket whose policy refuses a request that does not sign its bytes has it signed, and all that come after.
    async fn send_part(
        &self,
        request: impl Fn() -> UploadPartFluentBuilder,
        bytes: Bytes,
        context: &Context,
    ) -> Result<UploadPartOutput, StoreError> {
        let with_body = || request().body(ByteStream::from(bytes.clone()));
        let has_sum = request().get_checksum_crc64_nvme().is_some();
        let may_leave_out = has_sum && self.signatures.now() == PartSigning::Head;
        if may_leave_out {
            let unsigned = with_body().customize().disable_payload_signing();
            let sent = unsigned.send().await;
            match sent.map_err(|error| context.error(error)) {
                Err(StoreError::Denied { .. }) => {}
                answer => return answer,
            }
        }
        let sent = with_body().send().await;
        let answer = sent.map_err(|error| context.error(error))?;
        if may_leave_out {
            self.signatures.note_refusal(&self.bucket);
        }
        Ok(answer)
    }

    fn name(&self, key: &ObjectKey) -> String {
        self.folder.name(key)
    }

    fn context(&self, verb: &str, key: &ObjectKey) -> Context {
        let what = format!("{verb} s3://{}/{}", self.bucket, self.name(key));
        Context {
            what,
            key: Some(key.clone()),
            upload: None,
        }
    }

    fn list_context(&self, verb: &str, under: &KeyPrefix) -> Context {
        let what = format!(
            "{verb} s3://{}/{}",
            self.bucket,
            self.folder.prefix_of(under)
        );
        Context {
            what,
            key: None,
            upload: None,
        }
    }

    fn upload_context(&self, verb: &str, upload: &Upload) -> Context {
        Context {
            upload: Some(upload.id().to_string()),
            ..self.context(verb, upload.key())
        }
    }
}

#[async_trait]
impl Store for S3 {
    fn limits(&self) -> StoreLimits {
        S3_LIMITS
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        for id in self.upload_ids(key).await? {
            self.abort(&Upload::new(key.clone(), id, part_bytes))
                .await?;
        }
        self.create_upload(key, part_bytes).await
    }

    async fn resume_or_begin(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
        leftovers: Leftovers,
    ) -> Result<Upload, StoreError> {
        if leftovers == Leftovers::None {
            return self.create_upload(key, part_bytes).await;
        }
        match self.resume(key, part_bytes).await? {
            Some(upload) => Ok(upload),
            // None was listed: there is none to be given up.
            None => self.create_upload(key, part_bytes).await,
        }
    }

    async fn resume(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
    ) -> Result<Option<Upload>, StoreError> {
        // The newest comes last.
        let Some(id) = self.upload_ids(key).await?.pop() else {
            return Ok(None);
        };
        let found = Upload::new(key.clone(), id, part_bytes);
        let parts = self.parts_of(&found).await?;
        let mut upload = found.in_parts_of(uploads::size_of(&parts, part_bytes));
        for (number, state) in parts {
            if state.length <= upload.part_bytes().get() {
                upload.note(number, state);
            }
        }
        Ok(Some(upload))
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        upload.check_part(part, &bytes, &self.limits())?;
        let length = bytes.len() as u64;
        let context = self.upload_context(&format!("write part {part} of"), upload);
        // An upload whose parts have none was begun without it, or by a server that does not know it.
        let mut parts = upload.done().values();
        let has_none = parts.any(|part| matches!(part.digest, PartDigest::ETag(_)));
        let algorithm = self.objects.algorithm().filter(|_| !has_none);
        let asked = algorithm.map(|_| crc64(&bytes));
        let request = || {
            let request = self.part_request(upload, part);
            request.set_checksum_crc64_nvme(asked.map(objects::crc64_text))
        };
        let answer = self.send_part(request, bytes, &context).await?;
        let tag = answer
            .e_tag
            .ok_or_else(|| answer_lacks(&context, "an entity tag"))?;
        let said = objects::crc64_said(answer.checksum_crc64_nvme.as_deref());
        let digest = match (asked, said) {
            (Some(sent), Some(kept)) if sent != kept => {
                return Err(context.kept_otherwise(upload.key(), sent, kept));
            }
            (Some(sum), Some(_)) => {
                self.signatures.note_comparison();
                PartDigest::Crc64 { sum, tag }
            }
            // The server knows no such checksum.
            _ => PartDigest::ETag(tag),
        };
        Ok(PartState { length, digest })
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        upload.check_complete(length)?;
        let mut parts = CompletedMultipartUpload::builder();
        for (part, state) in upload.done() {
            let (tag, sum) = match &state.digest {
                PartDigest::ETag(tag) => (tag, None),
                PartDigest::Crc64 { sum, tag } => (tag, Some(objects::crc64_text(*sum))),
                PartDigest::Xxh3(_) | PartDigest::Named { .. } => continue,
            };
            let entry = CompletedPart::builder().part_number(number_in_s3(*part));
            let entry = entry.e_tag(tag).set_checksum_crc64_nvme(sum);
            parts = parts.parts(entry.build());
        }
        let request = self.client.complete_multipart_upload().bucket(&self.bucket);
        let name = self.name(upload.key());
        let request = request.key(&name).upload_id(upload.id().to_string());
        let sent = request.multipart_upload(parts.build()).send().await;
        let context = self.upload_context("complete", upload);
        let answer = sent.map_err(|error| context.error(error));
        if let Ok(answer) = &answer {
            let kept = objects::crc64_said(answer.checksum_crc64_nvme());
            match (objects::crc64_of_parts(upload), kept) {
                (Some(sent), Some(kept)) if sent == kept => return Ok(()),
                (Some(sent), Some(kept)) => {
                    // Another call would find its length right.
                    self.delete(upload.key()).await?;
                    return Err(context.kept_otherwise(upload.key(), sent, kept));
                }
                _ => {}
            }
        }
        match answer {
            // It is what was sent, whole.
            Ok(answer) if uploads::is_of_parts(answer.e_tag(), upload) => return Ok(()),
            // Ceph names the object and no tag. Whoever publishes the checkpoint compares the lengths that a listing gives.
            Ok(answer) if has_no_tag(&answer) && answer.key() == Some(&*name) => return Ok(()),
            Ok(_) => {}
            // An earlier call may have done it, and its answer was lost.
            Err(StoreError::NoUpload { key, upload }) => {
                if self.length(&key).await.ok() != Some(length) {
                    return Err(StoreError::NoUpload { key, upload });
                }
            }
            Err(error) => return Err(error),
        }
        let got = self.length(upload.key()).await?;
        if got != length {
            let key = upload.key().clone();
            return Err(StoreError::Truncated {
                key,
                expected: length,
                got,
            });
        }
        Ok(())
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        let request = self.client.abort_multipart_upload().bucket(&self.bucket);
        let request = request
            .key(self.name(upload.key()))
            .upload_id(upload.id().to_string());
        match request
            .send()
            .await
            .map_err(|e| self.upload_context("abort", upload).error(e))
        {
            Ok(_) | Err(StoreError::NoUpload { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        let uploads = self.list_uploads(&self.folder.prefix_of(under)).await?;
        let mut keys: Vec<_> = uploads
            .into_iter()
            .filter_map(|(name, _)| self.folder.key_of(&name))
            .collect();
        keys.sort();
        keys.dedup();
        Ok(keys)
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        check_small(key, &bytes)?;
        let request = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(self.name(key));
        let request = request
            .if_none_match("*")
            .set_server_side_encryption(self.objects.encryption.clone())
            .set_ssekms_key_id(self.objects.kms_key.clone())
            .set_tagging(self.objects.tagging.clone())
            .body(ByteStream::from(bytes.clone()));
        match request
            .send()
            .await
            .map_err(|e| self.context("create", key).error(e))
        {
            Ok(_) => Ok(()),
            Err(StoreError::AlreadyExists { key }) => check_own(self, &key, &bytes).await,
            Err(error) => Err(error),
        }
    }

    async fn put_new_once(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        in_time("put_new_once", self.put_new(key, bytes)).await
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        check_asked(key, range.as_ref())?;
        let request = self
            .client
            .get_object()
            .bucket(&self.bucket)
            .key(self.name(key));
        let request = match &range {
            None => request,
            // HTTP cannot name an empty range.
            Some(range) if range.is_empty() => {
                return super::range_within(key, Some(range.clone()), self.length(key).await?)
                    .map(|_| Bytes::new());
            }
            Some(range) => request.range(format!("bytes={}-{}", range.start, range.end - 1)),
        };
        let context = self.context("read", key);
        let answer = match request.send().await.map_err(|error| context.error(error)) {
            Err(StoreError::Truncated { key, .. }) => {
                let expected = range.map_or(0, |range| range.end);
                let got = self.length(&key).await?;
                return Err(StoreError::Truncated { key, expected, got });
            }
            answer => answer?,
        };
        let announced = answer
            .content_length
            .and_then(|length| u64::try_from(length).ok());
        let announced = announced.ok_or_else(|| answer_lacks(&context, "a length"))?;
        let expected = range
            .as_ref()
            .map_or(announced, |range| range.end - range.start);
        check_range(key, &(0..announced))?;
        if announced == expected {
            let body = answer
                .body
                .collect()
                .await
                .map_err(|error| context.broken_off(error))?;
            let bytes = body.into_bytes();
            if bytes.len() as u64 == expected {
                return Ok(bytes);
            }
            let got = bytes.len() as u64;
            return Err(StoreError::Truncated {
                key: key.clone(),
                expected,
                got,
            });
        }
        // A server answers a range that reaches beyond the end with what there is.
        let start = range.map_or(0, |range| range.start);
        let (expected, got) = (start + expected, start + announced);
        Err(StoreError::Truncated {
            key: key.clone(),
            expected,
            got,
        })
    }

    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        let context = self.context("look at", key);
        let request = self
            .client
            .head_object()
            .bucket(&self.bucket)
            .key(self.name(key));
        let answer = request.send().await.map_err(|error| context.error(error))?;
        let length = answer
            .content_length
            .and_then(|length| u64::try_from(length).ok());
        length.ok_or_else(|| answer_lacks(&context, "a length"))
    }

    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        let context = self.list_context("list", under);
        let mut entries = Vec::new();
        let mut next = None;
        loop {
            let request = self.client.list_objects_v2().bucket(&self.bucket);
            let request = request
                .prefix(self.folder.prefix_of(under))
                .set_continuation_token(next);
            let page = request.send().await.map_err(|error| context.error(error))?;
            for object in page.contents() {
                let length = u64::try_from(object.size().unwrap_or(0)).unwrap_or(0);
                let key = object.key().and_then(|name| self.folder.key_of(name));
                entries.extend(key.map(|key| ObjectEntry { key, length }));
            }
            check_listed(&context.what, entries.len())?;
            next = page.next_continuation_token;
            if next.is_none() {
                entries.sort();
                return Ok(entries);
            }
        }
    }

    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        let context = self.list_context("list", under);
        let limit = i32::try_from(limit.min(PAGE_ENTRIES_MAX)).unwrap_or(1);
        let request = self.client.list_objects_v2().bucket(&self.bucket);
        let request = request.prefix(self.folder.prefix_of(under)).max_keys(limit);
        let request = request.set_start_after(after.map(|key| self.name(key)));
        let page = request.send().await.map_err(|error| context.error(error))?;
        let entries = page.contents().iter().filter_map(|object| {
            let length = u64::try_from(object.size().unwrap_or(0)).unwrap_or(0);
            let key = self.folder.key_of(object.key()?)?;
            Some(ObjectEntry { key, length })
        });
        let rest = if page.is_truncated().unwrap_or(false) {
            Rest::More
        } else {
            Rest::None
        };
        Ok(ListPage {
            entries: entries.collect(),
            rest,
        })
    }

    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        let context = self.list_context("list the folders of", under);
        let prefix = self.folder.prefix_of(under);
        let mut names = Vec::new();
        let mut next = None;
        loop {
            let request = self.client.list_objects_v2().bucket(&self.bucket);
            let request = request.prefix(&prefix).delimiter("/");
            let request = request.set_continuation_token(next);
            let page = request.send().await.map_err(|error| context.error(error))?;
            for folder in page.common_prefixes() {
                let name = folder.prefix().and_then(|name| name.strip_prefix(&prefix));
                let name = name.map(|name| name.trim_end_matches('/').to_owned());
                names.extend(name.filter(|name| !name.is_empty()));
            }
            check_listed(&context.what, names.len())?;
            next = page.next_continuation_token;
            if next.is_none() {
                names.sort();
                return Ok(names);
            }
        }
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let request = self
            .client
            .delete_object()
            .bucket(&self.bucket)
            .key(self.name(key));
        match request
            .send()
            .await
            .map_err(|e| self.context("remove", key).error(e))
        {
            Ok(_) => Ok(()),
            // Some servers say that there was nothing to remove; a missing bucket is found at start.
            Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Whether the server has said nothing of the object that it put together but that it is there.
fn has_no_tag(answer: &CompleteMultipartUploadOutput) -> bool {
    answer.e_tag().is_none_or(str::is_empty)
}

/// S3 counts parts from 1; `check_part` keeps the number far below the end of the type.
fn number_in_s3(part: PartNumber) -> i32 {
    i32::try_from(part.0).unwrap_or(i32::MAX - 1) + 1
}
