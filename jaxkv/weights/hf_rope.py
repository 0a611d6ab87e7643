"""The rotary embedding of a config.json, wherever its keys stand and under each of their spellings."""

from __future__ import annotations

import math

from jaxkv.models.config import RopeConfig
from jaxkv.weights.keys import Keys

_TABLES = ("rope_parameters", "rope_scaling")


def read_rope(keys: Keys, max_position: int) -> RopeConfig:
    """Reads rope_theta (top level or inside a table) and the scaling. `max_position`: of the model, in tokens."""
    table = _merged_table(keys)
    kind = table.text_or("rope_type", None) or table.text_or("type", "default")
    table.require("type", kind)
    table.require("partial_rotary_factor", 1.0)
    theta = _theta(keys, table)
    if kind == "default":
        rope = RopeConfig(theta=theta)
    elif kind == "linear":
        rope = RopeConfig(theta=theta, kind="linear", factor=_factor(table))
    elif kind == "llama3":
        rope = _llama3(table, theta, _original_max_position(keys, table, max_position))
    elif kind == "yarn":
        rope = _yarn(table, theta, max_position, _original_max_position(keys, table, max_position))
    else:
        raise table.refuse(
            "rope_type" if "rope_type" in table else "type", "supported are default, linear, llama3, yarn"
        )
    table.finish()
    return rope


def _merged_table(keys: Keys) -> Keys:
    merged: dict[str, object] = {}
    for name in _TABLES:
        table = keys.peek(name)
        if table is None:
            continue
        if not isinstance(table, dict):
            raise keys.refuse(name, "it must be an object or null")
        for key, value in table.items():
            if merged.setdefault(key, value) != value:
                raise keys.refuse(name, f"its {key} differs from that in {_TABLES[0]}")
    return Keys(merged, f"{keys.where} (rope)")


def _theta(keys: Keys, table: Keys) -> float:
    outside = keys.real_or("rope_theta", None)
    inside = table.real_or("rope_theta", outside)
    if outside is not None and inside != outside:
        raise keys.refuse("rope_theta", f"the rope table says {inside:g}: make them agree")
    return 10_000.0 if inside is None else inside


def _factor(table: Keys) -> float:
    factor = table.real_or("factor", None)
    if factor is None:
        raise table.refuse("factor", "this rope type needs a number")
    return factor


def _original_max_position(keys: Keys, table: Keys, max_position: int) -> int:
    """Context of pre-training: the top-level key goes first, then the table's, then the model's own limit."""
    inside = table.whole_or("original_max_position_embeddings", max_position)
    return keys.whole_or("original_max_position_embeddings", inside)


def _llama3(table: Keys, theta: float, original: int) -> RopeConfig:
    low, high = table.real_or("low_freq_factor", None), table.real_or("high_freq_factor", None)
    if low is None or high is None or low >= high:
        raise table.refuse("low_freq_factor", f"llama3 needs it to be below high_freq_factor, which is {high}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=_factor(table),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _yarn(table: Keys, theta: float, max_position: int, original: int) -> RopeConfig:
    table.peek("finetuned")  # says how the model was made, not how it runs
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=table.real_or("factor", max_position / original),
        original_max_position=original,
        beta_fast=table.real_or("beta_fast", 32.0),
        beta_slow=table.real_or("beta_slow", 1.0),
        attention_factor=table.real_or("attention_factor", None),
        mscale=table.real_or("mscale", None, above=-math.inf),
        mscale_all_dim=table.real_or("mscale_all_dim", None, above=-math.inf),
        truncate=table.flag_or("truncate", True),
    )
