#!/bin/sh
# preStop hook of the DaemonSet's pod. Kubernetes runs it before it ends the daemon, for one of two reasons that it does not tell:
#   the machine goes (drained, scaled away, reclaimed, shutting down): what only this node has goes first (storaged drain);
#   the pod alone is started again (a new image, kubectl delete pod): where a holder has the node's memory too (STORAGED_HOLDER) daemon and
#   keeper end at once and leave it to that one (storaged hand-over). Else it waits until a restart loses nothing (storaged restart-safe),
#   and drains with what is left of the pod's time where it never comes to that; the node keeps its place then.
# `storaged going` asks the API server which one it is, and how long this pod was given, again and again while it waits. Where that
# does not answer, it waits.
#
# Arguments go to storaged drain where the machine goes: with --keep-place one that comes back, as after maintenance, needs no
# `storaged node admit`.
# STORAGED_RESTART_WAIT_S (600) is the longest wait, and STORAGED_LEAVE_S (20) what it leaves of the pod's time to the drain. Every
# STORAGED_LOOK_S (15) it asks whether the machine goes. All are in seconds, fractions rounded up: the shell counts in whole ones.
set -u
# seconds NAME VALUE DEFAULT: the value as a whole number, or the default in place of what is none.
seconds() {
    whole=${2%%.*}
    whole=${whole#"${whole%%[!0]*}"}
    case $2 in
        . | *[!0-9.]* | *.*.*)
            echo "expected seconds in $1, got $2: it is taken for $3" >&2
            whole=$3
            ;;
        *.*[1-9]*) whole=$((${whole:-0} + 1)) ;;
    esac
    echo "${whole:-0}"
}
restart_wait=$(seconds STORAGED_RESTART_WAIT_S "${STORAGED_RESTART_WAIT_S:-600}" 600)
leave=$(seconds STORAGED_LEAVE_S "${STORAGED_LEAVE_S:-20}" 20)
look=$(seconds STORAGED_LOOK_S "${STORAGED_LOOK_S:-15}" 15)
end=$(($(date +%s) + restart_wait))
# By when a drain must be done, as far as the API server has said so. The kubelet counts from when it runs this hook, and anew where a
# later order to delete the pod gives less time.
gone=
# Memory is left to the holder only where the machine is known to stay. The container ends with its keeper, and this script with it.
# Where nothing comes of it, as where the daemon is still starting or the holder is away, it is tried again from then on.
hand_at=0
while true; do
    going=0
    given=$(storaged going) || going=$?
    now=$(date +%s)
    if [ -n "$given" ] && { [ -z "$gone" ] || [ "$gone" -gt $((now + ${given%s})) ]; }; then
        gone=$((now + ${given%s}))
    fi
    left=$((${gone:-$now} - now))
    deadline=$((left > 0 ? left : 1))s
    if [ "$going" -eq 0 ]; then
        exec storaged drain --deadline "$deadline" "$@"
    fi
    may_hand=$((now >= hand_at))
    # Another try takes up to ten seconds, which must not be the drain's.
    if [ "$hand_at" -gt 0 ] && [ -n "$gone" ] && [ $((left - 10)) -lt "$leave" ]; then
        may_hand=0
    fi
    if [ -n "${STORAGED_HOLDER:-}" ] && [ "$may_hand" -eq 1 ] && [ "$going" -eq 3 ]; then
        hand_at=$((now + 30))
        limit=10
        if [ -n "$gone" ] && [ $((left / 2)) -lt "$limit" ]; then
            limit=$((left > 2 ? left / 2 : 1))
        fi
        if storaged hand-over --timeout "${limit}s"; then
            exit 0
        fi
        continue
    fi
    wait=$((end - now))
    own=$((left - leave))
    if [ -n "$gone" ] && [ "$own" -lt "$wait" ]; then
        wait=$own
    fi
    if [ "$wait" -le 0 ]; then
        echo "ending although a restart is not safe" >&2
        if [ -n "$gone" ]; then
            exec storaged drain --deadline "$deadline" --keep-place
        fi
        exit 1
    fi
    if storaged restart-safe --wait --timeout "$((wait < look ? wait : look))"; then
        exit 0
    fi
    # Where no daemon answers, as before it has started, that ends at once.
    if [ "$(date +%s)" -le "$now" ]; then
        sleep 1
    fi
done
