"""The bill of materials has what CycloneDX 1.5 requires, and the crates that the daemon is made of."""

from __future__ import annotations

import re
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from advisories import built_from  # noqa: E402
from sbom import bill  # noqa: E402

SERIAL = re.compile(r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class Bill(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.made = bill()

    def test_it_has_the_fields_that_the_schema_requires(self):
        made = self.made
        self.assertEqual((made["bomFormat"], made["specVersion"], made["version"]), ("CycloneDX", "1.5", 1))
        self.assertRegex(made["serialNumber"], SERIAL)
        self.assertRegex(made["metadata"]["timestamp"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        for one in [made["metadata"]["component"], *made["components"]]:
            self.assertTrue(one["type"] in ("application", "library") and one["name"] and one["version"], one)
            self.assertRegex(one["purl"], r"^pkg:(cargo|generic)/[^@]+@[^@]+$")
            for digest in one.get("hashes", []):
                self.assertRegex(digest["content"], r"^[0-9a-f]{64}$")

    def test_references_are_unique_and_lead_to_components(self):
        listed = [one["bom-ref"] for one in [self.made["metadata"]["component"], *self.made["components"]]]
        self.assertEqual(len(listed), len(set(listed)))
        entries = [entry["ref"] for entry in self.made["dependencies"]]
        self.assertEqual(sorted(entries), sorted(listed))
        self.assertLessEqual({used for entry in self.made["dependencies"] for used in entry["dependsOn"]}, set(listed))

    def test_it_has_what_the_daemon_is_made_of_and_nothing_else(self):
        components = {(one["name"], one["version"]) for one in self.made["components"]}
        self.assertEqual(components, built_from("normal,build") - {("storaged", "0.1.0")} | {("xdelta3", "3.0.12")})
        scopes = {one["name"]: one["scope"] for one in self.made["components"]}
        self.assertEqual((scopes["rustls"], scopes["cc"], scopes["storaged-core"]), ("required", "excluded", "required"))
        self.assertNotIn("proptest", scopes)

    def test_crates_of_the_registry_have_their_digest_and_licence(self):
        ours = [one["name"] for one in self.made["components"] if "hashes" not in one]
        self.assertTrue(all(name.startswith("storaged-") or name == "xdelta3" for name in ours), ours)
        self.assertTrue(all(one.get("licenses") for one in self.made["components"]))


if __name__ == "__main__":
    unittest.main()
