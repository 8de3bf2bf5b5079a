#!/usr/bin/env bash
# Azurite, Microsoft's emulator of Azure Blob Storage, on loopback, with an empty container. Needs Node.js and npm.
#
#   azurite.sh COMMAND...   install it below target/tools, start it, run the command with the names of the server in its environment, and end it
set -euo pipefail

readonly VERSION=3.35.0 ACCOUNT=devstoreaccount1 CONTAINER=storaged
# Published with Azurite, and known to everybody.
readonly KEY='Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=='
readonly START_SECONDS_MAX=30

fail() { echo "azurite.sh: $*" >&2; exit 1; }

[ $# -gt 0 ] || fail "expected a command to run beside Azurite"
command -v npm >/dev/null || fail "expected npm (Debian's package npm), found none"
tools=$(cd "$(dirname "$0")/../.." && pwd)/target/tools/azurite-$VERSION
[ -x "$tools/node_modules/.bin/azurite-blob" ] ||
    npm install --silent --no-fund --no-audit --prefix "$tools" "azurite@$VERSION" >&2 || fail "npm could not install Azurite"

dir=$(mktemp -d)
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$tools/node_modules/.bin/azurite-blob" --silent --skipApiVersionCheck --disableTelemetry --inMemoryPersistence \
    --blobHost 127.0.0.1 --blobPort "$port" >"$dir/log" 2>&1 &
azurite=$!
trap 'kill "$azurite" 2>/dev/null || true; wait "$azurite" 2>/dev/null || true; rm -rf "$dir"' EXIT

for _ in $(seq $((START_SECONDS_MAX * 5))); do
    kill -0 "$azurite" 2>/dev/null || { cat "$dir/log" >&2; fail "Azurite ended"; }
    curl -s -o /dev/null --max-time 2 "http://127.0.0.1:$port/" && break
    sleep 0.2
done

python3 - "$port" "$ACCOUNT" "$CONTAINER" "$KEY" <<'PYTHON'
"""Makes the container, by a request that is signed as Azure wants it (Shared Key)."""
import base64, email.utils, hashlib, hmac, sys, urllib.request

port, account, container, key = sys.argv[1:]
headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
canonical = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
resource = f"/{account}/{account}/{container}\nrestype:container"
text = "PUT\n" + "\n" * 11 + canonical + resource
signature = base64.b64encode(hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()).decode()
url = f"http://127.0.0.1:{port}/{account}/{container}?restype=container"
request = urllib.request.Request(url, method="PUT", headers=headers | {"Authorization": f"SharedKey {account}:{signature}"})
urllib.request.urlopen(request, timeout=10).close()
PYTHON

STORAGED_TEST_AZURE_ENDPOINT="http://127.0.0.1:$port/$ACCOUNT" AZURE_STORAGE_ACCOUNT_KEY=$KEY "$@"
