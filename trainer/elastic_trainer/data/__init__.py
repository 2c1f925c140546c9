"""Data and random state of an elastic training: sample order, loaders, streams, random number generators.

It imports `batch` and `errors` of this package. The stacks import it. torch is imported only when a function needs it.
"""
