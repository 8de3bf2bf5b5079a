# The bench of the erasure code. ISA-L comes from Debian; the crate reed-solomon-erasure is either built with its C
# kernels or without, so it is measured in two builds, each time beside memcpy.

BENCH_CODEC := $(CARGO) build -q --release -p storaged-bench --bin bench-codec

BENCH_CODEC_ROUNDS := $(or $(ROUNDS),48)
BENCH_CODEC_ROUNDS_APART := $(or $(ROUNDS),16)

.PHONY: bench-codec-packages
bench-codec-packages: packages
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
