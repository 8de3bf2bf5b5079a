#!/usr/bin/env bash
# Runs make targets of the newest commit on a bare Debian 12, so that a package that somebody once installed by hand never
# hides one that make should install.
#
#   fresh.sh DIR TARGET...
#
# The root under DIR is what `mmdebstrap --variant=minbase` makes, with make and nothing else. The Rust toolchain and
# Python are mounted into it, read-only, and it gets this machine's settings for package registries (mirrors, proxies,
# certificates). It is removed at the end. Uncommitted changes are not seen.
set -euo pipefail

readonly SUITE=bookworm
trap 'echo "fresh.sh: line $LINENO failed" >&2' ERR
fail() { echo "fresh.sh: $*" >&2; exit 1; }
say() { echo "==> fresh: $*"; }

[ $# -ge 2 ] || fail "usage: fresh.sh DIR TARGET..."
[ "$(id -u)" -eq 0 ] || fail "expected root, which mounts and chroot need, got user $(id -un)"
command -v mmdebstrap >/dev/null || {
    say "installing the Debian package mmdebstrap"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mmdebstrap >/dev/null
}
SOURCE=$(git rev-parse --show-toplevel)
mkdir -p "$1"
DIR=$(cd "$1" && pwd)
shift
ROOT=$DIR/root
TOOLCHAIN=$(rustc --print sysroot)
PYTHON=$(python3 -c 'import sys; print(sys.base_prefix)')

# Debian's own Python cannot be mounted into another root; then the root gets Debian's, without what make should install.
includes=make
[ "$PYTHON" != /usr ] || includes+=,python3

# Mirrors as this machine has them, if it is a Debian of the same release.
mirrors() {
    grep -q "VERSION_CODENAME=$SUITE" /etc/os-release || return 0
    local file
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
        [ ! -s "$file" ] || echo "$file"
    done
}

# How apt gets its files here: proxies, certificates, whether dates are checked.
apt_settings() { apt-config dump 2>/dev/null | grep -E '^Acquire::[^ ]+ "[^"]+";$' || true; }

make_root() {
    local mirror
    mapfile -t mirror < <(mirrors)
    apt_settings >"$DIR/apt.conf"
    python3 "$SOURCE/tests/fresh/build.py" "making a bare Debian 12 under $DIR" mmdebstrap --quiet --mode=root --variant=minbase --include="$includes" --aptopt="$DIR/apt.conf" \
        "$SUITE" "$ROOT" "${mirror[@]}"
}

# Names of settings by which cargo, pip and what they call reach their registries.
is_registry_setting() {
    case $1 in
        *_proxy | *_PROXY | PIP_* | CARGO_HTTP_* | CARGO_NET_* | CARGO_REGISTR* | CARGO_SOURCE_*) true ;;
        SSL_CERT_FILE | SSL_CERT_DIR | CURL_CA_BUNDLE | REQUESTS_CA_BUNDLE | GIT_SSL_CAINFO) true ;;
        *) false ;;
    esac
}

copy_into_root() {
    [ -e "$1" ] || return 0
    mkdir -p "$ROOT$(dirname "$2")"
    cp -rL --no-clobber "$1" "$ROOT$2" 2>/dev/null || true
}

settings=()
copy_settings() {
    local name home=${CARGO_HOME:-$HOME/.cargo}
    for name in $(compgen -e); do
        is_registry_setting "$name" || continue
        settings+=("$name=${!name}")
        case ${!name} in /*) copy_into_root "${!name}" "${!name}" ;; esac
    done
    rm -f "$ROOT/etc/resolv.conf" "$ROOT/etc/hosts"
    copy_into_root /etc/resolv.conf /etc/resolv.conf
    copy_into_root /etc/hosts /etc/hosts
    copy_into_root /etc/pip.conf /etc/pip.conf
    copy_into_root "$HOME/.config/pip/pip.conf" /root/.config/pip/pip.conf
    copy_into_root "$HOME/.pip/pip.conf" /root/.pip/pip.conf
    copy_into_root "$home/config.toml" /root/.cargo/config.toml
    copy_into_root /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
}

# A Python that was built elsewhere comes with the libraries that it was built against.
copy_python_libraries() {
    [ "$PYTHON" != /usr ] || return 0
    local library
    mkdir -p "$ROOT/opt/python-libraries"
    find "$PYTHON"/bin/python3.* "$PYTHON"/lib/python3.*/lib-dynload -type f ! -name '_tkinter*' -print0 |
        { xargs -0 ldd 2>/dev/null || true; } | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
        while read -r library; do
            chroot "$ROOT" ldconfig -p | grep "$(basename "$library") " >/dev/null || cp -L "$library" "$ROOT/opt/python-libraries/"
        done
    echo /opt/python-libraries >"$ROOT/etc/ld.so.conf.d/zz-python.conf"
    chroot "$ROOT" ldconfig
}

# Runs a command in the root. Mounts and processes end with it.
in_root() {
    unshare --mount --pid --fork --kill-child --propagation private \
        bash -euo pipefail -c '
            root=$1 toolchain=$2 python=$3; shift 3
            # ip remounts "/" in the namespaces that it enters, which has to be a mount of its own for that.
            mount --bind "$root" "$root"
            mount -t proc proc "$root/proc"
            for place in /sys /dev; do mount --rbind "$place" "$root$place"; done
            mount -t tmpfs tmpfs "$root/run"
            mount -t tmpfs tmpfs "$root/tmp"
            for place in "$toolchain" "$python"; do
                [ "$place" != /usr ] || continue
                mkdir -p "$root$place"
                mount --bind "$place" "$root$place"
                mount -o remount,ro,bind "$root$place"
            done
            exec chroot "$root" "$@"' bash "$ROOT" "$TOOLCHAIN" "$PYTHON" \
        /usr/bin/env -i HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        PATH="$TOOLCHAIN/bin:$PYTHON/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
        "${settings[@]}" "$@"
}

# The processor time that a command took, user and system.
TIMEFORMAT='%0R s, %0U s + %0S s of processor time'

rm -rf --one-file-system "$ROOT"
trap 'rm -rf --one-file-system "$ROOT"' EXIT
make_root
copy_settings
copy_python_libraries
git clone -q --no-local "file://$SOURCE" "$ROOT/storaged"
for target; do
    say "make $target"
    time in_root make --no-print-directory -C /storaged "$target"
    say "make $target ended well"
done
