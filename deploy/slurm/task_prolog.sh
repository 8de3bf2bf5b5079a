#!/usr/bin/env bash
# Slurm TaskProlog (the job's user, before every task): lines "export NAME=value" on stdout go to the task.
# A value that the job has set already stays.
set -euo pipefail

tenant="${STORAGED_TENANT:-training}"
if [[ -z "${STORAGED_SOCKET:-}" ]]; then
    echo "export STORAGED_SOCKET=/run/storaged/${tenant}/storaged.sock"
fi
# A requeued job keeps its number, so it finds its checkpoints again; a job that is submitted anew to go on should
# name the namespace itself.
if [[ -z "${STORAGED_NAMESPACE:-}" && -n "${SLURM_JOB_ID:-}" ]]; then
    echo "export STORAGED_NAMESPACE=slurm-${SLURM_JOB_ID}"
fi
