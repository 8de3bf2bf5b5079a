//! Compiles the C library in `xdelta3/` for the feature `moved`.

fn main() {
    #[cfg(feature = "moved")]
    xdelta3();
}

#[cfg(feature = "moved")]
fn xdelta3() {
    println!("cargo::rerun-if-changed=xdelta3");
    let bits = std::env::var("CARGO_CFG_TARGET_POINTER_WIDTH");
    assert_eq!(
        bits.as_deref(),
        Ok("64"),
        "the feature `moved` is for 64-bit systems: its sizes stand below"
    );
    let mut build = cc::Build::new();
    // Sizes on 64-bit Linux; the library does not find them out by itself.
    for (name, value) in [
        ("SIZEOF_SIZE_T", "8"),
        ("SIZEOF_UNSIGNED_INT", "4"),
        ("SIZEOF_UNSIGNED_LONG", "8"),
        ("SIZEOF_UNSIGNED_LONG_LONG", "8"),
        ("SECONDARY_DJW", "0"),
        ("SECONDARY_FGK", "0"),
        ("EXTERNAL_COMPRESSION", "0"),
        ("XD3_USE_LARGEFILE64", "1"),
        ("SHELL_TESTS", "0"),
    ] {
        build.define(name, value);
    }
    build
        .include("xdelta3")
        .file("xdelta3/xdelta3.c")
        .file("xdelta3/layout.c")
        .flag_if_supported("-fstack-protector-strong")
        .warnings(false)
        .compile("storaged_xdelta3");
}
