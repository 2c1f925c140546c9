#!/bin/sh
# usage: images/build.sh [operator] [reshard] [example]     (default: all; the example holds torch: gigabytes)
#        images/build.sh --platforms                        (those of PLATFORMS that can be built here, one a line)
# Builds with docker, podman or buildah, whichever works here. Environment:
#   BUILDER    one of them; default: the first that works
#   REGISTRY   prefix of the names, for instance registry.example.com/team
#   VERSION    tag; default: the project's version
#   BUILD_ARGS more options of the build command, for instance "--build-arg PYTHON_IMAGE=..."
#   PLATFORMS  one image for several platforms, for instance linux/amd64,linux/arm64; docker needs buildx for this
#   ARCHIVES   folder to which such an image is written as an OCI archive
set -eu
cd "$(dirname "$0")/.."
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
revision=${REVISION:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
platforms=${PLATFORMS:-}

works() {
    command -v "$1" >/dev/null 2>&1 || return 1
    case $1 in
        docker) timeout 10 docker version --format '{{.Server.Version}}' >/dev/null 2>&1 ;;  # a client may have no engine
        *) "$1" --version >/dev/null 2>&1 ;;
    esac
}

# Says why not on stderr. Commands of other architectures run while an image is built, by QEMU if the kernel knows it.
can_build() {
    if [ "$builder" = docker ]; then
        known=$(docker buildx inspect --bootstrap 2>/dev/null | sed -n 's/^Platforms: *//p')
        if [ -z "$known" ]; then
            echo "images: $1: docker has no buildx with a builder (docker buildx create --use)" >&2
            return 1
        fi
        case ", $known," in *", $1,"* | *", $1*,"*) return 0 ;; esac
        echo "images: $1: docker buildx builds for $known here; register QEMU for more" >&2
        return 1
    fi
    case $1-$(uname -m) in
        linux/amd64-x86_64 | linux/arm64-aarch64 | linux/arm64-arm64) return 0 ;;
        linux/amd64-*) emulator=qemu-x86_64 ;;
        linux/arm64-*) emulator=qemu-aarch64 ;;
        *) emulator=unknown ;;
    esac
    [ ! -e "/proc/sys/fs/binfmt_misc/$emulator" ] || return 0
    echo "images: $1: this machine is $(uname -m), and the kernel does not know $emulator (binfmt_misc)" >&2
    return 1
}

# One image for all platforms, as an OCI archive.
build_for_platforms() {
    name=$1 reference=$2
    shift 2
    archive=$ARCHIVES/elastic-training-$name-$version.oci.tar
    if [ "$builder" = docker ]; then
        # shellcheck disable=SC2086  # BUILD_ARGS are words
        docker buildx build --platform "$platforms" --provenance=false -t "$reference" "$@" \
            --output "type=oci,dest=$archive" ${BUILD_ARGS:-} .
    else
        "$builder" manifest rm "$reference" >/dev/null 2>&1 || true
        # shellcheck disable=SC2086
        "$builder" build --platform "$platforms" --manifest "$reference" "$@" ${BUILD_ARGS:-} .
        "$builder" manifest push --all "$reference" "oci-archive:$archive:$version"
    fi
    echo "images: wrote $archive"
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
if [ "${1:-}" = --platforms ]; then
    for platform in $(echo "$platforms" | tr , ' '); do
        if can_build "$platform"; then echo "$platform"; fi
    done
    exit 0
fi
if [ -n "$platforms" ] && [ -z "${ARCHIVES:-}" ]; then
    echo "images: PLATFORMS needs ARCHIVES, the folder for the archives: an engine keeps images of its own platform" >&2
    exit 2
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
    echo "images: building $reference with $builder${platforms:+ for $platforms}"
    if [ -n "$platforms" ]; then
        build_for_platforms "$name" "$reference" -f "images/$name/Dockerfile" \
            --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
        continue
    fi
    # shellcheck disable=SC2086  # BUILD_ARGS are words
    "$builder" build -f "images/$name/Dockerfile" -t "$reference" \
        --build-arg "VERSION=$version" --build-arg "REVISION=$revision" ${BUILD_ARGS:-} .
    case $builder in
        buildah) buildah images --format '{{.Name}}:{{.Tag}}  {{.Size}}' "$reference" ;;
        *) "$builder" image inspect --format '{{index .RepoTags 0}}  {{.Size}} bytes' "$reference" ;;
    esac
done
