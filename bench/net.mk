# What makes networks of namespaces, and the bench of plans and transport on one: needs root, ip, tc and nft, and says
# so without them.

.PHONY: network-packages
network-packages: packages
	@if [ "$$(id -u)" -eq 0 ]; then \
		missing=(); \
		{ command -v ip && command -v tc; } >/dev/null || missing+=(iproute2); \
		command -v nft >/dev/null || missing+=(nftables); \
		if [ $${#missing[@]} -gt 0 ]; then \
			echo "installing Debian packages: $${missing[*]}"; \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $${missing[@]} >/dev/null; \
		fi; \
	fi

.PHONY: bench-net
bench-net: network-packages release ## Plans, repair and transport on shaped links (ONLY=chain8 for one): docs/bench/net.*
	@$(CARGO) build -q --release -p storaged-bench --bin bench-net
	@target/release/bench-net $(if $(ONLY),--only $(ONLY),--write docs/bench) --commit "$$(git rev-parse --short HEAD)"
