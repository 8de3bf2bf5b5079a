//! Configuration: what is accepted, what is refused and how, and the check at start.

use super::super::{FileIoConfig, StoreConfig, StoreError, open};
use super::randomness;

#[test]
fn both_kinds_parse_and_unknown_keys_are_refused() {
    let directory: StoreConfig =
        toml::from_str("kind = \"directory\"\npath = \"/ckpt\"\nio = \"plain\"").unwrap();
    let expected = StoreConfig::Directory {
        path: "/ckpt".into(),
        io: FileIoConfig::Plain,
    };
    assert_eq!(directory, expected);
    let s3: StoreConfig =
        toml::from_str("kind = \"s3\"\nbucket = \"ckpt\"\nendpoint = \"http://127.0.0.1:1\"")
            .unwrap();
    let StoreConfig::S3(s3) = s3 else {
        panic!("expected S3, got {s3:?}")
    };
    assert_eq!(
        (&*s3.region, &*s3.access_key_env),
        ("us-east-1", "AWS_ACCESS_KEY_ID")
    );
    for text in [
        "kind = \"directory\"\npath = \"/ckpt\"\npaht = \"/x\"",
        "kind = \"s3\"\nbucket = \"ckpt\"\nbukket = \"x\"",
        "kind = \"tape\"",
        "kind = \"directory\"",
    ] {
        assert!(toml::from_str::<StoreConfig>(text).is_err(), "{text}");
    }
}

#[tokio::test]
async fn an_existing_directory_opens_and_the_probe_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let config = StoreConfig::Directory {
        path: root.path().to_owned(),
        io: FileIoConfig::default(),
    };
    open(&config, randomness()).await.unwrap();
    let left = std::fs::read_dir(root.path().join(".storaged")).unwrap();
    let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["tmp", "uploads"]);
}

#[tokio::test]
async fn a_missing_directory_is_refused_and_not_made() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("not-mounted");
    let config = StoreConfig::Directory {
        path: path.clone(),
        io: FileIoConfig::default(),
    };
    let error = open(&config, randomness()).await.unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
    assert!(
        error.to_string().contains("is the file system mounted?"),
        "{error}"
    );
    assert!(!path.exists());
}
