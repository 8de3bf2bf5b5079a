#!/bin/sh
# What the DaemonSet's container starts: `storaged` with these arguments, in the failure domain that labels of the node say.
#
# STORAGED_FAILURE_DOMAIN_LABELS names them, from the outermost level on:
#   topology.kubernetes.io/zone,kubernetes.io/hostname      zone-a/node-3
#   topology.kubernetes.io/zone,example.com/rack            zone-a/rack-7
# Without it the daemon goes by its own configuration. They are asked for once: a daemon that its keeper starts again needs no API server.
# While that does not answer the daemon is not started: without the domain it would move to another one. It ends with 78 where the node
# lacks a label, or the service account may not get nodes.
set -u
if [ -n "${STORAGED_FAILURE_DOMAIN_LABELS:-}" ]; then
    while true; do
        STORAGED_FAILURE_DOMAIN=$(storaged failure-domain) && break
        code=$?
        [ "$code" -eq 1 ] || exit "$code"
        sleep "${STORAGED_LOOK_S:-5}"
    done
    export STORAGED_FAILURE_DOMAIN
fi
exec storaged "$@"
