#!/usr/bin/env bash
# Run a command with a container engine for the tests of tests/integration.
#
#   tests/integration/engine.sh COMMAND [ARGUMENT...]
#
# If an engine answers, it is used and left alone. Otherwise one is started for the time the command
# takes: what it needs is installed with apt (Debian; needs root), and images, containers, networks
# and the engine itself are gone afterwards. It changes no rule of the host's firewall, and no program
# is left running. The command finds RDZV_ETCD_REQUIRE_ENGINE=1: the tests that need an engine fail
# instead of being skipped. Exits with the command's status.
set -euo pipefail

export RDZV_ETCD_REQUIRE_ENGINE=1
say() { printf '== engine: %s\n' "$*" >&2; }

compose_is_there() { docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null; }

install_missing() {
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v docker >/dev/null || missing+=(docker.io docker-cli)
    command -v iptables >/dev/null || missing+=(iptables) # for the name server inside containers
    command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
    compose_is_there || missing+=(docker-compose)
    ((${#missing[@]})) || return 0
    local known=() name
    apt-get update -qq || say "apt-get update had problems; going on"
    for name in "${missing[@]}"; do # docker-cli is a package of its own in newer releases only
        if apt-cache show "$name" >/dev/null 2>&1; then known+=("$name"); fi
    done
    say "installing ${known[*]}"
    # The package would start a daemon of its own.
    local policy=/usr/sbin/policy-rc.d made=
    if [[ ! -e $policy ]]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        made=$policy
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${known[@]}" \
        >/dev/null || { [[ -z $made ]] || rm -f "$made"; return 1; }
    [[ -z $made ]] || rm -f "$made"
}

start_engine() {
    folder=$(mktemp -d /tmp/rdzv-etcd-engine.XXXXXX) # short: it is part of a socket's path
    export DOCKER_HOST=unix://$folder/socket
    ip link show docker0 >/dev/null 2>&1 || made_bridge=1
    setsid dockerd --host "$DOCKER_HOST" --pidfile "$folder/pid" \
        --data-root "$folder/data" --exec-root "$folder/exec" \
        --iptables=false --ip6tables=false --ip-forward=false \
        >"$folder/log" 2>&1 </dev/null &
    daemon=$!
    local tries
    for tries in {1..120}; do
        if docker info >/dev/null 2>&1; then return 0; fi
        kill -0 "$daemon" 2>/dev/null || break
        sleep 0.5
    done
    say "dockerd does not answer:"
    tail -n 20 "$folder/log" >&2
    return 1
}

stop_engine() {
    trap '' INT TERM HUP
    local containers
    containers=$(docker ps --all --quiet 2>/dev/null || true)
    if [[ -n $containers ]]; then
        # shellcheck disable=SC2086
        docker rm --force --volumes $containers >/dev/null 2>&1 || true
    fi
    local network
    for network in $(docker network ls --quiet --filter type=custom 2>/dev/null || true); do
        docker network rm "$network" >/dev/null 2>&1 || true # takes its bridge with it
    done
    if [[ -n ${daemon-} ]]; then
        kill "$daemon" 2>/dev/null || true
        wait "$daemon" 2>/dev/null || true
    fi
    if [[ -n ${made_bridge-} ]]; then ip link delete docker0 2>/dev/null || true; fi
    if [[ -n ${folder-} ]]; then
        local mounted
        for mounted in $(awk -v under="$folder/" 'index($2, under) == 1 { print $2 }' /proc/mounts | sort -r); do
            umount "$mounted" 2>/dev/null || true
        done
        rm -rf --one-file-system "$folder"
    fi
}

if ! compose_is_there || ! command -v docker >/dev/null || ! command -v mmdebstrap >/dev/null; then
    install_missing
fi
if ! docker info >/dev/null 2>&1; then
    install_missing
    trap stop_engine EXIT
    trap 'exit 130' INT TERM HUP
    start_engine
    say "started one for this command"
fi

# A process group of its own, so that an interrupt can be passed on; without it, it would be ignored.
set -m
status=0
"$@" &
child=$!
trap 'kill -INT -- "-$child" 2>/dev/null || true; wait "$child" || true; exit 130' INT TERM HUP
wait "$child" || status=$?
exit "$status"
