"""A rank's process: the standby that it is forked from, its start, its loop."""
