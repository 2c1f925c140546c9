#!/bin/sh
# usage: compile.sh PREFIX   (run while an image is built)
# Byte code for all modules below PREFIX, to be copied to /usr/local, and for the standard library, which the base image
# leaves out. It is valid whatever the files' dates.
set -eu
prefix=$1
compile="python -m compileall -q -f --invalidation-mode unchecked-hash"
$compile -s "$prefix" -p /usr/local "$prefix/lib"
cd /usr/local
# What cannot be compiled is the standard library's own test data.
$compile -x '/(test|tests|site-packages)/' lib || true
find lib/python3* -name __pycache__ -not -path '*/site-packages/*' -prune -exec cp -r --parents {} "$prefix" \;
