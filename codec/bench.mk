# The bench of the erasure code. ISA-L comes from Debian; the crate reed-solomon-erasure is either built with its C
# kernels or without, so it is measured in two builds, each time beside memcpy.

BENCH_CODEC := $(CARGO) build -q --release -p storaged-bench --bin bench-codec

BENCH_CODEC_ROUNDS := $(or $(ROUNDS),48)
BENCH_CODEC_ROUNDS_APART := $(or $(ROUNDS),16)

.PHONY: bench-codec-packages
bench-codec-packages: clang-packages
	@if ! [ -e /usr/include/isa-l/erasure_code.h ]; then \
		[ "$$(id -u)" -eq 0 ] || { echo "missing Debian package: libisal-dev; install it or run as root" >&2; exit 1; }; \
		echo "installing Debian package: libisal-dev"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libisal-dev >/dev/null; \
	fi

.PHONY: bench-codec
bench-codec: bench-codec-packages ## The erasure code against ISA-L, two crates and memcpy (ROUNDS=48): docs/bench/codec.*
	@$(BENCH_CODEC)
	@cp target/release/bench-codec target/bench-codec-default
	@$(BENCH_CODEC) --features isal,rse-simd
	@target/bench-codec-default --only rse_default,memcpy --rounds $(BENCH_CODEC_ROUNDS_APART) > target/bench-codec-default.json
	@target/release/bench-codec --merge target/bench-codec-default.json --write docs/bench --rounds $(BENCH_CODEC_ROUNDS) \
		--commit "$$(git rev-parse --short HEAD)" \
		--isal-version "$$(dpkg-query -W -f '$${Version}' libisal-dev 2>/dev/null || echo unknown)"

# Miri interprets the program and looks at every access to memory. It knows the instructions of AVX2 and GFNI on 32-byte
# vectors, not the stores past the cache, and is some hundred times slower, so it gets the tests that are short.
.PHONY: miri
miri: ## Engines and other arithmetic of the codec under Miri (needs a nightly toolchain)
	@rustup component add --toolchain nightly miri rust-src
	@RUSTFLAGS="-C target-feature=+avx2,+gfni" MIRIFLAGS="-Zmiri-disable-isolation" $(CARGO) +nightly miri test -p storaged-codec --lib -- \
		a_few_lengths uneven_lengths every_name field:: checked:: pinned
