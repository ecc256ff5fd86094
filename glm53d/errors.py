"""Every error glm53d raises on purpose: its stable code and, for those a client sees, its HTTP status."""


class Glm53dError(Exception):
    """Base of all. `code` is stable and meant for programs, `message` is one sentence for the person who reads it."""

    code = "internal_error"

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class RequestError(Glm53dError):
    """The caller can act on it: a 4xx. `param` is the path of the wrong field, None when there is no single one."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A body, field or parameter that cannot be served as sent."""


class Unauthorized(RequestError):
    """No valid key came with the request."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key is valid, but not for this."""

    status = 403
    code = "admin_key_required"


class NotFound(RequestError):
    """No such route or model."""

    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    code = "model_not_found"


class RequestTimeout(RequestError):
    """The client took too long to send its body."""

    status = 408
    code = "request_timeout"


class PayloadTooLarge(RequestError):
    """The body is over the limit."""

    status = 413
    code = "payload_too_large"


class HeadersTooLarge(RequestError):
    """The request line or a header is over the limit."""

    status = 431
    code = "headers_too_large"


class ContextTooLong(RequestError):
    """The prompt does not fit the context."""

    code = "context_length_exceeded"


class Overloaded(RequestError):
    """A queue is full; `retry_after_s` says when to come back."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(Glm53dError):
    """We could not: a 5xx."""

    status = 500
    code = "engine_error"


class NotReady(EngineError):
    """Still loading, draining, or a rank is gone; `retry_after_s` says when to come back."""

    status = 503
    code = "not_ready"

    def __init__(self, message: str, retry_after_s: int = 5):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueTimeout(NotReady):
    """The request waited too long to be admitted."""

    code = "queue_timeout"


class DeadlineExceeded(EngineError):
    """The request's own deadline cannot be met."""

    status = 504
    code = "deadline_exceeded"


class GrammarFailed(EngineError):
    """The output cannot go on in the form that was asked for."""

    code = "grammar_failed"


class IpcError(EngineError):
    """A shared-memory channel cannot be used."""

    code = "ipc_error"


class AbiMismatch(IpcError):
    """A segment of another version or another world."""


class PeerGone(IpcError):
    """The process at the other end is dead or has closed."""


class StartError(Glm53dError):
    """Refuses to start: exit code 2, one line, no traceback."""

    code = "start_error"


class ConfigError(StartError):
    """The configuration is wrong; the message names the field."""

    code = "config_error"


class CheckpointError(StartError):
    """The checkpoint is not one we can serve; the message names the file or tensor."""

    code = "checkpoint_error"
