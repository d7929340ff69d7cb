# What every shell on a node needs, the ones that start Ray above all. ~/.bashrc reads this; see setup-node.sh.
export PATH="$HOME/specserve-venv/bin:$PATH"

# Without the token of ~/.ray/auth_token nobody talks to Ray, and that is needed: talking to Ray is running code.
export RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED=0
# Ray would have its actors wait behind everything else on the machine (niceness 15).
export RAY_worker_niceness=0
# Each thread of Ray's node process would keep what it frees, which is 0.1 MiB more a minute.
export RAY_JEMALLOC_PROFILE=raylet RAY_JEMALLOC_CONF=tcache:false

# Keys of clients, with commas between; the endpoint asks for one of them once there is one.
if [ -r "$HOME/.specserve/api_key" ]; then
    SPECSERVE_API_KEY=$(cat "$HOME/.specserve/api_key")
    export SPECSERVE_API_KEY
fi
