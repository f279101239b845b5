from tests.started import device

__all__ = ["device"]
