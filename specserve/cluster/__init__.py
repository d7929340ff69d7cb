"""The only room that imports ray: it turns the plain coordinator and workers into placed, supervised actors."""

import os
import sys

RAY_START_WAIT_S = "90"
"""How long Ray waits for parts of itself when it starts: its own 30 s may be too few where a machine is only busy."""

# Ray reads these once, when it is first imported. A local Ray listens on the loopback address only if Ray was told so
# then. That has no effect on processes that join a given cluster: they learn their address from their node.
_AT_IMPORT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_raylet_start_wait_time_s": RAY_START_WAIT_S}

if "ray" not in sys.modules:
    _ours = {name: value for name, value in _AT_IMPORT.items() if name not in os.environ}
    os.environ |= _ours
    import ray  # noqa: F401

    for _name in _ours:
        del os.environ[_name]
