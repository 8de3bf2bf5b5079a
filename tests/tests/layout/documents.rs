//! What the documents name is there: who follows them to the code finds it.

use std::fs;
use std::path::Path;

use crate::{files_of, root};

/// Those that lead to the code.
const DOCUMENTS: &[&str] = &[
    "ARCHITECTURE",
    "DATA_PATH",
    "FAULTS",
    "HACKING",
    "SECURITY",
    "SEMANTICS",
    "TESTING",
];

/// Whether it is a name of the code: metrics are put together there from their parts.
fn is_name(text: &str) -> bool {
    let is_letter = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '_';
    text.contains('_') && text.chars().all(is_letter) && !text.starts_with("storaged_")
}

fn is_file(text: &str) -> bool {
    let is_plain = |it: char| it.is_ascii_alphanumeric() || "/_.-".contains(it);
    let kind = Path::new(text).extension();
    text.chars().all(is_plain) && kind.is_some_and(|it| it == "rs" || it == "py")
}

/// Names between backquotes of which nothing is known: of a function, a test, a planted bug, a figure, or a file.
fn unknown_names<'a>(document: &'a str, files: &[(String, String)]) -> Vec<&'a str> {
    let ends_so = |file: &str, name: &str| file == name || file.ends_with(&format!("/{name}"));
    let is_known = |name: &str| {
        if is_file(name) {
            return files.iter().any(|(file, _)| ends_so(file, name));
        }
        let last = name.rsplit("::").next().unwrap_or(name);
        let is_stem = |file: &str| Path::new(file).file_stem().is_some_and(|it| it == last);
        let known = |(file, text): &(String, String)| text.contains(last) || is_stem(file);
        !is_name(last) || files.iter().any(known)
    };
    let quoted = document.split('`').skip(1).step_by(2);
    quoted.filter(|name| !is_known(name)).collect()
}

fn code() -> Vec<(String, String)> {
    let mut files = files_of("rs");
    files.extend(files_of("py"));
    files
}

#[test]
fn the_documents_name_what_there_is() {
    let code = code();
    for name in DOCUMENTS {
        let path = root().join("docs").join(format!("{name}.md"));
        let document = fs::read_to_string(path).expect("readable");
        let unknown = unknown_names(&document, &code);
        assert!(unknown.is_empty(), "docs/{name}.md: {unknown:?}");
    }
}

#[test]
fn a_name_that_nothing_has_is_seen() {
    let code = [(
        "storaged/core/src/place/fence.rs".to_string(),
        "fn raise_fence() {}".to_string(),
    )];
    let document = "`place/fence.rs` (`raise_fence`, `fence_lowered`), `core/fences.rs`, `storaged_place_up`, `k + m`";
    assert_eq!(
        unknown_names(document, &code),
        ["fence_lowered", "core/fences.rs"]
    );
}
