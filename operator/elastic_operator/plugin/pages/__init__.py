"""What `kubectl etj` prints: data and text about jobs, made from plain objects.

Pure: no cluster, no clock. Imported by the verbs of the plugin.
"""
