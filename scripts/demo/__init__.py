"""What the quick start and the engine tests share: a model, processes, sessions, and the comparison of their tokens."""
