"""Sphinx configuration: MyST pages, the API from the docstrings, and no warnings."""

import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from oncekey.cli.explain import sections

sys.path.insert(0, str(Path(__file__).parent))
import cookbook

project = "oncekey"
author = "The oncekey contributors"
copyright = "The oncekey contributors"
release = installed_version("oncekey")
version = ".".join(release.split(".")[:2])

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["**/_*", "**/.*"]

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"oncekey {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_js_files = ["tables.js"]
html_show_sourcelink = False
# The prompt of an interpreter is not copied, and neither is what it printed.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True
# Documented without being installed: drivers and frameworks that only their own modules import.
autodoc_mock_imports = [
    "a2a",
    "aiohttp",
    "asgiref",
    "asyncpg",
    "celery",
    "cryptography",
    "django",
    "dramatiq",
    "fastapi",
    "flask",
    "google",
    "litestar",
    "mcp",
    "multidict",
    "opentelemetry",
    "prometheus_client",
    "psycopg",
    "redis",
    "starlette",
    "werkzeug",
]

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# Every type of ours that a signature or a page names must have an entry. Not asked for: types of
# others, which have no page here, private ones, and type variables.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!oncekey\.).*"),
    ("py:.*", r"oncekey\.(.*\.)?_.*"),
    ("py:.*", r"oncekey\..*\.([A-Z]|[A-Z]\w*T|[A-Z]_\w+|\w+_co)"),
    # Bases that say nothing of their own: what they do is told where it is promised.
    ("py:class", r"oncekey\.(resilience\.around|stores\.\w+\.(browsing|counting))\..*"),
]


def drop_empty_sections(app: Sphinx, docname: str, source: list[str]) -> None:
    """Leave out the sections of the front page that have no pages yet: a glob must match."""
    if docname != app.config.root_doc:
        return

    def keep(section: re.Match[str]) -> str:
        return section[0] if any(Path(app.srcdir, section["folder"]).glob("*.md")) else ""

    source[0] = re.sub(r"```\{toctree\}[^`]*\n(?P<folder>\w+)/\*\n```\n", keep, source[0])


def write_cookbook(app: Sphinx) -> None:
    """Make the pages of the providers, before Sphinx looks for documents."""
    cookbook.write(Path(app.srcdir, "providers"))


def show_code(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Blocks of code in docstrings are shown as code: between fences, or indented in a module's."""
    shown: list[str] = []
    fenced = indented = False
    for line in lines:
        if line.startswith("```"):
            fenced = not fenced
            shown += [".. code-block:: python", ""] if fenced else [""]
            continue
        if fenced:
            shown.append(f"   {line}" if line else "")
            continue
        starts = what == "module" and line.startswith("    ") and not (shown and shown[-1])
        told = next((one for one in reversed(shown) if one), "").endswith("::")  # already code
        if starts and not indented and not told:
            shown += [".. code-block:: python", ""]
            indented = True
        elif line and not line.startswith(" "):
            indented = False
        shown.append(line)
    lines[:] = shown


def check_errors(app: Sphinx, exception: Exception | None) -> None:
    """Every name that ``oncekey explain`` knows is a section of the built page of errors."""
    page = Path(app.outdir, "reference", "errors.html")
    if exception is None and page.exists():
        built = page.read_text("utf-8")
        lost = [name for name in sections() if f'id="{name.lower()}"' not in built]
        if lost:
            raise ExtensionError(f"errors without a section in {page}: {lost}")


def setup(app: Sphinx) -> None:
    """Connect the hooks."""
    app.connect("builder-inited", write_cookbook)
    app.connect("autodoc-process-docstring", show_code)
    app.connect("source-read", drop_empty_sections)
    app.connect("build-finished", check_errors)
