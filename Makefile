# What each target needs, it installs: Debian packages with apt (as root), Python packages into .venv.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

TORCH := 2.15.0
PYTHON := .venv/bin/python
CARGO := cargo
RUST_CRATES := --workspace --exclude storaged-python

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

.PHONY: packages
packages:
	@missing=(); \
	command -v cc >/dev/null || missing+=(build-essential); \
	ls /usr/lib/llvm-*/lib/libclang*.so* /usr/lib/*/libclang*.so* >/dev/null 2>&1 || missing+=(libclang-dev clang); \
	$${PYTHON3:-python3} -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv); \
	if [ $${#missing[@]} -gt 0 ]; then \
		[ "$$(id -u)" -eq 0 ] || { echo "missing Debian packages: $${missing[*]}; install them or run as root" >&2; exit 1; }; \
		echo "installing Debian packages: $${missing[*]}"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $${missing[@]} >/dev/null; \
	fi

.venv/.packages-$(TORCH): | packages
	@echo "installing PyTorch $(TORCH) and what builds and tests the Python package into .venv (about 5 GB)"
	@python3 -m venv .venv
	@.venv/bin/pip install -q --disable-pip-version-check "torch==$(TORCH)" numpy "maturin>=1.7,<2" pytest fsspec
	@touch $@

.PHONY: venv
venv: .venv/.packages-$(TORCH)

.PHONY: python
python: venv ## Build the Python package (release) into .venv
	@VIRTUAL_ENV=$(CURDIR)/.venv .venv/bin/maturin develop -q --release -m sdk/python/Cargo.toml

.PHONY: release
release: packages
	@$(CARGO) build -q --release -p storaged

.PHONY: demo
demo: release python ## The main job on this machine; S3=1 with a real S3 server
	@$(PYTHON) tests/demo/demo.py $(if $(S3),--s3)

.PHONY: test
test: packages network-packages python ## All tests: Rust, real processes, simulation, Python; ends with the runner's summary
	@$(CARGO) build -p storaged
	@$(CARGO) test $(RUST_CRATES) --lib --bins --tests --no-fail-fast
	@$(PYTHON) -m pytest -q sdk/python/tests

.PHONY: sim
sim: packages ## Thousands of simulated clusters whose nodes die, are slow or lie (SEEDS=2000, FIRST=0)
	@export STORAGED_SIM_SEEDS=$(or $(SEEDS),2000) STORAGED_SIM_FIRST=$(or $(FIRST),0); \
	export STORAGED_SIM_LIARS=$$((STORAGED_SIM_SEEDS / 4 + 18)) STORAGED_SIM_NETWORKS=$$((STORAGED_SIM_SEEDS / 20 + 4)); \
	$(CARGO) test -p storaged-core --test simulation -- --nocapture seeds lying; \
	$(CARGO) test -p storaged-tests --test simulated_network -- --nocapture seeds

.PHONY: check
check: packages ## What must hold before a commit lands: format, lints, licences, docs, tests, 50 rounds of kill -9
	@$(CARGO) fmt --all --check
	@$(CARGO) clippy -q --workspace --all-targets -- -D warnings
	@RUSTDOCFLAGS="-D warnings" $(CARGO) doc -q $(RUST_CRATES) --no-deps
	@command -v cargo-deny >/dev/null || $(CARGO) install -q --locked cargo-deny
	@$(CARGO) deny --log-level error check bans licenses sources
	@$(MAKE) test
	@$(MAKE) kill-loop

.PHONY: kill-loop
kill-loop: release python ## 50 rounds of kill -9 at random times (ROUNDS=50)
	@$(PYTHON) tests/demo/kill_loop.py --rounds $(or $(ROUNDS),50)

.PHONY: bench
bench: release ## Stage, encode and restore against memcpy and raw QUIC: docs/bench/path.json
	@mkdir -p docs/bench
	@target/release/storaged bench --json --commit "$$(git rev-parse --short HEAD)" > docs/bench/path.json.new
	@mv docs/bench/path.json.new docs/bench/path.json
	@cat docs/bench/path.json

.PHONY: corpus
corpus: venv ## Train small models and keep successive states for bench-delta: target/corpus
	@[ -f target/corpus/corpus.json ] || $(PYTHON) bench/corpus/make_corpus.py --out target/corpus

.PHONY: bench-delta
bench-delta: packages corpus ## Size and speed of deltas on real training state: docs/bench/delta.{json,md}
	@$(CARGO) run -q --release -p storaged-bench --bin bench-delta -- --commit "$$(git rev-parse --short HEAD)"

-include codec/bench.mk
-include bench/net.mk
