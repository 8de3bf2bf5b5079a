#!/usr/bin/env bash
# Slurm HealthCheckProgram (root, on every node; HealthCheckInterval=60, HealthCheckNodeState=ANY): drains the daemon of a node that Slurm
# takes out of service (scontrol update state=drain), once no job runs there any more.
#
# A restart by scontrol reboot, and power saving, leave no time for that: let RebootProgram run `storaged drain --keep-place` before it
# restarts the node, and SuspendProgram over ssh before it powers the nodes down.
# Slurm ends this script after 60 s, and a drain may take longer, so it goes on by itself; its words go to the system's log. The end of a job
# is no reason to drain: the daemon outlives it, and a requeued job finds its checkpoint in RAM.
# When a node is to work again without a restart of the machine: systemctl start storaged, then scontrol update state=resume.
#   STORAGED_DRAIN_WITHIN  the daemon ends after so long in any case (30m)
set -euo pipefail
# Slurm calls it without a PATH; bash has one for itself then, and does not tell it to the programs that it starts.
[[ "${PATH@a}" == *x* ]] || export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

scontrol="${SCONTROL_BIN:-scontrol}"
node="${SLURMD_NODENAME:-$(hostname -s)}"
state="$("$scontrol" --oneliner show node "$node" | sed -n 's/^.* State=\([^ ]*\) .*$/\1/p')"

case "$state" in
    IDLE*+COMPLETING*) exit 0 ;; # its epilog runs
    IDLE*+DRAIN*) ;;
    *) exit 0 ;;
esac
# Nothing to do where the daemon has ended already.
timeout 10 storaged status --probe live >/dev/null 2>&1 || exit 0
lock="${STORAGED_DRAIN_LOCK:-/run/storaged/drain.lock}"
# shellcheck disable=SC2016
exec setsid --fork flock --nonblock "$lock" sh -c \
    'storaged drain --keep-place --deadline "$1" 2>&1 | logger -t storaged-drain' - "${STORAGED_DRAIN_WITHIN:-30m}" \
    </dev/null >/dev/null 2>&1
