# The trainer's side, head to head: nothing else may run on the machine meanwhile.

.PHONY: bench-sdk
bench-sdk: release python ## Saves and loads from PyTorch against memcpy, stock DCP and torch.save (MIB=1024): docs/bench/sdk.json
	@mkdir -p docs/bench
	@STORAGED_BIN=$(CURDIR)/target/release/storaged $(PYTHON) bench/sdk/bench_sdk.py --mib $(or $(MIB),1024) \
		--commit "$$(git rev-parse --short HEAD)" --write docs/bench/sdk.json
