//! Keeps the layers and the layout of docs/ARCHITECTURE.md.

#[path = "layout/documents.rs"]
mod documents;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Crates by layer; arrows go down only. docs/ARCHITECTURE.md has the same numbers.
const LAYERS: &[(&str, &str, u8)] = &[
    ("codec", "storaged-codec", 0),
    ("codec/wire", "storaged-wire", 1),
    ("storaged/plan", "storaged-plan", 2),
    ("sdk/arena", "storaged-arena", 2),
    ("storaged/core", "storaged-core", 3),
    ("sdk", "storaged-sdk", 3),
    ("storaged", "storaged", 4),
    ("bench", "storaged-bench", 5),
    ("sdk/python", "storaged-python", 5),
    ("tests/fuzz", "storaged-fuzz", 5),
    ("tests", "storaged-tests", 6),
];

const TOP: &[&str] = &[
    ".cargo",
    ".ci",
    ".dockerignore",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "bench",
    "clippy.toml",
    "codec",
    "deny.toml",
    "deploy",
    "docs",
    "rustfmt.toml",
    "sdk",
    "storaged",
    "tests",
];

/// What decides, and does nothing.
const DECISIONS: &[&str] = &["storaged/core", "storaged/plan"];

/// Folders with an effect each; they know nothing of one another.
const EFFECTS: &[&str] = &["encode", "stage", "trickle"];

/// Where unsafe code may be.
const UNSAFE: &[&str] = &[
    "bench/src/isal.rs",
    "codec/src/delta/xdelta3.rs",
    "codec/src/engine/",
    "sdk/arena/src/",
    "sdk/python/src/",
    "storaged/src/heap.rs",
    "storaged/src/trickle/store/directory/uring.rs",
];

/// Files that may be longer than 700 lines, and why.
const LONG: &[(&str, &str)] = &[];

/// A function has no more lines.
const FUNCTION_LINES_MAX: usize = 80;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ is in the root")
        .into()
}

fn sources(folder: &Path, kind: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(folder) else {
        return found;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(sources(&path, kind));
        } else if path.extension().is_some_and(|extension| extension == kind) {
            found.push(path);
        }
    }
    found
}

fn all_sources() -> Vec<(String, String)> {
    files_of("rs")
}

/// All files of this kind, with their text.
fn files_of(kind: &str) -> Vec<(String, String)> {
    let root = root();
    let folders = ["codec", "storaged", "sdk", "bench", "tests"];
    let files = folders
        .iter()
        .flat_map(|folder| sources(&root.join(folder), kind));
    files
        .filter(|path| !path.components().any(|part| part.as_os_str() == "target"))
        .map(|path| {
            let name = path
                .strip_prefix(&root)
                .expect("below the root")
                .display()
                .to_string();
            (name, fs::read_to_string(path).expect("readable"))
        })
        .collect()
}

/// Dependencies of a manifest that point up or sideways.
fn arrows_up(manifest: &str, layer: u8) -> Vec<String> {
    let ours = manifest
        .split("[dev-dependencies]")
        .next()
        .unwrap_or_default()
        .lines()
        .filter_map(|line| line.split(['.', ' ', '=']).next());
    ours.filter(|name| {
        LAYERS
            .iter()
            .any(|(_, known, other)| known == name && *other >= layer)
    })
    .map(Into::into)
    .collect()
}

#[test]
fn arrows_go_down() {
    for (folder, name, layer) in LAYERS {
        let manifest =
            fs::read_to_string(root().join(folder).join("Cargo.toml")).expect("a manifest");
        let dependencies = manifest
            .split_once("[dependencies]")
            .map_or("", |(_, rest)| rest);
        assert_eq!(
            arrows_up(dependencies, *layer),
            Vec::<String>::new(),
            "{name} points up"
        );
    }
    assert_eq!(
        arrows_up("storaged-sdk.workspace = true\n", 3),
        ["storaged-sdk"]
    );
}

#[test]
fn the_top_level_is_fixed() {
    let output = std::process::Command::new("git")
        .arg("ls-files")
        .current_dir(root())
        .output()
        .expect("git runs");
    let listed = String::from_utf8(output.stdout).expect("names are text");
    let top: BTreeSet<&str> = listed
        .lines()
        .filter_map(|line| line.split('/').next())
        .collect();
    let strangers: Vec<_> = top.iter().filter(|name| !TOP.contains(name)).collect();
    assert!(
        strangers.is_empty(),
        "not in the fixed top level: {strangers:?}"
    );
}

#[test]
fn the_layers_are_numbered_as_the_document_says() {
    let text = fs::read_to_string(root().join("docs/ARCHITECTURE.md")).expect("readable");
    let says = |folder: &str, layer: u8| {
        let (number, folder) = (format!("L{layer}"), format!("{folder}/"));
        text.lines().any(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some(&number) && words.any(|word| word == folder)
        })
    };
    for (folder, name, layer) in LAYERS {
        assert!(says(folder, *layer), "{name} is not at L{layer} there");
        assert!(!says(folder, layer + 1), "{name} is at two layers there");
    }
}

/// The crates that a package is built from, without its tests.
fn built_from(package: &str, options: &[&str]) -> Vec<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = std::process::Command::new(cargo)
        .args([
            "tree",
            "--offline",
            "--edges",
            "normal,build",
            "--prefix",
            "none",
        ])
        .args(["--package", package])
        .args(options)
        .current_dir(root())
        .output()
        .expect("cargo runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{package}: {said}");
    let listed = String::from_utf8(output.stdout).expect("names are text");
    let names = listed.lines().filter_map(|line| line.split(' ').next());
    names.map(Into::into).collect()
}

#[test]
fn nothing_needs_clang() {
    for package in [
        "storaged",
        "storaged-sdk",
        "storaged-python",
        "storaged-tests",
    ] {
        let crates = built_from(package, &[]);
        assert!(!crates.contains(&"clang-sys".into()), "{package}");
        assert!(crates.contains(&"storaged-codec".into()), "{package}");
    }
}

/// What a crate needs to be built, without its tests.
fn needed_to_build(manifest: &str, workspace: &str) -> BTreeSet<String> {
    let mut needs = BTreeSet::new();
    let mut in_table = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            in_table = line.ends_with("dependencies]") && !line.contains("dev-dependencies");
        } else if let Some(name) = line.split(['.', ' ', '=']).next().filter(|_| in_table)
            && name.starts_with(|first: char| first.is_ascii_alphabetic())
        {
            needs.insert(package_called(name, workspace));
        }
    }
    needs
}

/// The package that the workspace means by a dependency's name.
fn package_called(name: &str, workspace: &str) -> String {
    let mut lines = workspace.lines();
    let line = lines.find(|line| line.starts_with(&format!("{name} =")));
    let renamed = line.and_then(|line| line.split("package = \"").nth(1));
    let package = renamed.and_then(|rest| rest.split('"').next());
    package.unwrap_or(name).to_owned()
}

/// The names of what a package needs, as a lock file has them.
fn locked(lock: &str, package: &str) -> Option<BTreeSet<String>> {
    let name = format!("\nname = \"{package}\"\n");
    let mut blocks = lock.split("[[package]]");
    let block = blocks.find(|block| block.contains(&name))?;
    let listed = block.lines().filter_map(|line| line.strip_prefix(" \""));
    let names = listed.map(|line| line.split([' ', '"']).next().unwrap_or_default().to_owned());
    Some(names.collect())
}

#[test]
fn the_fuzz_engines_lock_file_knows_what_the_crates_need() {
    let read = |path: PathBuf| fs::read_to_string(path).expect("a file of the repository");
    let lock = read(root().join("tests/fuzz/engine/Cargo.lock"));
    let workspace = read(root().join("Cargo.toml"));
    let mut seen = 0;
    for (folder, package, _) in LAYERS {
        let Some(known) = locked(&lock, package) else {
            continue;
        };
        let manifest = root().join(folder).join("Cargo.toml");
        let needs = needed_to_build(&read(manifest), &workspace);
        let lacking: Vec<&String> = needs.difference(&known).collect();
        assert!(
            lacking.is_empty(),
            "tests/fuzz/engine/Cargo.lock is older than {folder}/Cargo.toml, which needs {lacking:?} too: `make fuzz` \
             would not build; run `cargo metadata` in tests/fuzz/engine"
        );
        seen += needs.len();
    }
    assert!(seen > 0, "nothing was compared");
}

/// What the decisions may not touch.
fn effects_in(text: &str) -> Option<&'static str> {
    let forbidden = [
        "std::net",
        "std::fs",
        "std::thread",
        "tokio",
        "Instant",
        "SystemTime",
        "rand::",
        "HashMap",
    ];
    let code = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect::<Vec<_>>()
        .join("\n");
    forbidden.into_iter().find(|word| code.contains(word))
}

#[test]
fn the_decisions_have_no_effects() {
    for (name, text) in all_sources().iter().filter(|(name, _)| {
        DECISIONS
            .iter()
            .any(|folder| name.starts_with(&format!("{folder}/src")))
    }) {
        assert_eq!(effects_in(text), None, "{name}");
    }
    assert_eq!(effects_in("use std::fs::File;"), Some("std::fs"));
    for folder in DECISIONS {
        let manifest =
            fs::read_to_string(root().join(folder).join("Cargo.toml")).expect("a manifest");
        // Their benches tell the time.
        let built = manifest.split("[dev-dependencies]").next();
        assert_eq!(built.and_then(effect_crate), None, "{folder}");
    }
    assert_eq!(effect_crate("tokio.workspace = true"), Some("tokio"));
}

/// A crate that a manifest depends on and that has effects.
fn effect_crate(manifest: &str) -> Option<&'static str> {
    let effects = ["tokio", "quinn", "rand", "rustix", "aws-sdk-s3", "axum"];
    let names = |line: &str| line.split(['.', ' ', '=']).next().map(str::to_owned);
    let named: BTreeSet<String> = manifest.lines().filter_map(names).collect();
    effects.into_iter().find(|name| named.contains(*name))
}

/// The code of a line, without its comment.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

/// Whether a file names a module of its crate, by path or in a group such as `crate::{stage, net}`.
fn imports(text: &str, module: &str) -> bool {
    let code: String = text.lines().map(code).collect();
    let begins = |path: &str| {
        let rest = path.trim_start().strip_prefix(module);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    };
    code.split("crate::").skip(1).any(|path| {
        let group = path.strip_prefix('{');
        begins(path) || group.is_some_and(|group| outer_parts(group).into_iter().any(begins))
    })
}

/// The parts of a group of imports up to its closing brace; inner groups stay whole.
fn outer_parts(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' if depth > 0 => {}
            ',' | '}' => {
                parts.push(&group[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        if c == '}' && start == at + 1 {
            break;
        }
    }
    parts
}

#[test]
fn effects_do_not_import_one_another() {
    for (name, text) in all_sources() {
        let own = EFFECTS
            .iter()
            .find(|folder| name.starts_with(&format!("storaged/src/{folder}/")));
        let Some(own) = own else { continue };
        for other in EFFECTS.iter().filter(|other| *other != own) {
            assert!(!imports(&text, other), "{name} imports {other}");
        }
    }
}

#[test]
fn an_import_is_seen_however_it_is_written() {
    for text in [
        "use crate::stage::Answer;",
        "use crate::{net::{Peer, stage}, stage};",
        "use crate::{\n    net,\n    stage::Answer,\n};",
        "let x = crate::stage::listen();",
    ] {
        assert!(imports(text, "stage"), "{text}");
    }
    for text in [
        "use crate::stages::One;",
        "use crate::{net::{Peer, stage}}; fn stage() {}",
        "// as crate::stage does",
    ] {
        assert!(!imports(text, "stage"), "{text}");
    }
}

/// Whether a file has unsafe code of its own.
fn has_unsafe(text: &str) -> bool {
    let words = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"];
    let mut lines = text.lines().map(code);
    lines.any(|line| words.iter().any(|word| line.contains(word)))
}

#[test]
fn unsafe_code_is_where_it_may_be() {
    for (name, text) in all_sources() {
        let allowed =
            UNSAFE.iter().any(|place| name.starts_with(place)) || name == "tests/tests/layout.rs";
        assert!(allowed || !has_unsafe(&text), "{name} has unsafe code");
    }
    assert!(has_unsafe("let x = unsafe { *p };"));
    assert!(!has_unsafe("#![forbid(unsafe_code)] // no unsafe { } here"));
}

#[test]
fn every_file_says_what_it_is_and_is_not_too_long() {
    for (name, text) in all_sources() {
        assert!(text.starts_with("//!"), "{name} does not open with //!");
        let long = LONG.iter().any(|(file, _)| *file == name);
        assert!(
            long || text.lines().count() <= 700,
            "{name} has {} lines",
            text.lines().count()
        );
    }
}

#[test]
fn the_documents_are_there() {
    for name in [
        "ARCHITECTURE",
        "DATA_PATH",
        "FORMATS",
        "SEMANTICS",
        "GLOSSARY",
        "HACKING",
        "operate/config",
    ] {
        assert!(
            root().join("docs").join(format!("{name}.md")).exists(),
            "docs/{name}.md is missing"
        );
    }
}

/// Whoever plots them reads one number per key.
#[test]
fn figures_are_flat_objects() {
    let entries = fs::read_dir(root().join("docs/bench")).expect("docs/bench is there");
    let names = entries.map(|entry| entry.expect("an entry").path());
    for path in names.filter(|path| path.extension().is_some_and(|kind| kind == "json")) {
        let text = fs::read_to_string(&path).expect("it can be read");
        let figures: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&text).expect("one object");
        let nested = figures
            .iter()
            .find(|(_, it)| it.is_object() || it.is_array());
        let has_cases = path.ends_with("delta.json");
        assert!(
            has_cases || nested.is_none(),
            "{}: {nested:?}",
            path.display()
        );
    }
}

/// The type that a line at the left margin defines.
fn type_defined_in(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace();
    let first = words.find(|word| !word.starts_with("pub") && *word != "unsafe")?;
    let is_type = ["struct", "enum", "trait", "type", "union"].contains(&first);
    let name = words.next().filter(|_| is_type && !line.starts_with(' '))?;
    name.split(|it: char| !it.is_alphanumeric() && it != '_')
        .next()
}

#[test]
fn no_two_types_of_a_crate_have_one_name() {
    assert_eq!(type_defined_in("pub(crate) struct Slot<T> {"), Some("Slot"));
    assert_eq!(type_defined_in("    struct Inner;"), None);
    for (folder, ..) in LAYERS.iter().filter(|(.., layer)| *layer < 5) {
        let within = format!("{folder}/src/");
        let all = all_sources();
        let its = all.iter().filter(|(name, _)| {
            let is_of_test = name.contains("/tests/") || name.ends_with("/tests.rs");
            // Each engine is built for one kind of processor.
            name.starts_with(&within) && !is_of_test && !name.starts_with("codec/src/engine/")
        });
        let mut defined: BTreeMap<&str, &str> = BTreeMap::new();
        for (name, text) in its {
            for of in text.lines().filter_map(type_defined_in) {
                let before = defined.insert(of, name);
                assert_eq!(before, None, "{of} is defined twice, also in {name}");
            }
        }
    }
}

/// The name of the function that begins on a line.
fn function_begun_in(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace();
    let is_before = |word: &&str| {
        let known = ["async", "const", "default", "extern", "unsafe", "\"C\""];
        word.starts_with("pub") || known.contains(word)
    };
    let first = words.find(|word| !is_before(word));
    let name = words.next().filter(|_| first == Some("fn"))?;
    name.split(|it: char| !it.is_alphanumeric() && it != '_')
        .next()
}

fn indent_of(line: &str) -> &str {
    &line[..line.len() - line.trim_start().len()]
}

/// The functions of a file that have a body, each with its lines. The format, which is checked, ends a body with a
/// brace below the beginning of its function.
fn functions_in(text: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = text.lines().map(|line| code(line).trim_end()).collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = function_begun_in(line) else {
            continue;
        };
        let mut head = lines[at..].iter();
        let head_lines = 1 + head
            .position(|line| line.ends_with(['{', '}', ';']))
            .unwrap_or_default();
        let last = lines[at + head_lines - 1];
        let is_end = |line: &&str| line.strip_prefix(indent_of(lines[at])) == Some("}");
        let body_lines = lines[at + head_lines..].iter().position(is_end);
        match (last.chars().last(), body_lines) {
            (Some('{'), Some(body_lines)) => found.push((name, head_lines + body_lines + 1)),
            (Some('}'), _) => found.push((name, head_lines)),
            _ => {}
        }
    }
    found
}

fn is_long(lines: usize) -> bool {
    lines > FUNCTION_LINES_MAX
}

#[test]
fn no_function_is_long() {
    for (name, text) in all_sources() {
        let all = functions_in(&text).into_iter();
        let long: Vec<_> = all.filter(|(_, lines)| is_long(*lines)).collect();
        assert!(long.is_empty(), "{name}: {long:?}");
    }
}

#[test]
fn a_function_is_measured_however_it_is_written() {
    let steps = |count: usize| "        step();\n".repeat(count);
    for head in [
        "fn f() {",
        "pub(crate) const unsafe extern \"C\" fn f() {",
        "async fn f<T>(\n    a: [u8; 4],\n) -> T\nwhere\n    T: Default,\n{",
    ] {
        let (head_lines, steps) = (head.lines().count(), steps(78));
        let text = format!("{head}\n{steps}}}\n\nfn g() {{}}\n");
        let f = ("f", head_lines + 79);
        assert_eq!(functions_in(&text), [f, ("g", 1)], "{head}");
        assert_eq!(is_long(f.1), head_lines > 1, "{head}");
    }
    let within = format!(
        "impl A {{\n    fn f(&self) {{\n{}    }}\n\n    fn declared(\n        &self,\n    );\n}}\n",
        steps(3)
    );
    assert_eq!(functions_in(&within), [("f", 5)]);
    assert_eq!(functions_in("// fn f() {\nlet fn_of = 1;\n"), []);
}

/// The code of a file without what is built for tests only.
fn built(text: &str) -> String {
    let mut lines = text.lines().map(code);
    let mut built = String::new();
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            built.push_str(line.trim());
            built.push(' ');
            continue;
        }
        let is_end = |rest: &str| !rest.starts_with(' ') && rest.ends_with([',', ';', '}']);
        let indent = indent_of(line);
        let _ = lines.find(|line| line.strip_prefix(indent).is_some_and(is_end));
    }
    built
}

/// Types of errors that are mere text, as they stand in a file.
fn text_errors(text: &str) -> Vec<String> {
    let built = built(text);
    let named = ["type Err = String;", "type Error = String;"];
    let named = named.into_iter().filter(|it| built.contains(it));
    let results = built.split("Result<").skip(1).filter_map(|rest| {
        let inside = generics(rest);
        (inside.get(1).map(|it| it.trim()) == Some("String"))
            .then(|| format!("Result<{}>", inside.join(",")))
    });
    named.map(Into::into).chain(results).collect()
}

/// The arguments of a type up to its closing bracket; inner ones stay whole.
fn generics(rest: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts, mut before) = (0, 0, Vec::new(), ' ');
    for (at, c) in rest.char_indices() {
        match c {
            '<' | '(' | '[' => depth += 1,
            '>' if before == '-' => {}
            '>' | ')' | ']' if depth > 0 => depth -= 1,
            ',' if depth > 0 => {}
            ',' | '>' => {
                parts.push(&rest[start..at]);
                start = at + 1;
                if c == '>' {
                    break;
                }
            }
            _ => {}
        }
        before = c;
    }
    parts
}

/// Who gets a text for an error can only show it: nothing may be decided by what it says.
#[test]
fn no_error_is_mere_text() {
    for (name, text) in all_sources() {
        let is_of_test = name.contains("/tests/") || name.ends_with("/tests.rs");
        if name.contains("/src/") && !is_of_test {
            assert_eq!(text_errors(&text), Vec::<String>::new(), "{name}");
        }
    }
}

#[test]
fn a_mere_text_is_seen_however_it_is_written() {
    for text in [
        "fn f() -> Result<(), String> {",
        "fn f() -> Result<\n    Box<dyn Fn(u8) -> Vec<(u8, u16)>>,\n    String,\n> {",
        "#[cfg(test)]\nmod tests;\n\nlet f: impl Future<Output = Result<[u8; 4], String>>;",
        "impl FromStr for A {\n    type Err = String;\n}",
    ] {
        assert_eq!(text_errors(text).len(), 1, "{text}");
    }
    for text in [
        "fn f() -> Result<String, FError> {",
        "fn f() -> Result<(u8, String), FError> {",
        "fn f() -> Result<HashMap<u8, String>, FError> {",
        "// Result<(), String>",
        "#[cfg(test)]\nmod tests {\n    fn f() -> Result<(), String> {\n    }\n}\n",
    ] {
        assert_eq!(text_errors(text), Vec::<String>::new(), "{text}");
    }
}
