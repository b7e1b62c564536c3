"""Deterministic simulation: the production cores as a whole cluster, under seeded faults, in virtual time.

runner.py           one world from its seed to its end; cli.py plays many (scripts/sim)
world.py            events, clocks, processes          network.py   messages, and what happens to them
store_process.py    Store over SQLite, whose file can be torn
plane_process.py    Metadata, as worker/peers.py drives it          worker_process.py   and Pages over a small arena
engine_process.py   writes and reads the arena by itself
plan_service.py     plans in a worker: the gateway's and the executor's cores, as worker/plans.py and executor.py drive them
caller_process.py   who submits plans, under shared keys, to any gateway, and asks until it knows
cluster.py          what a world consists of           faults.py    what goes wrong in it
invariants/         what holds after every event; settled.py: what holds in the end
mutants.py          deliberate faults that have to be caught (plan_mutants.py: of plans)
test_found.py       faults that were found          test_plans.py    the gateway of a plan killed at every boundary

A third of the worlds has callers and so plans. What it leaves out: sockets and event loops (tests/net, tests/worker), etcd
(tests/store), engines (tests/e2e), what the operations of plans do (tests/client).
"""
