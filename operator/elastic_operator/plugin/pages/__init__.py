"""The output of `kubectl etj`: data and text about jobs, made from plain objects.

Pure: no requests, no clock. Imported by the other modules of the plugin, and by `web` for the operator's status page.
"""
