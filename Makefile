# What each target needs, it installs: Debian packages with apt (as root), Python packages into .venv.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

TORCH := 2.15.0
# What builds and tests the Python package beside PyTorch; count VENV up when it changes.
PYTHON_TOOLS := numpy "maturin>=1.7,<2" pytest pytest-xdist fsspec
VENV := .venv/.packages-2-$(TORCH)
PYTHON := .venv/bin/python
# Python's tests wait too, for daemons and for one another's processes: one more at a time than there are cores.
PYTEST := $(PYTHON) -m pytest -q -n $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4))) --dist loadfile
CARGO := cargo
RUST_CRATES := --workspace --exclude storaged-python

.PHONY: help
help: ## This list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What a build says is one line now and then; its warnings and errors come through.
BUILD := python3 tests/fresh/build.py
PACKAGES := bash tests/fresh/packages.sh

.PHONY: packages
packages:
	@$(PACKAGES) build python

.PHONY: network-packages
network-packages: packages
	@$(PACKAGES) network

$(VENV): | packages
	@python3 -m venv .venv
	@$(BUILD) "installing PyTorch $(TORCH) and what builds and tests the Python package into .venv (about 5 GB)" .venv/bin/pip install -q --disable-pip-version-check "torch==$(TORCH)" $(PYTHON_TOOLS)
	@touch $@

.PHONY: venv
venv: $(VENV)

MATURIN := VIRTUAL_ENV=$(CURDIR)/.venv $(BUILD)

.PHONY: python
python: venv ## Build the Python package (release) into .venv
	@$(MATURIN) "building the Python package" .venv/bin/maturin develop --release -m sdk/python/Cargo.toml

# For tests: the crates that it shares with theirs are built once.
.PHONY: python-for-tests
python-for-tests: venv
	@$(MATURIN) "building the Python package for tests" .venv/bin/maturin develop -m sdk/python/Cargo.toml

# Where cargo-auditable is installed the binary names its crates itself, for `cargo audit bin` and scanners of images.
AUDITABLE := $(if $(shell command -v cargo-auditable),auditable)

.PHONY: release
release: packages ## target/release/storaged, stripped, storaged.debug and the bill of materials storaged.cdx.json beside it
	@$(BUILD) "building the release of storaged" $(CARGO) $(AUDITABLE) build --release -p storaged
	@python3 tests/supply/sbom.py --write target/release/storaged.cdx.json
	@cd target/release && objcopy --only-keep-debug --compress-debug-sections storaged storaged.debug \
		&& objcopy --strip-all --add-gnu-debuglink=storaged.debug storaged storaged.stripped && mv storaged.stripped storaged

.PHONY: demo
demo: release python ## The main job on this machine; S3=1 with a real S3 server
	@$(PYTHON) tests/demo/demo.py $(if $(S3),--s3)

# Daemon and tests are built at once: alone, the daemon needs other features of what both use, and all of it is built twice.
.PHONY: tests-built
tests-built: packages
	@$(BUILD) "building the daemon and all tests" $(CARGO) build $(RUST_CRATES) --bin storaged --lib --tests --examples

.PHONY: etcd
etcd: packages
	@bash tests/fresh/etcd.sh target/tools

.PHONY: test
test: network-packages etcd tests-built python-for-tests ## All tests: Rust, real processes, simulation, Python; ends with the runner's summary
	@python3 -m unittest discover -q -s tests/fresh
	@python3 tests/fresh/rust_tests.py $(CARGO) test $(RUST_CRATES) --lib --bins --tests
	@STORAGED_BIN=$(CURDIR)/target/debug/storaged $(PYTEST) sdk/python/tests

.PHONY: wheel
wheel: tests-built venv ## Wheels for manylinux_2_28, x86-64 and aarch64, tried without Rust or clang: target/wheels
	@$(BUILD) "installing zig, which links the wheels, into .venv" .venv/bin/pip install -q --disable-pip-version-check ziglang
	@$(PYTHON) tests/wheel/wheel.py --daemon target/debug/storaged

WHEEL_FOR_TESTS := target/torch-versions/wheel

.PHONY: torch-versions
torch-versions: tests-built venv ## The Python tests with torch 2.4 to the newest and Python 3.10 to 3.14, a venv each (5 GB, deleted after; KEEP=1, ONLY="2.4.1 2.6.0")
	@rm -rf $(WHEEL_FOR_TESTS)
	@$(MATURIN) "building the Python package for its tests" .venv/bin/maturin build -m sdk/python/Cargo.toml -o $(WHEEL_FOR_TESTS)
	@$(PYTHON) tests/versions/torch_versions.py --wheel $(WHEEL_FOR_TESTS)/*.whl --daemon target/debug/storaged \
		$(if $(ONLY),--only $(ONLY)) $(if $(KEEP),--keep) --write docs/bench/sdk.json --commit "$$(git rev-parse --short HEAD)"

.PHONY: frameworks
frameworks: tests-built python-for-tests ## Lightning, Hugging Face, Accelerate, torchtitan, torchft, Megatron-Core, DeepSpeed, Orbax, DDP and FSDP2: killed, resumed, the same losses; HyperPod's client
	@$(BUILD) "installing the frameworks into .venv" .venv/bin/pip install -q --disable-pip-version-check lightning transformers accelerate torchao safetensors tyro torchft megatron-core nvidia-resiliency-ext deepspeed torchdata "jax[cpu]" orbax-checkpoint s3fs "moto[server]"
	@.venv/bin/pip install -q --disable-pip-version-check --no-deps torchtitan
	@.venv/bin/pip install -q --disable-pip-version-check amzn-sagemaker-checkpointing boto3 s3torchconnector tenacity
	@code=0; STORAGED_BIN=$(CURDIR)/target/debug/storaged $(PYTEST) --junitxml=target/frameworks.xml sdk/python/tests/test_frameworks.py \
		sdk/python/tests/test_hyperpod_client.py sdk/python/tests/test_torchft.py sdk/python/tests/test_deepspeed.py \
		sdk/python/tests/test_orbax.py sdk/python/tests/test_megatron.py sdk/python/tests/test_data.py \
		sdk/python/tests/test_kinds_of_state.py sdk/python/tests/test_export.py || code=$$?; \
	$(PYTHON) tests/versions/frameworks.py --report target/frameworks.xml --write docs/bench/sdk.json --commit "$$(git rev-parse --short HEAD)"; exit $$code

.PHONY: typed
typed: python-for-tests ## mypy --strict over the Python package; it and pyright, strict, over what a user writes with it
	@$(BUILD) "installing mypy and pyright into .venv" .venv/bin/pip install -q --disable-pip-version-check mypy safetensors "pyright[nodejs]"
	@.venv/bin/mypy --strict sdk/python/python/storaged sdk/python/python/storaged_rendezvous sdk/python/typed
	@.venv/bin/pyright --pythonpath .venv/bin/python -p sdk/python/pyrightconfig.json

.PHONY: fresh
fresh: ## make demo and make test on a bare Debian 12 (root; an hour on two cores, 25 GB of disk while it runs)
	@bash tests/fresh/fresh.sh target/fresh python demo test

.PHONY: sim
sim: packages ## Thousands of simulated clusters and ordinary months (SEEDS=2000, FIRST=0): docs/bench/sim.json
	@python3 tests/sim/run.py seeds --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0)
	@export STORAGED_SIM_FIRST=$(or $(FIRST),0) STORAGED_SIM_NETWORKS=$$(($(or $(SEEDS),2000) / 20 + 4)); \
	$(CARGO) test $(RUST_CRATES) --test simulated_network -- --nocapture many_seeds

.PHONY: sim-mutants
sim-mutants: packages ## Bugs planted in the core, one at a time: the simulation must catch each (ONLY="name name")
	@python3 tests/sim/run.py mutants $(if $(ONLY),--only $(ONLY))

.PHONY: mutants
mutants: packages ## Random mutants of core and plan against their tests (SAMPLE=60 SEED=n): keys of docs/bench/sim.json
	@command -v cargo-mutants >/dev/null || $(BUILD) "installing cargo-mutants" $(CARGO) install --debug --locked cargo-mutants
	@python3 tests/mutants/mutants.py --sample $(or $(SAMPLE),60) $(if $(SEED),--seed $(SEED)) --write docs/bench/sim.json

SOAK_WRITE := --write docs/bench/soak.json

.PHONY: soak
soak: network-packages release python ## Daemons, S3 and two jobs under kills, pauses, cuts and outages (MINUTES=15; root): docs/bench/soak.json
	@$(PACKAGES) s3
	@$(PYTHON) tests/soak/soak.py --minutes $(or $(MINUTES),15) $(if $(SEED),--seed $(SEED)) $(SOAK_WRITE)

# With the crates of all tests chosen, what the layout tests are built from is built for `make test` too.
.PHONY: lint
lint: packages ## Format, clippy, documentation, layout, house and advisories; licences too where cargo-deny is installed
	@$(CARGO) fmt --all --check
	@$(CARGO) fmt --manifest-path tests/fuzz/engine/Cargo.toml --check
	@$(BUILD) "checking lints" $(CARGO) clippy --workspace --all-targets -- -D warnings
	@RUSTDOCFLAGS="-D warnings" $(BUILD) "checking the documentation" $(CARGO) doc $(RUST_CRATES) --no-deps
	@if command -v cargo-deny >/dev/null; then $(MAKE) licences; \
		else echo "==> licences were not checked: there is no cargo-deny; make check installs it"; fi
	@$(BUILD) "building the layout tests" $(CARGO) test --no-run $(RUST_CRATES) --test layout --test house
	@$(CARGO) test -q $(RUST_CRATES) --test layout --test house
	@$(MAKE) advisories

.PHONY: licences
licences: packages
	@command -v cargo-deny >/dev/null || $(BUILD) "installing cargo-deny" $(CARGO) install --locked cargo-deny
	@$(CARGO) deny --log-level error check bans licenses sources

# Without a network: the database's index is in the repository. The tests first, so that what finds nothing has been seen to find.
.PHONY: advisories
advisories: packages ## Cargo.lock against the RustSec advisories in tests/supply
	@mkdir -p target
	@python3 -m unittest discover -s tests/supply 2> target/supply-tests.log || { cat target/supply-tests.log >&2; exit 1; }
	@python3 tests/supply/advisories.py

.PHONY: renew-advisories
renew-advisories: packages ## The newest RustSec advisories, from GitHub, into tests/supply/advisories.json
	@rm -rf target/advisory-db
	@git clone -q --depth 1 https://github.com/rustsec/advisory-db target/advisory-db
	@python3 tests/supply/renew.py target/advisory-db

.PHONY: check
check: packages licences ## What must hold before a commit lands: lint, licences, tests, 250 kills, a fresh machine (hours)
	@$(MAKE) lint
	@$(CARGO) test -q -p storaged-codec --no-default-features --test delta --test golden_delta
	@$(MAKE) test
	@$(MAKE) frameworks
	@$(MAKE) torch-versions
	@$(MAKE) typed
	@$(MAKE) places-in-s3
	@$(MAKE) azure
	@$(MAKE) kill-loop
	@$(MAKE) torture KILLS=200 SECONDS=60 LIFETIME_WRITE=
	@$(MAKE) soak MINUTES=5 SOAK_WRITE=
	@$(MAKE) fresh

.PHONY: azure
azure: tests-built ## The durable tier's conformance suite against Azurite, Microsoft's emulator (npm)
	@tests/azure/azurite.sh $(CARGO) test $(RUST_CRATES) --lib -- azurite_conforms

.PHONY: places-in-s3
places-in-s3: network-packages tests-built ## Eight nodes in network namespaces whose registry is a real S3 server (root, Ceph's packages)
	@$(PACKAGES) s3
	@$(CARGO) test $(RUST_CRATES) --test namespaces -- --ignored an_s3_server

.PHONY: systemd
systemd: tests-built python-for-tests ## The shipped unit under a real systemd, three nodes that systemd-nspawn boots (root; two minutes and 0.3 GB)
	@$(PYTHON) tests/nodes/under_systemd.py

.PHONY: slurm
slurm: tests-built python-for-tests ## The shipped Slurm files with a real Slurm, three nodes that systemd-nspawn boots (root; ten minutes)
	@$(PYTHON) tests/nodes/under_slurm.py

.PHONY: kubernetes
kubernetes: release etcd tests-built python-for-tests ## The shipped Kubernetes files in a real cluster of four nodes that systemd-nspawn boots (root, Debian 12 with control groups of version 1; eight minutes once to build Kubernetes, then six)
	@STORAGED_BIN=$(CURDIR)/target/release/storaged $(PYTHON) tests/nodes/under_kubernetes.py

.PHONY: kill-loop
kill-loop: release python ## 50 rounds of kill -9 at random times (ROUNDS=50)
	@$(PYTHON) tests/demo/kill_loop.py --rounds $(or $(ROUNDS),50)

LIFETIME_WRITE := --write docs/bench/lifetime.json

.PHONY: lifetime
lifetime: network-packages ## Restarts, upgrades, lost nodes, a real S3 server as registry, every loss of up to m (also between two epochs) and losses of m+1, kills at any moment: docs/bench/lifetime.json (root; KILLS=200 SEED=1; hours, most of them for losses-replaced; ONLY=restart,upgrade for parts)
	@$(PACKAGES) s3
	@$(BUILD) "building the release of the daemon and of what kills it" $(CARGO) build --release -p storaged -p storaged-tests --bin storaged --bin lifetime
	@target/release/lifetime --kills $(or $(KILLS),200) --seed $(or $(SEED),1) $(if $(ONLY),--only $(ONLY)) $(LIFETIME_WRITE)

.PHONY: upgrade
upgrade: packages ## A cluster of another commit's daemons upgraded to this one's under a saving job, and back (FROM=commit)
	@[ -n "$(FROM)" ] || { echo "expected FROM=COMMIT" >&2; exit 2; }
	@python3 tests/upgrade/upgrade.py --from "$(FROM)" $(LIFETIME_WRITE)

.PHONY: torture
torture: ## 1,000 kills of trainers' processes, daemons, keepers and nodes in the middle of saves, then ten minutes of each fuzz target (KILLS=1000 SEED=1 SECONDS=600)
	@$(MAKE) lifetime ONLY=torture KILLS=$(or $(KILLS),1000)
	@$(MAKE) fuzz ONLY= SECONDS=$(or $(SECONDS),600)

# The same compiler as the daemon's: counters are a pass of LLVM's, so that no nightly toolchain is needed.
.PHONY: fuzz
fuzz: packages ## Coverage-guided fuzzing of what users, peers and tiers can send (SECONDS=60 of each; ONLY="node tier")
	@SECONDS_EACH=$(or $(SECONDS),60) ONLY="$(ONLY)" $(BUILD) "building the fuzz targets" bash tests/fuzz/fuzz.sh build
	@SECONDS_EACH=$(or $(SECONDS),60) ONLY="$(ONLY)" bash tests/fuzz/fuzz.sh run

.PHONY: fuzz-merge
fuzz-merge: packages ## What make fuzz has found that reaches new code, into tests/fuzz/corpus (ONLY="node tier")
	@ONLY="$(ONLY)" bash tests/fuzz/fuzz.sh merge

.PHONY: fuzz-coverage
fuzz-coverage: packages ## Which lines of the core the fuzz targets' inputs reach: docs/bench/security.json (needs rustup's llvm-tools)
	@python3 tests/fuzz/coverage.py --write docs/bench/security.json

ATTACK_WRITE := --write docs/bench/security.json

.PHONY: attack
attack: ## Attacks by users of a node while another tenant saves: docs/bench/security.json (root; ten minutes; QUICK=1: one; ONLY=name,name)
	@$(BUILD) "building the release of the daemon and of what attacks it" $(CARGO) build --release -p storaged -p storaged-tests --bin storaged --bin attack
	@target/release/attack $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(QUICK)$(ONLY),,$(ATTACK_WRITE))
	@$(if $(QUICK)$(ONLY),:,python3 tests/supply/advisories.py $(ATTACK_WRITE))

.PHONY: bench
bench: release ## Stage, encode and restore against memcpy and raw QUIC: docs/bench/path.json
	@mkdir -p docs/bench
	@target/release/storaged bench --json --commit "$$(git rev-parse --short HEAD)" > docs/bench/path.json.new
	@mv docs/bench/path.json.new docs/bench/path.json
	@cat docs/bench/path.json

.PHONY: bench-scale
bench-scale: packages ## What decisions cost a home node at 128 to 100,000 ranks, and all of 1,250 nodes: docs/bench/scale.json
	@$(CARGO) bench -q -p storaged-core --bench scale -- --write $(CURDIR)/docs/bench/scale.json
	@$(CARGO) bench -q -p storaged-core --bench cluster -- --write $(CURDIR)/docs/bench/scale.json

.PHONY: bench-security
bench-security: packages ## What it costs to authenticate a checkpoint: docs/bench/security.json
	@$(CARGO) bench -q -p storaged-wire --bench security -- --write $(CURDIR)/docs/bench/security.json

.PHONY: corpus
corpus: venv ## Train small models and keep successive states for bench-delta: target/corpus
	@[ -f target/corpus/corpus.json ] || $(PYTHON) bench/corpus/make_corpus.py --out target/corpus

.PHONY: bench-delta
bench-delta: packages corpus ## Size and speed of deltas on real training state: docs/bench/delta.{json,md}
	@$(CARGO) run -q --release -p storaged-bench --bin bench-delta -- --commit "$$(git rev-parse --short HEAD)"

-include codec/bench.mk
-include bench/net.mk
-include bench/sdk.mk
