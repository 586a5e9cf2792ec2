"""Writes src/pando/models.py and src/pando/_api.py from the OpenAPI document of the service.

    python clients/python/generate.py          write them: make python-client
    python clients/python/generate.py --check  fail if they are out of date

Generators of others were tried: openapi-python-client 0.29.1 makes 148 files with 20,500 lines of this document, which
need httpx, attrs and python-dateutil. These two files have a fifteenth of that and need nothing.
"""

from __future__ import annotations

import json
import keyword
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent.parent / "api" / "openapi.json"
PACKAGE = HERE / "src" / "pando"
WIDTH = 120

# Bodies of requests become arguments of methods, and problems become exceptions.
REQUEST = "Request"
NOT_MODELS = {"Problem", "ProblemDetail"}

Node = dict[str, Any]


def python_name(name: str) -> str:
    """Returns the name of an argument or field for one of the document: from -> from_, If-Match -> if_match."""
    name = re.sub(r"\W", "_", name).lower()
    return name + "_" if keyword.iskeyword(name) else name


def class_of(ref: str) -> str:
    """Returns the class for a reference to a schema."""
    return ref.rsplit("/", 1)[-1]


def types_of(schema: Node) -> tuple[str, bool]:
    """Returns the type of a schema without null, and whether null is allowed."""
    kind = schema.get("type", "")
    if isinstance(kind, list):
        return next(k for k in kind if k != "null"), "null" in kind
    return kind, False


def annotation(schema: Node, prefix: str, *, request: bool) -> str:
    """Returns the annotation of a value, without None."""
    if "$ref" in schema:
        name = class_of(schema["$ref"])
        return "Problem" if name == "Problem" else prefix + name
    kind, _ = types_of(schema)
    match kind:
        case "string" if request and "enum" in schema:
            return f"Literal[{', '.join(json.dumps(v) for v in schema['enum'])}]"
        case "string" if schema.get("format") == "date-time":
            return "datetime"
        case "string":
            return "str"
        case "integer":
            return "int"
        case "number":
            return "float"
        case "boolean":
            return "bool"
        case "array":
            item = annotation(schema["items"], prefix, request=request)
            return f"Sequence[{item}]" if request else f"list[{item}]"
        case "object":
            values = schema.get("additionalProperties")
            item = annotation(values, prefix, request=request) if isinstance(values, dict) else "Any"
            return f"Mapping[str, {item}]" if request else f"dict[str, {item}]"
    return "Any"


def sentence(text: str) -> str:
    """Returns a text that ends with a full stop."""
    text = " ".join(text.split())
    return text if text.endswith(".") else text + "."


def docstring(text: str, indent: str) -> list[str]:
    """Returns the lines of a docstring. The first paragraph is a line if it is short enough."""
    one = f'{indent}"""{text}"""'
    if "\n" not in text and len(one) <= WIDTH:
        return [one]
    out: list[str] = []
    for i, paragraph in enumerate(text.split("\n")):
        start = '"""' if i == 0 else ""
        wrapped = textwrap.wrap(start + paragraph, WIDTH - len(indent), break_long_words=False)
        out += [indent + line for line in wrapped] or [""]
    return [*out, indent + '"""']


# --- Models ---


def field_lines(name: str, schema: Node, *, required: bool) -> list[str]:
    """Returns the lines of a field of a model. Lists and mappings that are missing are empty."""
    kind, nullable = types_of(schema)
    note = annotation(schema, "", request=False)
    default = ""
    if kind == "array" and (nullable or not required):
        default = " = field(default_factory=list)"
    elif kind == "object" and not required:
        default = " = field(default_factory=dict)"
    elif (nullable or not required) and note != "Any":
        note, default = note + " | None", " = None"
    elif not required:
        default = " = None"

    lines = [f"    {python_name(name)}: {note}{default}"]
    if about := schema.get("description"):
        lines += docstring(sentence(about), "    ")
    return lines


def model(name: str, schema: Node, *, tagged: bool) -> list[str]:
    """Returns the lines of a model."""
    required = set(schema.get("required", []))
    about = sentence(schema.get("description", f"{name} of the API"))
    lines = ["@dataclass(frozen=True, kw_only=True)", f"class {name}:", *docstring(about, "    "), ""]
    for key in sorted(schema["properties"]):
        lines += field_lines(key, schema["properties"][key], required=key in required)
    if tagged:
        lines += ['    etag: str = field(default="", compare=False)', '    """For if_match of a later change."""']
    return lines


def reached(document: Node, ref: str) -> set[str]:
    """Returns the schemas that a schema leads to, and itself."""
    found: set[str] = set()
    todo = [class_of(ref)]
    while todo:
        name = todo.pop()
        if name in found or name in NOT_MODELS:
            continue
        found.add(name)
        todo += re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document["components"]["schemas"][name]))
    return found


# --- Methods ---


def operations(document: Node) -> list[tuple[str, str, Node]]:
    """Returns method, path and description of each operation."""
    return [
        (method.upper(), path, op)
        for path, item in sorted(document["paths"].items())
        for method, op in sorted(item.items())
    ]


def result_of(op: Node) -> tuple[str, Node]:
    """Returns the content type of a success and its schema: "" if it has no content."""
    for status, response in op["responses"].items():
        if status.startswith("2"):
            for kind, content in response.get("content", {}).items():
                return kind, content.get("schema", {})
    return "", {}


def has_etag(op: Node) -> bool:
    """Reports whether a success has an ETag."""
    return any("ETag" in r.get("headers", {}) for s, r in op["responses"].items() if s.startswith("2"))


class Method:
    """What is written for an operation."""

    def __init__(self, document: Node, method: str, path: str, op: Node) -> None:
        self.method, self.path, self.op = method, path, op
        self.name = python_name(op["operationId"])
        self.positional: list[str] = []
        self.required: list[str] = []
        self.optional: list[str] = []
        self.about: list[str] = []
        self.query: list[str] = []
        self.headers: list[str] = []
        self.body: list[str] = []
        self.stream = False

        for p in op.get("parameters", []):
            self.parameter(p)
        for kind, content in op.get("requestBody", {}).get("content", {}).items():
            if kind != "application/json":
                self.stream = True
                continue
            schema = document["components"]["schemas"][class_of(content["schema"]["$ref"])]
            required = set(schema.get("required", []))
            for key in sorted(schema["properties"]):
                self.argument(key, schema["properties"][key], required=key in required)
                self.body.append(key)

    def parameter(self, p: Node) -> None:
        """Adds a parameter of the path, the query or the header."""
        name = python_name(p["name"])
        match p["in"]:
            case "path":
                self.positional.append(f"{name}: {annotation(p['schema'], '', request=True)}")
                return
            case "query":
                self.query.append(p["name"])
            case "header":
                self.headers.append(p["name"])
        self.argument(p["name"], p | p["schema"], required=p.get("required", False))

    def argument(self, key: str, schema: Node, *, required: bool) -> None:
        """Adds an argument that has a name."""
        name = python_name(key)
        note = annotation(schema, "models.", request=True)
        if required:
            self.required.append(f"{name}: {note}")
        else:
            self.optional.append(f"{name}: {note} | None = None")
        if about := schema.get("description"):
            self.about.append(f"{name}: {sentence(about)}")

    def lines(self) -> list[str]:
        """Returns the lines of the method."""
        kind, schema = result_of(self.op)
        json_result = kind == "application/json"
        returns = "models." + class_of(schema["$ref"]) if json_result else "Stream" if kind else "None"

        arguments = ["self", *self.positional]
        if self.stream:
            arguments.append("content: Content")
        if self.required or self.optional:
            arguments += ["*", *self.required, *self.optional]
        about = sentence(self.op["summary"])
        if more := self.op.get("description"):
            about += "\n\n" + sentence(more)
        if self.about:
            about += "\n\n" + "\n".join(self.about)

        path = re.sub(r"\{(\w+)\}", lambda m: "{quote(" + python_name(m[1]) + ")}", self.path)
        call = [f'"{self.method}"', ("f" if "{" in path else "") + f'"{path}"']
        for argument, keys in (("query", self.query), ("headers", self.headers), ("body", self.body)):
            if keys:
                pairs = ", ".join(f'"{k}": {python_name(k)}' for k in keys)
                call.append(f"{argument}={{{pairs}}}")
        if self.stream:
            call.append("content=content")
        function = {"None": "nothing", "Stream": "stream"}.get(returns, "json")
        if json_result:
            call.insert(0, returns)
        keyword_return = "" if returns == "None" else "return "
        return [
            f"    def {self.name}({', '.join(arguments)}) -> {returns}:",
            *docstring(about, "        "),
            f"        {keyword_return}self.transport.{function}({', '.join(call)})",
            "",
        ]


# --- Files ---

NOTE = '"""{about}\n\nWritten by generate.py from api/openapi.json: do not edit it, run `make python-client`.\n"""\n\n'


def models_text(document: Node) -> str:
    """Returns the text of models.py."""
    named: set[str] = set()
    tagged: set[str] = set()
    for _, _, op in operations(document):
        kind, schema = result_of(op)
        if kind == "application/json":
            named |= reached(document, schema["$ref"])
            if has_etag(op):
                tagged.add(class_of(schema["$ref"]))

    lines: list[str] = []
    for name in sorted(named):
        lines += ["", "", *model(name, document["components"]["schemas"][name], tagged=name in tagged)]
    head = NOTE.format(about="What the service answers.")
    head += "from __future__ import annotations\n\nfrom dataclasses import dataclass, field\n"
    head += "from datetime import datetime\nfrom typing import Any\n\nfrom .errors import Problem\n"
    return head + "\n".join(lines) + "\n"


def api_text(document: Node) -> str:
    """Returns the text of _api.py."""
    lines: list[str] = []
    for method, path, op in operations(document):
        lines += Method(document, method, path, op).lines()
    head = NOTE.format(about="A method for each request of the service.")
    head += "from __future__ import annotations\n\nfrom collections.abc import Mapping, Sequence\n"
    head += "from datetime import datetime\nfrom typing import Literal\n\nfrom . import models\n"
    head += "from ._transport import Content, Stream, Transport, quote\n\n\n"
    head += 'class API:\n    """The requests of the service. Arguments that are None are not sent."""\n\n'
    head += "    def __init__(self, transport: Transport) -> None:\n        self.transport = transport\n\n"
    return head + "\n".join(lines)


def formatted(text: str, name: str) -> str:
    """Returns a program as ruff formats it."""
    ruff = [sys.executable, "-m", "ruff"]
    where = ["--config", str(HERE / "pyproject.toml"), "--stdin-filename", name, "-"]
    fix = ["check", "--fix", "--quiet", "--select", "I,F401"]
    for step in (fix, ["format", "--quiet"]):
        text = subprocess.run([*ruff, *step, *where], input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> int:
    """Writes the files, or checks them."""
    document = json.loads(DOCUMENT.read_text())
    stale = []
    for path, text in ((PACKAGE / "models.py", models_text(document)), (PACKAGE / "_api.py", api_text(document))):
        new = formatted(text, path.name)
        if path.exists() and path.read_text() == new:
            continue
        stale.append(path.name)
        if "--check" not in sys.argv:
            path.write_text(new)
    if stale and "--check" in sys.argv:
        print(f"out of date: {', '.join(stale)}: run `make python-client`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
