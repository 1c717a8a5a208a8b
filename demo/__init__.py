"""What `outlast demo` runs: break a job twice, then prove that nobody can tell from its losses.

`faults` draws when and whom to hit, `host` runs a controller with local nodes
and hits them from outside, `scenario` drives both runs, `analysis` turns what
was recorded into the report's figures, and `svg` and `page` draw them.
"""
