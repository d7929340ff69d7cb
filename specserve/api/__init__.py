"""OpenAI-compatible HTTP. Sees the engine only through `specserve.types.EngineClient`; works under any ASGI server."""
