#!/usr/bin/env bash
# Installs the Debian packages that are missing for what is named: build, python, network, s3, nodes, kubernetes.
set -euo pipefail

missing=()
have() { command -v "$1" >/dev/null; }

build() {
    have cc && have objcopy || missing+=(build-essential)
    # The layout test asks git for the files that it knows.
    have git || missing+=(git)
    # cargo and pip speak TLS.
    [ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
}

python() {
    local python=${PYTHON3:-python3}
    have "$python" || missing+=(python3)
    "$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
}

network() {
    [ "$(id -u)" -eq 0 ] || return 0
    { have ip && have tc; } || missing+=(iproute2)
    have nft || missing+=(nftables)
}

# Ceph's S3 gateway, for tests/s3/ceph.sh.
s3() {
    local tool
    for tool in ceph-mon ceph-osd radosgw radosgw-admin ceph-authtool monmaptool curl; do
        have "$tool" || { missing+=(ceph-mon ceph-osd ceph-mgr radosgw curl); return 0; }
    done
}

# What Kubernetes is built with, and runs on, for tests/nodes.
kubernetes() {
    have go || missing+=(golang-go)
    have rsync || missing+=(rsync)
    have jq || missing+=(jq)
    have mmdebstrap || missing+=(mmdebstrap)
    have openssl || missing+=(openssl)
    have curl || missing+=(curl)
}

# Machines that systemd-nspawn boots, for tests/nodes.
nodes() {
    have mmdebstrap || missing+=(mmdebstrap)
    have systemd-nspawn || missing+=(systemd-container)
    have ip || missing+=(iproute2)
}

for purpose; do "$purpose"; done
[ ${#missing[@]} -gt 0 ] || exit 0
[ "$(id -u)" -eq 0 ] || { echo "missing Debian packages: ${missing[*]}; install them or run as root" >&2; exit 1; }
echo "==> installing Debian packages: ${missing[*]}"
apt-get update -qq
# Errors only: on a bare machine debconf says with each package that it has no terminal.
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2> >(grep -v '^debconf: ' >&2)
