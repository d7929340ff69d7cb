"""Every error that specserve raises on purpose.

SpecserveError                     500  internal_error
├── ConfigError                    500  config_error            the deployment can never work; raised at start
├── RequestError                   400  invalid_request         the request can never be served as it stands
│   ├── InvalidField               400  invalid_value           one field is out of range or of the wrong type
│   ├── UnsupportedField           400  unsupported_parameter   known elsewhere, not served here
│   ├── ContextLengthExceeded      400  context_length_exceeded
│   ├── NotAuthenticated           401  invalid_api_key
│   ├── NotPermitted               403  permission_denied
│   ├── ModelNotFound              404  model_not_found
│   ├── RouteNotFound              404  route_not_found
│   ├── MethodNotAllowed           405  method_not_allowed
│   ├── BodyTooLarge               413  body_too_large
│   ├── WrongContentType           415  unsupported_media_type
│   └── HeadersTooLarge            431  headers_too_large
├── DeadlineExceeded               408  deadline_exceeded       the answer took longer than the deployment allows
├── ClientTooSlow                  408  client_too_slow         the client does not read its answer
├── Overloaded                     429  queue_full              try again later
│   └── KeyOverloaded              429  rate_limit_exceeded     one client has too many requests at once
├── Unavailable                    503  unavailable             starting, draining, or a worker is being replaced
│   ├── DraftWorkerLost            503  draft_worker_lost       decoding goes on without drafts
│   └── VerifierLost               503  verifier_lost           requests wait for the restarted verifier
├── EmulationTooSlow               500  emulation_too_slow      an emulated device was slower than the real one
├── ChannelError                   503  channel_error           a message could not be carried
├── ProtocolError                  500  protocol_error          a peer sent what the protocol does not allow
└── PoolError                      500  pool_error              a slot or block was freed twice, or never held

Each class carries an HTTP `status` and a `code`; `api` turns any of them into OpenAI's error shape in one place.
"""

from __future__ import annotations

from typing import Self


class SpecserveError(Exception):
    """The root. `param` names the request field at fault, where there is one."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        # Ray pickles exceptions across processes; keyword arguments do not survive the default way.
        return (_rebuild, (type(self), self.message, self.param))


def _rebuild(kind: type[SpecserveError], message: str, param: str | None) -> SpecserveError:
    return kind(message, param=param)


class ConfigError(SpecserveError):
    """The configuration can never work; the message holds the numbers and what to change."""

    code = "config_error"


class RequestError(SpecserveError):
    """The client's request is at fault; sending it again unchanged cannot help."""

    status = 400
    code = "invalid_request"


class InvalidField(RequestError):
    """One field has a wrong type or a value out of range."""

    code = "invalid_value"


class UnsupportedField(RequestError):
    """A field that other servers know and this deployment does not serve."""

    code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    """Prompt and answer do not fit into the model's context."""

    code = "context_length_exceeded"


class NotAuthenticated(RequestError):
    """No API key, or not one of those that this server knows."""

    status = 401
    code = "invalid_api_key"


class NotPermitted(RequestError):
    """The key is known, but this path needs the admin key."""

    status = 403
    code = "permission_denied"


class ModelNotFound(RequestError):
    """The named model is not served here."""

    status = 404
    code = "model_not_found"


class RouteNotFound(RequestError):
    """No such path."""

    status = 404
    code = "route_not_found"


class MethodNotAllowed(RequestError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class BodyTooLarge(RequestError):
    """The body is over the configured limit."""

    status = 413
    code = "body_too_large"


class WrongContentType(RequestError):
    """The body is not application/json."""

    status = 415
    code = "unsupported_media_type"


class HeadersTooLarge(RequestError):
    """The headers are over the configured limit."""

    status = 431
    code = "headers_too_large"


class DeadlineExceeded(SpecserveError):
    """The answer took longer than the deployment allows; the request was cancelled."""

    status = 408
    code = "deadline_exceeded"


class ClientTooSlow(SpecserveError):
    """The client left too much of its answer unread; the request was cancelled."""

    status = 408
    code = "client_too_slow"


class Overloaded(SpecserveError):
    """The queue is full. `retry_after_s` says when another try makes sense."""

    status = 429
    code = "queue_full"
    retry_after_s = 1.0

    def until(self, seconds: float) -> Self:
        """The same, with another time to come back."""
        self.retry_after_s = seconds
        return self


class KeyOverloaded(Overloaded):
    """One API key has as many requests running as it may; others are not affected."""

    code = "rate_limit_exceeded"


class Unavailable(SpecserveError):
    """The service is starting, draining, or replacing a worker."""

    status = 503
    code = "unavailable"
    retry_after_s = 2.0


class DraftWorkerLost(Unavailable):
    """The draft worker is gone. Requests go on at depth 0; nobody is failed for this."""

    code = "draft_worker_lost"


class VerifierLost(Unavailable):
    """The verifier is gone. Requests wait, bounded, and are refilled when it is back."""

    code = "verifier_lost"


class GroupLost(Unavailable):
    """The ranks of a tensor-parallel worker lost each other: the worker is of no use until all of them are replaced."""

    code = "group_lost"


class EmulationTooSlow(SpecserveError):
    """A step of an emulated device took longer to compute than the device takes; its timing would be a lie."""

    code = "emulation_too_slow"


class ChannelError(SpecserveError):
    """A message could not be sent or received: the peer is gone or the frame is damaged."""

    status = 503
    code = "channel_error"


class ProtocolError(SpecserveError):
    """A peer sent a message that the protocol does not allow. The message is dropped and counted."""

    code = "protocol_error"


class PoolError(SpecserveError):
    """A pool was asked for something impossible: freeing what is not held, or a bad reference count."""

    code = "pool_error"


UNREADABLE = (OSError, RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What Python and libraries raise over files that cannot be read, or hold what nobody expects."""

_TOLD = 600


def described(error: Exception) -> str:
    """Such an error for people: its kind and what it says, at most 600 characters."""
    return f"{type(error).__name__}: {error}"[:_TOLD]
