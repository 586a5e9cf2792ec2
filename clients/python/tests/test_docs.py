"""The examples of docs/python.md: they run in the order of the page, and print what it says."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "python.md"
UPDATE = "PANDO_UPDATE"

EXAMPLE = re.compile(r"^```python\n(?P<code>.*?)^```\n(?P<rest>\n```text\n(?P<output>.*?)^```\n)?", re.M | re.S)


@pytest.mark.usefixtures("service")
def test_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("v1\n")
    page = PAGE.read_text()
    names: dict[str, Any] = {}

    def checked(example: re.Match[str]) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(example["code"], f"{PAGE.name}: {example['code'].splitlines()[0]}", "exec"), names)
        printed = out.getvalue()
        return f"```python\n{example['code']}```\n" + (f"\n```text\n{printed}```\n" if printed else "")

    new = EXAMPLE.sub(checked, page)
    assert page.count("```python") >= 5
    if os.environ.get(UPDATE):
        PAGE.write_text(new)
        return
    assert new == page
