#!/bin/sh
# Whether a cloud has announced that this machine goes: ends with 0 once it has. For drain-on-notice.sh; needs curl.
#
#   notice.sh aws      spot instances, two minutes before; asks with a token where it gets one (IMDSv2)
#   notice.sh gcp      spot and preemptible VMs, 30 s before
#   notice.sh azure    Scheduled Events of this VM, not of others in its scale set: Preempt, 30 s before; Terminate, where the scale set has
#                      that notice. Not Freeze, which keeps the memory, nor Reboot and Redeploy, which may be told days before: drain
#                      such a machine when its jobs allow it. The first question turns the service on, which takes up to two minutes.
#
# Maintenance of AWS and GCP is told elsewhere, and not asked for.
#
# NOTICE_METADATA is where the metadata service is, if not where all three have it.
set -eu
metadata=${NOTICE_METADATA:-http://169.254.169.254}

ask() {
    curl --silent --fail --max-time 2 --noproxy '*' "$@"
}

aws() {
    token=$(ask -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" "$metadata/latest/api/token") || token=
    # Without a token curl leaves the header out.
    ask -H "X-aws-ec2-metadata-token: $token" "$metadata/latest/meta-data/spot/instance-action"
}

gcp() {
    ask -H Metadata-Flavor:Google "$metadata/computeMetadata/v1/instance/preempted" | grep -q TRUE
}

azure() {
    name=$(ask -H Metadata:true "$metadata/metadata/instance/compute/name?api-version=2021-02-01&format=text")
    # One event a line: there are no objects in them.
    ask -H Metadata:true "$metadata/metadata/scheduledevents?api-version=2020-07-01" | tr -d '\r\n' | tr '{' '\n' |
        grep -E '"EventType": *"(Preempt|Terminate)"' |
        grep -qiE "\"Resources\": *\[[^]]*\"$name\""
}

case "${1:-}" in
    aws | gcp | azure) "$1" ;;
    *)
        echo "usage: $0 aws|gcp|azure" >&2
        exit 2
        ;;
esac
