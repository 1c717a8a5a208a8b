"""The pure controller: events in, effects out; no I/O, clocks, threads or randomness.

`machine.Machine` is the only way in. `states` has the tables, `policy` the
decisions, `records` what is remembered; `jobs`, `losses` and `fleet` note what
happened, `requests` what persons ask, and `steps` and `acting` move jobs on.
"""
