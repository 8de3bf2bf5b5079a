#!/bin/sh
# Waits until this machine is announced to go (spot, preemption), then drains it. Runs beside the daemon, as root or as the daemon's
# user: as a systemd service (systemd/storaged-notice.service), or as a second container of the DaemonSet, from an image that has curl
# and notice.sh besides (storaged's own has neither).
#
#   drain-on-notice.sh DEADLINE COMMAND...
#
# COMMAND is run every five seconds, and ends with 0 once the notice is there. DEADLINE is less than what the provider gives, as 25s.
#   AWS spot (two minutes):     drain-on-notice.sh 100s ./notice.sh aws
#   GCP spot (30 seconds):      drain-on-notice.sh 20s ./notice.sh gcp
#   Azure (30 seconds):         drain-on-notice.sh 20s ./notice.sh azure
#   anything else:              drain-on-notice.sh 25s test -e /run/going
# Ends as `storaged drain` does: 0 nothing is lost, 75 the time was over before, 1 the daemon did not say.
set -eu
if [ "$#" -lt 2 ]; then
    echo "usage: $0 DEADLINE COMMAND..." >&2
    exit 2
fi
deadline=$1
shift
until "$@" >/dev/null; do
    code=$?
    case $code in
        2 | 126 | 127)
            echo "$1 cannot be asked for notices (exit code $code)" >&2
            exit "$code"
            ;;
    esac
    sleep "${NOTICE_EVERY:-5}"
done
echo "this machine is about to go: draining it within $deadline" >&2
exec storaged drain --deadline "$deadline"
