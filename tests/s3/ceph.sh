#!/usr/bin/env bash
# A throw-away S3 server on loopback: one Ceph monitor, one in-memory object store, one S3 gateway.
#
#   ceph.sh start DIR [PORT]   start it (state under DIR, S3 at 127.0.0.1:PORT, default 7480)
#   ceph.sh stop DIR           end the processes that `start` began, and nothing else
#   ceph.sh kill-gateway DIR   kill the gateway alone with SIGKILL; what lies in the store stays
#   ceph.sh start-gateway DIR [PORT]   start it again
#
# With S3_ADDRESS=10.0.0.9 it is reached there as well, at the same port: for who is in another network namespace.
#
# `start` is idempotent: a server that still answers is left as it is, a dead one is replaced.
# It writes DIR/env, a file to source: endpoint, bucket, region and credentials.
set -euo pipefail

readonly ACCESS_KEY=storaged SECRET_KEY=storaged-demo-secret BUCKET=storaged REGION=us-east-1
readonly START_SECONDS_MAX=60
# The SHA-256 of no bytes: the gateway wants the body's digest as a header of every signed request.
readonly EMPTY_SHA256=e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855

fail() { echo "ceph.sh: $*" >&2; exit 1; }
usage() { sed -n '2,12p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }

answers() { curl -s -o /dev/null --max-time 2 "http://127.0.0.1:$1/"; }

# A pid file may outlive its process and its number may be given to a stranger, so a pid counts as
# ours only while its command line still names our configuration file.
pid_of() {
    local file=$1/$2.pid pid
    [ -r "$file" ] || return 1
    pid=$(tr -dc 0-9 <"$file")
    [ -n "$pid" ] && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF -- "-c $1/ceph.conf" && echo "$pid"
}

stop() {
    local dir=$1 name pid
    for name in client.rgw osd.0 mon.a; do
        pid=$(pid_of "$dir" "$name") || continue
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        # The state is thrown away with the processes, so an unclean end loses nothing.
        kill -9 "$pid" 2>/dev/null || true
    done
    rm -f "$dir"/{client.rgw,osd.0,mon.a}.pid
}

write_config() {
    local dir=$1 port=$2 mon=$((2 + $2))
    cat >"$dir/ceph.conf" <<CONF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon host = [v2:127.0.0.1:$mon,v1:127.0.0.1:$((mon + 1))]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = $dir/keyring
run dir = $dir
admin socket = $dir/\$name.asok
log file = $dir/\$name.log
pid file = $dir/\$name.pid
mon data = $dir/mon
# Where less of a disk is free than 5 %, a monitor does not start and says so to nobody. This one writes a few megabytes.
mon data avail crit = 0
osd data = $dir/osd
rgw data = $dir/rgw
# One copy on one store: the server is for trying things, its data lives as long as its process.
osd pool default size = 1
mon allow pool size one = true
osd crush chooseleaf type = 0
osd pool default pg num = 8
osd objectstore = memstore
memstore device bytes = 8589934592
rgw frontends = beast endpoint=127.0.0.1:$port${S3_ADDRESS:+ endpoint=$S3_ADDRESS:$port}
rgw dynamic resharding = false
rgw run sync thread = false
CONF
}

write_keys() {
    local keyring=$1/keyring
    ceph-authtool --create-keyring "$keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
    ceph-authtool "$keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
    ceph-authtool "$keyring" --gen-key -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *' --cap mgr 'allow profile osd'
    ceph-authtool "$keyring" --gen-key -n client.rgw --cap mon 'allow rw' --cap osd 'allow rwx'
}

boot() {
    local dir=$1 conf=(-c "$1/ceph.conf") fsid osd mon
    fsid=$(sed -n 's/^fsid = //p' "$dir/ceph.conf")
    mon=$(sed -n 's/^mon host = //p' "$dir/ceph.conf")
    osd=$(cat /proc/sys/kernel/random/uuid)
    monmaptool --create --addv a "$mon" --fsid "$fsid" "$dir/monmap" >/dev/null
    ceph-mon "${conf[@]}" --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
    ceph-mon "${conf[@]}" -i a
    timeout "$START_SECONDS_MAX" ceph "${conf[@]}" osd new "$osd" >/dev/null
    ceph-osd "${conf[@]}" -i 0 --mkfs --osd-uuid "$osd" 2>/dev/null
    timeout "$START_SECONDS_MAX" ceph "${conf[@]}" auth import -i "$dir/keyring" 2>/dev/null
    ceph-osd "${conf[@]}" -i 0 >/dev/null
}

wait_for() {
    local port=$1 tries=$((START_SECONDS_MAX * 5))
    for _ in $(seq "$tries"); do answers "$port" && return; sleep 0.2; done
    fail "no answer from the S3 gateway at 127.0.0.1:$port after $START_SECONDS_MAX s: see the logs in $2"
}

make_user_and_bucket() {
    local dir=$1 port=$2 status
    timeout "$START_SECONDS_MAX" radosgw-admin -c "$dir/ceph.conf" user create --uid=storaged --display-name=storaged \
        --access-key="$ACCESS_KEY" --secret-key="$SECRET_KEY" >/dev/null 2>&1
    status=$(curl -s -o /dev/null -w '%{http_code}' --max-time 30 -X PUT --aws-sigv4 "aws:amz:$REGION:s3" \
        --user "$ACCESS_KEY:$SECRET_KEY" -H "x-amz-content-sha256: $EMPTY_SHA256" "http://127.0.0.1:$port/$BUCKET")
    [ "$status" = 200 ] || fail "expected status 200 for the new bucket $BUCKET, got $status"
}

write_env() {
    cat >"$1/env" <<ENV
export STORAGED_TEST_S3_ENDPOINT=http://127.0.0.1:$2
export STORAGED_TEST_S3_BUCKET=$BUCKET
export AWS_REGION=$REGION
export AWS_ACCESS_KEY_ID=$ACCESS_KEY
export AWS_SECRET_ACCESS_KEY=$SECRET_KEY
ENV
}

kill_gateway() {
    local pid
    pid=$(pid_of "$1" client.rgw) || fail "no gateway runs in $1"
    kill -9 "$pid"
    while kill -0 "$pid" 2>/dev/null && ! grep -q '^State:.Z' "/proc/$pid/status" 2>/dev/null; do sleep 0.05; done
}

start_gateway() {
    radosgw -c "$1/ceph.conf" -n client.rgw
    wait_for "$2" "$1"
}

start() {
    local dir=$1 port=$2
    if [ -f "$dir/env" ] && pid_of "$dir" client.rgw >/dev/null && answers "$port"; then
        echo "S3 already at http://127.0.0.1:$port, settings in $dir/env"
        return
    fi
    answers "$port" && fail "port $port is taken by another server: give another port"
    bash "$(dirname "${BASH_SOURCE[0]}")/../fresh/packages.sh" s3 >&2
    stop "$dir"
    # Only what an earlier start made is removed, so a wrongly given DIR loses nothing else.
    rm -rf "$dir"/{mon,osd,rgw,keyring,monmap,ceph.conf,env}
    mkdir -p "$dir"/{mon,osd,rgw}
    write_config "$dir" "$port"
    write_keys "$dir"
    # Whatever fails from here on says why and leaves no process behind.
    trap 'tail -n 5 "$DIR"/*.log >&2; stop "$DIR"' EXIT
    boot "$dir"
    start_gateway "$dir" "$port"
    make_user_and_bucket "$dir" "$port"
    write_env "$dir" "$port"
    trap - EXIT
    echo "S3 at http://127.0.0.1:$port, settings in $dir/env"
}

[ $# -ge 2 ] || usage
mkdir -p "$2"
DIR=$(cd "$2" && pwd)
case $1 in
    start) start "$DIR" "${3:-7480}" ;;
    stop) stop "$DIR" ;;
    kill-gateway) kill_gateway "$DIR" ;;
    start-gateway) start_gateway "$DIR" "${3:-7480}" ;;
    *) usage ;;
esac
