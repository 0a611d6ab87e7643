"""Errors, models and the state of the service on the wire."""

from __future__ import annotations

from pydantic import Field

from server.protocol.base import ResponseModel


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorDetail


class ModelCard(ResponseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str
    root: str = Field(description="The model as it was named when the server started.")
    max_model_len: int


class ModelList(ResponseModel):
    object: str = "list"
    data: list[ModelCard]


class Status(ResponseModel):
    status: str


class Version(ResponseModel):
    version: str
