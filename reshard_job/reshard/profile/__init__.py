"""Where the time of a run goes, and what follows from it while the run goes on.

Clocks in workers, records of units, their merge into a `Profile`, and the decision how many processes are active.
Imports `system` and nothing above it; every package above may use it. Only `devices.py` and clocks touch the system.
"""
