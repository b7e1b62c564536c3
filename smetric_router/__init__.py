"""An OpenAI-compatible router with session-turn-aware scheduling. See ARCHITECTURE.md."""
