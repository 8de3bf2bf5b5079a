//! The shape of the core: machines that own their tables, methods that do not all reach one another, and files that can be
//! read one after the other; and in all crates parameters that say at the call what they are. Each check proves itself on
//! planted text.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{File, ImplItem, Item, ItemImpl, ItemUse, Type, UseTree, Visibility};

/// Types whose tables nobody outside their folder touches.
const MACHINES: &[&str] = &[
    "Node",
    "Sessions",
    "Restores",
    "Runs",
    "Drops",
    "PinOrders",
    "Scrub",
];
/// Methods of one type that all reach one another: beyond this nobody reads one of them without the others.
const COMPONENT_MAX: usize = 15;
/// Files that import one another in a circle.
const CIRCLE_MAX: usize = 3;
/// Crates of decisions.
const CRATES: &[&str] = &["storaged/core/src", "storaged/plan/src"];

/// Where code of ours is.
const ALL: &[&str] = &["codec", "storaged", "sdk", "bench", "tests"];
/// Functions that take a bool or a tuple all the same, and why.
const UNNAMED_ALLOWED: &[(&str, &str)] = &[
    // Python calls them by keyword, and calls a yes or no a bool.
    ("sdk/python/src/control.rs", "open_shard"),
    ("sdk/python/src/control.rs", "plan"),
];

/// A crate's files, each named by its module path, such as `encode::lead`.
struct Crate {
    files: BTreeMap<String, File>,
}

impl Crate {
    fn read(folder: &str) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(folder);
        let mut files = BTreeMap::new();
        for path in rust_files(&root) {
            let below = path.strip_prefix(&root).expect("below the crate");
            let module = module_of(below);
            let is_test = module.split("::").any(|part| part.starts_with("test"));
            if !is_test {
                let text = fs::read_to_string(&path).expect("readable");
                let parsed = syn::parse_file(&text);
                files.insert(module, parsed.expect("it compiles"));
            }
        }
        assert!(files.len() > 5, "{folder}: {} files", files.len());
        Self { files }
    }

    fn of(texts: &[(&str, &str)]) -> Self {
        let parse = |text: &str| syn::parse_file(text).expect("it parses");
        let files = texts
            .iter()
            .map(|(name, text)| ((*name).to_owned(), parse(text)));
        Self {
            files: files.collect(),
        }
    }

    fn items(&self) -> impl Iterator<Item = (&String, &Item)> {
        let files = self.files.iter();
        let all = files.flat_map(|(name, file)| file.items.iter().map(move |item| (name, item)));
        all.filter(|(_, item)| !is_for_tests(item))
    }

    /// Fields of machines that others may touch.
    fn open_fields(&self) -> Vec<String> {
        let mut open = Vec::new();
        for (_, item) in self.items() {
            let Item::Struct(item) = item else { continue };
            if !MACHINES.iter().any(|name| item.ident == name) {
                continue;
            }
            for field in &item.fields {
                if !matches!(field.vis, Visibility::Inherited) {
                    let name = field.ident.as_ref().map(ToString::to_string);
                    open.push(format!("{}.{}", item.ident, name.unwrap_or_default()));
                }
            }
        }
        open
    }

    /// For each method of each type, the methods of that type that it calls by `self`.
    fn calls(&self) -> BTreeMap<(String, String), BTreeSet<(String, String)>> {
        let mut calls = BTreeMap::new();
        for (_, item) in self.items() {
            let Item::Impl(block) = item else { continue };
            let Some(owner) = owner_of(block).filter(|_| block.trait_.is_none()) else {
                continue;
            };
            for method in &block.items {
                let ImplItem::Fn(method) = method else {
                    continue;
                };
                let mut seen = SelfCalls::default();
                seen.visit_block(&method.block);
                let called = seen.0.into_iter().map(|name| (owner.clone(), name));
                calls.insert(
                    (owner.clone(), method.sig.ident.to_string()),
                    called.collect(),
                );
            }
        }
        calls
    }

    /// For each file, the files that it imports from. A folder's `mod.rs` lists its files: that is no arrow.
    fn imports(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut definitions: BTreeMap<String, BTreeSet<&String>> = BTreeMap::new();
        for (file, item) in self.items() {
            if let Some(name) = defined(item) {
                definitions.entry(name).or_default().insert(file);
            }
        }
        let folders: BTreeSet<&str> = self
            .files
            .keys()
            .filter_map(|file| Some(file.rsplit_once("::")?.0))
            .collect();
        let is_folder = |file: &str| folders.contains(file) || file.is_empty();
        let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (file, item) in self.items() {
            let Item::Use(item) = item else { continue };
            for path in paths_of(item, file) {
                let target = self.target(&path, &definitions);
                let arrow = target.filter(|target| *target != file && !is_folder(target));
                if let Some(target) = arrow.filter(|_| !is_folder(file)) {
                    arrows
                        .entry(file.clone())
                        .or_default()
                        .insert(target.clone());
                }
            }
        }
        arrows
    }

    /// The file that a path leads to: where what it names is defined, if it goes by a folder that passes it on.
    fn target<'a>(
        &'a self,
        path: &[String],
        definitions: &BTreeMap<String, BTreeSet<&'a String>>,
    ) -> Option<&'a String> {
        let longest = (0..=path.len()).rev().find_map(|length| {
            let module = path[..length].join("::");
            Some((length, self.files.get_key_value(&module)?.0))
        });
        let (length, module) = longest?;
        let named = path.get(length).and_then(|name| definitions.get(name));
        let below = |file: &&&String| file.starts_with(&format!("{module}::")) || module.is_empty();
        named
            .and_then(|files| files.iter().find(below).copied())
            .or(Some(module))
    }
}

#[derive(Default)]
struct SelfCalls(BTreeSet<String>);

impl Visit<'_> for SelfCalls {
    fn visit_expr_method_call(&mut self, call: &syn::ExprMethodCall) {
        if let syn::Expr::Path(path) = &*call.receiver
            && path.path.is_ident("self")
        {
            self.0.insert(call.method.to_string());
        }
        visit::visit_expr_method_call(self, call);
    }
}

/// What a file does that a reader of a call or of a choice cannot follow.
#[derive(Default)]
struct Unnamed {
    /// Other names of tuples.
    tuples: BTreeSet<String>,
    /// Functions that take a bool or a tuple.
    functions: Vec<String>,
    /// How many choices are made by a pattern with a bool.
    matches: usize,
}

impl Unnamed {
    fn of(text: &str) -> Self {
        let file = syn::parse_file(text).expect("it parses");
        let mut found = Self::default();
        for item in &file.items {
            if let Item::Type(item) = item
                && matches!(&*item.ty, Type::Tuple(_))
            {
                found.tuples.insert(item.ident.to_string());
            }
        }
        found.visit_file(&file);
        found
    }

    fn is_unnamed(&self, of: &Type) -> bool {
        match of {
            Type::Reference(of) => self.is_unnamed(&of.elem),
            Type::Paren(of) => self.is_unnamed(&of.elem),
            Type::Tuple(of) => !of.elems.is_empty(),
            Type::Path(of) => of.path.get_ident().is_some_and(|name| {
                let name = name.to_string();
                name == "bool" || self.tuples.contains(&name)
            }),
            _ => false,
        }
    }
}

impl Visit<'_> for Unnamed {
    /// A trait's methods are looked at where it is declared: who implements it has no choice.
    fn visit_item_impl(&mut self, block: &ItemImpl) {
        for item in &block.items {
            match item {
                ImplItem::Fn(method) if block.trait_.is_some() => self.visit_block(&method.block),
                other => self.visit_impl_item(other),
            }
        }
    }

    fn visit_signature(&mut self, signature: &syn::Signature) {
        let unnamed = signature.inputs.iter().any(|input| match input {
            syn::FnArg::Typed(input) => self.is_unnamed(&input.ty),
            syn::FnArg::Receiver(_) => false,
        });
        if unnamed {
            self.functions.push(signature.ident.to_string());
        }
        visit::visit_signature(self, signature);
    }

    fn visit_arm(&mut self, arm: &syn::Arm) {
        let mut bools = Bools::default();
        bools.visit_pat(&arm.pat);
        self.matches += bools.0;
        visit::visit_arm(self, arm);
    }

    /// What stands in a macro is text.
    fn visit_macro(&mut self, of: &syn::Macro) {
        let text = of.tokens.to_string();
        self.matches += text.matches("true =>").count() + text.matches("false =>").count();
    }
}

#[derive(Default)]
struct Bools(usize);

impl Visit<'_> for Bools {
    fn visit_lit_bool(&mut self, _: &syn::LitBool) {
        self.0 += 1;
    }
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").flatten();
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.path()) {
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|it| it == "rs") {
            found.push(path);
        }
    }
    found
}

fn module_of(below: &Path) -> String {
    let path = below.with_extension("");
    let parts: Vec<String> = path
        .iter()
        .map(|part| part.to_string_lossy().into())
        .collect();
    let parts = match parts.last().map(String::as_str) {
        Some("mod" | "lib") => &parts[..parts.len() - 1],
        _ => &parts[..],
    };
    parts.join("::")
}

fn is_for_tests(item: &Item) -> bool {
    let attributes = match item {
        Item::Mod(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        _ => return false,
    };
    attributes.iter().any(|it| {
        let is_cfg = it.path().is_ident("cfg");
        is_cfg && it.parse_args::<syn::Ident>().is_ok_and(|it| it == "test")
    })
}

fn owner_of(block: &ItemImpl) -> Option<String> {
    match &*block.self_ty {
        Type::Path(path) => Some(path.path.segments.last()?.ident.to_string()),
        _ => None,
    }
}

fn defined(item: &Item) -> Option<String> {
    let name = match item {
        Item::Struct(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Const(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        _ => return None,
    };
    Some(name.to_string())
}

/// What an import names, as paths from the crate's root; what is of other crates is left out.
fn paths_of(item: &ItemUse, file: &str) -> Vec<Vec<String>> {
    fn walk(tree: &UseTree, so_far: &[String], found: &mut Vec<Vec<String>>) {
        let with = |name: &syn::Ident| [so_far, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(path) => walk(&path.tree, &with(&path.ident), found),
            UseTree::Name(name) => found.push(with(&name.ident)),
            UseTree::Rename(name) => found.push(with(&name.ident)),
            UseTree::Glob(_) => found.push(so_far.to_vec()),
            UseTree::Group(group) => group.items.iter().for_each(|it| walk(it, so_far, found)),
        }
    }
    let mut found = Vec::new();
    walk(&item.tree, &[], &mut found);
    let here: Vec<String> = file
        .split("::")
        .filter(|it| !it.is_empty())
        .map(Into::into)
        .collect();
    let from_root = |path: Vec<String>| {
        let first = path.first()?.as_str();
        let ups = path.iter().take_while(|part| *part == "super").count();
        match first {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some([&here[..], &path[1..]].concat()),
            "super" => Some([&here[..here.len().checked_sub(ups)?], &path[ups..]].concat()),
            _ => None,
        }
    };
    found.into_iter().filter_map(from_root).collect()
}

/// The largest set of which each reaches each.
fn largest_circle<T: Ord + Clone>(arrows: &BTreeMap<T, BTreeSet<T>>) -> BTreeSet<T> {
    let reach = |from: &T| {
        let mut seen = BTreeSet::new();
        let mut next: Vec<&T> = arrows.get(from).into_iter().flatten().collect();
        while let Some(at) = next.pop() {
            if seen.insert(at.clone()) {
                next.extend(arrows.get(at).into_iter().flatten());
            }
        }
        seen
    };
    let reached: BTreeMap<&T, BTreeSet<T>> =
        arrows.keys().map(|from| (from, reach(from))).collect();
    let circle = |of: &&T| {
        let others = reached[of]
            .iter()
            .filter(|it| reached.get(it).is_some_and(|back| back.contains(*of)));
        others.cloned().collect::<BTreeSet<T>>()
    };
    arrows
        .keys()
        .map(|of| circle(&of))
        .max_by_key(BTreeSet::len)
        .unwrap_or_default()
}

#[test]
fn machines_own_their_tables() {
    for folder in CRATES {
        let open = Crate::read(folder).open_fields();
        assert!(open.is_empty(), "{folder}: {open:?}");
    }
    let planted = [("node", "pub struct Node { cx: u8, pub(crate) led: u8 }")];
    assert_eq!(Crate::of(&planted).open_fields(), ["Node.led"]);
}

#[test]
fn methods_do_not_all_reach_one_another() {
    for folder in CRATES {
        let largest = largest_circle(&Crate::read(folder).calls());
        assert!(largest.len() <= COMPONENT_MAX, "{folder}: {largest:?}");
    }
    let planted = [
        (
            "a",
            "impl Node { fn one(&self) { self.two() } fn three(&self) {} }",
        ),
        (
            "b",
            "impl Node { fn two(&self) { if true { self.x.go(self.one()); self.three() } } }",
        ),
    ];
    assert_eq!(largest_circle(&Crate::of(&planted).calls()).len(), 2);
}

#[test]
fn files_do_not_import_one_another_in_circles() {
    for folder in CRATES {
        let largest = largest_circle(&Crate::read(folder).imports());
        assert!(largest.len() <= CIRCLE_MAX, "{folder}: {largest:?}");
    }
    let planted = [
        ("", "mod encode; mod node;"),
        ("node", "use crate::encode::{Led, other}; pub struct Node;"),
        ("encode", "mod lead; pub(crate) use lead::Led;"),
        (
            "encode::lead",
            "use super::tail::T; use std::fmt; pub struct Led;",
        ),
        (
            "encode::tail",
            "use crate::node::Node; #[cfg(test)] mod tests { use super::*; } pub struct T;",
        ),
    ];
    let circle = largest_circle(&Crate::of(&planted).imports());
    let expected = ["encode::lead", "encode::tail", "node"];
    assert_eq!(
        circle.iter().map(String::as_str).collect::<Vec<_>>(),
        expected
    );
}

#[test]
fn a_call_and_a_choice_say_what_they_are_about() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = ALL.iter().flat_map(|folder| rust_files(&root.join(folder)));
    let (mut unnamed, mut matches) = (Vec::new(), Vec::new());
    for path in files {
        let below = path.strip_prefix(&root).expect("below the root");
        let file = below.display().to_string();
        let found = Unnamed::of(&fs::read_to_string(&path).expect("readable"));
        let functions = found.functions.into_iter();
        unnamed.extend(functions.map(|function| (file.clone(), function)));
        if found.matches > 0 {
            matches.push(file);
        }
    }
    unnamed.sort();
    let unnamed: Vec<_> = unnamed.iter().map(|(file, of)| (&**file, &**of)).collect();
    assert_eq!(unnamed, UNNAMED_ALLOWED, "they take a bool or a tuple");
    assert!(
        matches.is_empty(),
        "choose by if, not by match: {matches:?}"
    );
}

#[test]
fn an_unnamed_parameter_and_a_match_on_a_bool_are_seen_however_they_are_written() {
    for text in [
        "fn f(force: bool) {}",
        "impl A { async fn f(&self, (a, b): (u8, u16)) {} }",
        "trait A { fn f(&self, place: &(u8, u16)); }",
        "type Place = (u8, u16); fn f(at: &Place) {}",
        "mod tests { fn g() { fn f(_: &mut bool) {} } }",
    ] {
        assert_eq!(Unnamed::of(text).functions, ["f"], "{text}");
    }
    for text in [
        "fn f(force: Force, done: impl Fn(bool, (u8, u8)), none: ()) -> (bool, u8) { |a: bool| a }",
        "impl Visit for A { fn visit(&mut self, first: bool) {} }",
    ] {
        assert!(Unnamed::of(text).functions.is_empty(), "{text}");
    }
    for text in [
        "fn f() { match a { true => 1, _ => 2 } }",
        "fn f() { match (a, b) { (_, false) => 1, _ => 2 } }",
        "fn f() { match a { Some(A { first: true, .. }) => 1, _ => 2 } }",
        "macro_rules! m { () => { match STREAM { true => 1, _ => 2 } } }",
        "impl Visit for A { fn visit(&mut self) { match a { Ok(true) => 1, _ => 2 } } }",
    ] {
        assert_eq!(Unnamed::of(text).matches, 1, "{text}");
    }
    let none = "fn f() { match a { 1 if b == true => true, _ => matches!(c, Some(false)) } }";
    assert_eq!(Unnamed::of(none).matches, 0);
}
