"""Pure: what a node's agent decides. No process, file, clock, thread or connection.

The agent process and the simulator feed the same machine and do what it says.
"""
