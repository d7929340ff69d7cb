"""A real server on loopback around an engine, for tests that speak HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import uvicorn

from specserve.api.app import create_app


@contextlib.contextmanager
def serving(engine):
    """The base URL of a uvicorn that serves this LocalEngine in a thread."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = create_app(engine, engine.tokenizer, engine.config, check_structured=engine.check_structured)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
