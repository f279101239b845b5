"""Every test here runs on a started CPU device."""

from tests.started import device

__all__ = ["device"]
