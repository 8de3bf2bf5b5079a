#!/bin/sh
# preStop hook of the DaemonSet's pod. Kubernetes runs it before it ends the daemon, for one of two reasons that it does not tell:
#   the machine goes (drained, scaled away, reclaimed, shutting down): what only this node has goes first (storaged drain);
#   the pod alone is started again (a new image, kubectl delete pod): it waits until that loses nothing (storaged restart-safe).
# `storaged going` asks the API server which one it is, again and again while it waits. Where that does not answer, it waits.
#
# Arguments go to storaged drain: with --keep-place a machine that comes back, as after maintenance, needs no `storaged node admit`.
# STORAGED_RESTART_WAIT_S (600) is the longest wait: less than terminationGracePeriodSeconds.
set -u
end=$(($(date +%s) + ${STORAGED_RESTART_WAIT_S:-600}))
while true; do
    if deadline=$(storaged going); then
        exec storaged drain --deadline "$deadline" "$@"
    fi
    left=$((end - $(date +%s)))
    if [ "$left" -le 0 ]; then
        echo "ending although a restart is not safe" >&2
        exit 1
    fi
    look=${STORAGED_LOOK_S:-15}
    if storaged restart-safe --wait --timeout "$((left < look ? left : look))"; then
        exit 0
    fi
done
