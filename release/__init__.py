"""The files of a release, byte for byte the same from the same commit: wheel, sdist, chart, SBOM, checksums.

`python -m release` (`make release`) makes them. Imports nothing of the products.
"""
