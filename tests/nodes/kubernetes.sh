#!/usr/bin/env bash
# Builds Kubernetes under DIR, once, from the source package that Debian makes kubectl of: the API server, the controllers, the scheduler, the
# kubelet, kubectl, and what holds a pod's namespaces; and the files of two images: Debian with authorities of certificates, and with Python.
#
#   kubernetes.sh DIR
#
# Debian 12 has Kubernetes 1.20.2, the newest that Debian has whole. Eight minutes, and 3 GB while it is built; it is kept until RELEASE below changes.
set -euo pipefail

readonly SUITE=bookworm
readonly RELEASE="$SUITE 1.20.2 4"
readonly PROGRAMS="kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl"
readonly REFLECT=golang-github-modern-go-reflect2-dev
fail() { echo "kubernetes.sh: $*" >&2; exit 1; }

[ $# -eq 1 ] || fail "usage: kubernetes.sh DIR"
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
grep -q "VERSION_CODENAME=$SUITE" /etc/os-release || fail "expected a machine with Debian 12, whose sources have Kubernetes whole"
bash "$HERE/../fresh/packages.sh" build kubernetes
mkdir -p "$1"
DIR=$(cd "$1" && pwd)
[ "$(cat "$DIR/made" 2>/dev/null)" != "$RELEASE" ] || exit 0
build() { python3 "$HERE/../fresh/build.py" "$@"; }

# The sources of the mirrors that this machine has.
lists() {
    local file
    for file in /etc/apt/sources.list.d/debian.sources; do
        [ ! -s "$file" ] || sed -E 's/^Types:.*/Types: deb-src/' "$file" >"$DIR/sources/debian.sources"
    done
    for file in /etc/apt/sources.list; do
        [ ! -s "$file" ] || sed -nE 's/^deb(-src)? /deb-src /p' "$file" | sort -u >"$DIR/sources/debian.list"
    done
}

rm -rf --one-file-system "$DIR"/{source,sources,apt,made}
mkdir -p "$DIR/sources" "$DIR/apt/lists/partial" "$DIR/apt/archives/partial"
lists
[ -n "$(ls "$DIR/sources")" ] || fail "expected Debian's mirrors in /etc/apt/sources.list or /etc/apt/sources.list.d/debian.sources"
apt=(-o "Dir::Etc::SourceList=/dev/null" -o "Dir::Etc::SourceParts=$DIR/sources" -o "Dir::State::Lists=$DIR/apt/lists" -o "Dir::Cache=$DIR/apt" -o APT::Sandbox::User=root)
apt-get "${apt[@]}" -qq update
(cd "$DIR/apt" && apt-get "${apt[@]}" -qq source --download-only kubernetes)
mkdir "$DIR/source"
tar -xzf "$DIR"/apt/kubernetes_*.orig.tar.gz -C "$DIR/source" --strip-components=1
# The one in the source reads maps as Go had them before 1.18: the API server would end at the first PATCH.
(cd "$DIR/apt" && { apt-get download -qq "$REFLECT" 2>/dev/null || { apt-get update -qq && apt-get download -qq "$REFLECT"; }; } && dpkg-deb -x "$REFLECT"_*.deb .)
rm -r "$DIR/source/vendor/github.com/modern-go/reflect2"
cp -r "$DIR/apt/usr/share/gocode/src/github.com/modern-go/reflect2" "$DIR/source/vendor/github.com/modern-go/"

# As Debian builds it: without the network, since the packages of Go that it needs are in the source.
mkdir -p "$DIR/source/.go/src/k8s.io" "$DIR/source/.home"
ln -s ../../.. "$DIR/source/.go/src/k8s.io/kubernetes"
build "building Kubernetes from Debian's source" env -C "$DIR/source" -u GOFLAGS \
    GOPATH="$DIR/source/.go" HOME="$DIR/source/.home" CGO_ENABLED=0 KUBE_GIT_COMMIT=0 KUBE_GIT_TREE_STATE=archive KUBE_GIT_VERSION=v1.20.2 PATH="/usr/lib/go/bin:$PATH" make WHAT="$(printf 'cmd/%s ' $PROGRAMS)"
for program in $PROGRAMS; do
    cp "$DIR/source/_output/bin/$program" "$DIR/"
done
cc -static -O2 -DVERSION=3.2 -o "$DIR/pause" "$DIR/source/build/pause/linux/pause.c"

mirrors=()
for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
    [ ! -s "$file" ] || mirrors+=("$file")
done
apt-config dump 2>/dev/null | grep -E '^Acquire::[^ ]+ "[^"]+";$' >"$DIR/apt.conf" || true
for image in "base ca-certificates" "python ca-certificates,python3"; do
    build "making the files of the image $image" mmdebstrap --quiet --mode=root --variant=minbase --include="${image#* }" \
        --aptopt="$DIR/apt.conf" "$SUITE" "$DIR/${image%% *}.tar" "${mirrors[@]}"
done
rm -rf "$DIR/source" "$DIR/apt" "$DIR/sources"
echo "$RELEASE" >"$DIR/made"
