"""An S3 server of this process, for what writes to object stores."""

import contextlib
import urllib.request

import pytest


@contextlib.contextmanager
def s3_server():
    """What a client needs to use its bucket `bucket`: variables of the environment."""
    threaded = pytest.importorskip("moto.server", reason="moto not installed: make frameworks installs it")
    server = threaded.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT"), timeout=10).close()
        yield {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stop()
