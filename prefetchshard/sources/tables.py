"""Tables and columns of other libraries: what reads like a dataset of rows, and is none.

They are refused with the way out rather than converted: what a column becomes as an array (missing values, categories, text) is for the
user to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from prefetchshard.base.errors import ConfigError

_EXPORTS = ("__arrow_c_stream__", "__arrow_c_array__", "__dataframe__")
"""Methods by which tables and columns hand themselves to each other."""


def is_column(value: Any) -> bool:
    """Whether it is an array by its behaviour, as columns of pandas, polars, h5py and zarr are."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return False
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")  # zarr's have no `__len__`
    return hasattr(value, "__getitem__") and (is_array or (hasattr(value, "__len__") and _is_table(value)))


def refuse_table(source: Any) -> None:
    """Refuse a table, or what is asked by key: `source[key]` is a column, not a row.

    Raises:
        ConfigError: it is one; says how to pass its columns.
    """
    if hasattr(source, "__getitems__") or not hasattr(source, "__getitem__"):
        return
    name = f"a {type(source).__module__}.{type(source).__qualname__},"
    if not hasattr(source, "__len__"):
        if is_column(source):
            raise ConfigError(
                f"the source, {name} is an array without a length: pass np.asarray(source), or a dataset whose __getitem__ reads a row of it"
            )
        return
    if not _is_table(source):
        if hasattr(source, "keys") and not isinstance(source, Mapping):
            raise ConfigError(
                f"the source, {name} is asked by key, not by row: pass its columns as NumPy arrays, "
                f"{{key: np.asarray(source[key]) for key in source.keys()}}, or a list of examples"
            )
        return
    columns = next((names for names in ("column_names", "columns", "data_vars") if hasattr(source, names)), None)
    if columns is None:
        raise ConfigError(f"the source, {name} is a column of a table: pass it as a NumPy array, source.to_numpy()")
    raise ConfigError(
        f"the source, {name} is a table: pass its columns as NumPy arrays, each with a dtype of its own, "
        f"{{name: source[name].to_numpy() for name in source.{columns}}}"
    )


def _is_table(value: Any) -> bool:
    kind = cast("Any", type(value))
    return any(hasattr(kind, name) for name in _EXPORTS) or kind.__module__.split(".")[0] in ("pandas", "polars", "pyarrow", "xarray")
