#!/usr/bin/env bash
# Unpack etcd's newest release of a minor version, as its project publishes it.
#
#   tools/fetch_etcd_release.sh 3.6 FOLDER
#
# FOLDER/etcd is the server. Needs git and curl.
set -euo pipefail

minor=${1:?usage: tools/fetch_etcd_release.sh MINOR FOLDER} folder=${2:?}
home=https://github.com/etcd-io/etcd
tag=$(git ls-remote --tags --refs "$home" "v$minor.*" | sed 's|.*refs/tags/||' | grep -v -- - |
    sort -V | tail -n 1) || { echo "error: etcd $minor has no release" >&2; exit 1; }
case $(uname -m) in x86_64) machine=amd64 ;; aarch64) machine=arm64 ;; *) machine=$(uname -m) ;; esac
mkdir -p "$folder"
curl --fail --silent --show-error --location --retry 3 \
    "$home/releases/download/$tag/etcd-$tag-linux-$machine.tar.gz" |
    tar --extract --gzip --strip-components=1 --directory "$folder"
"$folder/etcd" --version
