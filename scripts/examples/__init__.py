"""The three uses of the paper as programs of a page each, on engines that compute nothing (testing/engine.py)."""
