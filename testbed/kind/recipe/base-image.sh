#!/bin/bash
# Make the image BASE_IMAGE: what kind's own images/base/Dockerfile makes, laid out by hand over a root file system of
# Debian bookworm, whose systemd (252) still supports control groups of version 1.
set -euo pipefail
export TMPDIR=$LAB/build
kind=$(cd "$LAB/build" && go mod download -json "sigs.k8s.io/kind@$KIND_VERSION" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')

packages=systemd,conntrack,iptables,nftables,iproute2,ethtool,util-linux,mount,kmod,libseccomp2,pigz,e2fsprogs,bash
packages=$packages,ca-certificates,curl,jq,procps,runc,hostname,findutils,grep,sed,gawk,coreutils,passwd,login,iputils-ping
if [ ! -e "$LAB/base-rootfs.tar" ]; then
  PATH=/usr/bin:/bin:/usr/sbin:/sbin:$LAB/root/usr/bin "$LAB/root/usr/bin/mmdebstrap" --mode=root --variant=minbase --include=$packages \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    bookworm "$LAB/.base-rootfs.tar" /etc/apt/sources.list.d/debian.sources
  mv "$LAB/.base-rootfs.tar" "$LAB/base-rootfs.tar"
fi

root=$LAB/build/base
rm -rf "$root"
mkdir -p "$root"
tar -C "$root" -xpf "$LAB/base-rootfs.tar" --exclude='./dev/*'
cp -rT "$kind/images/base/files/usr/local/bin" "$root/usr/local/bin"
cp -rT "$kind/images/base/files/etc" "$root/etc"
mkdir -p "$root/kind"
cp -rT "$kind/images/base/files/kind" "$root/kind"
# Go's module cache is read-only: set the modes that the Dockerfile sets.
find "$root"/kind "$root"/etc/{containerd,systemd/system,sysctl.d,default} \
  -type d -exec chmod 755 {} + -o -type f -exec chmod 644 {} +
chmod 644 "$root/etc/crictl.yaml"
chmod 755 "$root"/usr/local/bin/* "$root"/kind/bin/*
# Without systemd on the machine, systemd in a node must not mount controllers that the machine has not mounted: their
# hierarchies would be machine-wide. kind's own function does this for "misc" only.
python3 - "$root/usr/local/bin/entrypoint" <<'PROGRAM'
import sys

path = sys.argv[1]
text = open(path).read()
old = text[text.index("remove_misc_controller() {"):]
old = old[:old.index("\n}\n") + 3]
new = """remove_misc_controller() {
  awk 'NR == 1 || system("mountpoint -q /sys/fs/cgroup/" $1) == 0' /proc/cgroups >/kind/fake-cgroups
  mount --bind /kind/fake-cgroups /proc/cgroups
}
"""
open(path, "w").write(text.replace(old, new))
PROGRAM
# Without CAP_SYS_RESOURCE nothing can lower its oom_score_adj.
sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' "$root/etc/containerd/config.toml"
rm -f "$root"/lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service \
  "$root"/lib/systemd/system/{multi-user,local-fs,basic}.target.wants/* "$root"/etc/systemd/system/*.wants/* \
  "$root"/lib/systemd/system/sockets.target.wants/*{udev,initctl}*
rm -f "$root"/usr/lib/sysctl.d/*.conf  # fs.protected_* and the like are machine-wide: not for a node to set
echo "ReadKMsg=no" >> "$root/etc/systemd/journald.conf"
ln -sf /usr/lib/systemd/systemd "$root/sbin/init"
for unit in kubelet containerd undo-mount-hacks; do chroot "$root" systemctl enable $unit.service; done
chroot "$root" systemctl mask systemd-binfmt.service
mkdir -p "$root/etc/kubernetes/manifests" "$root/opt/cni/bin"
cp "$PROGRAMS"/{containerd,containerd-shim-runc-v2,ctr} "$root/usr/local/bin/"
cp "$PROGRAMS/runc" "$root/usr/local/sbin/runc"
cp "$PROGRAMS"/cni/{host-local,loopback,portmap} "$LAB/root/usr/lib/cni/ptp" "$root/opt/cni/bin/"
hook='.hooks.createContainer[.hooks.createContainer| length] |= . + {"path": "/kind/bin/mount-product-files.sh"}'
chroot "$root" ctr oci spec | chroot "$root" jq "$hook | del(.process.rlimits)" > "$root/etc/containerd/cri-base.json"
rm -rf "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/* "$root/etc/resolv.conf" \
  "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
tar -C "$root" -c . | docker import --change "ENV PATH=$path" - "$BASE_IMAGE-rootfs"
# `docker import` knows no STOPSIGNAL; a build without RUN needs nothing else.
docker build -t "$BASE_IMAGE" - <<DOCKERFILE
FROM $BASE_IMAGE-rootfs
ENV container=docker
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT [ "/usr/local/bin/entrypoint", "/sbin/init" ]
DOCKERFILE
rm -rf "$root"
