"""What schemathesis does besides its own checks: it uses objects that exist, and checks what Pando promises.

Most names that are made up do not exist, and most requests would end there. So in parts of requests that are meant to
be valid, names are often replaced by those of objects that are there. These are made again from time to time, because
requests destroy them.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import random
from collections import Counter, defaultdict
from typing import Any

import requests
import schemathesis
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import negative_data_rejection

URL = os.environ["FUZZ_URL"]
TOKEN = os.environ["FUZZ_TOKEN"]
MOUNTS = os.environ["FUZZ_MOUNTS"]  # the directory for mount points: requests mount with the rights of root
ARCHIVE = os.environ["FUZZ_ARCHIVE"]

NAMES: dict[str, list[Any]] = {
    "volume": ["job", "other"],
    "golden": ["web", "db"],
    "snapshot": ["s1"],
    "remote": ["store"],
    "number": [1, 2],
    "ref": ["web", "job", "job@s1", "web@1", "other"],
    "a": ["web", "job@s1"],
    "b": ["job", "web@1"],
    "from": ["web", "job", "job@s1", "web@1"],
    "onto": ["web", "web@1"],
    "name": [f"n{i}" for i in range(60)],
    "format": ["tar", "tar.zst", "raw", "qcow2"],
    "size_bytes": [4 << 30, 5 << 30],
    "label": [["team=a"]],
    "after": ["0", ""],
}
PATIENCE = 5  # seconds for an operation, which is then cancelled
PATIENCE_OF_BENCH = 0.2  # measurements are a heavy load, and not what is tested
REQUIRED = {"from", "name", "ref", "onto", "snapshot", "volume", "volumes", "size_bytes", "what"}
LISTS = {"what": "ref", "volumes": "volume", "refs": "ref", "names": "golden"}
OFTEN = 0.7
CALLS = itertools.count()
RANDOM = random.Random(os.environ.get("PANDO_SEED"))  # hypothesis sets the one of the module back for each example
ANSWERS: dict[str, Counter[str]] = defaultdict(Counter)
EVERY = 40  # calls, after which objects that are gone are made again

KINDS = {
    "internal",
    "invalid",
    "not_found",
    "exists",
    "in_use",
    "no_space",
    "permission",
    "unsupported",
    "conflict",
    "damaged",
    "too_new",
    "io",
    "canceled",
}


def make_objects() -> None:
    """Makes the objects that are gone. Those that are there are refused, and stay."""
    headers = {"Authorization": "Bearer " + TOKEN}
    with open(ARCHIVE, "rb") as f:
        archive = f.read()
    for golden in NAMES["golden"]:
        kind = headers | {"Content-Type": "application/x-tar"}
        requests.post(f"{URL}/v1/goldens/{golden}/import", headers=kind, data=archive, timeout=30)
    for volume in NAMES["volume"]:
        body = {"from": "web", "name": volume, "mount": volume == "job"}
        requests.post(f"{URL}/v1/volumes", headers=headers, json=body, timeout=30)
        requests.post(f"{URL}/v1/volumes/{volume}/snapshots", headers=headers, json={"name": "s1"}, timeout=30)


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    if next(CALLS) % EVERY == 0:
        make_objects()
    case.headers = {**(case.headers or {}), "Authorization": "Bearer " + TOKEN}
    valid = {location for location, part in case.meta.components.items() if part.mode.is_positive}
    if ParameterLocation.PATH in valid:
        replace_names(case.path_parameters)
    if ParameterLocation.QUERY in valid:
        replace_names(case.query)
    if ParameterLocation.HEADER in valid:
        for optional in ("Idempotency-Key", "If-Match"):
            if RANDOM.random() < OFTEN:
                case.headers.pop(optional, None)
        if "Idempotency-Key" in case.headers:
            case.headers["Idempotency-Key"] = f"k{RANDOM.randrange(40)}"  # so that some requests are repeated
    if case.path.endswith("/import") and ParameterLocation.BODY in valid and RANDOM.random() < OFTEN:
        with open(ARCHIVE, "rb") as f:
            case.body = f.read()
    if isinstance(case.body, dict):
        if ParameterLocation.BODY in valid:
            simplify(case.body)
            replace_names(case.body)
        keep_mounts_together(case.body)


def simplify(body: dict[str, Any]) -> None:
    """Removes some fields that may be missing, many of which do not go together, and labels that are no labels."""
    for key in [k for k in body if k not in REQUIRED]:
        if RANDOM.random() < OFTEN:
            del body[key]
    for key in ("labels", "set"):
        if isinstance(body.get(key), dict):
            body[key] = {"team": RANDOM.choice(["a", "b"])}


def keep_mounts_together(body: dict[str, Any]) -> None:
    """Moves mount points into a directory: the service has the rights of root."""
    for key in ("mount_dir", "dir"):
        if isinstance(body.get(key), str) and body[key].startswith("/"):
            body[key] = MOUNTS + "/" + body[key].replace("/", "_").replace("\0", "_")[:40]


@schemathesis.hook
def after_call(_context: Any, case: Any, response: Any) -> None:
    ANSWERS[case.operation.label][str(response.status_code)] += 1
    if response.status_code == 202 and case.method == "POST":
        end(response.json())


def end(operation: dict[str, Any]) -> None:
    """Waits for an operation and cancels it if it takes long, so that those of all requests are not one heavy load."""
    headers = {"Authorization": "Bearer " + TOKEN}
    url = f"{URL}/v1/operations/{operation['id']}"
    patience = PATIENCE_OF_BENCH if operation["verb"].startswith("bench ") else PATIENCE
    after = requests.get(f"{url}/wait", headers=headers, params={"timeout_seconds": patience}, timeout=30).json()
    if after["state"] == "running":
        requests.delete(url, headers=headers, timeout=30)
        requests.get(f"{url}/wait", headers=headers, params={"timeout_seconds": 4 * PATIENCE}, timeout=30)


@atexit.register
def write_answers() -> None:
    """Writes how often each route had which status, from which the test sees that it reached something."""
    with open(os.environ["FUZZ_ANSWERS"], "w") as f:
        json.dump(ANSWERS, f)


def replace_names(values: Any) -> None:
    """Replaces names by those of objects that mostly exist."""
    for key in values or {}:
        if key in NAMES and RANDOM.random() < OFTEN:
            values[key] = RANDOM.choice(NAMES[key])
        if key in LISTS and RANDOM.random() < OFTEN:
            values[key] = [RANDOM.choice(NAMES[LISTS[key]])]


def is_lenient(case: Any) -> bool:
    """Reports whether a request has what the document says is like nothing: fields that are null, empty parameters."""
    query = case.query if isinstance(case.query, dict) else {}
    empty = any(v in ("", [""], []) for v in query.values())
    return empty or (isinstance(case.body, dict) and has_null(case.body))


def has_null(value: Any) -> bool:
    """Reports whether a field is null."""
    if isinstance(value, dict):
        return any(v is None or has_null(v) for v in value.values())
    return False


@schemathesis.check
def refuses_invalid(ctx: Any, response: Any, case: Any) -> None:
    """What the document forbids is refused."""
    try:
        negative_data_rejection(ctx, response, case)
    except (Failure, FailureGroup):
        if not is_lenient(case):
            raise


@schemathesis.check
def no_failure_of_the_service(_ctx: Any, response: Any, _case: Any) -> None:
    """The service does not fail. A pool that is full is not its failure."""
    if response.status_code >= 500 and response.json().get("kind") != "no_space":
        raise AssertionError(f"status {response.status_code}: {response.text}")


@schemathesis.check
def errors_are_problems(_ctx: Any, response: Any, _case: Any) -> None:
    """Each error says what it is, in the same form."""
    if response.status_code < 400:
        return
    assert response.headers.get("content-type") == ["application/problem+json"], response.headers
    problem = response.json()
    assert problem["status"] == response.status_code, problem
    assert problem["kind"] in KINDS, problem
    assert problem["type"] == "urn:pando:" + problem["kind"], problem
    assert problem["detail"], problem
    assert problem.get("hint") or problem.get("op"), problem
    assert TOKEN not in response.text
