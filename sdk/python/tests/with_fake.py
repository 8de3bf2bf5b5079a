"""Runs a script with the stand-in daemon instead of a real one: `with_fake.py FOLDER SCRIPT [ARGUMENT...]`."""

import runpy
import sys

from fake import FakeSession
from storaged._session import Session

session = FakeSession(sys.argv[1])
Session.shared = classmethod(lambda cls, namespace=None: session)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
