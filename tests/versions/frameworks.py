"""Of which frameworks all tests ran and passed, by the report of `make frameworks`: written into the bench's figures.

    frameworks.py --report target/frameworks.xml --write docs/bench/sdk.json --commit abc1234
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

#: Which framework a test is of: the example that it runs, or its file.
FRAMEWORKS = {
    "ddp.py": "DDP", "fsdp2.py": "FSDP2", "lightning_trainer.py": "Lightning", "hf_trainer.py": "Hugging Face Trainer",
    "accelerate_loop.py": "Accelerate", "torchtitan_checkpoints.py": "torchtitan", "megatron_checkpoints.py": "Megatron-Core",
    "deepspeed_zero.py": "DeepSpeed", "test_deepspeed": "DeepSpeed", "test_torchft": "torchft", "test_orbax": "Orbax", "test_megatron": "Megatron-Core",
    "test_hyperpod_client": "HyperPod's client",
}


def framework_of(case: ElementTree.Element) -> str | None:
    """None for a test of no framework alone."""
    _, _, parameter = case.get("name", "").rstrip("]").partition("[")
    module = case.get("classname", "") or case.get("name", "")  # a module that was skipped whole is a case itself
    return FRAMEWORKS.get(parameter.partition(" ")[0]) or FRAMEWORKS.get(module.rpartition(".")[2])


def passed(report: Path) -> list[str]:
    """Frameworks of which at least one test ran, and none failed or was left out."""
    good: dict[str, bool] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        framework = framework_of(case)
        if framework is not None:
            good[framework] = good.get(framework, True) and all(case.find(what) is None for what in ("failure", "error", "skipped"))
    return sorted(framework for framework, is_good in good.items() if is_good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--write", type=Path, required=True, help="sdk.json")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    names = passed(options.report)
    figures = json.loads(options.write.read_text())
    figures |= {"frameworks": len(names), "frameworks_passed": ", ".join(names), "frameworks_commit": options.commit}
    options.write.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    print(f"{len(names)} frameworks: {', '.join(names)}")


if __name__ == "__main__":
    main()
