"""Deterministic simulation: the production cores as a whole cluster, under seeded faults, in virtual time.

runner.py           one world from its seed to its end; cli.py plays many (scripts/sim)
world.py            events, clocks, processes          network.py   messages, and what happens to them
store_process.py    Store over SQLite, whose file can be torn
plane_process.py    Metadata, as worker/peers.py drives it          worker_process.py   and Pages over a small arena
engine_process.py   writes and reads the arena by itself
cluster.py          what a world consists of           faults.py    what goes wrong in it
invariants/         what holds after every event; settled.py: what holds in the end
mutants.py          deliberate faults that have to be caught        test_found.py   faults that were found

What it leaves out: sockets and event loops (tests/net, tests/worker), etcd (tests/store), engines (tests/e2e), plans.
"""
