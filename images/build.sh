#!/bin/sh
# usage: images/build.sh [operator] [reshard] [example]     (default: all; the example holds torch: gigabytes)
# Builds with docker, podman or buildah, whichever works here. Environment:
#   BUILDER    one of them; default: the first that works
#   REGISTRY   prefix of the names, for instance registry.example.com/team
#   VERSION    tag; default: the project's version
#   BUILD_ARGS more options of the build command, for instance "--platform linux/arm64"
set -eu
cd "$(dirname "$0")/.."
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)

works() {
    command -v "$1" >/dev/null 2>&1 || return 1
    case $1 in
        docker) timeout 10 docker version --format '{{.Server.Version}}' >/dev/null 2>&1 ;;  # a client may have no engine
        *) "$1" --version >/dev/null 2>&1 ;;
    esac
}

builder=${BUILDER:-}
if [ -z "$builder" ]; then
    for candidate in docker podman buildah; do
        if works "$candidate"; then builder=$candidate; break; fi
    done
elif ! works "$builder"; then
    echo "images: BUILDER=$builder does not work here: it is not on PATH or reaches no engine" >&2
    exit 1
fi
if [ -z "$builder" ]; then
    echo "images: none of docker (with a running engine), podman and buildah works here." >&2
    echo "Without any of them: \`python -m testbed images\` lays the same files out and writes an OCI archive;" >&2
    echo "\`python -m testbed images --load\` brings it onto the nodes of the test bed (docs/images.md)." >&2
    exit 1
fi

[ $# -gt 0 ] || set -- operator reshard example
for name in "$@"; do
    if [ ! -f "images/$name/Dockerfile" ]; then
        echo "images: no image $name: there are $(cd images && echo */ | tr -d /)" >&2
        exit 2
    fi
done
for name in "$@"; do
    reference=${REGISTRY:+$REGISTRY/}elastic-training-$name:$version
    echo "images: building $reference with $builder"
    # shellcheck disable=SC2086  # BUILD_ARGS are words
    "$builder" build -f "images/$name/Dockerfile" -t "$reference" \
        --build-arg "VERSION=$version" --build-arg "REVISION=$revision" ${BUILD_ARGS:-} .
    case $builder in
        buildah) buildah images --format '{{.Name}}:{{.Tag}}  {{.Size}}' "$reference" ;;
        *) "$builder" image inspect --format '{{index .RepoTags 0}}  {{.Size}} bytes' "$reference" ;;
    esac
done
