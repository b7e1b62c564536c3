"""The fakes are tested as strictly as what they stand for."""

from tests.loops import quiet_loop

__all__ = ["quiet_loop"]
