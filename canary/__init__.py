"""The engine tier against the newest frameworks and the newest Kubernetes that the registries offer.

`python -m canary` (`make canary`) tells what is newer than this repository pins, and whether the tests pass with it.
Imports nothing of the products.
"""
