//! What the bucket's owner wants of objects, as requests say it, and the checksum of parts.

use std::sync::atomic::{AtomicBool, Ordering};

use aws_sdk_s3::config::interceptors::BeforeTransmitInterceptorContextMut;
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_sdk_s3::types::{ChecksumAlgorithm, ServerSideEncryption, StorageClass};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::CrcAlgorithm::Crc64Nvme;
use form_urlencoded::Serializer;

use super::config::{PartChecksum, S3Config, SseConfig};
use crate::trickle::store::{PartDigest, StoreError, Upload};

/// S3's own limits.
const TAGS_MAX: usize = 10;
const TAG_KEY_CHARS_MAX: usize = 128;
const TAG_VALUE_CHARS_MAX: usize = 256;
/// What lies there is not read before somebody has asked for it hours earlier.
const ARCHIVES: [&str; 2] = ["GLACIER", "DEEP_ARCHIVE"];

/// What the bucket's owner wants of objects.
#[derive(Debug, Clone)]
pub(super) struct ObjectSettings {
    pub storage_class: Option<StorageClass>,
    pub encryption: Option<ServerSideEncryption>,
    pub kms_key: Option<String>,
    pub tagging: Option<String>,
    pub checksum: PartChecksum,
}

/// What the signature of a part covers beside what the request says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PartSigning {
    /// The part's bytes, by their SHA-256.
    Bytes,
    /// Nothing more of a part that has a checksum: TLS protects it on its way, and the server compares (`Signatures`). SHA-256
    /// would be another pass over it.
    Head,
}

impl ObjectSettings {
    /// As the configuration has them.
    pub fn of(config: &S3Config) -> Result<Self, StoreError> {
        let encryption = config.server_side_encryption.map(|how| match how {
            SseConfig::Aes256 => ServerSideEncryption::Aes256,
            SseConfig::Kms => ServerSideEncryption::AwsKms,
            SseConfig::KmsTwice => ServerSideEncryption::AwsKmsDsse,
        });
        let by_key = !matches!(encryption, None | Some(ServerSideEncryption::Aes256));
        if let Some(key) = config.kms_key.as_ref().filter(|_| !by_key) {
            return Err(StoreError::Invalid {
                what: "S3 kms_key".into(),
                expected: "server_side_encryption = \"aws:kms\" or \"aws:kms:dsse\" beside it"
                    .into(),
                got: format!("{key:?} alone"),
            });
        }
        Ok(Self {
            storage_class: config
                .storage_class
                .as_deref()
                .map(storage_class)
                .transpose()?,
            encryption,
            kms_key: config.kms_key.clone(),
            tagging: tagging(config)?,
            checksum: config.checksum(),
        })
    }

    /// What the server is asked to compute of parts.
    pub fn algorithm(&self) -> Option<ChecksumAlgorithm> {
        (self.checksum == PartChecksum::Crc64nvme).then_some(ChecksumAlgorithm::Crc64Nvme)
    }
}

/// How parts are signed: as the configuration has it, and by what the server has answered since.
#[derive(Debug)]
pub(super) struct Signatures {
    wish: PartSigning,
    /// The server is known to compare checksums, as Amazon's does. One that passes them over would be told of a part's bytes by nothing else
    /// where a proxy in front of it ends TLS.
    compares: AtomicBool,
    /// A policy of the bucket refuses what does not sign its bytes.
    are_required: AtomicBool,
}

impl Signatures {
    /// As the configuration has them.
    pub fn of(config: &S3Config) -> Self {
        Self {
            wish: part_signing(config),
            compares: AtomicBool::new(config.endpoint.is_none()),
            are_required: AtomicBool::new(false),
        }
    }

    /// Of a part that has a checksum.
    pub fn now(&self) -> PartSigning {
        let may_leave_out =
            self.compares.load(Ordering::Relaxed) && !self.are_required.load(Ordering::Relaxed);
        if may_leave_out {
            self.wish
        } else {
            PartSigning::Bytes
        }
    }

    /// The server has said what checksum it computed.
    pub fn note_comparison(&self) {
        self.compares.store(true, Ordering::Relaxed);
    }

    /// A part was refused, and taken once its bytes were signed.
    pub fn note_refusal(&self, bucket: &str) {
        if !self.are_required.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                bucket,
                "parts whose bytes are not signed are refused: all are signed from now on (durable.sign_parts = true from the start)"
            );
        }
    }

    /// As if TLS protected what is sent.
    #[cfg(test)]
    pub fn over_tls() -> Self {
        Self {
            wish: PartSigning::Head,
            compares: AtomicBool::new(false),
            are_required: AtomicBool::new(false),
        }
    }
}

/// Amazon's own endpoint, where none is named, is one of HTTPS.
fn part_signing(config: &S3Config) -> PartSigning {
    let endpoint = config.endpoint.as_deref();
    let has_tls = endpoint.is_none_or(|it| it.starts_with("https://"));
    if has_tls && config.checksum() == PartChecksum::Crc64nvme && !config.sign_parts {
        PartSigning::Head
    } else {
        PartSigning::Bytes
    }
}

fn storage_class(name: &str) -> Result<StorageClass, StoreError> {
    let is_name = !name.is_empty() && name.bytes().all(|it| it.is_ascii_graphic());
    if is_name && !ARCHIVES.contains(&name) {
        return Ok(StorageClass::from(name));
    }
    Err(StoreError::Invalid {
        what: "S3 storage class".into(),
        expected: "one whose objects are read at once, such as STANDARD_IA or INTELLIGENT_TIERING"
            .into(),
        got: format!("{name:?}"),
    })
}

/// Tags as one header has them.
fn tagging(config: &S3Config) -> Result<Option<String>, StoreError> {
    let tags = &config.tags;
    let fits = |key: &str, value: &str| {
        (1..=TAG_KEY_CHARS_MAX).contains(&key.chars().count())
            && value.chars().count() <= TAG_VALUE_CHARS_MAX
    };
    if tags.len() > TAGS_MAX || !tags.iter().all(|(key, value)| fits(key, value)) {
        return Err(StoreError::Invalid {
            what: "S3 tags".into(),
            expected: format!(
                "at most {TAGS_MAX}, keys of 1 to {TAG_KEY_CHARS_MAX} characters and values of at most {TAG_VALUE_CHARS_MAX}"
            ),
            got: format!("{tags:?}"),
        });
    }
    let mut header = Serializer::new(String::new());
    header.extend_pairs(tags);
    Ok((!tags.is_empty()).then(|| header.finish()))
}

/// Says in every request that this account pays for it, not the bucket's owner.
#[derive(Debug)]
pub(super) struct RequesterPays;

impl Intercept for RequesterPays {
    fn name(&self) -> &'static str {
        "RequesterPays"
    }

    fn modify_before_signing(
        &self,
        context: &mut BeforeTransmitInterceptorContextMut<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let headers = context.request_mut().headers_mut();
        headers.insert("x-amz-request-payer", "requester");
        Ok(())
    }
}

/// As a header has it.
pub(super) fn crc64_text(sum: u64) -> String {
    STANDARD.encode(sum.to_be_bytes())
}

/// What a header says; none of what is no such checksum.
pub(super) fn crc64_said(text: Option<&str>) -> Option<u64> {
    let bytes = STANDARD.decode(text?).ok()?;
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

/// The checksum of all parts of an upload, one behind the other; none if one of them has none.
pub(super) fn crc64_of_parts(upload: &Upload) -> Option<u64> {
    let mut all = None;
    for part in upload.done().values() {
        let PartDigest::Crc64 { sum, .. } = part.digest else {
            return None;
        };
        all = Some(match all {
            None => sum,
            Some(before) => crc_fast::checksum_combine(Crc64Nvme, before, sum, part.length),
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::trickle::store::upload::crc64;

    fn settings(more: &str) -> Result<ObjectSettings, StoreError> {
        let text = format!("bucket = 'ckpt'\nendpoint = 'http://127.0.0.1:1'\n{more}");
        ObjectSettings::of(&toml::from_str(&text).unwrap())
    }

    #[test]
    fn an_upload_is_checked_by_tags_unless_they_say_nothing() {
        let checksum = |more: &str| settings(more).unwrap().checksum;
        assert_eq!(checksum(""), PartChecksum::Etag);
        let kms = "server_side_encryption = 'aws:kms'";
        assert_eq!(checksum(kms), PartChecksum::Crc64nvme);
        let said = format!("{kms}\npart_checksum = 'etag'");
        assert_eq!(checksum(&said), PartChecksum::Etag);
        let amazon: S3Config = toml::from_str("bucket = 'ckpt'").unwrap();
        assert_eq!(amazon.checksum(), PartChecksum::Crc64nvme);
    }

    #[test]
    fn bytes_are_signed_unless_tls_and_a_checksum_protect_them() {
        let signing = |more: &str| {
            let config = format!("bucket = 'ckpt'\n{more}");
            part_signing(&toml::from_str(&config).unwrap())
        };
        let (tls, plain) = ("endpoint = 'https://s3'", "endpoint = 'http://s3'");
        let crc = "part_checksum = 'crc64nvme'";
        assert_eq!(signing(""), PartSigning::Head);
        assert_eq!(signing(&format!("{tls}\n{crc}")), PartSigning::Head);
        let signed = [
            "sign_parts = true".to_owned(),
            "part_checksum = 'etag'".to_owned(),
            format!("{tls}\n{crc}\nsign_parts = true"),
            tls.to_owned(),
            plain.to_owned(),
            format!("{plain}\n{crc}"),
        ];
        for more in signed {
            assert_eq!(signing(&more), PartSigning::Bytes, "{more}");
        }
    }

    #[test]
    fn tags_are_one_header() {
        let tags = "tags = { job = 'llm 70b', team = 'a&b=c' }";
        let header = settings(tags).unwrap().tagging.unwrap();
        assert_eq!(header, "job=llm+70b&team=a%26b%3Dc");
        assert_eq!(settings("").unwrap().tagging, None);
    }

    #[test]
    fn what_the_server_would_refuse_is_refused_at_the_start() {
        let many: Vec<String> = (0..11).map(|tag| format!("t{tag} = 'x'")).collect();
        let refused = [
            "storage_class = 'DEEP_ARCHIVE'".to_owned(),
            "storage_class = ''".to_owned(),
            "kms_key = 'alias/ckpt'".to_owned(),
            "server_side_encryption = 'AES256'\nkms_key = 'alias/ckpt'".to_owned(),
            format!("tags = {{ {} }}", many.join(", ")),
            format!("tags = {{ t = '{}' }}", "x".repeat(257)),
        ];
        for text in refused {
            let error = settings(&text).unwrap_err();
            assert!(
                matches!(error, StoreError::Invalid { .. }),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn checksums_of_parts_make_that_of_the_whole() {
        // The check value of CRC-64/NVME: that of the digits 1 to 9.
        assert_eq!(
            crc64(&Bytes::from_static(b"123456789")),
            0xae8b_1486_0a79_9888
        );
        let (first, second) = (Bytes::from_static(b"1234"), Bytes::from_static(b"56789"));
        let both = crc_fast::checksum_combine(Crc64Nvme, crc64(&first), crc64(&second), 5);
        assert_eq!(both, 0xae8b_1486_0a79_9888);
        assert_eq!(crc64_said(Some(&crc64_text(both))), Some(both));
        assert_eq!(crc64_said(Some("AAAA")), None);
        assert_eq!(crc64_said(None), None);
    }
}
