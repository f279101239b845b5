"""Imported before any module that imports tinygrad: the bridge imports it without what is not used."""

import tinyvllm.bridge  # noqa: F401
