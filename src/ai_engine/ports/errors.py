"""The error tree. Every error a caller can see is one of these, and each knows how every door reports it.

    AiEngineError                        internal_error            500  INTERNAL
    |- InvalidRequest                    invalid_request           400  INVALID_ARGUMENT
    |  |- InvalidValue                   invalid_value             400
    |  |- UnsupportedParameter           unsupported_parameter     400
    |  |- ContextLengthExceeded          context_length_exceeded   400
    |  |- InvalidJson                    invalid_json              400
    |  |- InvalidJsonSchema              invalid_json_schema       400
    |- InvalidApiKey                     invalid_api_key           401  UNAUTHENTICATED
    |- PermissionDenied                  permission_denied         403  PERMISSION_DENIED
    |- NotFound                          not_found                 404  NOT_FOUND
    |  |- ModelNotFound                  model_not_found           404
    |- MethodNotAllowed                  method_not_allowed        405  UNIMPLEMENTED
    |- RequestTimeout                    request_timeout           408  DEADLINE_EXCEEDED
    |- BodyTooLarge                      body_too_large            413  INVALID_ARGUMENT
    |- UnsupportedMediaType              unsupported_media_type    415  INVALID_ARGUMENT
    |- RateLimitExceeded                 rate_limit_exceeded       429  RESOURCE_EXHAUSTED   retryable
    |- Overloaded                        server_overloaded         503  UNAVAILABLE          retryable
    |  |- ShuttingDown                   shutting_down             503                       retryable
    |  |- NotReady                       not_ready                 503                       retryable
    |- DeadlineExceeded                  deadline_exceeded         504  DEADLINE_EXCEEDED
    |- EngineError                       engine_error              500  INTERNAL
    |- ModelFileError                    model_file_error          500  FAILED_PRECONDITION
    |  |- UnsupportedModel               unsupported_model         500
    |- DownloadError                     download_error            500  UNAVAILABLE
    |- ConfigError                       config_error              500  INVALID_ARGUMENT
    |- StaleHandle                       stale_handle              500  INTERNAL  (our bug: freed KV handle)

A message names the field, what was found, what was expected and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class AiEngineError(Exception):
    """Base of the tree. ``param`` names the offending request field, if there is one; ``details`` are the message's
    numbers for programs (a limit, what is left of it), sent beside it."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    error_type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, str | float] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details or {}


class InvalidRequest(AiEngineError):
    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"


class InvalidValue(InvalidRequest):
    code = "invalid_value"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InvalidJson(InvalidRequest):
    code = "invalid_json"


class InvalidJsonSchema(InvalidRequest):
    """A schema, pattern or grammar that cannot be enforced: names the keyword and where it stands."""

    code = "invalid_json_schema"


class InvalidApiKey(AiEngineError):
    code = "invalid_api_key"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    error_type = "authentication_error"


class PermissionDenied(AiEngineError):
    """The key is good, and this is not for it."""

    code = "permission_denied"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    error_type = "permission_error"


class NotFound(AiEngineError):
    code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"
    error_type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(AiEngineError):
    code = "method_not_allowed"
    http_status = 405
    grpc_status = "UNIMPLEMENTED"
    error_type = "invalid_request_error"


class RequestTimeout(AiEngineError):
    code = "request_timeout"
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"
    error_type = "invalid_request_error"


class BodyTooLarge(AiEngineError):
    code = "body_too_large"
    http_status = 413
    grpc_status = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"


class UnsupportedMediaType(AiEngineError):
    code = "unsupported_media_type"
    http_status = 415
    grpc_status = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"


class RateLimitExceeded(AiEngineError):
    code = "rate_limit_exceeded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    error_type = "rate_limit_error"
    retryable = True


class Overloaded(AiEngineError):
    code = "server_overloaded"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    error_type = "server_error"
    retryable = True


class ShuttingDown(Overloaded):
    code = "shutting_down"


class NotReady(Overloaded):
    code = "not_ready"


class DeadlineExceeded(AiEngineError):
    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class EngineError(AiEngineError):
    code = "engine_error"


class ModelFileError(AiEngineError):
    """A weights, tokeniser or config file that is damaged, truncated, hostile or inconsistent: says what and where."""

    code = "model_file_error"
    grpc_status = "FAILED_PRECONDITION"


class UnsupportedModel(ModelFileError):
    """A well-formed file of an architecture or type that we do not run; the message lists those we do."""

    code = "unsupported_model"


class DownloadError(AiEngineError):
    code = "download_error"
    grpc_status = "UNAVAILABLE"


class ConfigError(AiEngineError):
    code = "config_error"
    grpc_status = "INVALID_ARGUMENT"


class StaleHandle(AiEngineError):
    code = "stale_handle"


def _tree(root: type[AiEngineError]) -> list[type[AiEngineError]]:
    return [root, *(leaf for sub in root.__subclasses__() for leaf in _tree(sub))]


ERRORS_BY_CODE: dict[str, type[AiEngineError]] = {cls.code: cls for cls in _tree(AiEngineError)}
"""Code -> class, to rebuild an error that crossed a process border."""


def error_from_code(code: str, message: str, *, param: str | None = None) -> AiEngineError:
    """The error with this code; an unknown code gives the base class."""
    return ERRORS_BY_CODE.get(code, AiEngineError)(message, param=param)
