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
    STORAGED_NAMESPACE="slurm-${SLURM_JOB_ID}"
    echo "export STORAGED_NAMESPACE=${STORAGED_NAMESPACE}"
fi
# Whoever has the token is the job, for as long as its checkpoints are kept: one per namespace, in a folder that the job's nodes share. The first
# task to come makes it; the others find it.
if [[ -z "${STORAGED_TOKEN:-}${STORAGED_TOKEN_FILE:-}" && -n "${STORAGED_NAMESPACE:-}" ]]; then
    tokens="${STORAGED_TOKENS:-${HOME}/.storaged}"
    token="${tokens}/${STORAGED_NAMESPACE}.token"
    (umask 077 && mkdir -p "${tokens}")
    [[ -e "${token}" ]] || storaged token "${token}" 2>/dev/null || [[ -e "${token}" ]]
    echo "export STORAGED_TOKEN_FILE=${token}"
fi
