#!/bin/sh
# usage: REGISTRY=registry.example.com/team release/publish.sh [FOLDER]     (`make publish`; default: dist)
# Pushes the images and the chart of a release to a registry, with skopeo and helm, which are logged in there already.
#   DIGESTS  file to which operator=DIGEST, reshard=DIGEST and chart=DIGEST are appended
set -eu
dist=${1:-dist}
if [ -z "${REGISTRY:-}" ]; then
    echo "publish: REGISTRY is needed, for instance REGISTRY=registry.example.com/team" >&2
    exit 2
fi
(cd "$dist" && sha256sum --quiet --check SHA256SUMS)
# What SHA256SUMS does not list is of another release: `make release` leaves such files in the folder.
listed() { sed -n "s/^[0-9a-f]\{64\}  \($1\)\$/\1/p" "$dist/SHA256SUMS"; }
chart=$(listed 'elastic-training-operator-.*\.tgz')
version=${chart#elastic-training-operator-}
version=${version%.tgz}
for name in operator reshard; do
    if [ -z "$(listed "elastic-training-$name-$version.oci.tar")" ]; then
        echo "publish: $dist has no elastic-training-$name-$version.oci.tar: \`make release\` says why it was left out" >&2
        exit 1
    fi
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for name in operator reshard; do
    reference=$REGISTRY/elastic-training-$name
    skopeo copy --all --preserve-digests --digestfile "$work/digest" \
        "oci-archive:$dist/elastic-training-$name-$version.oci.tar" "docker://$reference:$version"
    digest=$(cat "$work/digest")
    echo "pushed $reference@$digest"
    [ -z "${DIGESTS:-}" ] || echo "$name=$digest" >> "$DIGESTS"
done
helm push "$dist/$chart" "oci://$REGISTRY/charts" > "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
digest=$(sed -n 's/^Digest: *//p' "$work/log")
echo "pushed $REGISTRY/charts/elastic-training-operator@$digest"
[ -z "${DIGESTS:-}" ] || echo "chart=$digest" >> "$DIGESTS"
