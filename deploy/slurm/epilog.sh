#!/usr/bin/env bash
# Slurm Epilog (root, on every node, after a job): a node whose daemon does not answer gets no next job, because a
# failing epilog drains it. It frees nothing: the job's newest checkpoint stays in RAM for its requeue.
set -euo pipefail
# Slurm calls it without a PATH; bash has one for itself then, and does not tell it to the programs that it starts.
[[ "${PATH@a}" == *x* ]] || export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# Over the operator's socket: any process of the node can hold up the HTTP server.
for _ in 1 2 3; do
    if why=$(timeout 10 storaged status --probe live 2>&1); then
        exit 0
    fi
    sleep 1
done
echo "storaged on $(hostname) does not answer ($why): see journalctl -u storaged" >&2
exit 1
