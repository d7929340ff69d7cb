"""The only room that imports ray: it turns the plain coordinator and workers into placed, supervised actors."""

import os
import sys

_NAME = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

# A local Ray listens on the loopback address only if Ray was told so when it was first imported. This has no effect
# on processes that join a given cluster: they learn their address from their node.
if "ray" not in sys.modules and _NAME not in os.environ:
    os.environ[_NAME] = "0"
    import ray  # noqa: F401

    del os.environ[_NAME]
