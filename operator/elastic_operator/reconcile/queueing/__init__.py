"""Quota from Kueue: wait for it, stay within it, give it back after an eviction, ask for more, all by a Workload.

`standing` says what Kueue's word means for the job now, `pause` stops the job and waits, `workload_actions` writes the
Workload. Pure, as everything in `reconcile`.
"""
