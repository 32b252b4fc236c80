"""Replicas that step asynchronously: parameter servers, stale-synchronous, AD-PSGD, Hogwild and ensembles.

- `asynchronous_replicas.py`: the base of these modes, and the messages between their ranks.
- `parameter_servers.py`: modes "stale" and "asynchronous"; every rank also serves a part of the parameters.
- `ad_psgd.py`: AD-PSGD; pairs of replicas are averaged while replicas compute.
- `hogwild.py`: the ranks of one host train one model in shared memory, without locks.
- `ensemble.py`: independent members, whose predictions are averaged.

Each mode's entry (name, parameters, traffic) is in config/consistency_modes.py; `local_sgd/modes.py` makes the mode
that a plan names. The interface that the step calls is in local_sgd/consistency.py.
"""
