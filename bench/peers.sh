#!/usr/bin/env bash
# Install the peers that bench/speed.py compares with, each in a virtual environment of its own: bench/peers.sh FOLDER
set -eu
[ $# -eq 1 ] || { echo "usage: bench/peers.sh FOLDER" >&2; exit 2; }
install() {
    python3 -m venv "$1"
    "$1/bin/pip" install --quiet --disable-pip-version-check "$2"
}
mkdir -p "$1"
install "$1/dynamo" "ai-dynamo==1.3.1"
install "$1/aisimulate" "aisimulate==0.13.0.dev202610270000000085"
