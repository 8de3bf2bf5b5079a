#!/usr/bin/env bash
# Makes the root of a Debian 12 node under DIR, once: systemd, Slurm and Python, and nothing of storaged's.
#
#   root.sh DIR
#
# mmdebstrap makes it from Debian's mirrors, as this machine has them. It is kept until the packages below change.
set -euo pipefail

readonly SUITE=bookworm
readonly PACKAGES=systemd,systemd-sysv,dbus,procps,iproute2,util-linux,python3,slurmctld,slurmd,slurm-client,munge,containerd,runc,containernetworking-plugins,iptables,kmod,ca-certificates
fail() { echo "root.sh: $*" >&2; exit 1; }

[ $# -eq 1 ] || fail "usage: root.sh DIR"
[ "$(id -u)" -eq 0 ] || fail "expected root, which mounts and namespaces need, got user $(id -un)"
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bash "$HERE/../fresh/packages.sh" nodes
mkdir -p "$1"
DIR=$(cd "$1" && pwd)
[ "$(cat "$DIR/made" 2>/dev/null)" != "$SUITE $PACKAGES" ] || exit 0

# Mirrors and settings as this machine has them, if it is a Debian of the same release.
mirrors=()
if grep -q "VERSION_CODENAME=$SUITE" /etc/os-release; then
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
        [ ! -s "$file" ] || mirrors+=("$file")
    done
fi
apt-config dump 2>/dev/null | grep -E '^Acquire::[^ ]+ "[^"]+";$' >"$DIR/apt.conf" || true
rm -rf --one-file-system "$DIR/root" "$DIR/made"
python3 "$HERE/../fresh/build.py" "making the root of a Debian 12 node under $DIR" mmdebstrap --quiet --mode=root --variant=minbase \
    --include="$PACKAGES" --aptopt="$DIR/apt.conf" "$SUITE" "$DIR/root" "${mirrors[@]}"
echo "$SUITE $PACKAGES" >"$DIR/made"
