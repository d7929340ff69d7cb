"""The servers that all client tests share."""

from client_servers import models, server

__all__ = ["models", "server"]
