"""HTTP as a HyperPod client speaks it, byte by byte."""

import base64
import http.client
import json
import socket
import time

TOKEN = "hyper-secret-of-tests"
# xxh3_128 of bodies, as the Python package `xxhash` gives it: tests here do without the package.
CHECKSUMS = {
    b"": "maoG0wFHmNhgAcMkRo1Jfw==",
    b"storaged": "NeflCp7fFy5kt/sdm9rhpw==",
    bytes(range(256)) * 4000: "4oJBqkqOsinrFxP7UQloCw==",
}


def section(folder, port, more=""):
    """`[hyperpod]` for a configuration, and its token's file."""
    token = folder / "hyper-token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    return f'[hyperpod]\nlisten = "127.0.0.1:{port}"\ntoken_file = "{token}"\n{more}\n'


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def __repr__(self):
        return f"{self.status} {self.body[:300]!r}"

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.status, self.json["error"]


class Http:
    """Requests to one node."""

    def __init__(self, port, token=TOKEN):
        self.port, self.token = port, token

    def ask(self, method, path, body=None, headers=None, timeout=60):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        connection.request(method, path, body=body, headers=sent | (headers or {}))
        got = connection.getresponse()
        answer = Answer(got.status, got.headers, got.read())
        connection.close()
        return answer

    def create(self, namespace, ranks, retained=3):
        return self.ask("POST", f"/v1/cp/namespaces/{namespace}?num_ranks={ranks}&steps_retained={retained}")

    def namespace(self, namespace):
        return self.ask("GET", f"/v1/cp/namespaces/{namespace}")

    def put(self, namespace, rank, step, body, checksum=None, **named):
        headers = {"Shard-Meta": meta(checksum)} if checksum else {}
        return self.ask("POST", f"/v1/cp/checkpoints/{namespace}/{rank}/{step}", body, headers, **named)

    def get(self, namespace, rank, step, **headers):
        return self.ask("GET", f"/v1/cp/checkpoints/{namespace}/{rank}/{step}", headers=headers)

    def latest(self, namespace, limit=5):
        return self.ask("GET", f"/v1/cp/checkpoints/{namespace}/latest?limit={limit}")

    def save(self, namespace, step, bodies):
        """All ranks, the last one's answer."""
        for rank, body in enumerate(bodies):
            answer = self.put(namespace, rank, step, body)
            assert answer.status == 200, (rank, answer)
        return answer.json["state"]

    def raw(self, request, wait=30):
        """Bytes as they are; what comes back until the end of the connection or of the wait."""
        with socket.create_connection(("127.0.0.1", self.port)) as stream:
            stream.sendall(request)
            stream.settimeout(wait)
            got = b""
            try:
                while piece := stream.recv(65536):
                    got += piece
            except TimeoutError:
                pass
            return got


def meta(checksum):
    return json.dumps({"checksum": checksum, "algorithm": "xxh3_128"})


def flipped(checksum):
    """Another checksum."""
    raw = bytearray(base64.b64decode(checksum))
    raw[3] ^= 1
    return base64.b64encode(raw).decode()


def until(check, limit=20):
    """Waits until it holds."""
    end = time.monotonic() + limit
    while not check():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.05)
