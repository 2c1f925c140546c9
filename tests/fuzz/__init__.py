"""Fuzzing of everything that reads a file: `python -m tests.fuzz --seconds 60`, and a short run in the property tier.

A *mutator* damages bytes with knowledge of their structure, driven by a `random.Random`. A *target* puts damaged bytes
where the resharder reads them and says what came out. The *guard* holds every case to the same promise: the same
result as the undamaged original, or an error of our own with the exit code of its class; within two seconds, without
200 MB, with the source untouched and no visible result.
"""
