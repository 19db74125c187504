"""Write what oncekey is made of as CycloneDX JSON: from a wheel's own metadata, and nothing else.

``python scripts/sbom.py oncekey-1.0-py3-none-any.whl > oncekey.cdx.json``. The same wheel gives the
same bytes: there is no time, host or path in it, and its serial number is made of the wheel's hash.
"""

from __future__ import annotations

import email.parser
import hashlib
import json
import re
import sys
import uuid
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(\[[^\]]*\])?\s*([^;]*)(?:;\s*(.*))?")
EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


def metadata(wheel: Path) -> Message:
    """The METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.Parser().parsestr(files.read(name).decode())


def plain(name: str) -> str:
    """A project's name as package URLs have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def dependencies(about: Message) -> list[dict[str, Any]]:
    """One component for each package that an extra may install."""
    found: dict[str, dict[str, set[str]]] = {}
    for line in about.get_all("Requires-Dist") or ():
        match = REQUIREMENT.fullmatch(line.strip())
        if match is None:
            raise SystemExit(f"this requirement can't be read: {line}")
        name, _, versions, marker = match.groups()
        if plain(name) == plain(str(about["Name"])):
            continue  # an extra of our own that names others
        one = found.setdefault(plain(name), {"versions": set(), "extras": set()})
        one["versions"].add((versions or "").strip())
        one["extras"] |= set(EXTRA.findall(marker or ""))
    return [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}",
            "name": name,
            "purl": f"pkg:pypi/{name}",
            "scope": "optional" if one["extras"] else "required",
            "properties": [
                {"name": "oncekey:versions", "value": " or ".join(sorted(one["versions"]))},
                {"name": "oncekey:extras", "value": ", ".join(sorted(one["extras"]))},
            ],
        }
        for name, one in sorted(found.items())
    ]


def bill(wheel: Path) -> dict[str, Any]:
    """The bill of materials of a wheel."""
    about = metadata(wheel)
    name, version = str(about["Name"]), str(about["Version"])
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own = f"pkg:pypi/{plain(name)}@{version}"
    components = dependencies(about)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(digest[:32])}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": name,
                "version": version,
                "purl": own,
                "description": str(about["Summary"]),
                "licenses": [{"expression": str(about["License-Expression"])}],
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
        },
        "components": components,
        "dependencies": [
            {"ref": own, "dependsOn": [one["bom-ref"] for one in components]},
            *({"ref": one["bom-ref"], "dependsOn": []} for one in components),
        ],
    }


if __name__ == "__main__":
    print(json.dumps(bill(Path(sys.argv[1])), indent=2))
