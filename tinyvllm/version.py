"""The version of this package; pyproject.toml has the same."""

VERSION = "0.1.0"
