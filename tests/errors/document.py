"""Writes docs/errors.md from the catalogue and from what the messages say today: python -m tests.errors.document."""

from __future__ import annotations

import inspect

from tests.errors import mistakes
from tests.errors.catalogue import MISTAKES, ROOT, Said, commit
from tests.world import world

__all__ = ["document"]

_HEAD = """# Errors

What whale_torch says about a mistake has up to four parts: what is wrong, with the numbers and the module's name;
where it was asked for; the fix; and the ranks concerned. Errors about annotations, sizes and plans are raised before
the model is changed, with the same text on every rank. All are children of `wh.WhaleError`.

The messages below come from the code shown above each: `python -m tests.errors.document` writes this page, and a test
fails where it no longer holds. `classifier` is this, in `model.py`:

```python
{classifier}
```
"""


def document(said: dict[str, Said]) -> str:
    """The page. said: what the first rank read about each mistake."""
    sections: dict[str, list[str]] = {}
    for name, found in MISTAKES.items():
        on = "" if found.ranks == 1 else f" On {found.ranks} ranks:"
        text = f"{said[name].kind}: {said[name].text}"
        lines = [
            f"### {found.title}",
            "",
            f"{found.cause}{on}",
            "",
            "```python",
            found.code,
            "```",
            "",
            "```text",
            text,
            "```",
            "",
        ]
        sections.setdefault(found.section, []).extend(lines)
    contents = [f"- [{section}](#{_anchor(section)})" for section in sections]
    body = [line for section, lines in sections.items() for line in (f"## {section}", "", *lines)]
    head = _HEAD.format(classifier=inspect.getsource(mistakes.classifier).strip())
    return "\n".join([head, *contents, "", *body]).rstrip() + "\n"


def _anchor(section: str) -> str:
    return "".join(c for c in section.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def main() -> None:
    said: dict[str, Said] = {}
    for name, found in MISTAKES.items():
        if found.ranks == 1:
            (said[name],) = commit(0, 1, [name])
        elif found.alone:
            (said[name],) = world(found.ranks, commit, [name], timeout=40)[0]
    for n in sorted({found.ranks for found in MISTAKES.values()} - {1}):
        names = [name for name, found in MISTAKES.items() if found.ranks == n and not found.alone]
        said |= dict(zip(names, world(n, commit, names, timeout=90)[0], strict=True))
    (ROOT / "docs" / "errors.md").write_text(document(said))


if __name__ == "__main__":
    main()
