"""Starts torchrun again until the job is done, and asks storaged before each start what it would get: a verdict, not a hope.

    python torchrun_verdict.py --restarts 5 --wait 600 -- --nproc-per-node 8 train.py --steps 1000

In place of torchrun, for a job of one node: a job of several takes `torchrun --rdzv-backend storaged` (docs/operate/restart.md), where the
nodes agree on one verdict and start together. It logs the verdict, waits for nodes whose return would bring a newer step, and starts; where nothing
that was saved can be had, or only a step that is older than a load takes by itself, it does not start and exits with the verdict's code
(`storaged plan --help`). A start that fails without a newer step counts against the step that it began from: the next start gets another.
Where the daemon does not answer it starts without a verdict once --wait is over: loads refuse by themselves what they must.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import time

import storaged
from storaged.errors import InvalidArgument, StoragedError
from torch.distributed.run import get_args_parser

logging.basicConfig(level=logging.INFO, format="%(asctime)s launcher: %(message)s", stream=sys.stderr)
log = logging.getLogger("launcher")

# Between questions while a node is waited for; each of them waits for nodes that are silent too.
ASK_AGAIN_S = 5
# Between looks at the signals that have come.
LOOK_EVERY_S = 0.2
# Signals that end the job: nothing is started after the first one.
told = []


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespace", default=os.environ.get("STORAGED_NAMESPACE"))
    parser.add_argument("--restarts", type=int, default=3, help="starts after the first one")
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait for what is silent and may bring a better step")
    parser.add_argument("--timeout", type=float, default=20, help="seconds that one verdict may take")
    parser.add_argument("--allow-older", action="store_true", help="start from a step behind one that was protected; TRAIN_ALLOW_OLDER=1 tells the script")
    parser.add_argument("torchrun", nargs="+", help="what torchrun gets, after --")
    options = parser.parse_args()
    nodes = get_args_parser().parse_args(options.torchrun).nnodes
    if nodes not in ("1", "1:1"):
        parser.error(f"expected a job of one node, got --nnodes {nodes}: several nodes use `torchrun --rdzv-backend storaged` in place of this")
    return options


def decided(options):
    """The verdict to act on: at once, or when waiting gains nothing more. None if no daemon has answered by then, or once told to end."""
    until = time.monotonic() + options.wait
    while not told:
        try:
            verdict = storaged.verdict(options.namespace, timeout=options.timeout)
        except InvalidArgument:
            raise
        except StoragedError as error:
            verdict, why = None, f"no verdict: {error}"
        else:
            log.info("%s", verdict)
            why = verdict.why_wait(allow_older=options.allow_older)
        left = until - time.monotonic()
        if why is None or left <= 0:
            if verdict is None:
                log.warning("starting without a verdict: %s", why)
            return verdict
        log.info("waiting up to %.0f s more: %s", left, why)
        pause(min(ASK_AGAIN_S, left))
    return None


def pause(seconds):
    until = time.monotonic() + seconds
    while not told and (left := until - time.monotonic()) > 0:
        time.sleep(min(LOOK_EVERY_S, left))


def run(verdict, options):
    """torchrun's exit code. A signal to this process goes to it; it ends its ranks."""
    environment = os.environ | ({"TRAIN_ALLOW_OLDER": "1"} if verdict is not None and verdict.needs_allow_older else {})
    # Restarts inside of torchrun would ask nobody.
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0", *options.torchrun]
    child = subprocess.Popen(command, env=environment)
    passed_on = 0
    while True:
        while passed_on < len(told):
            child.send_signal(told[passed_on])
            passed_on += 1
        try:
            return child.wait(LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            continue


def note_failure(began, options):
    """Says that the step failed, unless the job has saved a newer one since: then it got somewhere."""
    if began is None or began.plan is None:
        return
    plan = began.plan
    try:
        now = storaged.verdict(options.namespace, timeout=options.timeout)
        # Where loads refuse the step by now, as nodes have fallen silent, it may be that which ended the start.
        if now.plan is None or now.needs_allow_older or (now.plan.run, now.plan.step) != (plan.run, plan.step):
            return
        failed = storaged.restart_failed(plan.step, options.namespace, run=plan.run, timeout=options.timeout)
    except StoragedError as error:
        log.warning("the failed start from step %d could not be counted: %s", plan.step, error)
    else:
        log.warning("a restart from step %d has failed, %d by now: the next one gets another step if there is one", failed.step, failed.times)


def main():
    options = arguments()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.append(number))
    code = 1
    for start in range(options.restarts + 1):
        verdict = decided(options)
        if told:
            log.warning("told to end: nothing more is started")
            return 128 + told[0]
        if verdict is not None and not verdict.may_start(allow_older=options.allow_older):
            log.error("not started: %s", verdict.decision.value)
            return verdict.exit_code
        code = run(verdict, options)
        if code == 0 or told:
            return code
        log.warning("start %d ended with %d", start + 1, code)
        note_failure(verdict, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
