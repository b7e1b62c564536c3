"""The processes that are measured and those that measure them. Some run in a peer's environment: standard library only here."""
