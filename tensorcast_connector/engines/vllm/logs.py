"""Our lines in vLLM's log."""

import logging


def log_with_vllm() -> None:
    """vLLM configures its own loggers only; ours speak through the same handlers, at the same level."""
    ours, theirs = logging.getLogger("tensorcast_connector"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = not ours.handlers
