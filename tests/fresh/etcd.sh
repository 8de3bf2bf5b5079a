#!/usr/bin/env bash
# Puts etcd of Debian's package below a directory, for tests, unless the machine has one: not installed, because the package would start
# a service.
set -euo pipefail

into=$1
! command -v etcd >/dev/null || exit 0
[ ! -x "$into/usr/bin/etcd" ] || exit 0
mkdir -p "$into"
cd "$into"
fetch() { apt-get download -qq etcd-server 2>/dev/null; }
echo "==> fetching etcd for tests into $into"
fetch || { apt-get update -qq && fetch; }
dpkg-deb -x etcd-server_*.deb .
rm etcd-server_*.deb
