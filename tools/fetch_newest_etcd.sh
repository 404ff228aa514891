#!/usr/bin/env bash
# Unpack the etcd of Debian's testing release, etcdctl and the libraries they need.
#
#   tools/fetch_newest_etcd.sh FOLDER
#
# FOLDER/usr/bin/etcd runs where the C library is at least as new as what it was built for (2.34), and
# FOLDER as a whole is the content of an image. Nothing is installed. Needs root and mmdebstrap. Its
# packages come from mmdebstrap's default mirror, or from the one that RDZV_ETCD_DEBIAN_MIRROR names.
set -euo pipefail

folder=$(realpath -m "${1:?usage: tools/fetch_newest_etcd.sh FOLDER}")
command -v mmdebstrap >/dev/null || {
    echo "error: mmdebstrap is missing (apt-get install mmdebstrap)" >&2
    exit 1
}
scratch=$(mktemp -d)
trap 'rm -rf --one-file-system "$scratch"' EXIT

# Packages are only unpacked. The release file of a mirror that is a snapshot may be out of date.
mmdebstrap --mode=root --variant=extract --format=directory --quiet \
    --aptopt='Acquire::Check-Valid-Until "false"' --include=etcd-server,etcd-client \
    testing "$scratch/root" ${RDZV_ETCD_DEBIAN_MIRROR:+"$RDZV_ETCD_DEBIAN_MIRROR"} || {
    echo "error: mmdebstrap could not fetch etcd-server and etcd-client of Debian testing" >&2
    exit 1
}

# The loader and the C library; the rest of the release is not needed.
mkdir -p "$folder"
cd "$scratch/root"
places=(usr/lib) && [[ ! -e usr/lib64 ]] || places+=(usr/lib64)
find usr/bin/etcd usr/bin/etcdctl "${places[@]}" \( -path 'usr/bin/*' -o -name 'ld-linux*' \
    -o -name 'libc.so*' -o -name 'libresolv.so*' -o -name 'libpthread.so*' -o -name 'libnss_*' \) -print0 |
    tar --create --null --no-recursion --files-from=- | tar --extract --directory "$folder"
for name in "${places[@]}"; do ln -sfn "$name" "$folder/${name#usr/}"; done
"$folder/usr/bin/etcd" --version >/dev/null
