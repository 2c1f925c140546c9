#!/bin/sh
# usage: images/lock.sh UV   (`make lock-images`)
# Writes the part of requirements.lock that each image needs, with hashes. Versions are only taken over, never chosen
# here.
set -eu
uv=$1
cd "$(dirname "$0")/.."

lock() {
    target=images/$1/requirements.txt
    shift
    extras=$(printf ' --extra %s' "$@")
    {
        echo "# Made by \`make lock-images\` from requirements.lock: what the extras $* need."
        # shellcheck disable=SC2086  # options are words
        "$uv" pip compile -q $extras -c requirements.lock --generate-hashes --no-emit-index-url --no-annotate --no-header \
            --python-version 3.11 pyproject.toml
    } > "$target.new"
    mv "$target.new" "$target"
}

lock operator operator
lock reshard reshard
lock example reshard trainer engine
{
    echo "# Made by \`make lock-images\` from requirements.lock: as requirements.txt, for bases that bring torch along."
    # A package is a line that begins with its name, and the indented lines of its hashes.
    awk '/^[^ ]/ { keep = !/^(#|torch==|triton==|nvidia-|cuda-)/ } keep' images/example/requirements.txt
} > images/example/requirements-without-torch.txt
