#!/bin/sh
# A throw-away certificate authority, and what it signs: for the servers, for the training nodes
# (client) and for etcd's health check.
#
#   certificates.sh FOLDER SERVER-NAME...
#
# Does nothing if the folder has them already. Only the health check's certificate has a common name:
# with users on, etcd takes a common name for a user, and the others shall need a password.
set -eu
folder=$1
shift
cd "$folder"
[ ! -e done ] || exit 0

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
    rm "$1.csr" "$1.ext"
}

authority ca "try-out CA"
signed server /O=rdzv-etcd ca
signed client /O=rdzv-etcd ca
signed health /O=rdzv-etcd/CN=health-check ca
# Somebody else's, to see how a wrong certificate is refused.
authority foreign-ca "somebody else's CA"
signed foreign /O=somebody-else foreign-ca
touch done
