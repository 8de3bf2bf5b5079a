#!/usr/bin/env bash
# Slurm Prolog (root, on every node, before a job): lets a job start only where the daemon is ready.
# A failure drains the node and requeues the job, so it waits for the daemon first. The job is held then, until `scontrol release JOB`, unless
# slurm.conf has SchedulerParameters=nohold_on_prolog_fail.
set -euo pipefail
# Slurm calls it without a PATH; bash has one for itself then, and does not tell it to the programs that it starts.
[[ "${PATH@a}" == *x* ]] || export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# Over the operator's socket: any process of the node can hold up the HTTP server.
wait_s="${STORAGED_READY_WAIT_S:-30}"

end=$((SECONDS + wait_s))
until why=$(timeout 10 storaged status --probe ready 2>&1); do
    if ((SECONDS >= end)); then
        echo "storaged on $(hostname) is not ready after ${wait_s} s ($why): see journalctl -u storaged" >&2
        exit 1
    fi
    sleep 1
done
