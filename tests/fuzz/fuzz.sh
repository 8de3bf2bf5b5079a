#!/usr/bin/env bash
# libFuzzer on the targets of this package, built with the toolchain that builds the daemon: `fuzz.sh build`, `run`, or `merge`, which
# takes from what was found the inputs that reach new lines into corpus/. SECONDS_EACH=60, ONLY="node tier".
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
work=$root/target/fuzz
decisions=(node local control records streams)
effects=(data tier http holder)

# Counters of edges, and the operands of comparisons: LLVM's own passes, which need no nightly toolchain.
watched="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
watched+=" -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"

build() {
    (
        cd "$root/tests/fuzz/engine"
        export RUSTC_WRAPPER=$root/tests/fuzz/rustc.sh CARGO_TARGET_DIR=$work/$1
        export STORAGED_FUZZ_FLAGS="$watched ${FUZZ_CFG:-}"
        cargo build --locked --release --features "$2" --bin engine --bin seeds
    )
}

is_one_of() {
    local name=$1
    shift
    [[ " $* " == *" $name "* ]]
}

# The folder of the build that has a target. What decides needs none of the daemon's crates.
built_in() {
    if is_one_of "$1" "${decisions[@]}"; then echo decisions; else echo effects; fi
}

chosen=(${ONLY:-${decisions[@]} ${effects[@]}})
for target in "${chosen[@]}"; do
    is_one_of "$target" "${decisions[@]}" "${effects[@]}" ||
        { echo "expected some of ${decisions[*]} ${effects[*]}, got $target" >&2; exit 2; }
done

prepare() {
    local kinds target kind
    kinds=$(for target in "${chosen[@]}"; do built_in "$target"; done | sort -u)
    for kind in $kinds; do
        case $kind in
            decisions) build decisions engine ;;
            effects) build effects engine,daemon ;;
        esac
        "$work/$kind/release/seeds" "$work/seeds"
    done
}

engine() {
    local target=$1
    shift
    # A length that is believed takes no memory before it is found out; an input that takes longer is a hang.
    STORAGED_FUZZ_TARGET=$target "$work/$(built_in "$target")/release/engine" \
        -rss_limit_mb=2048 -timeout=60 -len_control=0 -max_len=4096 -artifact_prefix="$work/found/$target-" "$@"
}

run() {
    local target failed=()
    mkdir -p "$work/found"
    for target in "${chosen[@]}"; do
        mkdir -p "$work/corpus/$target" "$root/tests/fuzz/corpus/$target"
        echo "==> $target, ${SECONDS_EACH:-60} s"
        engine "$target" "$work/corpus/$target" "$work/seeds/$target" "$root/tests/fuzz/corpus/$target" \
            -max_total_time="${SECONDS_EACH:-60}" -print_final_stats=1 > "$work/$target.log" 2>&1 || failed+=("$target")
        grep -aE '^stat::(number_of_executed_units|peak_rss_mb)|^Done |cov: ' "$work/$target.log" | tail -n 4 | sed 's/NEW_FUNC.*//'
    done
    for target in "${failed[@]}"; do
        echo "$target found something; its log is $work/$target.log:" >&2
        grep -aE 'panicked at|ERROR: libFuzzer|Test unit written' -A 1 "$work/$target.log" | head -n 12 >&2
        echo "again: cargo run --release --manifest-path tests/fuzz/engine/Cargo.toml --features daemon --bin replay -- $target FILE" >&2
    done
    [ ${#failed[@]} -eq 0 ]
}

merge() {
    local target
    for target in "${chosen[@]}"; do
        local into=$root/tests/fuzz/corpus/$target
        mkdir -p "$into"
        # Seeds are made anew each time: only what reaches more than they do is kept.
        rm -rf "$work/merged" && mkdir -p "$work/merged" "$work/corpus/$target"
        cp "$work/seeds/$target"/* "$work/merged"
        engine "$target" -set_cover_merge=1 -use_counters=0 "$work/merged" "$into" "$work/corpus/$target" > "$work/$target-merge.log" 2>&1
        for seed in "$work/seeds/$target"/*; do rm -f "$work/merged/$(basename "$seed")"; done
        cp "$work/merged"/* "$into" 2>/dev/null || true
        echo "$target: $(ls "$into" | wc -l) inputs, $(du -sk --apparent-size "$into" | cut -f1) KiB"
    done
}

prepare
case ${1:-run} in
    build) ;;
    run) run ;;
    merge) merge ;;
    *) echo "expected build, run or merge, got $1" >&2; exit 2 ;;
esac
