#!/bin/bash
# Build one program of a kind cluster from its Go module into LAB/bin: components.sh PROGRAM. Go's own cache makes it
# seconds the second time; the first time kubernetes and etcd take minutes.
set -euo pipefail
bin=$LAB/bin work=$LAB/build here=$(cd "$(dirname "$0")" && pwd)
export CGO_ENABLED=0 GOFLAGS=-buildvcs=false
mkdir -p "$bin" "$work"
version=${KUBERNETES_VERSION:?} kind=${KIND_VERSION:?}
# etcd and coredns: what `kubeadm config images list` names.
etcd=v3.6.8 coredns=v1.14.2 provisioner=v0.0.30

folder() { go mod download -json "$1" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p'; }

build() { go build -trimpath -ldflags "${flags:--s -w}" -o "$bin/.$1" "$2" && mv "$bin/.$1" "$bin/$1"; }

fresh() { rm -rf "${work:?}/$1" && mkdir -p "$work/$1" && cd "$work/$1"; }

case $1 in
kind)
  GOBIN=$bin go install "sigs.k8s.io/kind@$kind" ;;
kubeadm | kube-proxy)
  fresh "$1"
  cp "$KUBERNETES_MODULE/go.mod" .
  printf '//go:build tools\n\npackage tools\n\nimport _ "k8s.io/kubernetes/cmd/%s"\n' "$1" > tools.go
  go mod tidy
  flags="-s -w" variable=k8s.io/component-base/version
  for pair in gitVersion=v$version gitMajor=1 gitMinor="$(cut -d. -f2 <<< "$version")" gitCommit=unknown gitTreeState=clean; do
    flags="$flags -X $variable.$pair"
  done
  build "$1" "k8s.io/kubernetes/cmd/$1" ;;
etcd)  # a module that requires it: etcd's own go.mod has replace directives, so `go install ...@version` refuses
  fresh etcd
  printf 'module w\n\ngo 1.26.0\n\nrequire go.etcd.io/etcd/server/v3 %s\n' "$etcd" > go.mod
  printf '//go:build tools\n\npackage tools\n\nimport _ "go.etcd.io/etcd/server/v3"\n' > tools.go
  go mod tidy
  build etcd go.etcd.io/etcd/server/v3 ;;
coredns)  # only the plugins that kubeadm's Corefile names
  fresh coredns
  cp "$here/coredns/main.go" .
  printf 'module coredns\n\ngo 1.26.0\n\nrequire github.com/coredns/coredns %s\n' "$coredns" > go.mod
  go mod tidy
  build coredns . ;;
local-path-provisioner)
  fresh provisioner
  cp -r "$(folder "github.com/rancher/local-path-provisioner@$provisioner")/." .
  chmod -R u+w .
  GOFLAGS="$GOFLAGS -mod=mod" build local-path-provisioner . ;;
kindnetd)
  fresh kindnetd
  cp "$here"/kindnetd/{main.go,go.mod} .
  go mod tidy
  build kindnetd . ;;
pause)
  fresh pause
  cp "$here"/pause/{main.go,go.mod} .
  build pause . ;;
*)
  echo "no program $1" >&2
  exit 2 ;;
esac
