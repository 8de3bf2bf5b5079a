#!/bin/sh
# Cargo's RUSTC_WRAPPER: what is to be watched is compiled with the flags in STORAGED_FUZZ_FLAGS, all else as ever. A build script
# would not link with them, and counters of the AWS SDK would only have to be looked through.
compiler=$1
shift
case "${CARGO_CRATE_NAME:-}" in
    storaged* | minicbor | engine | replay) exec "$compiler" "$@" $STORAGED_FUZZ_FLAGS ;;
    *) exec "$compiler" "$@" ;;
esac
