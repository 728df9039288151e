"""Names, versions and files of a trace directory."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

SCHEMA = "coverage-lab trace"
VERSION = 1

MANIFEST = "manifest.json"  # written last: a directory without it is unfinished
RUN = "run.json"  # what the run was started with, until it is finished
REQUESTS = "requests.parquet"
ROWS = "rows"
TENSORS = "tensors"
JOURNAL = "journal"  # one file a finished request, until the run is finished
TEMPORARY = ".tmp-"  # prefix of files that are being written

# float16 keeps 11 bits of a share: at most half a unit in the last place, 2**-12 below 1.
ROUNDING = {"float16": 2.0**-12, "float32": 2.0**-25}


def share_column(estimator: str, query_head: int | None = None) -> str:
    """Return the name of the list column with the shares of an estimator, of the row or one query head."""
    name = "share" if estimator == "exact" else f"share_{estimator}"
    return name if query_head is None else f"{name}_q{query_head}"


def oracle_column(gamma: float) -> str:
    """Return the name of the column with the size of C*(gamma)."""
    return f"oracle_pages_{gamma:.10g}"


def write_atomic(path: Path, data: bytes) -> str:
    """Write a file under a temporary name, rename it, and return its sha256."""
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(record: Any) -> bytes:
    """Return JSON in one fixed form, so that equal records are equal bytes."""
    return (json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True) + "\n").encode()
