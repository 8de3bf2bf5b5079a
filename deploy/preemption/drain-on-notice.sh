#!/bin/sh
# Waits until this machine is announced to go (spot, preemption, maintenance), then drains it. Runs beside the daemon, as root or as
# the daemon's user, for instance as a systemd service or as a second container of the DaemonSet.
#
#   drain-on-notice.sh DEADLINE COMMAND...
#
# COMMAND is run every five seconds, and ends with 0 once the notice is there. DEADLINE is less than what the provider gives, as 25s.
#   AWS spot (two minutes), where instances may be asked without a token:
#                            drain-on-notice.sh 100s curl -sfm 2 http://169.254.169.254/latest/meta-data/spot/instance-action
#   and where they need one (IMDSv2 alone; without it the first form never sees the notice):
#                            drain-on-notice.sh 100s sh -c 'M=http://169.254.169.254/latest && \
#                                T=$(curl -sfm 2 -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" $M/api/token) && \
#                                curl -sfm 2 -H "X-aws-ec2-metadata-token: $T" $M/meta-data/spot/instance-action'
#   GCP (30 seconds):        drain-on-notice.sh 25s sh -c 'curl -sm 2 -H Metadata-Flavor:Google \
#                                http://169.254.169.254/computeMetadata/v1/instance/preempted | grep -q TRUE'
#   anything else:           drain-on-notice.sh 25s test -e /run/going
# Ends as `storaged drain` does: 0 nothing is lost, 75 the time was over before, 1 the daemon did not say.
set -eu
if [ "$#" -lt 2 ]; then
    echo "usage: $0 DEADLINE COMMAND..." >&2
    exit 2
fi
deadline=$1
shift
until "$@" >/dev/null; do
    sleep "${NOTICE_EVERY:-5}"
done
echo "this machine is about to go: draining it within $deadline" >&2
exec storaged drain --deadline "$deadline"
