#!/usr/bin/env bash
# Makes the Secret with a job's token that trainer.yaml mounts. One that is there stays: a job that gets another token is a stranger
# to its own checkpoints (storaged rotate changes the token of a job).
#
#   make-token.sh JOB NAMESPACE      JOB: STORAGED_NAMESPACE of the trainers; NAMESPACE: where their pods run
#
# Run where kubectl may create Secrets there; whoever may read them is the job. KUBECTL and STORAGED_BIN name other programs.
set -euo pipefail

job="${1:?which job?}"
namespace="${2:?in which namespace of the cluster?}"
secret="${job}-storaged-token"
kubectl="${KUBECTL:-kubectl}"
storaged="${STORAGED_BIN:-storaged}"

found() { "$kubectl" get secret "$secret" --namespace "$namespace" --ignore-not-found --output name; }

there="$(found)"
if [[ -n "$there" ]]; then
    echo "make-token.sh: $there is there already" >&2
    exit 0
fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"$storaged" token "$folder/token" >/dev/null
# The token is in a file, never among the arguments, which all users of this machine see.
if ! "$kubectl" create secret generic "$secret" --namespace "$namespace" --from-file=token="$folder/token"; then
    # Somebody else may have come first.
    there="$(found)"
    [[ -n "$there" ]]
fi
