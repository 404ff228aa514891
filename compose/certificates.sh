#!/bin/sh
# A throw-away certificate authority, and what it signs: for the servers and etcd's health check, and
# for the training nodes (client).
#
#   certificates.sh ETCD-FOLDER NODE-FOLDER SERVER-NAME...
#
# Each folder gets the keys of those it is for, and the authority's certificate; the authority's key is
# gone when this ends. NODE_OWNER (USER:GROUP, as numbers) is who the nodes' files are given to. Does
# nothing if the folders have them already. Only the health check's certificate has a common name: with
# users on, etcd takes a common name for a user, and the others shall need a password.
set -eu
etcd=$1
node=$2
shift 2
if [ -e "$etcd/done" ] && [ -e "$node/done" ]; then exit 0; fi

umask 077
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

names=DNS:localhost,IP:127.0.0.1
for name in "$@"; do names=$names,DNS:$name; done

key() { openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

authority() { # file stem, name
    key "$1-key.pem"
    openssl req -x509 -new -key "$1-key.pem" -subj "/O=rdzv-etcd/CN=$2" -days 30 -out "$1.pem"
}

signed() { # file stem, subject, file stem of the authority
    key "$1-key.pem"
    openssl req -new -key "$1-key.pem" -subj "$2" -out "$1.csr"
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$names" >"$1.ext"
    openssl x509 -req -in "$1.csr" -CA "$3.pem" -CAkey "$3-key.pem" -CAcreateserial \
        -days 30 -extfile "$1.ext" -out "$1.pem" 2>/dev/null
}

authority ca "try-out CA"
signed server /O=rdzv-etcd ca
signed client /O=rdzv-etcd ca
signed health /O=rdzv-etcd/CN=health-check ca
# Somebody else's, to see how a wrong certificate is refused.
authority foreign-ca "somebody else's CA"
signed foreign /O=somebody-else foreign-ca

cp ca.pem server.pem server-key.pem health.pem health-key.pem "$etcd"
cp ca.pem client.pem client-key.pem foreign-ca.pem foreign.pem foreign-key.pem "$node"
touch "$etcd/done" "$node/done"
if [ -n "${NODE_OWNER:-}" ]; then
    chown -R "$NODE_OWNER" "$node"
fi
