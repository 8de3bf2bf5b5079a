#!/usr/bin/env bash
# Slurm Prolog (root, on every node, before a job): lets a job start only where the daemon is ready.
# A failure drains the node and requeues the job, so it waits for the daemon first.
set -euo pipefail

url="${STORAGED_OPS:-http://127.0.0.1:9301}/readyz"
wait_s="${STORAGED_READY_WAIT_S:-30}"

end=$((SECONDS + wait_s))
until curl --silent --fail --max-time 2 --output /dev/null "$url"; do
    if ((SECONDS >= end)); then
        echo "storaged on $(hostname) is not ready after ${wait_s} s ($url): see journalctl -u storaged" >&2
        exit 1
    fi
    sleep 1
done
