"""Builds the documentation site from the pages of the repository: `make docs`.

`links` decides where a link of a page leads on the site, and is pure; `hooks` is what MkDocs calls. Only `hooks`
imports MkDocs, so that tests of the links need nothing but this repository.
"""
