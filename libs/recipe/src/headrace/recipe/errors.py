"""Every way a request can be refused: one exception with its HTTP status, and its body in each protocol's words."""

from .jsontext import compact

INVALID = "invalid_request_error"
_TYPES = {
    400: INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    422: INVALID,
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class RecipeError(Exception):
    """A request that cannot be served as sent. `body(protocol)` is the reply to the client.

    `more`, `instead`, `place`: of an error in the referee's words, what the open dialect says behind them (the value that was
    sent, the way out), or in place of them, and the field that it names; `open` makes it so."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = INVALID,
        more: str = "",
        instead: str = "",
        place: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, "api_error")
        self.param = param
        self.code = code
        self._open = instead or (f"{message} ({more})" if more else message), place

    def open(self) -> "RecipeError":
        """This error as the open dialect tells it."""
        self.message, place = self._open
        self.param = place or self.param
        self.args = (self.message,)
        return self

    def body(self, protocol: str = "chat", dialect: str = "open", request_id: str | None = None) -> bytes:
        """The JSON body: OpenAI's shape, or Anthropic's for "messages" in the open dialect."""
        if protocol == "messages" and dialect == "open":
            error: dict = {"type": "error", "error": {"type": self.type, "message": self.message}}
            if request_id is not None:
                error["request_id"] = request_id
            return compact(error).encode()
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return compact({"error": fields}).encode()


class ShapeError(RecipeError):
    """The body is not JSON, or not the shape of the protocol's request."""


def as_recipe_error(error: Exception) -> RecipeError:
    """`error` as one that may be shown to a client; anything unexpected is an internal error without details."""
    if isinstance(error, RecipeError):
        return error
    return RecipeError("internal error", status=500, type="api_error", code="internal_error")
