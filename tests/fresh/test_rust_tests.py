"""The runner of Rust's tests, on binaries that are scripts: python3 -m unittest discover -s tests/fresh"""

import contextlib
import io
import json
import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import rust_tests

FAILED = r"""
running 2 tests
test a ... ok
test b::c ... FAILED

failures:

---- b::c stdout ----
Error: what the test printed is no cause

thread 'b::c' panicked at src/lib.rs:1:
assertion `left == right` failed
  left: 1
 right: 2
stack backtrace:

failures:
    b::c

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""
RETURNED = r"""
---- d stdout ----
Error: 2026-01-01T00:00:00Z the log of the first node, which says a lot of things that are no cause
2026-01-01T00:00:00Z and of the second


Caused by:
    0: waited for steps
    1: step 22 after 20

Stack backtrace:
   0: anyhow

failures:
    d

test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""
PASSED = "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n"


class RunnerTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.messages = []

    def script(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def binary(self, name: str, text: str, says: str = ""):
        """A binary that shows this, and then does that."""
        (self.folder / f"{name}.says").write_text(says)
        executable = self.script(name, f"cat {self.folder}/{name}.says\n{text}")
        told = {"target": {"name": name}, "executable": executable, "profile": {"test": True}}
        self.messages.append(told | {"manifest_path": str(self.folder / "Cargo.toml")})

    def run_all(self) -> tuple[int, str]:
        built = [*self.messages, {"reason": "build-finished"}, {"executable": "/not-a-test", "profile": {"test": False}}]
        (self.folder / "messages").write_text("".join(f"{json.dumps(it)}\n" for it in built))
        cargo = self.script("cargo", f"cat {self.folder}/messages")
        shown = io.StringIO()
        with mock.patch("sys.argv", ["rust_tests.py", cargo, "test"]), contextlib.redirect_stdout(shown):
            return rust_tests.main(), shown.getvalue()

    def test_all_that_passed_is_counted_and_shown(self):
        self.binary("one", 'echo "in $PWD of $CARGO_MANIFEST_DIR"', PASSED)
        self.binary("simulation", "", PASSED)
        code, shown = self.run_all()
        self.assertEqual(code, 0, shown)
        self.assertIn("6 passed, 0 failed, 2 ignored in 2 binaries", shown)
        self.assertIn(f"in {self.folder} of {self.folder}", shown)

    def test_what_takes_longest_comes_first(self):
        for name in ("one", "jobs", "simulation"):
            self.binary(name, "")
        told = "\n".join(json.dumps(it) for it in self.messages)
        self.assertEqual([it.name for it in rust_tests.Binary.all_of(told)], ["simulation", "jobs", "one"])

    def test_a_failure_is_named_at_the_end_with_its_cause(self):
        self.binary("good", "", PASSED)
        self.binary("bad", "exit 101", FAILED)
        code, shown = self.run_all()
        self.assertEqual(code, 101)
        self.assertTrue(shown.endswith("bad b::c: assertion `left == right` failed left: 1 right: 2\n"), shown)
        self.assertIn("4 passed, 1 failed, 1 ignored", shown)

    def test_an_error_is_named_with_what_it_comes_from(self):
        self.binary("several", "exit 101", RETURNED)
        self.binary("one", "exit 101", RETURNED.replace("    0: waited for steps\n    1: step", "    step"))
        _, shown = self.run_all()
        logs = "Error: 2026-01-01T00:00:00Z the log of the first node, which"
        self.assertIn(f"several d: {logs} 0: waited for steps 1: step 22 after 20\n", shown)
        self.assertIn(f"one d: {logs} step 22 after 20\n", shown)

    def test_a_binary_that_says_nothing_of_its_end_is_named(self):
        self.binary("killed", "kill -9 $$", PASSED)
        self.binary("ends", "exit 3")
        code, shown = self.run_all()
        self.assertEqual(code, 101)
        self.assertIn("killed as a whole: signal SIGKILL", shown)
        self.assertIn("ends as a whole: exit code 3", shown)

    def test_what_a_test_has_left_behind_is_not_waited_for(self):
        self.binary("leaves", f"sleep 600 & echo $! > {self.folder}/left", PASSED)
        code, shown = self.run_all()
        self.assertEqual(code, 0, shown)
        os.kill(int((self.folder / "left").read_text()), 9)

    def test_a_build_that_failed_and_one_of_nothing_are_no_success(self):
        code, shown = self.run_all()
        self.assertEqual((code, shown), (1, "==> cargo has built no tests\n"))
        with mock.patch("sys.argv", ["rust_tests.py", self.script("broken", "exit 7")]):
            self.assertEqual(rust_tests.main(), 7)

    def test_the_end_of_a_log_has_room_for_so_many(self):
        causes = {f"t{number}": ["x" * 500] for number in range(20)}
        told = rust_tests.told(causes)
        self.assertEqual((len(told), told[-1]), (13, "and 8 more"))
        self.assertTrue(all(len(line) <= 200 for line in told))


if __name__ == "__main__":
    unittest.main()
