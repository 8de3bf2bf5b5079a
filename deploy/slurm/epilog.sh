#!/usr/bin/env bash
# Slurm Epilog (root, on every node, after a job): a node whose daemon does not answer gets no next job, because a
# failing epilog drains it. It frees nothing: the job's newest checkpoint stays in RAM for its requeue.
set -euo pipefail

url="${STORAGED_OPS:-http://127.0.0.1:9301}/healthz"
for _ in 1 2 3; do
    if curl --silent --fail --max-time 5 --output /dev/null "$url"; then
        exit 0
    fi
    sleep 1
done
echo "storaged on $(hostname) does not answer ($url): see journalctl -u storaged" >&2
exit 1
