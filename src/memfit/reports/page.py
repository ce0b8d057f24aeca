"""An estimate, dry run, plan, supervised run or difference as one web page that needs nothing but itself.

Style, script and data are inside the file; it opens from a disk with no network, and a content security policy made
of the hashes of our own style and script lets a browser run nothing else. Data travels as JSON in an inert
script element and reaches the document only as text, so a module named like a tag stays a name.
"""

import base64
import hashlib
import html
import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from memfit.core.dryrun import DryRun
from memfit.core.estimate import Estimate
from memfit.core.plan import Plan
from memfit.core.printing import printable
from memfit.core.supervised import SupervisedRun
from memfit.reports.diff import figures as diff_figures
from memfit.reports.dryrun import figures as run_figures
from memfit.reports.estimate import figures
from memfit.reports.estimate.payload import build_payload
from memfit.reports.files import write_whole
from memfit.reports.parts import Report
from memfit.reports.plan import figures as plan_figures
from memfit.reports.plan.payload import build_plan_payload
from memfit.reports.run import figures as supervised_figures
from memfit.snapshots.difference import SnapshotDifference

_SCRIPTS = {
    "page": ("document", "axes", "curves", "chart", "treemap", "tables", "run", "page"),
    "plan": ("document", "axes", "front", "timelines", "plan"),
    "supervised": ("document", "axes", "supervised"),
    "diff": ("document", "diff"),
}
_STYLES = {"page": ("page",), "plan": ("page", "plan"), "supervised": ("page", "supervised"), "diff": ("page", "diff")}


_Result = Estimate | DryRun | Plan | SupervisedRun | SnapshotDifference


def render_page(result: _Result) -> str:
    """The page of a result as one string of HTML."""
    if isinstance(result, DryRun):
        return _render("page", run_figures.build_run_payload(result), run_figures.report(result))
    if isinstance(result, Plan):
        return _render("plan", build_plan_payload(result), plan_figures.report(result))
    if isinstance(result, SupervisedRun):
        payload = supervised_figures.build_supervised_payload(result)
        return _render("supervised", payload, supervised_figures.report(result))
    if isinstance(result, SnapshotDifference):
        return _render("diff", diff_figures.build_diff_payload(result), diff_figures.report(result))
    return _render("page", build_payload(result), figures.report(result), figures.headline(result))


def write_page(result: _Result, path: str | os.PathLike[str]) -> Path:
    """Write the page of a result to `path`, as `write_whole` does, and return the path."""
    return write_whole(lambda: render_page(result), path)


def _render(kind: str, payload: dict[str, Any], report: Report, headline: str = "") -> str:
    style = "".join(_asset(f"assets/{name}.css") for name in _STYLES[kind])
    # The files share one scope of their own, in this order; modules would need a server.
    body = "\n".join(_asset(f"assets/{name}.js") for name in _SCRIPTS[kind])
    script = f'"use strict";\n(() => {{\n{body}}})();\n'
    parts = {
        "body": _asset(f"templates/{kind}.html"),
        "policy": f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'",
        "title": html.escape(f"memfit: {headline or report.verdict}"),
        "plain": html.escape(f"{headline}\n{report}" if headline else str(report)),
        "style": style,
        "script": script,
        "data": embed_json(payload),
    }
    # One pass over the template: inserted text is never searched for placeholders again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("templates/frame.html"))


def embed_json(data: Any) -> str:
    r"""JSON that can stand inside a script element: nothing in it can end the element or a line.

    >>> embed_json("</script>")
    '"\\u003c/script>"'
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    # Control characters, which JSON has as escapes, and invisible ones, which could reverse what stands beside them, or
    # can't be written to a file at all (file names that aren't UTF-8), are shown as escapes: a backslash more for each.
    text = re.sub(
        r"\\(?:\\|u00[01][0-9a-f]|[bfr])", lambda match: match[0] if match[0] == r"\\" else "\\" + match[0], text
    )
    return re.sub(r"[^\x20-\x7e]", lambda match: printable(match[0]).replace("\\", r"\\"), text)


def _asset(name: str) -> str:
    return files("memfit.reports").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
