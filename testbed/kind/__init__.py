"""The same cluster on kind: nodes are containers of Docker; `docker kill` is a power loss, `docker start` the return.

Where Docker runs and pulls images this is plain `kind create cluster`. Elsewhere, on Debian as root, Docker comes from
unpacked packages and the node image is built from source, once for each machine (`build`, `recipe/`).
`python -m testbed kind --help` lists what can be done. Imports the test bed; only its command line imports this.
"""
