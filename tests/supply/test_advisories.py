"""What advisories.py finds and what it lets pass, on lock files written here and on the repository's own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from advisories import ROOT  # noqa: E402
from semver import BadVersion, Version, matches  # noqa: E402

CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"
# Nothing is known of the first. In the real index: rustls before 0.23.5, 0.22.4 and 0.21.11 may loop for ever (RUSTSEC-2024-0336).
HARMLESS = {"name": "itoa", "version": "1.0.15", "source": CRATES_IO}
KNOWN = {"name": "rustls", "version": "0.23.4", "source": CRATES_IO}


def lock(*packages: dict) -> str:
    tables = ["[[package]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in one.items()) for one in packages]
    return "version = 4\n\n" + "\n".join(tables)


def ignoring(identity: str, reason: str) -> str:
    return f'[advisories]\nignore = [{{ id = "{identity}", reason = "{reason}" }}]\n'


class Check(unittest.TestCase):
    """The command, as make runs it."""

    def run_with(self, text: str, deny: str = "", today: str = "2026-08-22", index: str | None = None) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            (place := Path(folder, "Cargo.lock")).write_text(text)
            (rules := Path(folder, "deny.toml")).write_text(deny)
            command = [sys.executable, HERE / "advisories.py", "--lock", place, "--deny", rules, "--today", today]
            if index is not None:
                (own := Path(folder, "index.json")).write_text(index)
                command += ["--index", own]
            ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertNotIn("Traceback", ended.stdout)
        return ended.returncode, ended.stdout

    def test_a_vulnerable_version_fails_and_is_named(self):
        code, said = self.run_with(lock(KNOWN))
        self.assertEqual(code, 1, said)
        self.assertIn("RUSTSEC-2024-0336 (vulnerability): rustls 0.23.4", said)

    def test_it_is_found_among_the_crates_that_are_locked(self):
        code, said = self.run_with((ROOT / "Cargo.lock").read_text() + "\n" + lock(KNOWN).split("\n\n", 1)[1])
        self.assertEqual(code, 1, said)
        self.assertIn("rustls 0.23.4", said)

    def test_patched_versions_pass(self):
        for version in ["0.23.5", "0.22.4", "0.21.11", "0.23.40"]:
            code, said = self.run_with(lock(KNOWN | {"version": version}))
            self.assertNotIn("RUSTSEC-2024-0336", said)
            self.assertEqual(code, 0, said)

    def test_a_crate_of_the_workspace_is_not_taken_for_one_of_that_name(self):
        code, said = self.run_with(lock({"name": "rustls", "version": "0.23.4"}))
        self.assertEqual(code, 0, said)

    def test_what_is_accepted_passes_until_its_day(self):
        deny = ignoring("RUSTSEC-2024-0336", "until 2026-09-01: no handshakes")
        self.assertEqual(self.run_with(lock(KNOWN), deny, today="2026-09-01")[0], 0)
        code, said = self.run_with(lock(KNOWN), deny, today="2026-09-02")
        self.assertEqual(code, 1)
        self.assertIn("was accepted in deny.toml until 2026-09-01", said)

    def test_an_acceptance_without_a_day_or_a_reason_is_refused(self):
        for reason in ["no handshakes", "until 2026-09-01", "until 2026-09-01: ", "until 2026-02-31: why"]:
            code, said = self.run_with(lock(KNOWN), ignoring("RUSTSEC-2024-0336", reason))
            self.assertEqual(code, 2, said)

    def test_an_acceptance_of_nothing_fails(self):
        deny = ignoring("RUSTSEC-2024-0336", "until 2026-09-01: no handshakes")
        code, said = self.run_with(lock(KNOWN | {"version": "0.23.40"}), deny)
        self.assertEqual(code, 1)
        self.assertIn("nothing in Cargo.lock is affected", said)

    def test_an_old_database_is_warned_of(self):
        fresh, old = (self.run_with(lock(HARMLESS), today=today) for today in ["2026-08-22", "2036-08-22"])
        self.assertNotIn("warning", fresh[1])
        self.assertIn("days old", old[1])
        self.assertEqual(old[0], 0)

    def test_files_that_are_not_what_they_should_be_are_refused(self):
        for index in ["", "[]", "{}", '{"date": "2026-08-21", "advisories": []}', '{"date": "2026-08-21", "advisories": [{"id": "x"}]}']:
            code, said = self.run_with(lock(KNOWN), index=index)
            self.assertEqual(code, 2, f"{index}: {said}")
        self.assertEqual(self.run_with("package = 1")[0], 2)
        self.assertEqual(self.run_with(lock(KNOWN | {"version": "new"}))[0], 2)
        self.assertEqual(self.run_with(lock())[0], 2)


class Requirements(unittest.TestCase):
    """Ranges as RustSec reads them."""

    def test_operators(self):
        for requirement, meets, fails in [
            (">= 1.3.0", ["1.3.0", "2.0.0"], ["1.2.9", "1.3.0-alpha.1"]),
            ("< 1.3", ["1.2.9", "1.3.0-rc.1"], ["1.3.0"]),
            ("> 1.0.0, <= 1.2.0", ["1.0.1", "1.2.0"], ["1.0.0", "1.2.1"]),
            ("^1.2.3", ["1.2.3", "1.9.0"], ["1.2.2", "2.0.0", "2.0.0-alpha"]),
            ("^0.2.3", ["0.2.9"], ["0.3.0", "0.2.2"]),
            ("^0.0.3", ["0.0.3"], ["0.0.4"]),
            ("^0.0", ["0.0.9"], ["0.1.0"]),
            ("^0", ["0.9.0"], ["1.0.0"]),
            ("1.2", ["1.2.0", "1.9.0"], ["2.0.0", "1.1.9"]),
            ("~1.2.3", ["1.2.9"], ["1.3.0", "1.3.0-alpha"]),
            ("~1.2", ["1.2.0"], ["1.3.0"]),
            ("~1", ["1.9.9"], ["2.0.0"]),
            ("= 1.2.3", ["1.2.3", "1.2.3+build"], ["1.2.4", "1.2.3-rc.1"]),
            ("=1.2", ["1.2.9"], ["1.3.0"]),
            ("*", ["0.0.0"], []),
        ]:
            for version in meets:
                self.assertTrue(matches(requirement, Version.parse(version)), f"{version} {requirement}")
            for version in fails:
                self.assertFalse(matches(requirement, Version.parse(version)), f"{version} {requirement}")

    def test_order(self):
        # The example of Semantic Versioning 2.0.0, section 11.
        order = "1.0.0-alpha 1.0.0-alpha.1 1.0.0-alpha.beta 1.0.0-beta 1.0.0-beta.2 1.0.0-beta.11 1.0.0-rc.1 1.0.0".split()
        versions = [Version.parse(text) for text in order]
        self.assertEqual(sorted(reversed(versions)), versions)
        self.assertEqual(len(set(versions)), len(order))

    def test_what_is_no_requirement_is_refused(self):
        for text in ["", "about 1", ">= one", "1.2.3.4"]:
            with self.assertRaises(BadVersion):
                matches(text, Version(1, 0, 0))


if __name__ == "__main__":
    unittest.main()
