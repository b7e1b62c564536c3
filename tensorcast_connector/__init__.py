"""The tensor pool: plugins for inference engines over a light pool of tensor workers. See ARCHITECTURE.md."""
