#!/usr/bin/env bash
# In a job's batch script, in place of a bare srun: asks storaged what a start would get, and starts, waits for a node, starts again
# in place, or requeues the job. train.sbatch is a whole job with it.
#
#   #SBATCH --requeue
#   #SBATCH --open-mode=append
#   #SBATCH --signal=B:USR1@180
#   exec restart.sh srun torchrun train.py
#
# STORAGED_NAMESPACE must be the same at each start; by default it is made of the job's number, which a requeue keeps, as in
# task_prolog.sh. Beside it:
#   STORAGED_WAIT_S        how long to wait here for nodes that would bring a newer step, and where there is none to start from, or one that
#                          starts fail from, for whoever does not answer: nodes, the durable tier, the daemon (300)
#   STORAGED_STARTS_MAX    starts in one allocation, while only processes die (3)
#   STORAGED_REQUEUES_MAX  after so many requeues the job fails (5); those at the end of its time do not end it, but count
#   STORAGED_ALLOW_OLDER   1 takes a step behind one that was protected; the training script must allow it too
# A start that fails and has saved nothing newer is counted against its step, unless loads refuse that step by then, as where nodes are
# silent: the next one gets another step, if there is one. A step that is passed over for good is offered again by
# `storaged plan JOB --lift STEP`, as this script says then.
#
# SIGUSR1 says that the job's time is nearly over. The tasks get SIGTERM, save once more and end, and the job goes back into the queue. It
# must reach this process: `exec`, and B: in --signal. SIGTERM is Slurm's own, when the job is cancelled: nothing is started any more.
set -euo pipefail

storaged="${STORAGED_BIN:-storaged}"
scontrol="${SCONTROL_BIN:-scontrol}"
scancel="${SCANCEL_BIN:-scancel}"
export STORAGED_NAMESPACE="${STORAGED_NAMESPACE:-slurm-${SLURM_JOB_ID:?}}"
ask_s="${STORAGED_ASK_S:-20}"
text=""
told=""

say() { echo "restart.sh: $*" >&2; }

# To the tasks of all steps, not to this script. Not by srun: it would kill them.
# shellcheck disable=SC2317  # bash calls it
save_once_more() {
    told="requeue"
    say "the time is nearly over: SIGTERM to the tasks, which save once more"
    "$scancel" --signal=TERM "${SLURM_JOB_ID:?}" || true
}
trap save_once_more USR1
trap 'told="${told:-end}"' TERM

# Returns the verdict's exit code (storaged plan --help); its text goes to the job's log.
verdict() {
    local code=0
    text="$("$storaged" plan "$STORAGED_NAMESPACE" --verdict --timeout "$ask_s")" || code=$?
    printf '%s\n' "$text" >&2
    return "$code"
}

# "run R step S" of what a start would get, empty if there is nothing.
offered() { sed -n 's/^\(run [^ ]* step [0-9]*\) .*/\1/p' <<<"$text"; }

has_reason() { grep -qE "^because: .* \(($1)\)\$" <<<"$text"; }

# A step behind one that was protected, or that may be: a load refuses it unless it may go back.
is_behind() { has_reason 'goes-back|too-few-answered'; }
is_refused() { [[ "${STORAGED_ALLOW_OLDER:-0}" != 1 ]] && is_behind; }

# Nodes that are away would bring another step than the one that is offered. For the same one from nearer a job would stand still for nothing.
is_newer_away() {
    local gained
    gained="$(sed -n 's/^waiting would gain step \([0-9]*\) of run \([^ ]*\) .*/run \2 step \1/p' <<<"$text")"
    grep -qvxF -e "" -e "$(offered)" <<<"$gained"
}

back_into_the_queue() {
    say "requeue: $1"
    "$scontrol" requeue "${SLURM_JOB_ID:?}"
    exit 0
}

# Steps that only an operator has offered again: no other node helps there.
tell_of_lift() {
    local step
    for step in $(sed -n 's/^passed over: run [^ ]* step \([0-9]*\): .*--lift.*/\1/p' <<<"$text"); do
        say "step $step is passed over for good, since starts from it fail: mend that, then 'storaged plan $STORAGED_NAMESPACE --lift $step' has it offered again"
    done
}

requeue() {
    tell_of_lift
    if ((${SLURM_RESTART_COUNT:-0} >= ${STORAGED_REQUEUES_MAX:-5})); then
        say "not requeued again after ${SLURM_RESTART_COUNT} times: $1"
        exit 1
    fi
    back_into_the_queue "$1"
}

# Ends the script if a signal has said that the job ends; with $1 as a cancelled job ends.
heed() {
    case "$told" in
        requeue) back_into_the_queue "the time is over" ;;
        end)
            say "the job was ended: no further start"
            exit "$1"
            ;;
    esac
}

# Whom to wait for; nothing if the verdict stands. torchrun's backend decides likewise (RestartVerdict.why_wait).
worth_waiting_for() {
    if is_newer_away; then
        echo "a node"
    # While it is upgraded, say, all requeues would be used up, each of them at once, and the job would be over.
    elif ((code == 1)); then
        echo "the daemon"
    # There is nothing to start from, or only a step that starts fail from, and who is silent may have a good one: requeues would be used
    # up here too, or a start.
    elif { ((code == 12)) || is_refused || has_reason last-resort; } && has_reason 'nodes-silent|too-few-answered|durable-unreadable'; then
        echo "nodes or a durable tier that have not answered"
    fi
}

# The verdict to act on: at once, or when waiting gains nothing more.
decide() {
    local whom end=$((SECONDS + ${STORAGED_WAIT_S:-300}))
    while true; do
        code=0
        verdict || code=$?
        heed 143
        whom="$(worth_waiting_for)"
        if ((SECONDS >= end)) || [[ -z "$whom" ]]; then
            return
        fi
        say "waiting $((end - SECONDS)) s more for $whom"
        sleep "${STORAGED_SLEEP_S:-10}"
        heed 143
    done
}

# Runs a start to its end. In the background: bash hears signals only while it waits there.
start() {
    "$@" &
    while [[ -n "$(jobs -pr)" ]]; do
        wait "$!" || true
    done
    ended=0
    wait "$!" || ended=$?
}

for ((starts = 0; starts < ${STORAGED_STARTS_MAX:-3}; starts++)); do
    decide
    case "$code" in
        0 | 10 | 11) ! is_refused || requeue "only a step behind one that was protected can be had" ;;
    esac
    case "$code" in
        0 | 11 | 13) ;; # all of it is in place, or waiting gains nothing, or it is the first start
        10) ((starts == 0)) || requeue "nodes were lost" ;;
        12) requeue "nothing that was saved can be had with these nodes" ;;
        *) requeue "no verdict (exit code $code)" ;;
    esac
    before="$(offered)"
    start "$@"
    heed "$ended"
    if ((ended == 0)); then
        exit 0
    fi
    say "start $((starts + 1)) ended with $ended"
    verdict || true
    heed "$ended"
    # If the step is behind others by now torchrun may have refused the start, before any worker has run, or has lost workers with their node:
    # counted thrice for nodes that fall silent, a good step would be passed over for good.
    if [[ -n "$before" && "$(offered)" == "$before" ]] && ! is_behind; then
        read -r _ run _ step <<<"$before"
        "$storaged" plan "$STORAGED_NAMESPACE" --failed "$step" --run "$run" >&2 || true
    fi
done
requeue "${STORAGED_STARTS_MAX:-3} starts have failed"
