# The trainer's side, head to head: nothing else should run on the machine meanwhile. HyperPod's client and DLRover are what
# PyPI has; DLRover's handler of shared memory needs less than its package asks for.

.PHONY: bench-sdk
bench-sdk: release python ## Saves and loads from PyTorch against memcpy, DCP, torch.save, HyperPod's client and DLRover (MIB=1024): docs/bench/sdk.*
	@$(BUILD) "installing what is measured beside us into .venv" .venv/bin/pip install -q --disable-pip-version-check \
		amzn-sagemaker-checkpointing boto3 s3torchconnector tenacity psutil pynvml deprecated requests grpcio torchdata
	@.venv/bin/pip install -q --disable-pip-version-check --no-deps dlrover
	@STORAGED_BIN=$(CURDIR)/target/release/storaged $(PYTHON) bench/sdk/bench_sdk.py --mib $(or $(MIB),1024) \
		--rounds $(or $(ROUNDS),5) --commit "$$(git rev-parse --short HEAD)" --write docs/bench
