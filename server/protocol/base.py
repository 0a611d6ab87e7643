"""How every body is read: requests strictly, with unknown fields let through; answers are only described."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RequestModel(BaseModel):
    """Strict: "5" is not 5, true is not 1, NaN is no number. Unknown fields end in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class ResponseModel(BaseModel):
    """Describes an answer on the OpenAPI page; answers themselves are built as plain dicts."""

    model_config = ConfigDict(extra="allow")
