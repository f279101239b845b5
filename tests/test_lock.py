"""requirements.lock has what pyproject.toml asks for, with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "requirements.lock").read_text()
PINNED = re.findall(r"^([\w.-]+)==([\w.]+)", LOCK, re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [
    *PROJECT["dependencies"],
    *(one for extra in ("server", "structured", "clang") for one in PROJECT["optional-dependencies"][extra]),
]


@pytest.mark.parametrize("wanted", WANTED)
def test_a_locked_version_is_what_the_project_allows(wanted: str) -> None:
    requirement = Requirement(wanted)
    versions = [version for name, version in PINNED if canonicalize_name(name) == canonicalize_name(requirement.name)]
    assert versions and all(version in requirement.specifier for version in versions), f"{wanted}: locked is {versions or 'nothing'}"


def test_every_package_has_hashes_and_no_index_is_named() -> None:
    entries = re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert len(entries) == len(PINNED) and all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in LOCK and "--index" not in LOCK and "--find" not in LOCK
