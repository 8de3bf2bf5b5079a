#!/usr/bin/env bash
# In a job's batch script, in place of a bare srun: asks storaged what a start would get, and starts, waits for a node, starts again
# in place, or requeues the job.
#
#   #SBATCH --requeue
#   #SBATCH --open-mode=append
#   restart.sh srun torchrun train.py
#
# STORAGED_NAMESPACE must be the same at each start; by default it is made of the job's number, which a requeue keeps, as in
# task_prolog.sh. Beside it:
#   STORAGED_WAIT_S        how long to wait here for nodes that would bring a newer step (300)
#   STORAGED_STARTS_MAX    starts in one allocation, while only processes die (3)
#   STORAGED_REQUEUES_MAX  after so many requeues the job fails (5)
#   STORAGED_ALLOW_OLDER   1 takes a step behind one that was protected; the training script must allow it too
# A start that fails and has saved nothing newer is counted against its step: the next one gets another step, if there is one.
set -euo pipefail

storaged="${STORAGED_BIN:-storaged}"
scontrol="${SCONTROL_BIN:-scontrol}"
export STORAGED_NAMESPACE="${STORAGED_NAMESPACE:-slurm-${SLURM_JOB_ID:?}}"
ask_s="${STORAGED_ASK_S:-20}"
text=""

say() { echo "restart.sh: $*" >&2; }

# Returns the verdict's exit code (storaged plan --help); its text goes to the job's log.
verdict() {
    local code=0
    text="$("$storaged" plan "$STORAGED_NAMESPACE" --verdict --timeout "$ask_s")" || code=$?
    printf '%s\n' "$text" >&2
    return "$code"
}

# "run R step S" of what a start would get, empty if there is nothing.
offered() { sed -n 's/^\(run [^ ]* step [0-9]*\) .*/\1/p' <<<"$text"; }

requeue() {
    if ((${SLURM_RESTART_COUNT:-0} >= ${STORAGED_REQUEUES_MAX:-5})); then
        say "not requeued again after ${SLURM_RESTART_COUNT} times: $1"
        exit 1
    fi
    say "requeue: $1"
    "$scontrol" requeue "${SLURM_JOB_ID:?}"
    exit 0
}

# The verdict to act on: at once, or when waiting gains nothing more.
decide() {
    local end=$((SECONDS + ${STORAGED_WAIT_S:-300}))
    while true; do
        code=0
        verdict || code=$?
        # With a verdict of 0 or 10 a node would only bring the same step faster.
        if ((code != 11 && code != 12 || SECONDS >= end)) || ! grep -q '^waiting would gain' <<<"$text"; then
            return
        fi
        say "waiting $((end - SECONDS)) s more for a node"
        sleep "${STORAGED_SLEEP_S:-10}"
    done
}

for ((starts = 0; starts < ${STORAGED_STARTS_MAX:-3}; starts++)); do
    decide
    case "$code" in
        0 | 13) ;; # all of it is in place, or it is the first start
        10) ((starts == 0)) || requeue "nodes were lost" ;;
        11)
            if [[ "${STORAGED_ALLOW_OLDER:-0}" != 1 ]] && grep -qE '\((goes-back|too-few-answered)\)$' <<<"$text"; then
                requeue "only a step behind one that was protected can be had"
            fi
            ;;
        12) requeue "nothing that was saved can be had with these nodes" ;;
        *) requeue "no verdict (exit code $code)" ;;
    esac
    before="$(offered)"
    ended=0
    "$@" || ended=$?
    if ((ended == 0)); then
        exit 0
    fi
    say "start $((starts + 1)) ended with $ended"
    verdict || true
    if [[ -n "$before" && "$(offered)" == "$before" ]]; then
        read -r _ run _ step <<<"$before"
        "$storaged" plan "$STORAGED_NAMESPACE" --failed "$step" --run "$run" >&2 || true
    fi
done
requeue "${STORAGED_STARTS_MAX:-3} starts have failed"
